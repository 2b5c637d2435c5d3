"""Whether a tensor in CPU memory has changed since something was computed of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from . import _native


class Snapshot:
    """The state of a tensor that is not empty and has no gaps in a row or a column.

    Writes that PyTorch sees change its version counter, and ``.to()``, assignment to ``.data`` and
    deletion leave its memory: a weak reference to its storage, since one to the tensor would keep
    ``torch.utils.swap_tensors`` from working. Others are found by the fingerprint (`all_hold` of the
    native module).
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


def unchanged(states: Sequence[Snapshot], tensors: Sequence[Tensor], rows: int) -> bool:
    """Whether all are as they were. ``rows``: of the work that depends on it, as for `Fingerprint`."""
    assert _native.module is not None
    return all(
        state.storage() is not None and state.is_of(tensor, tensor)
        for state, tensor in zip(states, tensors, strict=True)
    ) and bool(_native.module.all_hold([state.fingerprint for state in states], rows))


def _fingerprint(tensor: Tensor) -> Any:
    assert _native.module is not None
    matrix = tensor if tensor.dim() == 2 else tensor.reshape(1, -1)
    matrix = matrix if matrix.stride(1) == 1 else matrix.t()
    size = tensor.element_size()
    return _native.module.Fingerprint(
        tensor.data_ptr(), matrix.shape[0], matrix.shape[1] * size, matrix.stride(0) * size
    )
