"""Compiles kernels for any architecture without a GPU, and reports resources and instructions.

The calls cover each kernel, dtype and class of sizes once. They run with meta tensors through the
launchers of real calls, and their launches are recorded. So a kernel is compiled exactly as in a real
call. Neither driver nor GPU are needed, because Triton includes an assembler.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from ...ops.layer_norm import NORMS
from ...ops.linear import CODES
from . import config
from . import feed_forward as networks
from . import layer_norm as norms
from . import linear as maps
from .attention import attention_forward
from .attention_bwd import attention_backward
from .cross_entropy import cross_entropy_backward, cross_entropy_forward
from .runtime import INTERPRETED, Launch, instead_of_launching

HEADS = (64, 128, 256)
COLUMNS = (512, 1024, 4096, 8192)
#: Numbers of classes: short rows, long rows, rows that do not start at multiples of 16 bytes.
CLASSES = (1000, 32000, 50257)
DTYPES = (torch.bfloat16, torch.float32)
#: Architecture -> shared memory limit of a block in bytes (CUDA programming guide).
SHARED_LIMIT = {80: 166912, 86: 101376, 90: 232448, 100: 232448, 120: 101376}


class Case(NamedTuple):
    """A named call, and the function that makes it."""

    name: str
    run: Callable[[], Any]


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attention(
    head: int, dtype: torch.dtype, *, causal: bool = False, mask: torch.dtype | None = None,
    lengths: bool = False, query_lengths: bool = False, dropout_p: float = 0.0, queries: int = 2048,
    weights: bool = False, group: int = 1, packed: bool = False,
) -> None:  # fmt: skip
    batch = 1 if packed else 4
    q = _meta(batch, 8, queries, head, dtype=dtype)
    k = _meta(batch, 8 // group, 2048, head, dtype=dtype)
    attn_mask = None if mask is None else _meta(1, 8, queries, 2048, dtype=mask)
    seed = _meta(dtype=torch.int64) if dropout_p else None
    places = 5 if packed else 4
    key_lengths = _meta(places, dtype=torch.int64) if lengths or packed else None
    ends = _meta(places, dtype=torch.int64) if query_lengths or packed else None
    longest = (512, 512) if packed else (-1, -1)
    arguments = (q, k, k, attn_mask, key_lengths, causal, 0.125, dropout_p, seed)
    output, _, row_max, row_sum = attention_forward(*arguments, weights, ends, *longest)
    if queries > 1:
        learned = attn_mask is not None and attn_mask.is_floating_point()
        kept = (output, None, row_max, row_sum, True, True, True, learned)
        attention_backward(output, None, *arguments, *kept, ends, *longest)


def _attention_calls(dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    mixed = {"mask": dtype, "lengths": True, "causal": True, "dropout_p": 0.1}
    return {
        "": {},
        " causal, weights": {"causal": True, "weights": True},
        " bool mask": {"mask": torch.bool},
        " float mask, lengths, causal, dropout": mixed,
        " lengths of both": {"lengths": True, "query_lengths": True},
        " packed": {"packed": True},
        " packed, causal": {"packed": True, "causal": True},
        " groups, causal": {"causal": True, "group": 2},
        " one query": {"queries": 1, "lengths": True, "group": 2},
    }


def _norm(columns: int, dtype: torch.dtype, dropout_p: float, kind: int = 0) -> None:
    x, weight = _meta(8192, columns, dtype=dtype), _meta(columns, dtype=dtype)
    seed = _meta(dtype=torch.int64) if dropout_p else None
    y, total, mean, rstd = norms.forward(x, x, weight, weight, 1, 1e-5, kind, dropout_p, seed)
    assert total is not None
    drops = dropout_p > 0.0
    norms.backward(
        y, total, total, weight, mean, rstd, 1, kind, dropout_p, seed, True, drops, True, True
    )


def _feed_forward(dtype: torch.dtype, activation: str, dropout_p: float, rows: int = 4096) -> None:
    x = _meta(rows, 1024, dtype=dtype)
    weight1, bias1 = _meta(4096, 1024, dtype=dtype), _meta(4096, dtype=dtype)
    weight2, bias2 = _meta(1024, 4096, dtype=dtype), _meta(1024, dtype=dtype)
    seed = _meta(dtype=torch.int64) if dropout_p else None
    rest = (CODES[activation], dropout_p, seed)
    y, kept = networks.forward(x, weight1, bias1, weight2, bias2, *rest, True)
    assert kept is not None
    networks.backward(y, x, weight1, weight2, kept, *rest, True, True, True, True, True)


def _linear(dtype: torch.dtype) -> None:
    x, weight = _meta(4096, 1000, dtype=dtype), _meta(1024, 1000, dtype=dtype)
    residual = _meta(4096, 1024, dtype=dtype)
    y, z = maps.forward(x, weight, residual[0], residual, CODES["gelu"], True)
    maps.backward(y, x, weight, z, CODES["gelu"], True, True, True)


def _cross_entropy(classes: int, dtype: torch.dtype, label_smoothing: float) -> None:
    logits, target = _meta(4096, classes, dtype=dtype), _meta(4096, dtype=torch.int64)
    losses, lse = cross_entropy_forward(logits, target, -100, label_smoothing)
    cross_entropy_backward(losses, logits, target, lse, -100, label_smoothing)


def _named(name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Case:
    return Case(name, partial(function, *args, **options))


def cases(
    dtypes: Iterable[torch.dtype] = DTYPES,
    heads: Iterable[int] = HEADS,
    columns: Iterable[int] = COLUMNS,
    classes: Iterable[int] = CLASSES,
) -> Iterator[Case]:
    """Yields all calls for these head sizes, norm sizes and numbers of classes.

    The kernels of a call depend on the architecture.
    """
    for dtype in dtypes:
        kind = str(dtype).removeprefix("torch.")
        for head in heads:
            at = f"attention {kind} head {head}"
            for name, options in _attention_calls(dtype).items():
                yield _named(f"{at}{name}", _attention, head, dtype, **options)
        for width in columns:
            at = f"{kind} columns {width}"
            for op, norm in NORMS.items():
                yield _named(f"{op} {at}", _norm, width, dtype, 0.0, norm.kind)
            yield _named(f"layer_norm {at} dropout", _norm, width, dtype, 0.1)
        at = f"feed_forward {kind}"
        yield _named(f"{at} relu, dropout", _feed_forward, dtype, "relu", 0.1)
        yield _named(f"{at} gelu, dropout", _feed_forward, dtype, "gelu", 0.1)
        yield _named(f"{at} few rows", _feed_forward, dtype, "silu", 0.1, rows=16)
        yield _named(f"linear {kind} odd sizes", _linear, dtype)
        for count in classes:
            at = f"cross_entropy {kind} classes {count}"
            yield _named(at, _cross_entropy, count, dtype, 0.0)
            yield _named(f"{at} smoothing", _cross_entropy, count, dtype, 0.1)


def launches(case: Case, architecture: int) -> list[Launch]:
    """Returns the launches of a call on an architecture."""
    found: list[Launch] = []
    with config.use_architecture(architecture), instead_of_launching(found.append):
        case.run()
    return found


def warm(case: Case, architecture: int) -> int:
    """Compiles the kernels of a call for the current GPU, into Triton's cache; returns their number."""
    return len(
        {
            launch.kernel.warmup(
                *launch.args, grid=launch.grid, num_warps=launch.warps, num_stages=launch.stages,
                **launch.constants,
            )
            for launch in launches(case, architecture)
        }
    )  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """The assembler's report on one kernel for one architecture."""

    kernel: str
    architecture: int
    registers: int
    #: Bytes of stack per thread, for values that did not fit in registers.
    spilled: int
    shared: int
    warps: int
    stages: int
    cubin: bytes

    @property
    def fits(self) -> bool:
        return self.shared <= SHARED_LIMIT[self.architecture]


