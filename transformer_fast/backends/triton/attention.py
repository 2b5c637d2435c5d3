"""Scaled dot-product attention on one GPU: the arguments of all kernels, and the forward.

    output = dropout(softmax(scale * Q K^T + mask)) V

There is one program per BLOCK_T queries of one (batch, head). It loops over tiles of BLOCK_S keys with
the online softmax (Milakov & Gimelshein 2018; Dao et al., FlashAttention, 2022): running maximum m,
running sum l, accumulator in fp32. Fully visible tiles come first and need no masking; partially
visible tiles follow; fully masked tiles are skipped.

Two statistics are saved per row: ``row_max``, the maximum m of its natural scores, and ``row_sum``, the
sum l of exp(score - m), so that P = exp(score - m) / l. Both are 0 for a fully masked row. A single
log-sum-exp m + log l would lose precision: it would round to m if a mask adds finfo.min to a whole row.
The kernels for bf16 and fp16 use exponents of 2 (see `tiles`), P = exp2(score - base) with
base = m log2(e) + log2(l), unless a mask is added.

Masked-out keys and values may be NaN or inf. Masked-out scores are replaced, so the keys have no
effect; but values would give 0 * NaN. Instead of cleaning every tile, the program checks its result
once. Only if that is not finite, the program loops over its tiles again with cleaned values. It keeps
its first result only where a query attends to a value that is not finite.

Shapes: query (B, H, T, D), key (B, Hkv, S, D), value (B, Hkv, S, DV), attn_mask broadcastable to
(B, H, T, S), key_lengths (B,). D and DV are up to 256, padded to a power of two inside the kernel.
Masking follows the reference. Packed sequences are tensors (1, H, rows, D) that are read in place;
their lengths are cumulative.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference.attention import empty_heads, empty_output
from . import config
from .arithmetic import divide, dot, narrow, product, store
from .mask_tiles import NO_LISTS, TileLists, kind_of, prepare_mask, tile_lists
from .philox import Dropout, dropout_arguments, keep_tile, seed_for
from .runtime import (
    ceil_div,
    constant,
    dot_precision,
    launch,
    multiprocessors,
    next_power_of_2,
    with_unit_stride,
)
from .tiles import (
    FLOAT_MASK,
    LOG2E,
    PER_BATCH,
    PER_BATCH_BUT_KEYS,
    Call,
    Constants,
    Heads,
    Mask,
    Sizes,
    any_not_finite,
    load_rows,
    load_statistics,
    online_softmax,
    power,
    query_program,
    rows_of,
    sequence_end,
    store_rows,
    store_statistics,
    tile_number,
    visible_scores,
    walked_tile,
)


@triton.jit(do_not_specialize=PER_BATCH)
def attention_forward_kernel(
    q_heads, k_heads, v_heads, out_heads, mask,
    lists,  # counts and numbers of `mask_tiles.TileLists`, or None
    row_max_ptr,  # (B, H, T) fp32
    row_sum_ptr,  # (B, H, T) fp32
    call,
    queries, keys, stride_length, stride_query_length, stride_list_b, stride_list_h, capacity, limit,
    C: tl.constexpr,
):  # fmt: skip
    sizes = Sizes(
        queries, keys, stride_length, stride_query_length, stride_list_b, stride_list_h, capacity, limit
    )  # fmt: skip
    p = query_program(lists, call, sizes, C)
    query, upcoming = p.query, p.upcoming
    numbers = lists[1]
    column, column_v = tl.arange(0, C.BLOCK_D), tl.arange(0, C.BLOCK_DV)
    k_base = rows_of(k_heads, p.b, p.h // call.group, p.key_begin)
    v_base = rows_of(v_heads, p.b, p.h // call.group, p.key_begin)
    q_base = rows_of(q_heads, p.b, p.h, p.begin)
    q = load_rows(q_base, query, q_heads.stride_t, column, p.query_end, C.D, True)

    PLAIN: tl.constexpr = numbers is not None or C.MASK == 0
    MASKED: tl.constexpr = C.CAUSAL or C.MASK != 0 or C.BOUNDED
    row_max = tl.full([C.BLOCK_T], float("-inf"), tl.float32)
    row_sum = tl.zeros([C.BLOCK_T], tl.float32)
    accumulator = tl.zeros([C.BLOCK_T, C.BLOCK_DV], tl.float32)
    for HIDES in tl.static_range(2):  # fully visible tiles, then partially visible ones
        if MASKED if HIDES else PLAIN:
            for i in range(p.full if HIDES else 0, p.total if HIDES else p.full):
                number, upcoming = walked_tile(
                    i, upcoming, p.full, p.total, 0, numbers, p.list_at, capacity
                )
                start = number * C.BLOCK_S
                key = start + tl.arange(0, C.BLOCK_S)
                k = load_rows(
                    k_base, key, k_heads.stride_t, column, p.end, C.D, HIDES and C.BOUNDED
                )
                scores = product(q, tl.trans(k), C.PRECISION)
                if HIDES:
                    scores, _ = visible_scores(
                        scores, query[:, None], key[None, :], call.scale, p.end, mask, p.b, p.h,
                        queries, keys, C.BOUNDED, False, C,
                    )  # fmt: skip
                elif C.NATURAL:
                    scores *= call.scale
                v = load_rows(
                    v_base, key, v_heads.stride_t, column_v, p.end, C.DV, HIDES and C.BOUNDED
                )
                keep = None
                if C.DROPOUT:
                    keep = keep_tile(p.seed, p.row, start, limit, C.BLOCK_S)
                row_max, row_sum, accumulator = online_softmax(
                    scores, row_max, row_sum, accumulator, v, call.scale, HIDES, keep, C
                )

    if call.query_lengths is not None:
        real = query < p.query_end
        row_sum = tl.where(real, row_sum, 0.0)
        accumulator = tl.where(real[:, None], accumulator, 0.0)
    # A fully masked row has l = 0 and output 0; m = 0 avoids infinities in the backward.
    share = divide(1.0, tl.where(row_sum == 0.0, 1.0, row_sum))
    row_max = tl.where(row_sum == 0.0, 0.0, row_max)
    store_statistics(row_max_ptr, row_sum_ptr, p.row, row_max, row_sum, query < queries, C.NATURAL)
    if C.DROPOUT:
        share *= call.keep_scale
    accumulator *= share[:, None]
    out_base = rows_of(out_heads, p.b, p.h, p.begin)
    # A packed sequence is followed by the next, which must not be overwritten.
    rows = p.query_end if C.PACKED else queries
    store_rows(out_base, query, out_heads.stride_t, column_v, accumulator, rows, C.DV)

    # Keys beyond ``end`` were loaded as 0. So a product of NaN or inf with a weight of 0 comes only
    # from keys that a mask or causality hides. Such sums are computed again without these keys.
    if C.CAUSAL or C.MASK != 0:
        if any_not_finite(accumulator):
            tl.debug_barrier()  # other threads stored the first result
            CHUNK: tl.constexpr = 32 if C.BLOCK_DV > 32 else C.BLOCK_DV
            PIECE: tl.constexpr = 16
            PIECES: tl.constexpr = C.BLOCK_S // PIECE
            for first_column in range(0, C.BLOCK_DV, CHUNK):
                some = first_column + tl.arange(0, CHUNK)
                clean = tl.zeros([C.BLOCK_T, CHUNK], tl.float32)
                spoilt = tl.zeros([C.BLOCK_T, CHUNK], tl.float32)
                # In small pieces, so that this rare loop does not need registers of the common one.
                for j in tl.range(0, p.total * PIECES, num_stages=1):
                    number = tile_number(j // PIECES, p.full, 0, numbers, p.list_at, capacity)
                    start = number * C.BLOCK_S + j % PIECES * PIECE
                    key = start + tl.arange(0, PIECE)
                    k = load_rows(k_base, key, k_heads.stride_t, column, p.end, C.D, C.BOUNDED)
                    scores, visible = visible_scores(
                        product(q, tl.trans(k), C.PRECISION), query[:, None], key[None, :], call.scale,
                        p.end, mask, p.b, p.h, queries, keys, C.BOUNDED, False, C,
                    )  # fmt: skip
                    weights = (
                        power(scores, row_max[:, None], call.scale, C.NATURAL) * share[:, None]
                    )
                    if C.DROPOUT:
                        keep = keep_tile(p.seed, p.row, start, limit, PIECE)
                        weights = tl.where(keep, weights, 0.0)
                    inside = (key < p.end)[:, None] & (some < C.DV)[None, :]
                    at = v_base + key.to(tl.int64)[:, None] * v_heads.stride_t + some[None, :]
                    v = tl.load(at, mask=inside, other=0.0)
                    finite = tl.abs(v.to(tl.float32)) < float("inf")
                    clean = dot(narrow(weights, v), tl.where(finite, v, 0.0), clean, C.PRECISION)
                    seen = (visible & (scores == scores)).to(tl.float32).to(v.dtype)
                    other = (~finite).to(tl.float32).to(v.dtype)
                    spoilt = dot(seen, other, spoilt, C.PRECISION)
                at = out_base + query.to(tl.int64)[:, None] * out_heads.stride_t + some[None, :]
                inside = (query < p.query_end)[:, None] & (some < C.DV)[None, :] & (spoilt == 0.0)
                store(at, clean, inside)


# Computes the weights from the statistics of each row that the forward saved,
#
#     weights = dropout(exp(scores - row_max) / row_sum),  0 where masked out
#
# (B, H, T, S) in the input's dtype; these are the factors of V. One program per tile. Only q and k are
# read twice, and attention itself does not store the T x S matrix.
@triton.jit(do_not_specialize=PER_BATCH_BUT_KEYS)
def attention_weights_kernel(
    q_heads, k_heads, mask, lists, row_max_ptr, row_sum_ptr,
    weight_ptr,  # (B, H, T, S) contiguous
    call,
    queries, keys, stride_length, stride_query_length, stride_list_b, stride_list_h, capacity, limit,
    C: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(queries, C.BLOCK_T), tl.cdiv(keys, C.BLOCK_S)
    program = tl.program_id(0)
    start = program % across * C.BLOCK_S
    rest = program // across
    query = rest % down * C.BLOCK_T + tl.arange(0, C.BLOCK_T)
    bh = rest // down
    b, h = (bh // call.heads).to(tl.int64), (bh % call.heads).to(tl.int64)
    key = start + tl.arange(0, C.BLOCK_S)
    column = tl.arange(0, C.BLOCK_D)
    end = sequence_end(call.lengths, stride_length, b, keys)
    query_end = sequence_end(call.query_lengths, stride_query_length, b, queries)
    at = rows_of(q_heads, b, h, 0)
    q = load_rows(at, query, q_heads.stride_t, column, query_end, C.D, True)
    at = rows_of(k_heads, b, h // call.group, 0)
    k = load_rows(at, key, k_heads.stride_t, column, end, C.D, True)
    scores, visible = visible_scores(
        product(q, tl.trans(k), C.PRECISION), query[:, None], key[None, :], call.scale, end,
        mask, b, h, query_end, keys, True, call.query_lengths is not None, C,
    )  # fmt: skip
    row = bh.to(tl.int64) * queries + query
    base, share = load_statistics(row_max_ptr, row_sum_ptr, row, query < queries, C.NATURAL)
    weights = power(scores, base[:, None], call.scale, C.NATURAL)
    if C.NATURAL:
        weights *= share[:, None]
    if C.DROPOUT:
        keep = keep_tile(tl.load(call.seed), row, start, limit, C.BLOCK_S)
        weights = tl.where(keep, weights * call.keep_scale, 0.0)
    weights = tl.where(visible, weights, 0.0)
    inside = (query < queries)[:, None] & (key < keys)[None, :]
    at = weight_ptr + row[:, None] * keys + key[None, :]
    store(at, weights, inside)


# One query per sequence (decoding): split over the keys. Each head has one row of scores, and keys
# and values are read once. So memory bandwidth is the limit, and B x H rows do not occupy the GPU.
# Therefore the keys of each (batch, key head) are split over several programs, the query heads that
# share them are in one tile, and a second kernel merges the partial results. If there is one split,
# the program writes the result itself.
#
# The unpadded keys (``key_lengths``) are split evenly. The number of splits depends on shapes only,
# so a CUDA graph can be replayed as the cache grows.
#
# These kernels require that the mask is the same for all heads of a tile. Then a masked-out value
# is masked out for all of them, and it is read as 0, even if it is NaN or inf.
@triton.jit(do_not_specialize=PER_BATCH)
def attention_decode_kernel(
    q_heads, k_heads, v_heads, out_heads, mask,
    out_ptr,  # (B, H, splits, DV) fp32: weighted values of a split, not yet divided by its sum
    max_ptr,  # (B, H, splits) fp32
    sum_ptr,  # (B, H, splits) fp32; with WHOLE these three are output, row_max and row_sum
    call,
    keys, stride_length, splits,
    GROUP: tl.constexpr, BLOCK_H: tl.constexpr,
    WHOLE: tl.constexpr,  # there is one split, and this program writes the result
    C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    split = program % splits
    pair = program // splits
    b, hk = (pair // call.key_heads).to(tl.int64), (pair % call.key_heads).to(tl.int64)
    member = tl.arange(0, BLOCK_H)
    column, column_v = tl.arange(0, C.BLOCK_D), tl.arange(0, C.BLOCK_DV)
    q_base = rows_of(q_heads, b, hk * GROUP, 0)
    q = load_rows(q_base, member, q_heads.stride_h, column, GROUP, C.D, True)
    k_base, v_base = rows_of(k_heads, b, hk, 0), rows_of(v_heads, b, hk, 0)
    end = sequence_end(call.lengths, stride_length, b, keys)
    each = tl.cdiv(tl.cdiv(end, splits), C.BLOCK_S) * C.BLOCK_S
    last = tl.minimum(split * each + each, end)
    row_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_H], tl.float32)
    accumulator = tl.zeros([BLOCK_H, C.BLOCK_DV], tl.float32)
    for start in range(split * each, last, C.BLOCK_S):
        key = start + tl.arange(0, C.BLOCK_S)
        k = load_rows(k_base, key, k_heads.stride_t, column, end, C.D, True)
        scores, visible = visible_scores(
            product(q, tl.trans(k), C.PRECISION), member[:, None] * 0, key[None, :], call.scale, end,
            mask, b, hk,  # with GROUP > 1 the mask does not depend on the head
            1, keys, True, False, C,
        )  # fmt: skip
        v = load_rows(v_base, key, v_heads.stride_t, column_v, end, C.DV, True)
        if C.MASK != 0:
            seen = tl.max((visible & (member[:, None] >= 0)).to(tl.int32), 0)
            v = tl.where((seen > 0)[:, None], v, 0.0)
        row_max, row_sum, accumulator = online_softmax(
            scores, row_max, row_sum, accumulator, v, call.scale, True, None, C
        )
    row = ((b * call.key_heads + hk) * GROUP + member) * splits + split
    at = row[:, None] * C.DV
    if WHOLE:
        some = tl.where(row_sum == 0.0, 1.0, row_sum)
        accumulator = divide(accumulator, some[:, None])
        at = b * out_heads.stride_b + (hk * GROUP + member)[:, None] * out_heads.stride_h
        store_statistics(max_ptr, sum_ptr, row, row_max, row_sum, member < GROUP, C.NATURAL)
    else:  # in the units of `largest`
        tl.store(max_ptr + row, row_max, mask=member < GROUP)
        tl.store(sum_ptr + row, row_sum, mask=member < GROUP)
    inside = (member < GROUP)[:, None] & (column_v < C.DV)[None, :]
    store(out_ptr + at + column_v[None, :], accumulator, inside)


@triton.jit(do_not_specialize=PER_BATCH)
def attention_merge_kernel(
    share_ptr,  # (B, H, splits, DV) fp32
    max_ptr,  # (B, H, splits) fp32
    sum_ptr,  # (B, H, splits) fp32
    out_heads,
    row_max_ptr,  # (B, H, 1) fp32
    row_sum_ptr,  # (B, H, 1) fp32
    heads, splits,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr,
    NATURAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK_DV)
    at = row * splits + split
    maxima = tl.load(max_ptr + at, mask=split < splits, other=float("-inf"))
    sums = tl.load(sum_ptr + at, mask=split < splits, other=0.0)
    inside = (split < splits)[:, None] & (column < DV)[None, :]
    shares = tl.load(share_ptr + at[:, None] * DV + column[None, :], mask=inside, other=0.0)
    highest = tl.max(maxima, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    factor = power(maxima, base, 1.0, NATURAL)
    row_sum = tl.sum(sums * factor, 0)
    some = tl.where(row_sum == 0.0, 1.0, row_sum)
    # A split whose keys are all masked out has the factor 0 and finite values.
    out = divide(tl.sum(shares * factor[:, None], 0), some)
    store_statistics(row_max_ptr, row_sum_ptr, row, base, row_sum, None, NATURAL)
    store(rows_of(out_heads, row // heads, row % heads, 0) + column, out, column < DV)


class Problem(NamedTuple):
    """One call of attention: the arguments of all its kernels."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask
    lengths: Tensor | None
    causal: bool
    scale: float
    natural: bool
    dropout: Dropout
    seed: Tensor | None
    sizes: tuple[int, int, int, int]
    group: int
    architecture: int
    query_lengths: Tensor | None = None
    packed: bool = False

    @property
    def head(self) -> tuple[int, int]:
        return self.query.shape[-1], self.value.shape[-1]

    def heads(self, x: Tensor) -> Heads:
        """Returns ``x`` as a kernel argument; packed sequences have no batch stride."""
        batch, heads, rows, _ = x.stride()
        return Heads(x, 0 if self.packed else batch, heads, rows)

    @property
    def call(self) -> Call:
        return Call(
            self.lengths, self.query_lengths, self.seed, self.sizes[1], self.key.shape[1],
            self.group, self.scale if self.natural else self.scale * LOG2E, self.scale,
            self.dropout.scale,
        )  # fmt: skip

    @property
    def stride_length(self) -> int:
        return 0 if self.lengths is None else self.lengths.stride(0)

    def numbers(self, lists: TileLists) -> Sizes:
        ends = self.query_lengths
        query_stride = 0 if ends is None else ends.stride(0)
        limit = self.dropout.limit
        return Sizes(*self.sizes[2:], self.stride_length, query_stride, *lists[2:], limit)

    @property
    def lowp(self) -> bool:
        return self.query.dtype != torch.float32

    def tile(self, kernel: str) -> config.AttentionTile:
        """Returns the tile of a kernel, by its name in `config`."""
        # Dropout and additive masks need more registers than the plain case.
        heavy = self.dropout.active or kind_of(self.mask) == FLOAT_MASK
        return config.attention(kernel, self.architecture, max(self.head), self.lowp, heavy)

    def options(self, tile: config.AttentionTile, **more: bool) -> dict[str, Any]:
        """Returns the launch options of kernels with this tile, `Constants` included."""
        head, head_value = self.head
        constants = Constants(
            D=head, DV=head_value, BLOCK_D=max(16, next_power_of_2(head)),
            BLOCK_DV=max(16, next_power_of_2(head_value)), BLOCK_T=tile.queries, BLOCK_S=tile.keys,
            CAUSAL=self.causal, MASK=kind_of(self.mask), MASK_ROWS=self.mask.stride_t != 0,
            DROPOUT=self.dropout.active, NATURAL=self.natural,
            PRECISION=dot_precision(self.query.dtype), PACKED=self.packed, **more,
        )  # fmt: skip
        return {"warps": tile.warps, "stages": tile.stages, "C": constant(constants)}

    def launch(
        self, kernel: Any, programs: int, tile: config.AttentionTile, heads: tuple[Tensor, ...],
        *others: Any, lists: TileLists = NO_LISTS, **constants: bool,
    ) -> None:  # fmt: skip
        """Launches a kernel with ``heads`` (B, H, T, D), mask, ``others``, and the call's arguments."""
        launch(
            kernel, (programs,), *map(self.heads, heads), self.mask, lists[:2], *others, self.call,
            *self.numbers(lists), **self.options(tile, **constants),
        )  # fmt: skip

    def lists(self, tile: config.AttentionTile, by_keys: bool = False) -> TileLists:
        """Returns the lists of visible tiles; `NO_LISTS` without a mask, or if the search is slower."""
        if self.packed:  # no lists: the fields for their strides hold the numbers of rows
            return TileLists(None, None, self.query.shape[2], self.key.shape[2], 0)
        if self.mask.data is None:
            return NO_LISTS
        across = ceil_div(self.sizes[3], tile.keys)
        if not config.use_block_lists(
            self.architecture, math.prod(self.sizes), self.mask.data.numel(), self.sizes[2], across
        ):
            return NO_LISTS
        granule = config.attention_granule(self.architecture, max(self.head), self.lowp)
        block = (tile.queries, tile.keys)
        return tile_lists(self.mask, self.sizes, self.lengths, self.causal, granule, block, by_keys)


