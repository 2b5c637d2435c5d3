"""The oracle: the reference implementation in fp64, on the exact inputs of a call."""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..dispatch import Call, make_call
from ..ops.arguments import RECORDS
from ..ops.autograd import wants_grad
from ..specs import OPS

__all__ = ["call_of", "oracle", "promote", "require_grad"]

_F = TypeVar("_F", bound=Callable[..., Any])

#: Most bytes of results that `remembered` caches for a function.
MOST_REMEMBERED = 1 << 28


def remembered(function: _F) -> _F:
    """Decorator: an LRU cache for ``function(op, arguments, ...)``, keyed by the arguments' values.

    The truth of a call takes longer than the call, and it is the same for all kernels, instruction
    sets and numbers of threads. Callers must not modify the results, which are shared.
    """
    known: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
    size = 0

    @functools.wraps(function)
    def wrapper(op: str, arguments: tuple[Any, ...], *rest: Any, **options: Any) -> Any:
        nonlocal size
        values = tuple(map(_value, arguments))
        key = op, OPS[op].reference, values, rest, tuple(sorted(options.items()))
        if key in known:
            known.move_to_end(key)
            return known[key][0]
        result = function(op, arguments, *rest, **options)
        known[key] = result, _bytes(list(vars(result).values()))
        size += known[key][1]
        while size > MOST_REMEMBERED:
            _, (_, freed) = known.popitem(last=False)
            size -= freed
        return result

    return wrapper  # type: ignore[return-value]


def _value(argument: Any) -> Any:
    """Returns a cache key of an argument; it includes the strides, because they affect rounding."""
    if not isinstance(argument, Tensor):
        return tuple(argument) if isinstance(argument, list) else argument
    # A copy, because contiguous tensors may have any stride in dimensions of size 1.
    whole = argument.detach().cpu().clone(memory_format=torch.contiguous_format)
    bits = whole.view(-1).view(torch.uint8).numpy()
    form = argument.dtype, argument.shape, argument.stride(), argument.device
    return *form, hashlib.blake2b(bits.data, digest_size=16).digest()


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


def is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def promote(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments with floating-point tensors in fp64; masks, lengths and seeds stay."""
    return tuple(x.detach().double() if is_floating(x) else x for x in arguments)


def scaled(op: str, arguments: tuple[Any, ...], factor: float) -> tuple[Any, ...]:
    """Returns the arguments with all tensors but masks multiplied by ``factor``, in their dtype.

    The call is numerically as difficult as before, but every rounding error is different.
    """
    names = [name for name in OPS[op].gradients_of if name != "attn_mask"]
    return tuple(
        value.detach() * factor if name in names and is_floating(value) else value
        for name, value in zip(OPS[op].arguments, arguments, strict=False)
    )


#: Factors for `scaled`: further calls that sample the reference's error.
FACTORS = (0.97, 0.94, 0.91)
#: Factors used if a result is beyond its limit. With few elements the reference's largest error
#: varies by a factor of 3, and it is small on CPUs where PyTorch's products sum in many short chains.
MORE_FACTORS = (*FACTORS, *(1.03 + 0.04 * i for i in range(60)))


def tries_for(elements: int) -> int:
    """Returns the number of calls that sample the reference's error: fewer for more elements."""
    return max(1, min(len(FACTORS) + 1, 20_000 // max(1, elements)))


def as_results(result: Any) -> tuple[Tensor | None, ...]:
    """Returns an op's result as a tuple."""
    return result if isinstance(result, tuple) else (result,)


@torch.no_grad()
def oracle(op: str, arguments: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    """Returns the results of the op's reference in fp64."""
    return as_results(OPS[op].reference(*promote(arguments)))


def call_of(op: str, arguments: tuple[Any, ...]) -> Call:
    """Returns the `Call` by which the dispatcher checks a kernel's limits."""
    record = RECORDS[op](*arguments)
    return make_call(record, wants_grad(*record.tensors(), getattr(record, "attn_mask", None)))


def require_grad(
    op: str, arguments: tuple[Any, ...], names: tuple[str, ...] | None = None
) -> tuple[Any, ...]:
    """Returns the arguments with the floating-point ones of ``names`` as leaves that require grad.

    The leaves have the same memory and strides. ``names=None``: all differentiable arguments of the
    op (`gradients_of` in its spec).
    """
    spec = OPS[op]
    names = spec.gradients_of if names is None else names
    return tuple(
        value.detach().requires_grad_() if name in names and is_floating(value) else value
        for name, value in zip(spec.arguments, arguments, strict=False)
    )
