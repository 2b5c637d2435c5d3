"""What the attention kernels share: tile loads, dots, scores and which places are visible.

A place (t, s) is visible if s is below the key length, if causal s <= t, if a bool mask is True and
if an additive mask is not -inf there. Hidden scores are -inf.

Scores come in one of two units. Natural ones are scaled and have the mask added, so that finfo.min in
a mask stays finite; they serve additive masks, scales <= 0 and fp32. The others are bare products of q
and k; the scale the kernels are given then holds log2(e) too, is positive, and is applied together
with the subtraction of the maximum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import store

LOG2E = 1.4426950408889634

_LOG2E: tl.constexpr = tl.constexpr(LOG2E)

NO_MASK = 0
BOOL_MASK = 1
FLOAT_MASK = 2
_BOOL_MASK: tl.constexpr = tl.constexpr(BOOL_MASK)

#: Parameters that change from batch to batch and decide about no instruction that counts: their
#: values (1, multiples of 16) shall not ask for variants of a kernel. Strides are not among them:
#: loads are wide only if rows are known to start at multiples of 16 bytes.
PER_BATCH = (
    "queries", "keys", "splits", "capacity", "stride_list_b", "stride_list_h", "stride_length",
    "stride_query_length", "limit",
)  # fmt: skip


@triton.jit
def load_rows(
    base,
    rows,
    stride,
    columns,
    row_limit,
    COLUMN_LIMIT: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
):
    """Tile [R, C]; rows at or beyond ``row_limit`` and columns beyond COLUMN_LIMIT are 0."""
    at = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if CHECK_ROWS:
        if columns.shape[0] == COLUMN_LIMIT:
            return tl.load(at, mask=(rows < row_limit)[:, None], other=0.0)
        return tl.load(
            at, mask=(rows < row_limit)[:, None] & (columns < COLUMN_LIMIT)[None, :], other=0.0
        )
    if columns.shape[0] == COLUMN_LIMIT:
        return tl.load(at)
    return tl.load(at, mask=(columns < COLUMN_LIMIT)[None, :], other=0.0)


@triton.jit
def store_rows(
    base,
    rows,
    stride,
    columns,
    value,
    row_limit,
    COLUMN_LIMIT: tl.constexpr,
):
    at = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    inside = (rows < row_limit)[:, None] & (columns < COLUMN_LIMIT)[None, :]
    store(at, value, inside)


@triton.jit
def power(scores, base, scale, NATURAL: tl.constexpr):
    """The exponential of (scores - base), ``base`` being in the units that are saved; 1 at most.

    Other scores than natural ones still lack the scale here: multiplying and subtracting is one
    instruction. It rounds once, but the base, a maximum, was rounded before, so that large scores
    would come out above their own maximum: from 1e9 on beyond every number.
    """
    exponent = (scores - base) * _LOG2E if NATURAL else scores * scale - base
    return tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def largest(scores, scale, NATURAL: tl.constexpr):
    """Row maxima, in the units that are saved."""
    if NATURAL:
        return tl.max(scores, 1)
    return tl.max(scores, 1) * scale


@triton.jit
def visible_scores(
    qk,
    queries,
    keys,
    scale,
    key_end,
    mask_ptr,
    stride_mask_t,
    stride_mask_s,
    query_limit,
    key_limit,
    BOUNDED: tl.constexpr,
    BOUND_QUERIES: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    NATURAL: tl.constexpr,
):
    """(scores, visible) of a tile; ``queries`` and ``keys`` are indices that broadcast to it.

    Works for [T, S] tiles (queries [T, 1], keys [1, S]) and transposed ones. MASK_ROWS is False
    where the mask does not depend on the query, BOUNDED is False where all keys are below
    ``key_end``. With BOUND_QUERIES what is beyond the last query counts as hidden: for sums over
    queries.
    """
    # The comparison with itself is a True of the right shape, which costs nothing.
    visible = keys == keys
    if BOUNDED:
        visible = keys < key_end
    if CAUSAL:
        visible = visible & (keys <= queries)
    if BOUND_QUERIES:
        visible = visible & (queries < query_limit)
    scores = qk
    if NATURAL:
        scores = qk * scale
    if MASK != 0:
        at = mask_ptr + keys.to(tl.int64) * stride_mask_s
        inside = keys == keys
        if BOUNDED:
            inside = keys < key_limit
        if MASK_ROWS:
            at += queries.to(tl.int64) * stride_mask_t
            inside = inside & (queries < query_limit)
        entry = tl.load(at, mask=inside, other=0)
        if MASK == _BOOL_MASK:
            visible = visible & (entry != 0)
        else:
            entry = entry.to(tl.float32)
            scores += entry
            visible = visible & (entry != float("-inf"))
    return tl.where(visible, scores, float("-inf")), visible


@triton.jit
def sequence_end(length_ptr, stride, batch, places):
    """How many places of a sequence are real: all, or its length, kept between 0 and ``places``."""
    return sequence(length_ptr, stride, batch, places, 0, False)[1]


@triton.jit
def sequence(length_ptr, stride, batch, places, rows, PACKED: tl.constexpr):
    """(row of a sequence's first place, how many of its places are real).

    PACKED: sequences lie one behind the other in one tensor of so many ``rows``, and instead of lengths
    there is where each begins and, behind the last, where that ends; what of a sequence lies outside of
    the tensor is left out. Otherwise each has rows of its own, from 0.
    """
    begin = 0
    end = places
    if length_ptr is not None:
        at = length_ptr + batch.to(tl.int64) * stride
        length = tl.load(at).to(tl.int64)
        if PACKED:
            begin = tl.maximum(tl.minimum(length, rows), 0)
            length = tl.minimum(tl.load(at + stride).to(tl.int64), rows) - begin
        end = tl.maximum(tl.minimum(length, places), 0).to(tl.int32)
    return begin, end


@triton.jit
def tile_number(
    i,
    full,
    first,
    list_ptr,
    capacity,
    LISTED: tl.constexpr,
):
    """Number of the i-th visible tile: fully visible ones first, then the others.

    Without lists the tiles are first, first + 1, ...
    """
    if LISTED:
        return tl.load(list_ptr + tl.where(i < full, i, capacity + i - full))
    return first + i


@triton.jit
def walked_tile(
    i,
    upcoming,
    full,
    total,
    first,
    list_ptr,
    capacity,
    LISTED: tl.constexpr,
):
    """(`tile_number` of i, that of the tile behind it), in a walk over all ``total`` tiles.

    ``upcoming`` is what this gave as the second for the tile before. A number that is read in the very
    step that loads its tile costs the pipeline half its stages, as loads whose place other loads tell.
    """
    number = first + i
    if LISTED:
        number = upcoming
        upcoming = tile_number(tl.minimum(i + 1, total - 1), full, 0, list_ptr, capacity, True)
    return number, upcoming


@triton.jit
def any_not_finite(x):
    """Whether any element is NaN or infinite."""
    return tl.max((tl.abs(x) < float("inf")).to(tl.int32) ^ 1, None) > 0
