"""Memory that exposes kernel bugs: NaN-filled new tensors, unaligned inputs surrounded by NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import deterministic

from .. import _native

__all__ = ["embed_all_in_nan", "embed_in_nan", "nan_memory"]


@contextmanager
def nan_memory() -> Iterator[None]:
    """Context manager that fills uninitialised tensors, also in C++, with NaN (integers: -1)."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    filled = _native.module is not None and _native.module.fill_fresh(True)
    try:
        yield
    finally:
        if _native.module is not None:
            _native.module.fill_fresh(filled)
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def embed_in_nan(tensor: Tensor, offset: int = 1, margin: int = 67) -> Tensor:
    """Copies the tensor into a NaN-filled buffer, ``offset`` elements from its start.

    The copy has the same strides, and it is surrounded by NaN; so are gaps between its elements. For
    integers the fill value is the largest of the dtype, for bools True. ``margin``: elements behind.
    """
    steps = list(zip(tensor.shape, tensor.stride(), strict=True))
    extent = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    if tensor.is_floating_point():
        fill: Any = float("nan")
    else:
        fill = True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max
    memory = torch.full((offset + extent + margin,), fill, dtype=tensor.dtype, device=tensor.device)
    placed = memory.as_strided(tensor.shape, tensor.stride(), offset)
    target, source = placed, tensor.detach()
    for dim, (size, stride) in enumerate(steps):
        if stride == 0 and size > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)
    return placed


def embed_all_in_nan(arguments: tuple[Any, ...], offset: int = 1) -> tuple[Any, ...]:
    """Applies `embed_in_nan` to every tensor, each with an offset one larger than the one before."""
    placed = []
    for value in arguments:
        placed.append(embed_in_nan(value, offset) if isinstance(value, Tensor) else value)
        offset += isinstance(value, Tensor)
    return tuple(placed)
