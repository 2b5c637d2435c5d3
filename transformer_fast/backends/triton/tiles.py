"""Common code of the attention kernels: tile loads, scores, visibility, online softmax, tile lists.

A score (t, s) is visible if s is below the key length, s <= t if causal, a bool mask is True there,
and an additive mask is not -inf there. Other scores are -inf.

Scores are in one of two units:

- Natural scores are scaled and have the mask added, so finfo.min in a mask stays finite. They are
  used for additive masks, scales <= 0 and fp32.
- Other scores are the products q @ k. Then the kernels' scale is positive and includes log2(e), and it
  is applied together with the subtraction of the maximum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .arithmetic import divide, dot, narrow, store

LOG2E = 1.4426950408889634

_LOG2E: tl.constexpr = tl.constexpr(LOG2E)
_LN2: tl.constexpr = tl.constexpr(1.0 / LOG2E)

NO_MASK = 0
BOOL_MASK = 1
FLOAT_MASK = 2
_BOOL_MASK: tl.constexpr = tl.constexpr(BOOL_MASK)

#: Parameters for which Triton must not specialize kernels by value (1, multiples of 16). They change
#: from batch to batch, and specialization would not make the code faster. Strides of tensors are
#: specialized, because wide loads require that rows start at multiples of 16 bytes. These parameters
#: are not in a record, because Triton specializes all members of a record.
PER_BATCH = (
    "queries", "keys", "splits", "capacity", "stride_list_b", "stride_list_h", "stride_length",
    "stride_query_length", "limit",
)  # fmt: skip


#: The same without ``keys``, for kernels that write rows of that length: alignment matters there.
PER_BATCH_BUT_KEYS = tuple(name for name in PER_BATCH if name != "keys")


class Heads(NamedTuple):
    """A tensor (B, H, T, D) or (B, Hkv, S, D), with unit stride in D."""

    data: Any
    stride_b: Any
    stride_h: Any
    stride_t: Any


class Mask(NamedTuple):
    """A mask as a kernel argument; strides are 0 in dimensions that the mask does not depend on."""

    data: Any  # (1 or B, 1 or H, 1 or T, 1 or S), uint8 or floating; None: no mask
    stride_b: Any
    stride_h: Any
    stride_t: Any
    stride_s: Any


class Call(NamedTuple):
    """Arguments of all kernels of a call, besides tensors and `Sizes`."""

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
    """The parameters of `PER_BATCH`, put together by the kernels."""

    queries: Any
    keys: Any
    stride_length: Any
    stride_query_length: Any
    stride_list_b: Any  # PACKED: number of query rows
    stride_list_h: Any  # PACKED: number of key rows
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
    BOUNDED: bool = True  # the last tile of the loop may be partial
    RAGGED_KEYS: bool = False  # there is a mask, and keys is not a multiple of BLOCK_S
    SUM_T: bool = False  # gradient of a mask that does not depend on the query: sum over queries


class Program(NamedTuple):
    """The work of a program that has a tile of queries."""

    b: Any
    h: Any
    query: Any
    row: Any  # rows in the statistics and in the dropout pattern
    begin: Any  # PACKED: first query row of the sequence
    key_begin: Any
    query_end: Any
    end: Any
    seed: Any
    full: Any  # number of key tiles that are fully visible to all queries
    total: Any  # number of key tiles that are visible to any query
    upcoming: Any  # see `walked_tile`
    list_at: Any  # offset of its list, if there are lists


@triton.jit
def query_program(lists, call, sizes, C: tl.constexpr):
    tiles = tl.cdiv(sizes.queries, C.BLOCK_T)
    program = tl.program_id(0)
    # With causal the last queries have the most work, so they start first.
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
    """Returns the pointer to row ``begin`` of a head."""
    return x.data + b * x.stride_b + h * x.stride_h + begin * x.stride_t


@triton.jit
def load_rows(
    base, rows, stride, columns, row_limit, COLUMN_LIMIT: tl.constexpr, CHECK_ROWS: tl.constexpr
):
    """Loads a tile [R, C]; rows >= ``row_limit`` and columns >= COLUMN_LIMIT are 0."""
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
    """Returns exp(scores - base), at most 1; ``base`` is in the units of `largest`.

    Scores other than natural ones are scaled here, because multiply and subtract is one instruction.
    It rounds once, but the base, a maximum, has been rounded before. So large scores would exceed
    their own maximum, and from 1e9 on the exponential would overflow: hence the limit of 1.
    """
    exponent = (scores - base) * _LOG2E if NATURAL else scores * scale - base
    return tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def largest(scores, scale, NATURAL: tl.constexpr):
    """Returns the row maxima of natural scores, or of scores times ``scale``, exponents of 2."""
    if NATURAL:
        return tl.max(scores, 1)
    return tl.max(scores, 1) * scale


@triton.jit
def online_softmax(
    scores, row_max, row_sum, accumulator, value, scale, HIDES: tl.constexpr, keep, C: tl.constexpr
):
    """Returns (row_max, row_sum, accumulator) after a tile; ``keep``: dropout flags or None."""
    new_max = tl.maximum(row_max, largest(scores, scale, C.NATURAL))
    base = new_max
    if HIDES:
        # If all scores of a row were masked out so far: -inf - -inf would be NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = power(scores, base[:, None], scale, C.NATURAL)
    shrink = power(row_max, base, 1.0, C.NATURAL)
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    if keep is not None:
        weights = tl.where(keep, weights, 0.0)
    accumulator = dot(narrow(weights, value), value, accumulator * shrink[:, None], C.PRECISION)
    return new_max, row_sum, accumulator


@triton.jit
def store_statistics(
    row_max_ptr, row_sum_ptr, row, row_max, row_sum, inside, NATURAL: tl.constexpr
):
    """Saves the maximum, of natural scores, and the sum of rows; both are 0 for fully masked rows."""
    row_max = tl.where(row_sum == 0.0, 0.0, row_max)
    if not NATURAL:
        row_max *= _LN2
    tl.store(row_max_ptr + row, row_max, mask=inside)
    tl.store(row_sum_ptr + row, row_sum, mask=inside)


@triton.jit
def load_statistics(row_max_ptr, row_sum_ptr, row, inside, NATURAL: tl.constexpr):
    """Returns (base, share): a weight is power(score, base), times share if NATURAL.

    For other scores ``base`` includes the sum, which saves a value and a multiplication.
    """
    row_max = tl.load(row_max_ptr + row, mask=inside, other=0.0)
    row_sum = tl.load(row_sum_ptr + row, mask=inside, other=0.0)
    some_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    base, share = row_max, row_max
    if NATURAL:
        # The weights of fully masked rows are 0.
        share = tl.where(row_sum == 0.0, 0.0, divide(1.0, some_sum))
    else:
        base = row_max * _LOG2E + tl.log2(some_sum)
    return base, share


@triton.jit
def visible_scores(
    qk, queries, keys, scale, key_end, mask, b, h, query_limit, key_limit, BOUNDED: tl.constexpr,
    BOUND_QUERIES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Returns (scores, visible) of a tile; ``queries`` and ``keys`` are indices that broadcast to it.

    Supports [T, S] tiles (queries [T, 1], keys [1, S]) and transposed ones. BOUNDED: False if all keys
    are below ``key_end``. BOUND_QUERIES: scores beyond the last query are masked out, for sums over
    queries.
    """
    # The comparison with itself gives True in the right shape, at no cost.
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
def sequence_end(length_ptr, stride, batch, positions):
    """Returns the length of a sequence without padding, clamped to 0 and ``positions``."""
    return sequence(length_ptr, stride, batch, positions, 0, False)[1]


