"""Weights packed once for inference and reused until they change.

The kernels read a weight in panels. Packing costs about as much as multiplying a few dozen rows, so
for calls without gradients the packed copy of an `nn.Parameter` (or of a view of one) is kept and
used until the parameter changes (`Snapshot`): by an in-place update or ``load_state_dict``, by
``.to()``, assignment to ``.data`` or deletion.

Writes that PyTorch does not see (through ``.data``, NumPy, another tensor on the same memory, shared
memory) are found by a fingerprint (``csrc/cpu/gemm/fingerprint.h``): every call compares something of
every row and of every column, each call something else, and calls of 1,024 rows or more everything.
So a row or a column that is written is found at once, and a single element after some calls. `forget`
drops copies. A copy that is found to be stale is packed anew.

On CPUs with AMX, products of 144 rows or more read another copy, in which each weight is three
bfloat16 pieces (6 bytes); a model that is called both ways, as in decoding, keeps both.

At most ``TRANSFORMER_FAST_PACKED_MB`` (default 4096) are kept. Beyond that, a weight's copy replaces
those that were not used since the weight was last asked for: of a model that is too large as a whole,
some copies stay and the rest is packed in each call.

There is no lock: a process that is forked while a thread packs finds none held.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
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

_limit = _switches.count("TRANSFORMER_FAST_PACKED_MB", 4096) << 20


class Snapshot:
    """The state of a tensor in CPU memory from which something was computed.

    The tensor is not empty and has no gaps within a row or a column.

    Writes that PyTorch sees change its version counter, and ``.to()``, assignment to ``.data`` and
    deletion leave its memory: a weak reference to its storage, since one to the tensor would keep
    ``torch.utils.swap_tensors`` from working. `all_hold` of the native module
    finds the others.
    """

    __slots__ = ("address", "alive", "fingerprint", "shape", "storage", "version")

    def __init__(
        self, tensor: Tensor, owner: Tensor, when_freed: Callable[[Any], None] | None = None
    ) -> None:
        """``owner``: of which the tensor is a view, or itself."""
        self.version = owner._version
        self.address = tensor.data_ptr()
        self.shape = tensor.shape
        self.alive = True
        self.storage = weakref.ref(tensor.untyped_storage(), when_freed)
        self.fingerprint = _fingerprint(tensor)

    def is_of(self, tensor: Tensor, owner: Tensor) -> bool:
        """Whether nothing that PyTorch sees has changed.

        As long as there is its storage, memory at the same address is the same.
        """
        return (
            self.alive
            and self.version == owner._version
            and self.address == tensor.data_ptr()
            and self.shape == tensor.shape
        )

    def is_unchanged(self, tensor: Tensor, rows: int) -> bool:
        """Whether nothing has changed, for work on so many rows."""
        assert _native.module is not None  # or no kernel would ask
        return (
            self.storage() is not None
            and self.is_of(tensor, tensor)
            and _native.module.all_hold([self.fingerprint], rows)
        )


class _Entry(Snapshot):
    """A packed copy, and the state of the weight when it was packed."""

    __slots__ = ("packed", "used")

    def __init__(self, key: tuple[Any, ...], weight: Tensor, owner: Tensor, rows: int) -> None:
        # The state before packing: a write in the meantime must not pass for the packed state.
        super().__init__(weight, owner, lambda _: _drop(key))
        self.used = 0
        #: None once the copy is dropped, and the state no longer ``alive``.
        self.packed: Tensor | None = torch.ops.transformer_fast.pack_weight.cpu(
            weight.detach(), rows
        )


def _fingerprint(tensor: Tensor) -> Any:
    assert _native.module is not None  # or no kernel would ask
    matrix = tensor
    if tensor.dim() != 2:
        # As many rows as each call is to read a part of.
        rows = 1
        for size in tensor.shape[:-1]:
            if rows >= 256:
                break
            rows *= size
        matrix = tensor.reshape(rows, -1)
    elif tensor.stride(1) != 1:
        matrix = tensor.t()
    size = tensor.element_size()
    return _native.module.Fingerprint(
        tensor.data_ptr(), matrix.shape[0], matrix.shape[1] * size, matrix.stride(0) * size
    )


_FINGERPRINT = attrgetter("fingerprint")

# All that is done with these are single operations of a dict.
_entries: dict[tuple[Any, ...], _Entry] = {}
#: When weights were last asked for of which no copy was kept, because there was no room.
_refused: dict[tuple[Any, ...], int] = {}
_MOST_REFUSED = 4096
#: The time: how often copies were asked for.
_clock = itertools.count(1)

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def packed_weight(weight: Tensor, rows: int) -> Tensor | None:
    """The packed copy of a parameter for products of so many rows.

    None where none is kept or needed: the kernel then reads the weight as it is, or packs it.
    """
    assert _native.module is not None  # or no kernel would ask
    # So few rows are multiplied that reading the weight as it is takes no longer, row by row.
    if (
        weight.dtype != torch.int8
        and weight.stride(1) == 1
        and rows <= _native.module.direct_rows(_NAMES[weight.dtype], weight.numel())
    ):
        return None
    if torch.is_grad_enabled() and weight.requires_grad:
        return None
    entry = _entry_of(weight, rows)
    return None if entry is None else entry.packed


def _linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: int
) -> Tensor:
    packed = packed_weight(weight, input.numel() // max(1, input.shape[-1]))
    return LINEAR_PACKED.of["cpu"](input, weight, packed, bias, residual, activation)  # type: ignore[no-any-return]


def _feed_forward(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: int,
) -> Tensor:
    rows = input.numel() // max(1, input.shape[-1])
    packed1, packed2 = packed_weight(weight1, rows), packed_weight(weight2, rows)
    return FEED_FORWARD_PACKED.of["cpu"](  # type: ignore[no-any-return]
        input, weight1, packed1, bias1, weight2, packed2, bias2, activation
    )


def _int8_linear(
    input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None,
    activation: int,
) -> Tensor:  # fmt: skip
    packed = packed_weight(weight, input.numel() // max(1, input.shape[-1]))
    return INT8_LINEAR_PACKED.of["cpu"](  # type: ignore[no-any-return]
        input, weight, scale, packed, bias, residual, activation
    )


def _int8_feed_forward(
    input: Tensor, weight1: Tensor, scale1: Tensor, bias1: Tensor | None, weight2: Tensor,
    scale2: Tensor, bias2: Tensor | None, activation: int,
) -> Tensor:  # fmt: skip
    rows = input.numel() // max(1, input.shape[-1])
    packed1, packed2 = packed_weight(weight1, rows), packed_weight(weight2, rows)
    return INT8_FEED_FORWARD_PACKED.of["cpu"](  # type: ignore[no-any-return]
        input, weight1, scale1, packed1, bias1, weight2, scale2, packed2, bias2, activation
    )


def implement_packed() -> None:
    """Implement the operators without packed copies, which look them up when they run.

    So a compiled program finds them, too. Calls that are not recorded need no operator for that.
    """
    for operator, function in (
        (LINEAR, _linear),
        (FEED_FORWARD, _feed_forward),
        (INT8_LINEAR, _int8_linear),
        (INT8_FEED_FORWARD, _int8_feed_forward),
    ):
        operator.of["cpu"] = _unless_recorded(operator.of["cpu"], function)


def _unless_recorded(operator: Any, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    torch.library.impl(operator.name(), "cpu", function)

    def run(*arguments: Any) -> Tensor:
        # A packed copy would become a constant of the program.
        return operator(*arguments) if is_recorded() else function(*arguments)  # type: ignore[no-any-return]

    return run


def _in_pieces(weight: Tensor, rows: int) -> bool:
    assert _native.module is not None  # or no kernel would ask
    return weight.dtype == torch.float32 and _native.module.packs_pieces(rows)


def _entry_of(weight: Tensor, rows: int, owner: Tensor | None = None) -> _Entry | None:
    """The copy that is kept, which is the weight as it is now; packed now if need be.

    ``owner``: what the weight is a view of; None: what the weight says.
    """
    if owner is None:
        owner = weight if weight._base is None else weight._base
        if memory.program.parameters and type(owner) is Tensor:
            found = memory.program.parameters.get(weight.untyped_storage().data_ptr(), owner)
            # Parameters that share their memory have versions of their own.
            if 0 <= weight.data_ptr() - found.data_ptr() < found.nbytes:
                owner = found
    # Sharded ones (DTensor) have no memory of their own, those made in inference mode no version
    # counter.
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
        if entry.is_of(weight, owner) and _native.module.all_hold([entry.fingerprint], rows):  # type: ignore[union-attr]
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
    # Whole panels, whichever instruction set is in use, and what stands behind them.
    n, k = (-(-size // 64) * 64 for size in weight.shape)
    # Without 8-bit dot products int8 takes 16 bits.
    element = 2 if weight.dtype == torch.int8 else weight.element_size()
    size = (n * k + 64) * (6 if _in_pieces(weight, rows) else element)
    if size > _limit:
        return False
    kept = list(_entries.items())
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
    """`packed_weight` of the same weights again and again, at a tenth of its time.

    For calls that need no gradients. It remembers copies, but it does not keep them.
    """

    def __init__(self) -> None:
        #: For each weight the copy that was kept at the last call. Threads find all of one time.
        self._last: tuple[bool, list[_Entry]] = (False, [])

    def __call__(
        self, weights: Sequence[Tensor], rows: int, owners: Sequence[Tensor] | None = None
    ) -> list[Tensor | None]:
        """The packed copies; None stands for those that are not kept or not needed.

        ``owners``: the parameters that the weights are, or are views of, for calls that are not
        recorded, even while a program is compiled; None: the weights.
        """
        assert _native.module is not None  # or no kernel would ask
        direct_rows = _native.module.direct_rows
        for weight in () if owners is None and is_recorded() else weights:
            if rows > direct_rows(_NAMES[weight.dtype], weight.numel()):
                break
        else:
            return [None] * len(weights)
        pieces = _in_pieces(weights[0], rows)
        before, last = self._last
        if pieces == before and len(last) == len(weights):
            packed: list[Tensor | None] = []
            # Each step of a generator is a call.
            for entry, weight, owner in zip(last, weights, owners or weights, strict=True):
                packed.append(entry.packed)
                if not entry.is_of(weight, owner):
                    break
            else:
                if _native.module.all_hold(list(map(_FINGERPRINT, last)), rows):
                    now = next(_clock)
                    for entry in last:
                        entry.used = now
                    return packed
        entries = list(
            map(_entry_of, weights, itertools.repeat(rows), owners or itertools.repeat(None))
        )
        # Packing the others, or another thread, may have dropped some.
        packed = [None if entry is None else entry.packed for entry in entries]
        kept = [entry for entry in entries if entry is not None and entry.packed is not None]
        self._last = (pieces, kept if len(kept) == len(weights) else [])
        return packed


def _drop(key: tuple[Any, ...]) -> None:
    entry = _entries.pop(key, None)
    if entry is not None:
        entry.alive, entry.packed = False, None


def forget(module: torch.nn.Module | None = None) -> None:
    """Drop the packed copies of a module's weights, or all; the next call packs again."""
    owners = None if module is None else {id(parameter) for parameter in module.parameters()}
    for key in list(_entries):
        if owners is None or key[0] in owners:
            _drop(key)


def held_bytes() -> int:
    """Memory that packed copies take now."""
    return sum(_size(entry) for entry in list(_entries.values()))


memory.packings.append((held_bytes, forget))
memory.COPIES["cpu"] = memory.Copies(PackedWeights, Snapshot)
