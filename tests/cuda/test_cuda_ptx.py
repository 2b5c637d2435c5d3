"""nvcc's PTX of the kernels for sm_80, run by the PTX emulator: results, and memory accesses.

This covers the branches of device.cuh for nvcc, which g++ never compiles.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import simt_build
import torch
from test_cuda_attention import heads
from test_cuda_operators import DTYPES, SEED, hold, rows_of, the_kernel
from test_cuda_sanitized import nvcc

from transformer_fast.specs import OPS
from transformer_fast.specs.attention import arrange
from transformer_fast.testing import check

sys.path.append(str(Path(__file__).parents[1] / "triton_kernels"))
import ptx_emulator

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(nvcc() is None, reason="there is no nvcc"),
    pytest.mark.skipif(simt_build.ON_GPU, reason="a GPU runs the kernels itself"),
]

TAKE = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_int, ctypes.c_size_t,
    ctypes.c_void_p, ctypes.c_size_t,
)  # fmt: skip


class Emulator:
    """Receives the operators' launches from the SIMT machine."""

    def __init__(self, library: ctypes.CDLL, modules: dict[str, dict[str, str]]) -> None:
        self.library, self.modules = library, modules
        self.texts = {name: text for module in modules.values() for name, text in module.items()}
        self.programs: dict[str, ptx_emulator.Program] = {}
        self.ran: set[str] = set()
        self.error: Exception | None = None
        self.callback = TAKE(self._take)

    def _take(
        self, name: bytes, x: int, y: int, threads: int, shared: int, argument: int, size: int
    ) -> None:
        if self.error is not None:
            return
        try:
            self._launch(name.decode(), (x, y), threads, shared, ctypes.string_at(argument, size))
        except Exception as error:
            self.error = error

    def _launch(
        self, name: str, grid: tuple[int, int], threads: int, shared: int, argument: bytes
    ) -> None:
        if name not in self.programs:
            self.programs[name] = ptx_emulator.Program(self.texts[name])
        program = self.programs[name]
        assert program.threads == threads
        self.ran.add(name)
        # Only the tensors into which the parameter points are accessible.
        begin, places = ctypes.c_size_t(), []
        for address in memoryview(argument).cast("Q"):
            size = self.library.simt_allocation(ctypes.c_size_t(address), ctypes.byref(begin))
            if size:
                places.append((begin.value, size))
        ptx_emulator.launch(program, grid, shared, argument, ptx_emulator.Memory(places))

    @contextlib.contextmanager
    def running(self, change: Callable[[str], str] | None = None) -> Iterator[None]:
        """Context manager that runs launches on the emulator; ``change`` edits the PTX."""
        self.ran.clear()
        self.error = None
        texts, programs = self.texts, self.programs
        if change is not None:
            self.texts = {name: change(text) for name, text in texts.items()}
            self.programs = {}
        self.library.simt_remember_allocations(True)
        self.library.simt_take_launches(self.callback)
        try:
            yield
        except AssertionError:
            if self.error is None:
                raise
        finally:
            self.library.simt_take_launches(None)
            self.library.simt_remember_allocations(False)
            self.texts, self.programs = texts, programs
        if self.error is not None:
            raise self.error


@pytest.fixture(scope="session")
def emulator(operators: str) -> Emulator:
    library = ctypes.CDLL(str(simt_build.library()))
    library.simt_allocation.restype = ctypes.c_size_t
    modules = simt_build.ptx(str(nvcc()))
    return Emulator(library, {m.stem: ptx_emulator.kernels(m.read_text()) for m in modules})


def norm(width: int, dtype: torch.dtype, device: str) -> None:
    rows = 37 if width <= 512 else 11  # more rows than threads run at once
    input, residual = (rows_of((rows, width), dtype, device, seed) for seed in (1, 2))
    weight = rows_of((width,), dtype, device, 3)
    hold("add_layer_norm", (input, residual, (width,), weight, None, 1e-5, 0.3, SEED.clone()))


def loss(classes: int, dtype: torch.dtype, device: str) -> None:
    target = torch.arange(5) * 7 % classes
    target[2] = -100
    hold("cross_entropy", (5 * rows_of((5, classes), dtype, device, 1), target, -100, 0.1))


def loss_case(name: str, dtype: torch.dtype, device: str) -> None:
    case = OPS["cross_entropy"].case(name)
    hold("cross_entropy", case.build(dtype, device, torch.Generator().manual_seed(0)))