def make_problem(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, key_lengths: Tensor | None,
    is_causal: bool, scale: float, dropout_p: float, seed: Tensor | None, query_lengths: Any = None,
    longest_queries: int = -1, longest_keys: int = -1,
) -> Problem:  # fmt: skip
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    packed = longest_queries >= 0
    if packed:
        batch, queries, keys = query_lengths.shape[0] - 1, longest_queries, longest_keys
    mask = prepare_mask(attn_mask)
    natural = _is_natural(query, attn_mask, scale)
    dropout = dropout_arguments(dropout_p)
    return Problem(
        with_unit_stride(query), with_unit_stride(key), with_unit_stride(value), mask, key_lengths,
        bool(is_causal), float(scale), natural, dropout, seed_for(dropout, seed, query.device),
        (batch, heads, queries, keys), heads // key.shape[1], config.architecture(query.device),
        query_lengths, packed,
    )  # fmt: skip


def _is_natural(query: Tensor, attn_mask: Tensor | None, scale: float) -> bool:
    """True if the kernels use natural scores (see `tiles`) instead of exponents of 2.

    With them, maximum and sum are separate. This rounds less, and in fp32 it is worth its cost.
    """
    is_added = attn_mask is not None and attn_mask.dtype != torch.bool
    return is_added or scale <= 0.0 or query.dtype == torch.float32


