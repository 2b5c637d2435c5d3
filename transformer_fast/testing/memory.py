"""Memory that shows mistakes: fresh tensors that start as NaN, inputs among NaN, off alignment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import deterministic

from .. import _native

__all__ = ["all_among_nan", "among_nan", "nan_memory"]


@contextmanager
def nan_memory() -> Iterator[None]:
    """Within the block fresh tensors start as NaN, also those that C++ operators allocate.

    Of a type of integers they start as -1.
    """
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


def among_nan(tensor: Tensor, offset: int = 1, margin: int = 67) -> Tensor:
    """The tensor with the same strides, ``offset`` elements off alignment, NaN all around it.

    Gaps that its strides leave are NaN as well. Integers are surrounded by their largest value,
    bools by True.
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


def all_among_nan(arguments: tuple[Any, ...], offset: int = 1) -> tuple[Any, ...]:
    """`among_nan` for every tensor, each one element further off alignment than the last."""
    placed = []
    for value in arguments:
        placed.append(among_nan(value, offset) if isinstance(value, Tensor) else value)
        offset += isinstance(value, Tensor)
    return tuple(placed)
