"""Weights packed once for inference and reused, never stale.

The kernels read a weight in panels. Packing costs about as much as multiplying a few dozen rows, so
for calls without gradients the packed copy of an `nn.Parameter` (or of a view of one) is kept and
used until the parameter changes: by an in-place update or ``load_state_dict`` (its version counter),
by ``.to()`` or assignment to ``.data`` (its memory), by replacement or deletion (a weak reference).
Writes that PyTorch cannot see (through ``.data`` views, NumPy, shared memory) are caught by
comparing two dozen values at each call, which notices an update of the whole matrix but may miss one
of a few elements; `forget` drops all copies.

On CPUs with AMX, products of 144 rows or more read another copy, in which each weight is three
bfloat16 pieces (6 bytes); a model that is called both ways, as in decoding, keeps both.

At most ``TRANSFORMER_FAST_PACKED_MB`` (default 4096) are kept, the oldest going first.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _native, _switches


class _Entry(NamedTuple):
    owner: weakref.ref[Tensor]
    version: int
    address: int
    #: Keeps the memory at `address` from being given to another tensor while the entry stands.
    storage: Any
    packed: Tensor


_entries: OrderedDict[tuple[Any, ...], _Entry] = OrderedDict()
_lock = threading.Lock()
_limit = _switches.count("TRANSFORMER_FAST_PACKED_MB", 4096) << 20
_held = 0
#: How often copies were dropped: who remembers some has to ask again.
_drops = 0


#: Products of so few rows read the weight as it is just as fast.
FEW_ROWS = 4


def packed_weight(weight: Tensor, rows: int = FEW_ROWS + 1) -> Tensor | None:
    """The packed copy of a parameter for products of so many rows.

    None where none is kept or needed: the kernel then reads the weight as it is, or packs it.
    """
    if rows <= FEW_ROWS and weight.dtype == torch.float32:
        return None
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and weight.requires_grad):
        return None
    owner = _owner(weight)
    # Tensors made in inference mode have no version counter.
    if not isinstance(owner, torch.nn.Parameter) or owner.is_inference():
        return None
    key = _key(weight, owner, rows)
    entry = _entries.get(key)
    if (
        entry is not None
        and entry.version == owner._version
        and entry.address == weight.data_ptr()
        and entry.owner() is owner
    ):
        return entry.packed
    return _pack(key, owner, weight, rows)


def _owner(weight: Tensor) -> Tensor:
    """What a view is a view of; the tensor itself if it is none."""
    return weight if weight._base is None else weight._base


def _in_pieces(weight: Tensor, rows: int) -> bool:
    assert _native.module is not None  # or no kernel would ask
    return weight.dtype == torch.float32 and _native.module.packs_pieces(rows)


def _key(weight: Tensor, owner: Tensor, rows: int) -> tuple[Any, ...]:
    return (
        id(owner), weight.storage_offset(), weight.shape, weight.stride(), weight.dtype,
        _in_pieces(weight, rows),
    )  # fmt: skip


def _pack(key: tuple[Any, ...], owner: Tensor, weight: Tensor, rows: int) -> Tensor | None:
    global _held
    # Before packing: a write in the meantime must not pass for the packed state.
    version, address = owner._version, weight.data_ptr()
    with torch.no_grad():
        packed = torch.ops.transformer_fast.cpu_pack_weight(weight.detach(), rows)
    size = packed.nbytes
    with _lock:
        _drop(key)
        if size > _limit:
            return packed
        while _held + size > _limit:
            _drop(next(iter(_entries)))
        reference = weakref.ref(owner, lambda _: forget_key(key))
        _entries[key] = _Entry(reference, version, address, weight.untyped_storage(), packed)
        _held += size
    return packed


class PackedWeights:
    """`packed_weight` of the same weights again and again, at a tenth of its time.

    For calls that need no gradients. It remembers copies, but it does not keep them.
    """

    def __init__(self) -> None:
        #: What was seen of the weights, and the copies that were kept then. In one tuple, so that
        #: threads find both of one time.
        self._last: tuple[list[int], list[weakref.ref[Tensor]]] = ([], [])

    def __call__(self, weights: Sequence[Tensor], rows: int) -> list[Tensor | None]:
        """The packed copies; None stands for those that are not kept or not needed."""
        if rows <= FEW_ROWS and weights[0].dtype == torch.float32:
            return [None] * len(weights)
        # Before packing: a write in the meantime must not pass for the packed state.
        now = _state(weights, rows)
        before, references = self._last
        if now == before:
            packed = [reference() for reference in references]
            if all(copy is not None for copy in packed):
                return packed
        if sum(weight.nbytes for weight in weights) > _limit:
            # They would drive one another out; kernels pack them, one at a time.
            return [None] * len(weights)
        packed = [_kept(weight, rows) for weight in weights]
        if _drops == now[0] and all(copy is not None for copy in packed):
            self._last = now, [weakref.ref(copy) for copy in packed if copy is not None]
        return packed


def _state(weights: Sequence[Tensor], rows: int) -> list[int]:
    """What changes when copies have to be asked for again.

    Where another tensor has the number of one that is gone, the latter's copy was dropped.
    """
    state = [_drops, _in_pieces(weights[0], rows)]
    for weight in weights:
        owner = _owner(weight)
        version = -1 if owner.is_inference() else owner._version
        state += (id(owner), version, weight.data_ptr())
    return state


def _kept(weight: Tensor, rows: int) -> Tensor | None:
    packed = packed_weight(weight, rows)
    entry = None if packed is None else _entries.get(_key(weight, _owner(weight), rows))
    return None if entry is None or entry.packed is not packed else packed


def _drop(key: tuple[Any, ...]) -> None:
    global _held, _drops
    entry = _entries.pop(key, None)
    if entry is not None:
        _held -= entry.packed.nbytes
        _drops += 1


def forget_key(key: tuple[Any, ...]) -> None:
    """Drop one copy (its parameter is gone)."""
    # A weak reference's callback may run while this thread holds the lock.
    if _lock.acquire(blocking=False):
        try:
            _drop(key)
        finally:
            _lock.release()


def forget() -> None:
    """Drop all packed copies; the next call of each kernel packs again."""
    global _drops
    with _lock:
        _drops += 1
        for key in list(_entries):
            _drop(key)


def held_bytes() -> int:
    """Memory that packed copies take now."""
    return _held
