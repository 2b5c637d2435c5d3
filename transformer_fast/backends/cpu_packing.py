"""Weights packed once for inference and reused until they change.

The kernels read a weight in panels. Packing costs about as much as multiplying a few dozen rows, so
for calls without gradients the packed copy of an `nn.Parameter` (or of a view of one) is kept and
used until the parameter changes (`Snapshot`): by an in-place update or ``load_state_dict``, by
``.to()``, assignment to ``.data`` or deletion.

Writes that PyTorch does not track (through ``.data``, NumPy, another tensor on the same memory,
shared memory) are detected by a fingerprint (``csrc/cpu/gemm/fingerprint.h``). Every call compares
a sample of each row and of each column, another sample each time; calls of 1,024 rows or more
compare everything. So a changed row or column is detected at once, and a single element after some
calls. In int8, four rows count as one. A stale copy is packed again. `forget` drops copies.

On CPUs with AMX, products of 144 rows or more read another copy, in which each weight is three
bfloat16 pieces (6 bytes); a model that is called both ways, as in decoding, keeps both.

At most ``TRANSFORMER_FAST_PACKED_MB`` (default 4096) are kept. Beyond that, a weight's copy
replaces those that were not used since the weight's last request: of a model that is too large as a
whole, some copies stay and the rest is packed in each call.

There is no lock, so that a process forked while a thread packs cannot deadlock.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _native, _switches, memory
from .._context import is_recorded
from ..ops.feed_forward import INFERENCE as FEED_FORWARD
from ..ops.feed_forward import PACKED as FEED_FORWARD_PACKED
from ..ops.int8_linear import FEED_FORWARD as INT8_FEED_FORWARD
from ..ops.int8_linear import FEED_FORWARD_PACKED as INT8_FEED_FORWARD_PACKED
from ..ops.int8_linear import LINEAR as INT8_LINEAR
from ..ops.int8_linear import LINEAR_PACKED as INT8_LINEAR_PACKED
from ..ops.linear import INFERENCE as LINEAR
from ..ops.linear import PACKED as LINEAR_PACKED

#: The native module. Without it, nothing in this module is called.
_module: Any = _native.module
_limit = _switches.count("TRANSFORMER_FAST_PACKED_MB", 4096) << 20


class Snapshot:
    """The state of a CPU tensor, to detect later changes of it.

    The tensor must not be empty, and must have no gaps within a row or a column.

    Writes that PyTorch tracks change its version counter. ``.to()``, assignment to ``.data`` and
    deletion free its memory, which a weak reference to the storage detects; one to the tensor would
    break ``torch.utils.swap_tensors``. `all_hold` of the native module detects other writes.
    """

    __slots__ = ("alive", "fingerprint", "state", "storage")

    def __init__(
        self, tensor: Tensor, owner: Tensor, when_freed: Callable[[Any], None] | None = None
    ) -> None:
        """``owner``: the tensor that ``tensor`` is a view of, or itself."""
        self.state = memory.state_of(tensor, owner)
        self.alive = True
        self.storage = weakref.ref(tensor.untyped_storage(), when_freed)
        #: None if only this package writes to the tensor. Then `is_of` suffices.
        self.fingerprint = None if hasattr(owner, memory.PRIVATE) else _fingerprint(tensor)

    def is_of(self, tensor: Tensor, owner: Tensor) -> bool:
        """True if PyTorch tracked no change of the tensor since the snapshot.

        An equal address is the same memory as long as the storage exists.
        """
        return self.alive and self.state == memory.state_of(tensor, owner)

    def is_unchanged(self, tensor: Tensor, later: list[Snapshot] | None = None) -> bool:
        """True if the tensor has not changed. With ``later``, no memory is read, and the snapshot is
        appended to the list for `all_unchanged`.
        """
        if self.storage() is None or not self.is_of(tensor, tensor):
            return False
        if self.fingerprint is None:
            return True
        if later is not None:
            later.append(self)
            return True
        return _all_hold([self.fingerprint], 1)


def _all_hold(fingerprints: Sequence[Any], rows: int) -> bool:
    done = memory.compared.get()
    if done is None or not done.is_valid:
        return bool(_module.all_hold(fingerprints, rows))
    new = [one for one in fingerprints if one not in done]
    if new and not _module.all_hold(new, rows):
        return False
    done.update(new)
    return True


def all_unchanged(snapshots: Sequence[Snapshot]) -> bool:
    """Compares the memory of all tensors, in several threads; False: all snapshots are stale now."""
    if _all_hold([one.fingerprint for one in snapshots], 1):
        return True
    _drop_all(snapshots)
    return False


def _drop_all(snapshots: Sequence[Snapshot]) -> None:
    """Makes all snapshots stale after a change: the next check would read other parts of the memory."""
    for one in snapshots:
        one.alive = False


class _Entry(Snapshot):
    """A packed copy, and the state of the weight when it was packed."""

    __slots__ = ("packed", "used")

    def __init__(self, key: tuple[Any, ...], weight: Tensor, owner: Tensor, rows: int) -> None:
        # Recorded before packing, so that a concurrent write makes the copy stale.
        super().__init__(weight, owner, lambda _: _drop(key))
        self.used = 0
        #: None after the copy was dropped; ``alive`` is then False.
        self.packed: Tensor | None = torch.ops.transformer_fast.pack_weight.cpu(
            weight.detach(), rows
        )


def _fingerprint(tensor: Tensor) -> Any:
    matrix = tensor
    if tensor.dim() != 2:
        # At least 256 rows if possible, because each check reads a part of every row.
        rows = 1
        for size in tensor.shape[:-1]:
            if rows >= 256:
                break
            rows *= size
        matrix = tensor.reshape(rows, -1)
    elif tensor.stride(1) != 1:
        matrix = tensor.t()
    elif tensor.dtype == torch.int8 and tensor.is_contiguous() and len(tensor) % 4 == 0:
        # Four int8 rows count as one, which then has the bytes of a float32 row. With single rows the
        # check would take a third of a decoding step.
        matrix = tensor.view(len(tensor) // 4, -1)
    size = tensor.element_size()
    return _module.Fingerprint(
        tensor.data_ptr(), matrix.shape[0], matrix.shape[1] * size, matrix.stride(0) * size
    )


# Thread-safe without a lock: all accesses are single dict operations.
_entries: dict[tuple[Any, ...], _Entry] = {}
#: Weights that did not fit the cache -> the `_clock` of their last request.
_refused: dict[tuple[Any, ...], int] = {}
_MOST_REFUSED = 4096
#: Logical time, the number of requests for copies.
_clock = itertools.count(1)

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def is_read_in_place(weight: Tensor, rows: int) -> bool:
    """True if ``rows`` is so small that the unpacked weight is read as fast as a packed copy."""
    name = _NAMES.get(weight.dtype)  # int8 is always packed
    return (
        name is not None
        and weight.stride(1) == 1
        and rows <= _module.direct_rows(name, weight.numel())
    )


def packed_weight(weight: Tensor, rows: int) -> Tensor | None:
    """Returns the packed copy of a parameter for products with ``rows`` rows.

    None if none is cached or needed: the kernel then reads the weight unpacked, or packs it itself.
    """
    if (  # inlined, here and below: a function call takes longer
        weight.dtype != torch.int8
        and weight.stride(1) == 1
        and rows <= _module.direct_rows(_NAMES[weight.dtype], weight.numel())
    ):
        return None
    if torch.is_grad_enabled() and weight.requires_grad:
        return None
    entry = _entry_of(weight, rows)
    return None if entry is None else entry.packed


def implement_packed() -> None:
    """Implements the operators without the argument ``packed``: they look up the packed copies.

    So compiled programs use the copies, too. Calls that are not recorded skip the operator.
    """
    for operator, packed in (
        (LINEAR, LINEAR_PACKED),
        (FEED_FORWARD, FEED_FORWARD_PACKED),
        (INT8_LINEAR, INT8_LINEAR_PACKED),
        (INT8_FEED_FORWARD, INT8_FEED_FORWARD_PACKED),
    ):
        operator.of["cpu"] = _with_copies(operator.of["cpu"], packed.of["cpu"])


def _with_copies(operator: Any, packed: Any) -> Callable[..., Tensor]:
    names = [argument.name for argument in packed._schema.arguments]
    #: For each weight: the positions of the weight and of its packed copy among the arguments.
    places = [
        (names.index(name.replace("packed", "weight")), place)
        for place, name in enumerate(names)
        if name.startswith("packed")
    ]

    def look_up(*arguments: Any) -> Tensor:
        input, given = arguments[0], [*arguments]
        rows = input.numel() // max(1, input.shape[-1])
        for weight, place in places:
            given.insert(place, packed_weight(given[weight], rows))
        return packed(*given)  # type: ignore[no-any-return]

    torch.library.impl(operator.name(), "cpu", look_up)

    def run(*arguments: Any) -> Tensor:
        # A recorded look-up would make the packed copy a constant of the program.
        return operator(*arguments) if is_recorded() else look_up(*arguments)  # type: ignore[no-any-return]

    return run


def _in_pieces(weight: Tensor, rows: int) -> bool:
    return weight.dtype == torch.float32 and _module.packs_pieces(rows)


def _entry_of(weight: Tensor, rows: int, owner: Tensor | None = None) -> _Entry | None:
    """Returns the cached copy if it is up to date, else packs the weight; None if not possible.

    ``owner``: the tensor that the weight is a view of; None: its ``_base``.
    """
    if owner is None:
        owner = weight if weight._base is None else weight._base
        if memory.program.parameters and type(owner) is Tensor:
            found = memory.program.parameters.get(weight.untyped_storage().data_ptr(), owner)
            # Parameters that share memory have separate version counters.
            if 0 <= weight.data_ptr() - found.data_ptr() < found.nbytes:
                owner = found
    # DTensor parameters have no memory of their own, and inference tensors no version counter.
    if type(owner) is not torch.nn.Parameter or owner.is_inference():
        return None
    shape, stride = weight.shape, weight.stride()
    if 1 not in stride or 0 in shape or weight.is_neg():
        return None
    key = (
        id(owner), weight.storage_offset(), shape, stride, weight.dtype, _in_pieces(weight, rows)
    )  # fmt: skip
    now = next(_clock)
    entry = _entries.get(key)
    if entry is not None:
        state = entry.fingerprint
        if entry.is_of(weight, owner) and (state is None or _all_hold([state], rows)):
            entry.used = now
            return entry
        _drop(key)
    if not _make_room(key, weight, rows, now):
        return None
    entry = _Entry(key, weight, owner, rows)
    entry.used = now
    _entries[key] = entry
    return entry


def _make_room(key: tuple[Any, ...], weight: Tensor, rows: int, now: int) -> bool:
    """Reserves cache space for a packed copy, evicting older ones; False if it does not fit."""
    # An upper bound for all instruction sets: whole panels, and the padding after the last.
    n, k = (-(-size // 64) * 64 for size in weight.shape)
    # CPUs without 8-bit dot products store packed int8 weights in 16 bits.
    element = 2 if weight.dtype == torch.int8 else weight.element_size()
    size = (n * k + 64) * (6 if _in_pieces(weight, rows) else element)
    if size > _limit:
        return False
    # Copied first: a garbage collection during the iteration may drop entries.
    kept = list(_entries.copy().items())
    beyond = size + sum(_size(entry) for _, entry in kept) - _limit
    idle: list[tuple[Any, ...]] = []
    since = _refused.get(key, 0)
    for other, entry in sorted(kept, key=lambda item: item[1].used):
        if beyond <= 0 or entry.used >= since:
            break
        idle.append(other)
        beyond -= _size(entry)
    if beyond > 0:
        if len(_refused) >= _MOST_REFUSED:
            _refused.clear()
        _refused[key] = now
        return False
    _refused.pop(key, None)
    for other in idle:
        _drop(other)
    return True


def _size(entry: _Entry) -> int:
    packed = entry.packed
    return 0 if packed is None else packed.nbytes


class PackedWeights:
    """`packed_weight` for repeated calls with the same weights, in a tenth of its time.

    For calls without gradients. Copies that the cache drops are not kept alive.
    """

    def __init__(self) -> None:
        #: (pieces, entries): the copies of the last call. One tuple, so that other threads read a
        #: consistent snapshot.
        self._last: tuple[bool, list[_Entry]] = (False, [])

    def __call__(
        self, weights: Sequence[Tensor], rows: int, owners: Sequence[Tensor] | None = None
    ) -> list[Tensor | None]:
        """Returns the packed copies; None for those that are not cached or not needed.

        ``owners``: the parameters that the weights are, or are views of, for calls that are not
        recorded, even while a program is compiled; None: the weights.
        """
        direct_rows = _module.direct_rows
        for weight in () if owners is None and is_recorded() else weights:
            name = _NAMES.get(weight.dtype)
            if name is None or weight.stride(1) != 1 or rows > direct_rows(name, weight.numel()):
                break
        else:
            return [None] * len(weights)
        pieces = _module.packs_pieces(rows) and any(
            weight.dtype == torch.float32 for weight in weights
        )
        before, last = self._last
        if pieces == before and len(last) == len(weights):
            packed: list[Tensor | None] = []
            states, prints, are_alive = [], [], True
            # A loop, since each step of a generator costs a function call.
            for entry, weight, owner in zip(last, weights, owners or weights, strict=True):
                packed.append(entry.packed)
                states.append((owner, weight, entry.state))
                are_alive = are_alive and entry.alive
                if entry.fingerprint is not None:
                    prints.append(entry.fingerprint)
            if are_alive and memory.are_unchanged(states):
                once = memory.compared.get() is not None
                if not prints or (_all_hold if once else _module.all_hold)(prints, rows):
                    now = next(_clock)
                    for entry in last:
                        entry.used = now
                    return packed
                _drop_all(last)
        entries = list(
            map(_entry_of, weights, itertools.repeat(rows), owners or itertools.repeat(None))
        )
        # Packing later weights, or another thread, may have dropped some copies.
        packed = [None if entry is None else entry.packed for entry in entries]
        kept = [entry for entry in entries if entry is not None and entry.packed is not None]
        self._last = (pieces, kept if len(kept) == len(weights) else [])
        return packed


def _drop(key: tuple[Any, ...]) -> None:
    entry = _entries.pop(key, None)
    if entry is not None:
        entry.alive, entry.packed = False, None


def forget(module: torch.nn.Module | None = None) -> None:
    """Drops the packed copies of a module's weights, or all; the next call packs again."""
    owners = None if module is None else {id(parameter) for parameter in module.parameters()}
    for key in list(_entries):
        if owners is None or key[0] in owners:
            _drop(key)


def held_bytes() -> int:
    """Returns the size of all packed copies in bytes."""
    return sum(_size(entry) for entry in list(_entries.values()))


memory.packings.append((held_bytes, forget))
memory.COPIES["cpu"] = memory.Copies(PackedWeights, Snapshot, all_unchanged, is_read_in_place)
