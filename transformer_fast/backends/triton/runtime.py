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
from triton.compiler import CompiledKernel

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


@cache
def _parameters(function: Any) -> tuple[str, ...]:
    """A kernel's parameters, in order: tensors or descriptors of tensors, numbers, constants."""
    code = function.__code__
    return tuple(code.co_varnames[: code.co_argcount])


@cache
def _tensors(function: Any) -> int:
    """How many tensors (and descriptors) a kernel begins with."""
    return sum(name.endswith(("_ptr", "_tiles")) for name in _parameters(function))


#: Plans and variants beyond which all are forgotten: every batch may have sizes of its own.
MOST_KEPT = 4096


def keep(store: dict[Any, Any], key: Any, value: Any) -> Any:
    """Put ``value`` into a store that forgets everything when it holds MOST_KEPT; returns it."""
    if len(store) >= MOST_KEPT:
        store.clear()
    store[key] = value
    return value


class Plan:
    """A launch with everything fixed but its tensors; calling it with them launches.

    From an argument list Triton derives at every call which variant of a kernel is needed, which
    takes longer than many a kernel runs. Here it derives it once for each dtype, device and
    alignment to 16 bytes of the tensors: with the other arguments fixed it looks at nothing else.
    Its switches (``TRITON_DEBUG``, instrumentation) hold for what was not launched before.
    """

    __slots__ = ("constants", "described", "grid", "kernel", "rest", "stages", "variants", "warps")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        *rest: Any,
        warps: int,
        stages: int,
        **constants: Any,
    ) -> None:
        """``rest``: the arguments after the tensors."""
        self.kernel, self.grid, self.rest, self.constants = kernel, grid, rest, constants
        self.warps, self.stages = warps, stages
        # Descriptors are made anew for every call and have sizes of their own.
        self.described = _parameters(kernel.fn)[0].endswith("_tiles")
        self.variants: dict[Any, Callable[..., Any] | None] = {}

    def __call__(self, *tensors: Any) -> None:
        """Launch on the current stream of the first tensor's device; other tensors may be None."""
        if _instead is not None:
            args = (*tensors, *self.rest)
            _instead(Launch(self.kernel, self.grid, args, self.constants, self.warps, self.stages))
            return
        if 0 in self.grid:
            return
        device = (tensors[0].base if self.described else tensors[0]).device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._run(device, tensors)
        else:
            self._run(device, tensors)

    def _run(self, device: torch.device, tensors: tuple[Any, ...]) -> None:
        if INTERPRETED or self.described:
            self._call(tensors)
            return
        places = [0 if x is None else x.data_ptr() for x in tensors]
        # A compiled kernel belongs to the device on which it was loaded.
        key = (device, *[None if x is None else x.dtype for x in tensors])
        bits = 0
        for place in places:
            bits |= place
        if bits & 15:
            key += (*[place & 15 == 0 for place in places],)
        found = self.variants.get(key)
        if found is None:
            found = _launcher(self._call(tensors), self)
            if found is not None:
                keep(self.variants, key, found)
        else:
            # Addresses save Triton asking each tensor, and the driver, for them.
            found(places)

    def _call(self, tensors: tuple[Any, ...]) -> Any:
        return self.kernel[self.grid](
            *tensors, *self.rest, num_warps=self.warps, num_stages=self.stages, **self.constants
        )


def _launcher(compiled: Any, plan: Plan) -> Callable[[list[int]], Any] | None:
    """What launches the compiled kernel of a plan on tensors at these addresses.

    ``compiled[grid]`` takes all parameters in order in Triton 3.6 and 3.7. None where that is not
    there: then every launch is an ordinary call of the kernel.
    """
    if not isinstance(compiled, CompiledKernel) or not hasattr(CompiledKernel, "__getitem__"):
        return None
    names = _parameters(plan.kernel.fn)
    fixed = (plan.constants[name] for name in names[len(names) - len(plan.constants) :])
    run, tail = compiled[(*plan.grid, 1, 1)[:3]], (*plan.rest, *fixed)
    return lambda places: run(*places, *tail)


_plans: dict[Any, Plan] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    warps: int,
    stages: int,
    **constants: Any,
) -> None:
    """Run ``kernel`` on the current stream of the first tensor's device."""
    function = kernel.fn
    count = _tensors(function)
    rest, fixed = args[count:], (*constants.values(),)
    # 1, 1.0 and True are equal, but kernels of their own.
    kinds = (*map(type, rest), *map(type, fixed))
    key = (function, grid, rest, warps, stages, *constants, *fixed, kinds)
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(kernel, grid, *rest, warps=warps, stages=stages, **constants)
        keep(_plans, key, plan)
    plan(*args[:count])


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
