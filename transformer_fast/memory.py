"""Memory that the CPU kernels cache: blocks for large results, and packed copies of weights.

Touching a new page costs more than writing it several times. So results of 256 KiB and more use memory
that the process keeps when they are freed, like PyTorch's caching allocator for CUDA. At most `limit`
bytes of unused memory are kept. Beyond that, the blocks unused for longest return to the system; all of
them do before a call fails for lack of memory.

Such tensors cannot grow in place, and their storage cannot be resized, not even to 0: ``resize_`` raises
a RuntimeError. After ``set_limit(0)`` results use PyTorch's memory, which can be resized.

In calls without gradients the kernels read a packed copy of each weight, which is kept until the weight
changes. `forget_packed` drops the copies after writes that cannot be detected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from . import _native
from ._cgroup import memory_limit

__all__ = [
    "forget_calls", "forget_packed", "kept", "limit", "packed", "release", "set_limit",
]  # fmt: skip

_MOST = 1 << 30
#: For each backend with packed weights: (function that returns their bytes, function that drops the
#: packed weights of a module, or all).
packings: list[tuple[Callable[[], int], Callable[[torch.nn.Module | None], None]]] = []
#: Functions that clear the call caches of backends.
call_caches: list[Callable[[], None]] = []


#: Attribute of a parameter whose memory only this package writes to.
PRIVATE = "_is_private_to_transformer_fast"


class Copies(NamedTuple):
    """A backend's `cpu_packing.PackedWeights` (packed copies), `Snapshot` (a tensor's state),
    `all_unchanged` and `is_read_in_place`."""

    packed: Callable[[], Any]
    snapshot: Callable[..., Any]
    all_unchanged: Callable[[Sequence[Any]], bool]
    is_read_in_place: Callable[[torch.Tensor, int], bool]


#: Backend -> its functions.
COPIES: dict[str, Copies] = {}


class _Compared(set[Any]):
    """The fingerprints whose weights were compared within `compared_once`."""

    #: False after the block, which copies of its context may outlive.
    is_valid = True


#: None, or not valid: each call compares.
compared: ContextVar[_Compared | None] = ContextVar("compared", default=None)


@contextmanager
def compared_once() -> Iterator[None]:
    """Within the block, only the first call compares a weight's memory with its fingerprint.

    Later calls find what PyTorch tracks. To read a part of each row takes a quarter of an int8 step.
    """
    found = _Compared()
    token = compared.set(found)
    try:
        yield
    finally:
        found.is_valid = False
        compared.reset(token)


def state_of(tensor: torch.Tensor, owner: torch.Tensor) -> tuple[Any, ...]:
    """Returns what changes whenever PyTorch tracks a change of a tensor, which is a view of ``owner``."""
    # Assignment to ``.data`` may keep the memory, and change only how it is read.
    return owner._version, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _compare(tensors: Sequence[tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]]) -> bool:
    return all(state == state_of(tensor, owner) for owner, tensor, state in tensors)


#: (list of (owner, tensor, `state_of` them)) -> True if none of the states has changed.
are_unchanged = _compare if _native.autograd is None else _native.autograd.are_unchanged


class _Program(threading.local):
    """The compiled program that runs on this thread."""

    #: Address of a storage -> the parameter that the program reads through a view of it. Needed
    #: because inductor's views do not record their base.
    parameters: Mapping[int, torch.Tensor] = {}


program = _Program()


def kept() -> int:
    """Returns the bytes of unused memory that are kept now; 0 without the native module."""
    return 0 if _native.module is None else int(_native.module.kept_bytes())


def limit() -> int:
    """Returns the limit of kept memory in bytes: `set_limit`'s, else 1 GiB or a sixteenth of the memory
    if that is less.

    The memory is the machine's, or the limit of the process's control group (a container). 0 without the
    native module.
    """
    return 0 if _native.module is None else int(_native.module.kept_limit())


def set_limit(size: int) -> None:
    """Set the limit of unused memory that is kept, in bytes; 0: keep none. Frees the excess at once.

    Raises:
        ValueError: ``size`` is negative, or no whole number.
    """
    if not hasattr(size, "__index__") or size < 0:
        raise ValueError(f"size must be a whole number of bytes, 0 or more, not {size!r}")
    if _native.module is not None:
        _native.module.set_kept_limit(size)


def release() -> None:
    """Return all kept memory that no tensor uses to the system."""
    if _native.module is not None:
        _native.module.release_kept()


def packed() -> int:
    """Returns the bytes of all packed weights (limit: ``TRANSFORMER_FAST_PACKED_MB``, 4096 MiB)."""
    return sum(held_bytes() for held_bytes, _ in packings)


def forget_packed(module: torch.nn.Module | None = None) -> None:
    """Drop the packed copies of a module's weights, or of all weights; the next calls pack them again.

    In either case the cached constants of compiled programs are dropped and computed again.

    Needed only after single elements of a weight were written without PyTorch's knowledge: through
    ``.data``, NumPy or another tensor on the same memory. All other changes are detected, also rows and
    columns written that way.
    """
    for _, forget in packings:
        forget(module)


def forget_calls() -> None:
    """Drop cached kernel selections and launch plans of GPU calls (no tensors): up to 4096 per op."""
    for forget in call_caches:
        forget()


if _native.module is not None:
    set_limit(min(_MOST, memory_limit() // 16))


def __dir__() -> list[str]:
    return list(__all__)