@cache
def _binder(kernel: Any, architecture: int) -> tuple[Any, GPUTarget, Callable[..., Any]]:
    """Returns Triton's own backend, target and binder, which derive types and specializations."""
    target = GPUTarget("cuda", architecture, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    return backend, target, bind


def output_of(tool: Any, option: str, cubin: bytes) -> str:
    """Runs a tool of NVIDIA on a binary and returns its output."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [tool.path, option, str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _resources(cubin: bytes) -> tuple[int, int]:
    """Returns registers and stack bytes per thread, as recorded in the binary by the assembler."""
    text = output_of(triton.knobs.nvidia.cuobjdump, "-res-usage", cubin)
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if match is None:
        raise RuntimeError(f"cuobjdump printed no resource usage:\n{text}")
    return int(match[1]), int(match[2])


def compile_binary(launch: Launch, architecture: int) -> Any:
    """Compiles a recorded launch to a CompiledKernel, which has ``asm["ptx"]`` and other stages."""
    if INTERPRETED:
        raise RuntimeError("kernels cannot be compiled in a process with TRITON_INTERPRET=1")
    backend, target, bind = _binder(launch.kernel, architecture)
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "debug": False}
    bound, specialization, rest = bind(*launch.args, **launch.constants, **options)
    parsed, *described = launch.kernel._pack_args(backend, options, bound, specialization, rest)
    source = ASTSource(launch.kernel, *described)
    return triton.compile(source, target=target, options=vars(parsed))


def compile_launch(launch: Launch, architecture: int) -> Compiled:
    """Compiles one recorded launch for ``architecture`` (80, 86, 90, 100 or 120)."""
    binary = compile_binary(launch, architecture)
    cubin = binary.asm["cubin"]
    registers, spilled = _resources(cubin)
    return Compiled(
        launch.kernel.fn.__name__, architecture, registers, spilled, binary.metadata.shared,
        launch.warps, launch.stages, cubin,
    )  # fmt: skip
