"""Dropout in the kernels, held to Philox4x32-10 as the fuzz tests define it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl
from definitions import numbers
from interpreted import jit

from transformer_fast.backends.triton import philox
from transformer_fast.reference.dropout import threshold

SEED = 0x7123456789ABCDEF


def _flags(
    seed_ptr,
    tile_ptr,
    element_ptr,
    first_row,
    first_column,
    limit,
    R: tl.constexpr,  # noqa: N803
    C: tl.constexpr,  # noqa: N803
):
    rows = first_row + tl.arange(0, R).to(tl.int64)
    columns = first_column + tl.arange(0, C)
    seed = tl.load(seed_ptr)
    place = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    tile = philox.keep_tile(seed, rows, first_column, limit, C)
    tl.store(tile_ptr + place, tile.to(tl.int8))
    each = philox.keep_elements(
        seed, rows[:, None] + columns[None, :] * 0, columns[None, :] + rows[:, None] * 0, limit
    )
    tl.store(element_ptr + place, each.to(tl.int8))


_flags_kernel = jit(_flags, do_not_specialize=["limit", "first_row"])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1.0, 1e-9])
@pytest.mark.parametrize("first_row", [0, 2**31 - 2, 2**32 - 1, 2**40 + 3])
def test_flags(p, first_row, device):
    rows, columns, first_column = 4, 32, 24
    drop = philox.dropout_arguments(p)
    seed = torch.tensor(SEED, device=device)
    tile = torch.full((rows, columns), -1, dtype=torch.int8, device=device)
    each = torch.full_like(tile, -1)
    _flags_kernel[(1,)](seed, tile, each, first_row, first_column, drop.limit, rows, columns)
    drawn = numbers(SEED, first_row + np.arange(rows), first_column + columns)[:, first_column:]
    expected = (drawn >= (threshold(p) if p < 1 else 2**16)).tolist()
    assert drop.active
    assert tile.bool().tolist() == expected
    assert each.bool().tolist() == expected


def test_probabilities_at_the_ends():
    assert not philox.dropout_arguments(0.0).active
    assert philox.dropout_arguments(2.0**-33)[:2] == (True, 0), "one number in 2^16 is dropped"
    assert philox.dropout_arguments(1.0) == (True, 2**16 - 1, 0.0)
    assert philox.dropout_arguments(0.5) == (True, 2**15 - 1, 2.0)