@triton.jit
def sequence(length_ptr, stride, batch, positions, rows, PACKED: tl.constexpr):
    """Returns (first row of a sequence, its length without padding).

    PACKED: sequences are concatenated in a tensor of ``rows`` rows, and ``length_ptr`` has the start
    row of each and the end row of the last. Parts of a sequence outside of the tensor are ignored.
    Otherwise the first row is 0.
    """
    begin = 0
    end = positions
    if length_ptr is not None:
        at = length_ptr + batch.to(tl.int64) * stride
        length = tl.load(at).to(tl.int64)
        if PACKED:
            begin = tl.maximum(tl.minimum(length, rows), 0)
            length = tl.minimum(tl.load(at + stride).to(tl.int64), rows) - begin
        end = tl.maximum(tl.minimum(length, positions), 0).to(tl.int32)
    return begin, end


@triton.jit
def tile_number(i, full, first, numbers, list_at, capacity):
    """Returns the number of the i-th visible tile: fully visible ones come first, then the others.

    Without lists the numbers are first, first + 1, ...
    """
    if numbers is not None:
        return tl.load(numbers + list_at + tl.where(i < full, i, capacity + i - full))
    return first + i


@triton.jit
def walked_tile(i, upcoming, full, total, first, numbers, list_at, capacity):
    """Returns (`tile_number` of i, that of the next tile), in a loop over all ``total`` tiles.

    ``upcoming`` is the second result of the previous iteration. If a number were read in the iteration
    that loads its tile, the address of one load would depend on another load, and the pipeline would
    have half as many stages.
    """
    number = first + i
    if numbers is not None:
        number = upcoming
        i = tl.minimum(i + 1, total - 1)
        upcoming = tile_number(i, full, 0, numbers, list_at, capacity)
    return number, upcoming


@triton.jit
def any_not_finite(x):
    """Returns True if any element is NaN or infinite."""
    return tl.max((tl.abs(x) < float("inf")).to(tl.int32) ^ 1, None) > 0
