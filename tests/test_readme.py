"""README and CONTRIBUTING say what is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from transformer_fast import _native
from transformer_fast.specs import OPS

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def sections() -> dict[str, list[str]]:
    """The Python of README by the heading above it."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"(?m)^(?=##)", text_of("README.md")):
        blocks = re.findall(r"```python\n(.*?)```", part, re.DOTALL)
        if blocks:
            found[part.partition("\n")[0].strip("# ")] = blocks
    return found


#: What a section's code prints, each way in with something that shows it went in.
SHOWN = {
    "Change one import": "torch.Size([2, 10, 512])",
    "Accelerate a model that exists": "modules swapped, 0 left as they were",
    "Leave the code alone": "",
    "Hugging Face": "attention of transformer_fast",
    "Code that somebody wrote by hand": "rewritten: 1 attention.",
    "Whole models, and decoding": "torch.Size([2, ",
    "The ops themselves": "attention runs on '",
    "Pictures": "",
    "Train": " steps, loss ",
}


def test_no_way_in_is_missing():
    assert set(SHOWN) <= set(sections())


def test_what_the_build_needs_is_told():
    """The versions where pip may not bring them: an older setuptools cannot read pyproject.toml."""
    tomllib = pytest.importorskip("tomllib")
    requires = tomllib.loads(text_of("pyproject.toml"))["build-system"]["requires"]
    (paragraph,) = [p for p in text_of("README.md").split("\n\n") if "--no-build-isolation" in p]
    assert "`pip install .`" in paragraph
    for requirement in requires:
        name, _, version = requirement.partition(">=")
        assert name == "wheel" or f"`{name}`" in paragraph  # setuptools has wheel's part since 70.1
        assert name != "setuptools" or f"`setuptools` {version} or later" in " ".join(
            paragraph.split()
        )


# Libraries other than ours have warnings of their own.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("section", sections())
def test_snippets_run(section, capsys):
    """Each section by itself, as somebody would copy it."""
    code = sections()[section]
    for extra, word in (("transformers", "from transformers "), ("matplotlib", "viz")):
        if any(word in block for block in code):
            pytest.importorskip(extra, reason=f"{extra} is not installed")
    if any("enable_sdpa" in block for block in code) and _native.why_not is not None:
        pytest.skip(f"there is no CPU kernel: {_native.why_not}")
    torch.compiler.reset()
    names: dict[str, object] = {}
    for block in code:
        exec(compile(block, "README.md", "exec"), names)
    assert SHOWN.get(section, "") in capsys.readouterr().out


def test_generated_parts_are_up_to_date():
    pytest.importorskip("matplotlib", reason="the report needs matplotlib")
    from benchmarks import readme

    assert readme.main(["--check"]) == 0


def test_the_table_has_every_op():
    text = text_of("README.md")
    for op in OPS:
        assert re.search(rf"(?m)^\| `{op}` \|", text)


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page):
    makefile = text_of("Makefile")
    for target in set(re.findall(r"`?make ([a-z][a-z-]*)", text_of(page))):
        assert re.search(rf"(?m)^{target}:", makefile), target


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page):
    named = re.findall(r"`((?:transformer_fast|csrc|benchmarks|tests)/[\w/.<>-]*)`", text_of(page))
    for path in named:
        for op in OPS if "<op>" in path else ("",):
            # What a command writes may not have been written yet.
            if "<" in path.replace("<op>", "") or path.startswith("benchmarks/results/"):
                continue
            assert list(ROOT.glob(path.replace("<op>", op).rstrip("/"))) or _shared(path, op), path


def _shared(path: str, op: str) -> bool:
    """Ops that stand in another's files."""
    other = {"add_layer_norm": "layer_norm", "linear_cross_entropy": "cross_entropy"}.get(op)
    return other is not None and (ROOT / path.replace("<op>", other)).exists()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", text_of(page)):
        if not target.startswith("http") and "report.md" not in target:
            assert (ROOT / target).exists(), target