def network(units: int, dtype: torch.dtype, device: str) -> None:
    x, residual = (rows_of((9, n), dtype, device, 1) for n in (24, units))
    first, second = (rows_of(s, dtype, device, 2) / 4 for s in ((units, 24), (16, units)))
    bias = rows_of((units,), dtype, device, 3)
    hold("linear", (x, first, bias, "gelu", residual))
    hold("feed_forward", (x, first, bias, second, None, "silu", 0.3, SEED.clone()))


def attention(size: int, dtype: torch.dtype, device: str) -> None:
    q, k, v = heads(device, dtype, 18, keys := 40 if dtype == torch.float32 else 70, size)
    hold("attention", arrange(q, k, v, causal=True))
    given = {"weights": True, "dropout_p": 0.4, "seed": SEED.clone()}
    hold("attention", arrange(q, k, v, mask=rows_of((18, keys), dtype, device, 4) > -1, **given))


def decoding(size: int, dtype: torch.dtype, device: str) -> None:
    for count in (1, 5):
        q, k, v = heads(device, dtype, 1, 70, size, heads=count, key_heads=1)
        arguments = arrange(q, k, v, lengths=torch.tensor([66]))
        check("attention", the_kernel("attention").run(*arguments), arguments)


#: Source of csrc/cuda -> calls that together run each of its kernels.
CALLS: dict[str, list[tuple[Any, Any]]] = {
    "layer_norm": [
        (norm, width) for width in (248, 512, 2048, 8192, 8200, 255, 515, 8193)
    ],
    "cross_entropy": [
        *((loss, classes) for classes in (24, 25, 1032, 1031)), (loss_case, "large logits"),
    ],
    "linear": [(network, units) for units in (264, 257)],
    "attention": [
        *((attention, size) for size in (32, 64, 128, 33)),
        *((decoding, size) for size in (32, 64, 128, 31, 63, 127)),
    ],
}  # fmt: skip
#: Element type -> its mangled name as the first argument of a template.
SPELLED = {torch.float32: "f", torch.bfloat16: "NS0_4bf16E", torch.float16: "NS0_4fp16E"}


@pytest.mark.sampled(100, 40)
@pytest.mark.parametrize(
    "dtype", [*DTYPES[:2], pytest.param(DTYPES[2], marks=pytest.mark.exhaustive)], ids=str
)
@pytest.mark.parametrize("source", CALLS)
def test_ptx_of_every_kernel_is_within_the_budget(source, dtype, emulator, device):
    ran = set()
    for call, size in CALLS[source]:
        with emulator.running():
            call(size, dtype, device)
        ran |= emulator.ran
    spelled = re.compile(rf"_kernelI(?:NS0_13AttentionTileI)?{SPELLED[dtype]}")
    wanted = {name for name in emulator.modules[source] if spelled.search(name)}
    assert len(wanted) >= 5
    assert wanted <= ran


#: Bug in the nvcc branches of device.cuh -> (a call, its size, an expression in the PTX, the
#: replacement, a part of the message).
PLANTED = {
    "halves swapped in pack": (
        attention, 32, r"(cvt\.rn\.bf16x2\.f32 \S+) (\S+), (\S+);", r"\1 \3, \2;", "attention: ",
    ),
    "words swapped in store_global": (
        network, 264, r"(st\.global\.v4\.b32 \[\S+\], {)(\S+), (\S+),", r"\1\3, \2,", "linear: ",
    ),
    "copies that are never zeros": (
        attention, 24, r"(cp\.async\.cg\.\S+ \S+ \S+ 16), \S+;", r"\1;", "attention: ",
    ),
    "values that are not transposed": (
        attention, 32, r"\.trans\.shared", ".shared", "attention: ",
    ),
    "a tail that is not masked": (
        norm, 264, r"(st\.global\.v4\.u32\s+\[%rd\d+)\]", r"\1+16]", "beyond the tensors",
    ),
    "a barrier left out": (norm, 2048, r"bar\.sync\s+0;", "", "of shared memory"),
    "copies that nobody waits for": (
        attention, 32, r"wait_group \d+;", "wait_group 9;", "under way",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_caught(bug, emulator, device):
    call, size, was, becomes, told = PLANTED[bug]
    changes = 0

    def change(text: str) -> str:
        nonlocal changes
        text, count = re.subn(was, becomes, text)
        changes += count
        return text

    with pytest.raises(AssertionError, match=told), emulator.running(change):
        call(size, torch.bfloat16, device)
    assert changes > 0
