"""Public names: visible in dir(), documented, and known to type checkers."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import transformer_fast
from transformer_fast import functional, memory, models, nn, training

ROOT = Path(__file__).resolve().parents[1]


def test_dir():
    shown = set(dir(transformer_fast))
    assert {*transformer_fast.__all__, "viz"} <= shown
    assert not any(name.startswith("_") and not name.endswith("__") for name in shown)
    assert not shown & {"Any", "TYPE_CHECKING", "memo", "small"}
    for name in transformer_fast.__all__:
        assert getattr(transformer_fast, name) is not None
    assert {*functional.__all__, "softmax"} <= set(dir(functional))
    assert {"Linear", "Dropout", "utils"} <= set(dir(nn))


@pytest.mark.parametrize("module", [transformer_fast, functional, nn], ids=lambda m: m.__name__)
def test_unknown_name(module):
    message = f"module {module.__name__!r} has no attribute 'NoSuchThing'"
    with pytest.raises(AttributeError, match=message):
        module.NoSuchThing  # noqa: B018


def _documented():
    for module in (transformer_fast, functional, memory, models, training):
        for name in module.__all__:
            if name != "__version__":
                yield pytest.param(getattr(module, name), id=f"{module.__name__}.{name}")
    for name in nn._OURS:
        yield pytest.param(getattr(nn, name), id=f"nn.{name}")


@pytest.mark.parametrize("item", list(_documented()))
def test_help(item):
    """A summary sentence of the item's own; a function's arguments are explained or need not be."""
    text = item.__doc__
    assert text is not None
    summary = " ".join(inspect.cleandoc(text).split("\n\n")[0].split())
    assert summary.endswith((".", ":")) or "->" in summary, summary
    if inspect.isfunction(item):
        needed = [name for name in inspect.signature(item).parameters if name != "kwargs"]
        missing = [name for name in needed if name not in text]
        assert len(missing) <= 1 or re.search("rguments.*: as in `", text), missing


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_type_checkers_know_the_names(tmp_path):
    code = [
        "import transformer_fast",
        "from transformer_fast import functional as F, nn",
        "nn.Linear(1, 2); nn.Dropout(0.1); nn.utils.clip_grad_norm_([], 1.0); F.softmax",
        "transformer_fast.training.adamw; transformer_fast.compile_backend",
        "nn.NoSuchThing",
        "F.no_such_thing",
        "transformer_fast.no_such_thing",
    ]
    (tmp_path / "user.py").write_text("\n".join(code) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=silent", "user.py"]
    done = subprocess.run(
        [*command, "--cache-dir", str(ROOT / ".mypy_cache")],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )
    wrong = [line for line in done.stdout.splitlines() if "error:" in line]
    assert [int(line.split(":")[1]) for line in wrong] == [5, 6, 7], done.stdout
