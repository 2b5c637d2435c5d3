"""Limits on the code itself: Python per call, imports of backends, and lines of each part.

Python per call is counted in functions of the package, their files, and switches between files (a
return into another file). The numbers are limits: lower them when a change allows it, and give the
reason in the commit that raises one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch

import transformer_fast
from transformer_fast import _native, fast_path, functional, models, nn

pytestmark = [
    pytest.mark.usefixtures("small_calls"),
    pytest.mark.skipif(_native.module is None, reason=str(_native.why_not)),
]
PACKAGE = str(Path(transformer_fast.__file__).parent)
ROOT = Path(__file__).resolve().parents[1]


class Count(NamedTuple):
    functions: int
    files: int
    turns: int


def _encoder_layer(training: bool) -> Callable[[], Any]:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True).train(training)
    x = torch.randn(2, 64, 512)
    return lambda: layer(x)


def _attention(training: bool) -> Callable[[], Any]:
    q, k, v = (torch.randn(2, 8, 64, 64, requires_grad=training) for _ in range(3))
    return lambda: functional.scaled_dot_product_attention(q, k, v)


def _linear() -> Callable[[], Any]:
    layer, x = nn.Linear(512, 512), torch.randn(128, 512)
    return lambda: layer(x)


def _generate() -> Callable[[], Any]:
    model = models.Transformer(
        90, 80, d_model=64, nhead=4, num_encoder_layers=2, num_decoder_layers=2, pad_token=0,
        start_token=1, end_token=2,
    ).eval()  # fmt: skip
    source = torch.randint(3, 90, (2, 9))
    return lambda: model.generate(source, max_new_tokens=8)


#: name -> (the call, True with gradients, the maximum counts)
CALLS: dict[str, tuple[Callable[[], Callable[[], Any]], bool, Count]] = {
    "encoder layer, inference": (lambda: _encoder_layer(False), False, Count(26, 9, 15)),
    "encoder layer, training": (lambda: _encoder_layer(True), True, Count(75, 23, 59)),
    "attention, inference": (lambda: _attention(False), False, Count(4, 4, 3)),
    "attention, training": (lambda: _attention(True), True, Count(7, 5, 5)),
    "linear, inference": (_linear, False, Count(13, 6, 6)),
    "generate, 8 tokens": (_generate, False, Count(316, 26, 155)),
}


def count(call: Callable[[], Any]) -> Count:
    functions = turns = 0
    files = set()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal functions, turns
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE):
            return
        if event == "call":
            functions += 1
            files.add(file)
        elif event == "return":
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
                caller = caller.f_back
            turns += caller is not None and caller.f_code.co_filename != file

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Count(functions, len(files), turns)


@pytest.fixture
def without_further_limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On some CPUs products have further limits, which calls with gradients check."""
    limited = [op for op, dtypes in fast_path.LIMITED.items() if dtypes]
    with monkeypatch.context() as patch:
        patch.setattr(fast_path, "LIMITED", {})
        for op in limited:
            fast_path.bind(op)
        yield
    for op in limited:
        fast_path.bind(op)


@pytest.mark.usefixtures("without_further_limits")
@pytest.mark.parametrize("name", CALLS)
def test_calls_run_little_python(name: str) -> None:
    make, grad, most = CALLS[name]
    call = make()
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            call()
        found = count(call)
    assert all(one <= limit for one, limit in zip(found, most, strict=True)), found


#: Packages and modules in the order in which they may import: each only those before it.
_ORDER = """
_version _switches _on_import _cgroup _native _context _console recipe reference proof ops specs dispatch
fast_path memory backends functional testing _sdpa nn models _explain compile accelerate
measure cli training viz __init__ __main__
"""
FLOORS = {name: number for number, name in enumerate(_ORDER.split())}


def test_imports_go_down_the_floors() -> None:
    for path in Path(PACKAGE).rglob("*.py"):
        floor = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for one in _imports(path):
            to = one.partition(".")[0]
            assert to == floor or FLOORS[to] < FLOORS[floor], f"{path}: {one}"


#: Modules that may use PyTorch's private bindings: the context of calls, the loader of the native
#: module, and the registration of SDPA's kernels.
PRIVATE_BINDINGS = {"_context.py", "_native.py", "_sdpa.py"}


def test_one_module_asks_pytorch_for_the_context_of_a_call() -> None:
    found = set()
    for path in Path(PACKAGE).rglob("*.py"):
        code = ast.unparse(ast.parse(path.read_text()))
        if re.search(r"\btorch\._C\b|_current_level\b", code):
            found.add(path.relative_to(PACKAGE).as_posix())
        if path.name != "_context.py":  # sets of types that are plain
            assert not re.search(r"[({\[](torch\.)?Tensor, torch\.nn\.Parameter[)}\]]", code), path
    assert found == PRIVATE_BINDINGS


#: Imports of backends by modules outside of them; all else goes through the dispatcher. Importing
#: the package registers the kernels.
IMPORT_BACKENDS = {("__init__.py", "backends"), ("__init__.py", "backends.warm")}


def _imports(path: Path) -> Iterator[str]:
    """Yields what a module imports, relative to the package's folder."""
    inside = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = (*inside[: len(inside) - node.level + 1], *(node.module or "").split("."))
            yield from (".".join(filter(None, (*base, alias.name))) for alias in node.names)


def test_only_the_dispatcher_imports_backends() -> None:
    found = set()
    for path in Path(PACKAGE).rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("backends/"):
            found |= {(name, one) for one in _imports(path) if f"{one}.".startswith("backends.")}
            # Also not by name, through importlib.
            assert "transformer_fast.backends" not in path.read_text(), name
    assert found == IMPORT_BACKENDS


def test_intrinsics_stand_in_simd_and_gemm() -> None:
    cpu = ROOT / "csrc" / "cpu"
    found = {
        path.relative_to(cpu).as_posix()
        for path in cpu.rglob("*")
        if path.suffix in (".cpp", ".h") and re.search(r"\b_(mm\d*|tile)_", path.read_text())
    }
    # The probe measures single instructions, so it may use intrinsics.
    assert {name for name in found if not name.startswith(("simd/", "gemm/", "probe/"))} == set()
    assert "simd/vec.h" in found


#: The most lines of source in each part. A change that raises one gives the reason in its commit; one
#: that removes code lowers it. The aims are 35,000, 18,500, 35,000 and 4,500.
LINES = {"transformer_fast": 41664, "csrc": 21476, "tests": 38385, "benchmarks": 4651}


@pytest.mark.parametrize("part", LINES)
def test_lines_stay_within_the_budget(part: str) -> None:
    sources = (
        path
        for path in (ROOT / part).rglob("*")
        if path.suffix in (".py", ".cpp", ".h", ".cu", ".cuh") and path.name != "_build_info.py"
    )
    found = sum(path.read_bytes().count(b"\n") for path in sources)
    assert found <= LINES[part], f"{part} has {found} lines"
