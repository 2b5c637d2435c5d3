"""Call cache: skips argument checks and dispatch for calls that were made before.

The checks, the choice of a kernel and the kernel's arguments depend on shapes, strides, dtypes,
devices, flags and a few switches, but not on data. On a GPU these checks take longer than
many kernels run, so the result is cached under exactly that key. The cache holds at most `MOST` calls;
`forget` clears it. Calls under tracing, modes or transforms and calls on tensor subclasses are not
cached. Calls on CPU tensors never get here: their checks take less time than a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import memory, proof
from .._context import (
    PLAIN,
    changed,
    fp32_precision,
    is_compiling,
    no_active_modes,
    settings,
)
from ..dispatch import CALL_CACHES, Kernel, registry
from ..reference.dropout import draw_seed

#: Largest number of cached calls; then the cache is cleared, since every batch may have its own sizes.
MOST = 4096

_Parameter = torch.nn.Parameter
_CONSTANT = frozenset({int, float, str})
_is_grad_enabled = torch.is_grad_enabled
_stores: list[dict[Any, Any]] = []


def new_store() -> dict[Any, Any]:
    """Creates a cache that `forget` clears."""
    store: dict[Any, Any] = {}
    _stores.append(store)
    return store


def insert(store: dict[Any, Any], key: Any, value: Any) -> None:
    """Adds ``value`` to a cache, which is cleared first if it holds `MOST` entries."""
    if len(store) >= MOST:
        store.clear()
    store[key] = value


def forget() -> None:
    """Clears all caches."""
    for store in _stores:
        store.clear()


def key_scope(scope: Any, **changes: Any) -> AbstractContextManager[None]:
    """Context manager that adds ``scope``, a hashable value that kernels depend on, to all keys.

    ``changes``: changed settings; ``scope`` stands for them in the keys.
    """
    return changed(key_scope=(*settings.current.key_scope, scope), **changes)


def describe(arguments: Sequence[Any], before: Sequence[Any] = ()) -> tuple[Any, ...] | None:
    """Cache key of a call: everything that its checks and its kernel depend on, except data.

    A tensor contributes dtype, shape, strides, device, whether it is aligned to 16 bytes (kernels have
    variants for that), and whether it requires gradients. Returns None if a tensor is not described by
    its memory alone. ``before``: further parts of the key.
    """
    parts: list[Any] = [settings.current.key_scope, *before]
    add = parts.append
    follows = _is_grad_enabled()
    bits = 0
    device = -1
    try:
        for value in arguments:
            # The most frequent values. The key omits their type, since no other part of it
            # compares equal to them.
            if value is None or value is False or value is True:
                add(value)
                continue
            kind = type(value)
            if kind is Tensor or kind is _Parameter:
                place = value.data_ptr()
                if value.is_neg() or (
                    # At address 0, but not empty: a meta tensor, or the zeros of autograd.
                    not place and (value.numel() > 0 or value.is_meta or value._is_zerotensor())
                ):
                    return None
                bits |= place
                device = value.get_device()
                parts += (value.dtype, value.shape, value.stride(), device)
                if follows and value.requires_grad:
                    add("grad")
            elif kind in _CONSTANT:
                # 1 and 1.0 compare equal, but select different variants.
                parts += (kind, value)
            elif kind is tuple or kind is list or kind is torch.Size:
                for one in value:
                    if type(one) is not int:
                        return None
                add(tuple(value))
            else:
                return None
    except RuntimeError:  # sparse tensors have no strides, nested ones no shape
        return None
    if bits & 15:
        add(tuple([x.data_ptr() & 15 == 0 for x in arguments if type(x) in PLAIN]))
    where = "cuda" if device >= 0 else "cpu"
    if torch.is_autocast_enabled(where):
        add(torch.get_autocast_dtype(where))
    add(fp32_precision("cuda", "matmul"))
    return tuple(parts)


_calls = new_store()
_SEEN = object()


def lookup(op: str, tensors: tuple[Any, ...], others: tuple[Any, ...]) -> tuple[Any, Any]:
    """Implements `dispatch.lookup`."""
    if is_compiling() or not no_active_modes():
        return None, None
    for one in others:  # a number given as a tensor, whose value may change
        if one.__class__ in PLAIN:
            return None, None  # type: ignore[unreachable]
    now = settings.current
    key = describe((*tensors, *others), (op, now.backend, now.strict, proof.epoch))
    if key is None:
        return None, None
    cached = _calls.get(key)
    if cached is None or cached is _SEEN or cached[0] is not registry.kernels[op]:
        return None, partial(_insert, key, tensors)
    return cached[1], None


def _insert(key: tuple[Any, ...], tensors: Any, kernel: Kernel, *call: Any) -> None:
    """Caches a call the second time it is made."""
    if key not in _calls:
        insert(_calls, key, _SEEN)
    elif (replay := _replay(kernel, tensors, *call)) is not None:
        insert(_calls, key, (registry.kernels[kernel.op], replay))


def _replay(
    kernel: Kernel,
    tensors: tuple[Tensor | None, ...],
    arguments: Any,
    needs_grad: bool,
    finish: Callable[[Any], Any] | None,
) -> Callable[..., Any] | None:
    """Returns the call as a function of ``tensors``; None if it uses others, except a seed."""
    moved: dict[int, int] = {}
    drawn: list[int] = []
    fixed: list[Any] = [*arguments]
    for at, value in enumerate(arguments):
        if not isinstance(value, Tensor):
            continue
        fixed[at] = None
        among = [n for n, tensor in enumerate(tensors) if tensor is value]
        if among:
            # Each occurrence of a repeated argument keeps its position: the key does not record that
            # two arguments are the same tensor.
            taken = [n for n in among if n not in moved.values()]
            moved[at] = (taken or among)[0]
        elif value is getattr(arguments, "seed", None):
            drawn.append(at)
        else:
            return None
    function, kind = kernel.function, type(arguments)

    def replay(*given: Any) -> Any:
        filled = fixed.copy()
        for at, n in moved.items():
            filled[at] = given[n]
        for at in drawn:
            filled[at] = draw_seed(given[0].device)
        result = function(kind(*filled))
        return result if finish is None else finish(result)

    if kernel.record is not None and not needs_grad:
        return kernel.record(replay)
    return replay


if torch.version.cuda is not None or torch.version.hip is not None:
    CALL_CACHES["cuda"] = lookup
memory.call_caches.append(forget)
