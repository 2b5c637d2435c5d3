"""Dropout flags from Philox4x32-10, keyed by (seed, element position) like the reference.

Element (row, column) of the dropped tensor, seen as (rows, columns) with columns its last
dimension, reads word ``column % 4`` of Philox(counter = (column // 4, row mod 2^32, row div 2^32,
0), key = seed) and is kept iff the word is at least floor(p * 2^32).
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Dropout(NamedTuple):
    """Dropout as kernels take it: keep iff word > limit, kept values are multiplied by scale."""

    active: bool
    limit: int
    scale: float


@lru_cache(256)
def dropout_arguments(p: float) -> Dropout:
    """``word >= floor(p * 2^32)`` as ``word > limit``, which p = 1 fits without a special case.

    ``limit`` is the int32 with the bits of that uint32, so that its Triton type never changes.
    """
    bound = int(p * 2**32)
    if bound == 0:
        return Dropout(False, 0, 1.0)
    limit = bound - 1
    return Dropout(
        True,
        limit - 2**32 if limit >= 2**31 else limit,
        1.0 / (1.0 - p) if p < 1.0 else 0.0,
    )


def seed_for(dropout: Dropout, seed: Tensor | None, device: torch.device) -> Tensor | None:
    """The seed as kernels read it; with p = 1 none is drawn, and any will do."""
    if not dropout.active:
        return None
    if seed is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    return seed if seed.device == device else seed.to(device)


@triton.jit
def keep_tile(seed, rows, first_column, limit, COLUMNS: tl.constexpr):
    """Flags [R, COLUMNS] of the rows (int64 [R]) and of the columns from ``first_column`` on.

    ``first_column`` must be a multiple of 4: one Philox call then serves four columns.
    """
    groups = first_column // 4 + tl.arange(0, COLUMNS // 4)
    zero = (rows * 0).to(tl.uint32)[:, None] + (groups * 0).to(tl.uint32)[None, :]
    c0 = zero + groups.to(tl.uint32)[None, :]
    c1 = zero + (rows & 0xFFFFFFFF).to(tl.uint32)[:, None]
    c2 = zero + (rows >> 32).to(tl.uint32)[:, None]
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, zero)
    bound = limit.to(tl.uint32, bitcast=True)
    # Compared before they are interleaved: flags are a quarter of the words' size.
    even = tl.join((w0 > bound).to(tl.int8), (w2 > bound).to(tl.int8))
    odd = tl.join((w1 > bound).to(tl.int8), (w3 > bound).to(tl.int8))
    flags = tl.reshape(tl.join(even, odd), [rows.shape[0], COLUMNS])
    return flags != 0


@triton.jit
def keep_elements(seed, rows, columns, limit):
    """Flags of elements at any (row, column), both int64 of one shape; one Philox call each."""
    c0 = (columns // 4).to(tl.uint32)
    c1 = (rows & 0xFFFFFFFF).to(tl.uint32)
    c2 = (rows >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c0 * 0)
    word = columns % 4
    even = tl.where(word == 0, w0, w2)
    odd = tl.where(word == 1, w1, w3)
    return tl.where(word % 2 == 0, even, odd) > limit.to(tl.uint32, bitcast=True)
