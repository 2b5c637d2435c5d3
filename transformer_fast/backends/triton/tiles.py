"""What the attention kernels share: tile loads, dots, scores and which places are visible.

A place (t, s) is visible if s is below the key length, if causal s <= t, if a bool mask is True and
if an additive mask is not -inf there. Hidden scores are -inf.

Scores come in one of two units. Natural ones are scaled and have the mask added, so that finfo.min in
a mask stays finite; they serve additive masks, scales <= 0 and fp32. The others are bare products of q
and k; the scale the kernels are given then holds log2(e) too, is positive, and is applied together
with the subtraction of the maximum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .arithmetic import divide, dot, narrow, store

LOG2E = 1.4426950408889634

_LOG2E: tl.constexpr = tl.constexpr(LOG2E)

NO_MASK = 0
BOOL_MASK = 1
FLOAT_MASK = 2
_BOOL_MASK: tl.constexpr = tl.constexpr(BOOL_MASK)

#: Parameters that change from batch to batch and decide about no instruction that counts: their
#: values (1, multiples of 16) shall not ask for variants of a kernel. Strides are not among them:
#: loads are wide only if rows are known to start at multiples of 16 bytes. Nor are they members of a
#: record, which Triton specializes all.
PER_BATCH = (
    "queries", "keys", "splits", "capacity", "stride_list_b", "stride_list_h", "stride_length",
    "stride_query_length", "limit",
)  # fmt: skip


#: Of kernels that write rows of ``keys`` places.
PER_BATCH_BUT_KEYS = tuple(name for name in PER_BATCH if name != "keys")


class Heads(NamedTuple):
    """A tensor (B, H, T, D) or (B, Hkv, S, D), with unit stride in D."""

    data: Any
    stride_b: Any
    stride_h: Any
    stride_t: Any


class Mask(NamedTuple):
    """A mask as the kernels take it; strides are 0 in dimensions it does not depend on."""

    data: Any  # (1 or B, 1 or H, 1 or T, 1 or S), uint8 or floating; None: no mask
    stride_b: Any
    stride_h: Any
    stride_t: Any
    stride_s: Any


class Call(NamedTuple):
    """What all kernels of a call are given, besides its tensors and `Sizes`."""

    lengths: Any  # (B,) or None; PACKED: (B + 1,), offsets into tensors of (1, H, rows, D)
    query_lengths: Any
    seed: Any  # () int64 or None
    heads: Any
    key_heads: Any
    group: Any  # query heads of a key head
    scale: Any
    grad_scale: Any
    keep_scale: Any


class Sizes(NamedTuple):
    """The parameters of `PER_BATCH`, which kernels put together."""

    queries: Any
    keys: Any
    stride_length: Any
    stride_query_length: Any
    stride_list_b: Any  # PACKED: rows of queries
    stride_list_h: Any  # PACKED: rows of keys
    capacity: Any
    limit: Any


class Constants(NamedTuple):
    """The compile-time constants of the attention kernels."""

    D: int
    DV: int
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_T: int
    BLOCK_S: int
    CAUSAL: bool
    MASK: int
    MASK_ROWS: bool  # the mask depends on the query
    DROPOUT: bool
    NATURAL: bool
    PRECISION: str
    PACKED: bool
    BOUNDED: bool = True  # the last tile of the walk may not be whole
    RAGGED_KEYS: bool = False  # keys is no multiple of BLOCK_S, where a mask has no entries
    SUM_T: bool = False  # the gradient of a mask that does not depend on the query


class Program(NamedTuple):
    """What a program that has a tile of queries works on."""

    b: Any
    h: Any
    query: Any
    row: Any  # of statistics and dropout
    begin: Any  # rows where a packed sequence begins
    key_begin: Any
    query_end: Any
    end: Any
    seed: Any
    full: Any  # tiles of keys that are visible to all queries
    total: Any  # and to any
    upcoming: Any  # see `walked_tile`
    list_at: Any  # where its list begins, if there are lists


@triton.jit
def query_program(lists, call, sizes, C: tl.constexpr):
    tiles = tl.cdiv(sizes.queries, C.BLOCK_T)
    program = tl.program_id(0)
    # With causal the last queries have the most work: they start first.
    tile = program % tiles
    if C.CAUSAL:
        tile = tiles - 1 - tile
    bh = program // tiles
    b, h = (bh // call.heads).to(tl.int64), (bh % call.heads).to(tl.int64)
    first = tile * C.BLOCK_T
    query = first + tl.arange(0, C.BLOCK_T)
    begin, query_end = sequence(
        call.query_lengths, sizes.stride_query_length, b, sizes.queries, sizes.stride_list_b, C.PACKED
    )  # fmt: skip
    key_begin, end = sequence(
        call.lengths, sizes.stride_length, b, sizes.keys, sizes.stride_list_h, C.PACKED
    )
    seed = 0
    if C.DROPOUT:
        seed = tl.load(call.seed)
    counts, numbers = lists
    list_at = 0
    if numbers is not None:
        row = b * sizes.stride_list_b + h * sizes.stride_list_h + tile
        full = tl.load(counts + row * 2)
        total = tl.load(counts + row * 2 + 1)
        list_at = row * 2 * sizes.capacity
    else:
        walk = end
        full_end = end
        if C.CAUSAL:
            walk = tl.minimum(end, first + C.BLOCK_T)
            full_end = tl.minimum(end, first + 1)
        total = tl.cdiv(walk, C.BLOCK_S)
        full = full_end // C.BLOCK_S
        if C.MASK != 0:
            full = 0
    if call.query_lengths is not None:
        live = (first < query_end).to(tl.int32)
        full, total = full * live, total * live
    upcoming = 0
    if numbers is not None:
        upcoming = tile_number(0, full, 0, numbers, list_at, sizes.capacity)
    return Program(
        b, h, query, bh.to(tl.int64) * sizes.queries + query, begin, key_begin, query_end, end,
        seed, full, total, upcoming, list_at,
    )  # fmt: skip


@triton.jit
def rows_of(x, b, h, begin):
    """Where the rows of a head are, from row ``begin`` on."""
    return x.data + b * x.stride_b + h * x.stride_h + begin * x.stride_t


@triton.jit
def load_rows(
    base, rows, stride, columns, row_limit, COLUMN_LIMIT: tl.constexpr, CHECK_ROWS: tl.constexpr
):
    """Tile [R, C]; rows at or beyond ``row_limit`` and columns beyond COLUMN_LIMIT are 0."""
    at = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    EVERY: tl.constexpr = columns.shape[0] == COLUMN_LIMIT
    if CHECK_ROWS:
        inside = (rows < row_limit)[:, None]
        if not EVERY:
            inside = inside & (columns < COLUMN_LIMIT)[None, :]
        return tl.load(at, mask=inside, other=0.0)
    if EVERY:
        return tl.load(at)
    return tl.load(at, mask=(columns < COLUMN_LIMIT)[None, :], other=0.0)


@triton.jit
def store_rows(base, rows, stride, columns, value, row_limit, COLUMN_LIMIT: tl.constexpr):
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
def online_softmax(
    scores, row_max, row_sum, accumulator, value, scale, HIDES: tl.constexpr, keep, C: tl.constexpr
):
    """(row_max, row_sum, accumulator) after a tile of scores, of which ``keep``, if any, is kept."""
    new_max = tl.maximum(row_max, largest(scores, scale, C.NATURAL))
    base = new_max
    if HIDES:
        # A row that has seen nothing yet: -inf - -inf would be NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = power(scores, base[:, None], scale, C.NATURAL)
    shrink = power(row_max, base, 1.0, C.NATURAL)
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    if keep is not None:
        weights = tl.where(keep, weights, 0.0)
    accumulator = dot(narrow(weights, value), value, accumulator * shrink[:, None], C.PRECISION)
    return new_max, row_sum, accumulator


@triton.jit
def load_share(norm_ptr, row, inside):
    """What the exponential of natural scores is still to be multiplied by."""
    norm = tl.load(norm_ptr + row, mask=inside, other=0.0)
    # Rows that see nothing have the norm 0 and no weights.
    return tl.where(norm == 0.0, 0.0, divide(1.0, tl.where(norm == 0.0, 1.0, norm)))


@triton.jit
def visible_scores(
    qk, queries, keys, scale, key_end, mask, b, h, query_limit, key_limit, BOUNDED: tl.constexpr,
    BOUND_QUERIES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """(scores, visible) of a tile; ``queries`` and ``keys`` are indices that broadcast to it.

    Works for [T, S] tiles (queries [T, 1], keys [1, S]) and transposed ones. BOUNDED is False where
    all keys are below ``key_end``. With BOUND_QUERIES what is beyond the last query counts as hidden:
    for sums over queries.
    """
    # The comparison with itself is a True of the right shape, which costs nothing.
    visible = keys == keys
    if BOUNDED:
        visible = keys < key_end
    if C.CAUSAL:
        visible = visible & (keys <= queries)
    if BOUND_QUERIES:
        visible = visible & (queries < query_limit)
    scores = qk
    if C.NATURAL:
        scores = qk * scale
    if C.MASK != 0:
        at = mask.data + b * mask.stride_b + h * mask.stride_h + keys.to(tl.int64) * mask.stride_s
        inside = keys == keys
        if BOUNDED:
            inside = keys < key_limit
        if C.MASK_ROWS:
            at += queries.to(tl.int64) * mask.stride_t
            inside = inside & (queries < query_limit)
        entry = tl.load(at, mask=inside, other=0)
        if C.MASK == _BOOL_MASK:
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
def tile_number(i, full, first, numbers, list_at, capacity):
    """Number of the i-th visible tile: fully visible ones first, then the others.

    Without lists the tiles are first, first + 1, ...
    """
    if numbers is not None:
        return tl.load(numbers + list_at + tl.where(i < full, i, capacity + i - full))
    return first + i


@triton.jit
def walked_tile(i, upcoming, full, total, first, numbers, list_at, capacity):
    """(`tile_number` of i, that of the tile behind it), in a walk over all ``total`` tiles.

    ``upcoming`` is what this gave as the second for the tile before. A number that is read in the very
    step that loads its tile costs the pipeline half its stages, as loads whose place other loads tell.
    """
    number = first + i
    if numbers is not None:
        number = upcoming
        i = tl.minimum(i + 1, total - 1)
        upcoming = tile_number(i, full, 0, numbers, list_at, capacity)
    return number, upcoming


@triton.jit
def any_not_finite(x):
    """Whether any element is NaN or infinite."""
    return tl.max((tl.abs(x) < float("inf")).to(tl.int32) ^ 1, None) > 0
