"""How every Triton kernel of this package is launched, and what it needs to know of the machine.

Importing this imports triton but asks nothing of a driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from . import plans

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
    """Within the block every launch is given to ``take``, and nothing else happens.

    The launchers can then be called with meta tensors, which is how kernels are compiled ahead of
    time exactly as they would be called.
    """
    global _instead
    before, _instead = _instead, take
    try:
        yield
    finally:
        _instead = before


def recording() -> bool:
    """Whether launches are taken by somebody else instead of run here."""
    return _instead is not None


class _Constant(str):
    """A record in one constant parameter: a string, so that Triton hashes and compares it as fast as a
    number, whose attributes are constants."""

    record: Any

    def __getattr__(self, name: str) -> Any:
        return tl.constexpr(getattr(self.record, name))


@cache
def constant(record: Any) -> Any:
    """A record of compile-time constants, as a kernel takes it."""
    if INTERPRETED:
        return record
    made = _Constant(record)
    made.record = record
    return made


def _first(argument: Any) -> Tensor:
    """The tensor that an argument of a launch is, describes, or has first."""
    while isinstance(argument, tuple):
        argument = argument[0]
    return argument.base if isinstance(argument, TensorDescriptor) else argument


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    warps: int,
    stages: int,
    **constants: Any,
) -> None:
    """Run ``kernel`` on the current stream of the first tensor's device.

    ``args``: tensors, descriptors of tensors, numbers, records of those and of None; first a tensor.
    ``constants``: the kernel's last parameters, in its order or not.
    """
    if _instead is not None:
        _instead(Launch(kernel, grid, args, constants, warps, stages))
        return
    if 0 in grid:
        return
    device = _first(args[0]).device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch(kernel, grid, args, warps, stages, constants)
    else:
        _launch(kernel, grid, args, warps, stages, constants)


def _launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    warps: int,
    stages: int,
    constants: dict[str, Any],
) -> None:
    recorder = plans.recorder()
    if recorder is not None:
        recorder.paused = True  # the interpreter computes with tensors of its own
    try:
        compiled = kernel[grid](*args, num_warps=warps, num_stages=stages, **constants)
    finally:
        if recorder is not None:
            recorder.paused = False
    if recorder is None:
        return
    if not isinstance(compiled, CompiledKernel) or not hasattr(CompiledKernel, "__getitem__"):
        options = {"num_warps": warps, "num_stages": stages, **constants}
        recorder.step(partial(kernel[grid], **options), *args)
        return
    # What `compiled[grid]` does in Triton 3.6 and 3.7 when no hook is set.
    active = triton.runtime.driver.active
    stream = recorder.once("stream", active.get_current_stream, active.get_current_device())
    recorder.step(
        compiled.run, *(*grid, 1, 1)[:3], stream, compiled.function, compiled.packed_metadata,
        None, None, None, *map(_replayed, args), *[None] * len(constants),
    )  # fmt: skip


def _replayed(argument: Any) -> Any:
    """How an argument of a launch is made at a replay: an address saves Triton asking the driver."""
    if isinstance(argument, Tensor):
        return plans.Pointer(argument)
    if isinstance(argument, tuple):
        return tuple(map(_replayed, argument))
    if isinstance(argument, TensorDescriptor):
        rest = {k: v for k, v in vars(argument).items() if k != "base"}
        return plans.Live(partial(_descriptor, rest), plans.Pointer(argument.base, address=False))
    return argument


def _descriptor(rest: dict[str, Any], base: Tensor) -> TensorDescriptor:
    """A descriptor like one that has been checked, of another tensor."""
    made = object.__new__(TensorDescriptor)
    vars(made).update(rest, base=base)
    return made


def _allowed() -> bool:
    """Whether launches may be replayed: nobody takes them, and no hook of Triton's looks at them."""
    return (
        _instead is None
        and (not INTERPRETED or plans.replays_interpreted)
        and not getattr(_knobs.launch_enter_hook, "calls", ())
        and not getattr(_knobs.launch_exit_hook, "calls", ())
    )


_knobs = triton.knobs.runtime
plans.allowed = _allowed


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


def ceil_div(n: int, d: int) -> int:
    """ceil(n / d). On the host, where `triton.cdiv` costs as much as allocating a tensor."""
    return -(-n // d)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def with_unit_stride(tensor: Tensor) -> Tensor:
    """``tensor``, copied only if its last dimension is strided."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()
