"""How every Triton kernel of this package is launched, and what it needs to know of the machine.

Importing this imports triton but asks nothing of a driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

#: Whether kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1 at import).
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)


class Launch(NamedTuple):
    """One kernel launch: what `launch` was asked for."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    stages: int


_instead: Callable[[Launch], None] | None = None


@contextmanager
def instead_of_launching(take: Callable[[Launch], None]) -> Iterator[None]:
    """Within the block every launch is given to ``take``, and nothing else happens."""
    global _instead
    before, _instead = _instead, take
    try:
        yield
    finally:
        _instead = before


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Within the block nothing runs; every launch is appended to the list instead.

    The launchers can then be called with meta tensors, which is how kernels are compiled ahead of
    time exactly as they would be called.
    """
    found: list[Launch] = []
    with instead_of_launching(found.append):
        yield found


def recording() -> bool:
    """Whether launches are taken by somebody else instead of run here."""
    return _instead is not None


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    warps: int,
    stages: int,
    **constants: Any,
) -> None:
    """Run ``kernel`` on the current stream of the first tensor's device."""
    if _instead is not None:
        _instead(Launch(kernel, grid, args, constants, warps, stages))
        return
    if 0 in grid:
        return
    device = next(x.device for x in args if isinstance(x, Tensor))
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*args, num_warps=warps, num_stages=stages, **constants)
    else:
        kernel[grid](*args, num_warps=warps, num_stages=stages, **constants)


@cache
def multiprocessors(device: torch.device) -> int:
    """Number of streaming multiprocessors; small off the GPU, so that loops are exercised."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 2


def dot_precision(dtype: torch.dtype) -> str:
    """``input_precision`` of a dot: TF32 only for fp32 and only where torch's switch allows it."""
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee"


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def with_unit_stride(tensor: Tensor) -> Tensor:
    """``tensor``, copied only if its last dimension is strided."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()
