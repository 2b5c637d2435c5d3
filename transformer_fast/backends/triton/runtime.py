"""Launches the Triton kernels of this package; properties of the device that launchers need.

Importing this imports triton, but does not call the driver.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from ..._context import changed, settings
from . import plans

#: True if kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1 at import).
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)


class Launch(NamedTuple):
    """One kernel launch: the arguments of `launch`."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    stages: int


def instead_of_launching(take: Callable[[Launch], None]) -> AbstractContextManager[None]:
    """Context manager in which every launch is passed to ``take`` instead of being run.

    Launchers then run on meta tensors, so that kernels are compiled ahead of time with exactly the
    arguments of real calls.
    """
    return changed(take_launch=take)


def recording() -> bool:
    """True inside `instead_of_launching`."""
    return settings.current.take_launch is not None


class _Constant(str):
    """A record of constants as one constant parameter; its attributes are the constants.

    It is a string, so that Triton hashes and compares it as fast as a number.
    """

    record: Any

    def __getattr__(self, name: str) -> Any:
        return tl.constexpr(getattr(self.record, name))


@cache
def constant(record: Any) -> Any:
    """Returns a record of compile-time constants as a kernel parameter."""
    if INTERPRETED:
        return record
    made = _Constant(record)
    made.record = record
    return made


def _first(argument: Any) -> Tensor:
    """Returns the tensor of a launch argument: itself, its descriptor's, or its first member's."""
    while isinstance(argument, tuple):
        argument = argument[0]
    return argument.base if isinstance(argument, TensorDescriptor) else argument


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, warps: int, stages: int, **constants: Any,
) -> None:  # fmt: skip
    """Runs ``kernel`` on the current stream of the first tensor's device.

    Args:
        args: tensors, tensor descriptors, numbers, and records of those and of None. The first one has
            to be, describe or contain a tensor.
        constants: the kernel's last parameters, by name.
    """
    if (take := settings.current.take_launch) is not None:
        take(Launch(kernel, grid, args, constants, warps, stages))
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
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], warps: int, stages: int,
    constants: dict[str, Any],
) -> None:  # fmt: skip
    recorder = plans.recorder()
    if recorder is not None:
        recorder.paused = True  # the interpreter calls PyTorch ops, which must not be recorded
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
    # The same as `compiled[grid]` in Triton 3.6 and 3.7 without hooks.
    active = triton.runtime.driver.active
    stream = recorder.once("stream", active.get_current_stream, active.get_current_device())
    recorder.step(
        compiled.run, *(*grid, 1, 1)[:3], stream, compiled.function, compiled.packed_metadata,
        None, None, None, *map(_replayed, args), *[None] * len(constants),
    )  # fmt: skip


def _replayed(argument: Any) -> Any:
    """Returns a launch argument's placeholder; tensors become addresses, to save a driver call."""
    if isinstance(argument, Tensor):
        return plans.Pointer(argument)
    if isinstance(argument, tuple):
        return tuple(map(_replayed, argument))
    if isinstance(argument, TensorDescriptor):
        rest = {k: v for k, v in vars(argument).items() if k != "base"}
        return plans.Live(partial(_descriptor, rest), plans.Pointer(argument.base, address=False))
    return argument


def _descriptor(rest: dict[str, Any], base: Tensor) -> TensorDescriptor:
    """Returns a descriptor of another tensor with the fields of one that has been checked."""
    made = object.__new__(TensorDescriptor)
    vars(made).update(rest, base=base)
    return made


def _allowed() -> bool:
    """True if launches may be replayed: they are not recorded, and Triton has no launch hooks."""
    return (
        settings.current.take_launch is None
        and (not INTERPRETED or plans.replays_interpreted)
        and not getattr(_knobs.launch_enter_hook, "calls", ())
        and not getattr(_knobs.launch_exit_hook, "calls", ())
    )


_knobs = triton.knobs.runtime
plans.allowed = _allowed


@cache
def multiprocessors(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors; 2 without a GPU, so that tests cover loops."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 2


def dot_precision(dtype: torch.dtype) -> str:
    """Returns ``input_precision`` of a dot: TF32 only for fp32, and only if PyTorch allows it."""
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee"


def ceil_div(n: int, d: int) -> int:
    """Returns ceil(n / d) on the host, where `triton.cdiv` costs as much as allocating a tensor."""
    return -(-n // d)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def with_unit_stride(tensor: Tensor) -> Tensor:
    """Returns the tensor, as a copy if its last dimension is strided."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()