def attention_weights(problem: Problem, row_max: Tensor, row_sum: Tensor) -> Tensor:
    """Returns the weights (B, H, T, S) of a call whose forward returned ``row_max`` and ``row_sum``."""
    batch, heads, queries, keys = problem.sizes
    weights = problem.query.new_empty(problem.sizes)
    tile = problem.tile("attention_weights")
    programs = ceil_div(queries, tile.queries) * ceil_div(keys, tile.keys) * batch * heads
    own = (problem.query, problem.key)
    problem.launch(attention_weights_kernel, programs, tile, own, row_max, row_sum, weights)
    return weights


def gradient_like(tensor: Tensor, packed: bool) -> Tensor:
    """Returns an empty tensor in the memory order of ``tensor``; zeros if ``packed``."""
    found = empty_heads(tensor, tensor.shape[-1])
    return found.zero_() if packed else found


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, key_lengths: Tensor | None,
    is_causal: bool, scale: float, dropout_p: float, seed: Tensor | None, need_weights: bool,
    query_lengths: Tensor | None = None, longest_queries: int = -1, longest_keys: int = -1,
    contiguous: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """The operator ``attention_training``: output, weights, row_max and row_sum ((B, H, T) fp32)."""
    problem = make_problem(
        query, key, value, attn_mask, key_lengths, is_causal, scale, dropout_p, seed, query_lengths,
        longest_queries, longest_keys,
    )  # fmt: skip
    output = empty_output(query, key, value, contiguous)
    if problem.packed:
        output.zero_()  # rows that belong to no sequence
    row_max, row_sum = _forward(problem, output)
    weights = attention_weights(problem, row_max, row_sum) if need_weights else None
    return output, weights, row_max, row_sum


