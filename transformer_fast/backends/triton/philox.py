"""Dropout flags from Philox4x32-10, keyed by (seed, element position).

The pattern is that of ``reference/dropout.py``: one Philox call yields 16-bit numbers for 8 columns.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference.dropout import threshold


class Dropout(NamedTuple):
    """Dropout arguments of kernels: keep if number > limit; kept values are multiplied by scale."""

    active: bool
    limit: int
    scale: float


@lru_cache(256)
def dropout_arguments(p: float) -> Dropout:
    """Returns the arguments for probability p. ``limit`` is the threshold - 1; p = 1 drops all."""
    if p == 0.0:
        return Dropout(False, 0, 1.0)
    if p == 1.0:
        return Dropout(True, 2**16 - 1, 0.0)
    return Dropout(True, threshold(p) - 1, 1.0 / (1.0 - p))


def seed_for(dropout: Dropout, seed: Tensor | None, device: torch.device) -> Tensor | None:
    """Returns the seed on ``device``; an arbitrary one for p = 1, where calls have none."""
    if not dropout.active:
        return None
    if seed is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    return seed if seed.device == device else seed.to(device)


@triton.jit
def _words(seed, rows, groups):
    """Returns the four words of the Philox call for each row and group of 8 columns (int64)."""
    c0 = groups.to(tl.uint32)
    c1 = (rows & 0xFFFFFFFF).to(tl.uint32)
    c2 = (rows >> 32).to(tl.uint32)
    return tl.philox(seed, c0, c1, c2, c0 * 0)


@triton.jit
def _keep_halves(word, limit):
    """Returns the keep flags of the two 16-bit numbers in each word, along a new last dimension."""
    low = (word & 0xFFFF).to(tl.int32) > limit
    high = (word >> 16).to(tl.int32) > limit
    return tl.join(low.to(tl.int8), high.to(tl.int8))


@triton.jit
def keep_tile(seed, rows, first_column, limit, COLUMNS: tl.constexpr):
    """Returns the keep flags [R, COLUMNS] of ``rows`` (int64 [R]) and columns from ``first_column``.

    ``first_column`` and ``COLUMNS`` must be multiples of 8, because one Philox call serves 8 columns.
    """
    groups = (first_column // 8 + tl.arange(0, COLUMNS // 8)).to(tl.int64)[None, :]
    w0, w1, w2, w3 = _words(seed, rows[:, None] + groups * 0, groups + rows[:, None] * 0)
    # Compared before interleaving, because flags have a quarter of the words' size.
    even = tl.join(_keep_halves(w0, limit), _keep_halves(w2, limit))
    odd = tl.join(_keep_halves(w1, limit), _keep_halves(w3, limit))
    # [R, groups, half, word // 2, word % 2]
    flags = tl.permute(tl.join(even, odd), (0, 1, 3, 4, 2))
    return tl.reshape(flags, [rows.shape[0], COLUMNS]) != 0


@triton.jit
def keep_elements(seed, rows, columns, limit):
    """Returns the keep flags of elements (row, column), int64 tensors; one Philox call each."""
    w0, w1, w2, w3 = _words(seed, rows, columns // 8)
    low = tl.where(columns % 8 < 4, w0, w2)
    high = tl.where(columns % 8 < 4, w1, w3)
    word = tl.where(columns % 4 < 2, low, high)
    number = tl.where(columns % 2 == 0, word & 0xFFFF, word >> 16)
    return number.to(tl.int32) > limit