def _forward(problem: Problem, output: Tensor) -> tuple[Tensor, Tensor]:
    """Computes ``output``; returns row_max and row_sum."""
    batch, heads, queries, keys = problem.sizes
    q, v = problem.query, problem.value
    row_max = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    row_sum = torch.empty_like(row_max)
    if _decodes(problem):
        _decode(problem, output, row_max, row_sum)
        return row_max, row_sum
    tile = problem.tile("attention_forward")
    lists = problem.lists(tile)
    problem.launch(
        attention_forward_kernel, ceil_div(queries, tile.queries) * batch * heads, tile,
        (q, problem.key, v, output), row_max, row_sum, lists=lists,
        BOUNDED=problem.lengths is not None or keys % tile.keys != 0,
    )  # fmt: skip
    return row_max, row_sum


def _decodes(problem: Problem) -> bool:
    """True if the kernels for decoding support the call."""
    _, _, queries, _ = problem.sizes
    uniform = problem.mask.stride_h == 0 or problem.group == 1
    return (
        queries == 1
        and not problem.causal
        and problem.query_lengths is None
        and not problem.dropout.active
        and problem.group <= 64
        and uniform
    )


def _decode(problem: Problem, output: Tensor, row_max: Tensor, row_sum: Tensor) -> None:
    """Computes ``output``, ``row_max`` and ``row_sum``."""
    q, k, v, mask = problem.query, problem.key, problem.value, problem.mask
    batch, heads, _, keys = problem.sizes
    tile = config.attention_decode(problem.architecture, max(problem.head), problem.lowp)
    pairs = batch * k.shape[1]
    splits = min(ceil_div(2 * multiprocessors(q.device), pairs), ceil_div(keys, tile.each), 64)
    head_value = v.shape[-1]
    whole = splits == 1
    shares, maxima, sums = output, row_max, row_sum
    if not whole:
        parts = (batch, heads, splits)
        shares = torch.empty((*parts, head_value), dtype=torch.float32, device=q.device)
        maxima = torch.empty(parts, dtype=torch.float32, device=q.device)
        sums = torch.empty_like(maxima)
    out = problem.heads(output)
    launch(
        attention_decode_kernel, (pairs * splits,), problem.heads(q), problem.heads(k),
        problem.heads(v), out, mask, shares, maxima, sums, problem.call, keys,
        problem.stride_length, splits, GROUP=problem.group,
        BLOCK_H=max(16, next_power_of_2(problem.group)), WHOLE=whole,
        **problem.options(config.AttentionTile(1, tile.keys, tile.warps, tile.stages)),
    )  # fmt: skip
    if whole:
        return
    launch(
        attention_merge_kernel, (batch * heads,), shares, maxima, sums, out, row_max, row_sum,
        heads, splits, warps=4, stages=1, DV=head_value,
        BLOCK_DV=max(16, next_power_of_2(head_value)), BLOCK=next_power_of_2(splits),
        NATURAL=problem.natural,
    )  # fmt: skip
