"""The forward kernel of attention; `attention` holds its launcher.

    output = dropout(softmax(scale * Q K^T + mask)) V

One program per BLOCK_T queries of one (batch, head). It walks over tiles of BLOCK_S keys with the
online softmax (Milakov & Gimelshein 2018; Dao et al., FlashAttention, 2022): running maximum m,
running sum l, accumulator in fp32. Tiles visible to all of its queries come first and take no
masking at all; the others follow; tiles visible to none are not in the walk.

Saved per row: ``shift`` and ``norm``, such that P = exp(score - shift) / norm with natural scores.
There m + log l would round too much: to m, where a mask adds finfo.min to a whole row. With the other
units, for half types, shift = m + log l and P = exp(score - shift): one value and one multiplication
less. A norm of 0 always tells of a row that sees nothing.

Hidden keys and values may hold NaN. Scores are replaced where hidden, so keys do no harm; for values
0 * NaN would. Rather than clean every tile, the result is looked at once: only if it is not finite
the program runs over its tiles again with cleaned values, and keeps its first result just where a
query really sees something not finite.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import divide, dot, narrow, product, store
from .philox import keep_tile
from .tiles import (
    PER_BATCH,
    any_not_finite,
    largest,
    load_rows,
    power,
    sequence,
    store_rows,
    tile_number,
    visible_scores,
    walked_tile,
)


@triton.jit
def _online_step(
    scores, scale, row_max, row_sum, accumulator, value, start, dropout_row, seed, limit,
    MASKED: tl.constexpr, DROPOUT: tl.constexpr, NATURAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    new_max = tl.maximum(row_max, largest(scores, scale, NATURAL))
    base = new_max
    if MASKED:
        # A row that has seen nothing yet: -inf - -inf would be NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = power(scores, base[:, None], scale, NATURAL)
    shrink = power(row_max, base, 1.0, NATURAL)
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    if DROPOUT:
        keep = keep_tile(seed, dropout_row, start, limit, scores.shape[1])
        weights = tl.where(keep, weights, 0.0)
    accumulator = dot(narrow(weights, value), value, accumulator * shrink[:, None], PRECISION)
    return new_max, row_sum, accumulator


@triton.jit(do_not_specialize=PER_BATCH)
def attention_forward_kernel(
    q_ptr,  # (B, H, T, D)
    k_ptr,  # (B, Hkv, S, D)
    v_ptr,  # (B, Hkv, S, DV)
    mask_ptr,  # broadcastable to (B, H, T, S) through its strides, or None
    length_ptr,  # (B,) or None
    query_length_ptr,  # (B,) or None
    seed_ptr,  # () int64 or None
    count_ptr,  # lists of visible tiles, or None
    number_ptr,
    out_ptr,  # (B, H, T, DV)
    shift_ptr,  # (B, H, T) fp32
    norm_ptr,  # (B, H, T) fp32
    stride_qb, stride_qh, stride_qt,
    stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_ot,
    stride_mb, stride_mh, stride_mt, stride_ms,
    stride_length, stride_query_length,
    stride_list_b, stride_list_h, capacity,  # PACKED: rows of queries and of keys, and 0
    heads, group, queries, keys,
    scale,
    limit, keep_scale,
    D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, MASK_ROWS: tl.constexpr, LISTED: tl.constexpr,
    RAGGED: tl.constexpr,  # keys is no multiple of BLOCK_S, and there are no lengths
    PACKED: tl.constexpr,  # lengths are offsets into tensors of (1, H, rows, D)
    DROPOUT: tl.constexpr, NATURAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(queries, BLOCK_T)
    program = tl.program_id(0)
    # With causal the last queries have the most work: they start first.
    tile = program % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    bh = program // tiles
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    first = tile * BLOCK_T
    query = first + tl.arange(0, BLOCK_T)
    column, column_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    begin, query_end = sequence(
        query_length_ptr, stride_query_length, b, queries, stride_list_b, PACKED
    )
    key_begin, end = sequence(length_ptr, stride_length, b, keys, stride_list_h, PACKED)
    k_base = k_ptr + b * stride_kb + (h // group) * stride_kh + key_begin * stride_ks
    v_base = v_ptr + b * stride_vb + (h // group) * stride_vh + key_begin * stride_vs
    q_base = q_ptr + b * stride_qb + h * stride_qh + begin * stride_qt
    q = load_rows(q_base, query, stride_qt, column, query_end, D, True)
    dropout_row = bh.to(tl.int64) * queries + query
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)
    mask_base = mask_ptr
    if MASK != 0:
        mask_base = mask_ptr + b * stride_mb + h * stride_mh

    BOUNDED: tl.constexpr = RAGGED or length_ptr is not None
    MASKED: tl.constexpr = CAUSAL or MASK != 0 or BOUNDED
    list_ptr = number_ptr
    if LISTED:
        row = b * stride_list_b + h * stride_list_h + tile
        full = tl.load(count_ptr + row * 2)
        total = tl.load(count_ptr + row * 2 + 1)
        list_ptr = number_ptr + row * 2 * capacity
    else:
        walk = end
        full_end = end
        if CAUSAL:
            walk = tl.minimum(end, first + BLOCK_T)
            full_end = tl.minimum(end, first + 1)
        total = tl.cdiv(walk, BLOCK_S)
        full = full_end // BLOCK_S
        if MASK != 0:
            full = 0
    if query_length_ptr is not None:
        live = (first < query_end).to(tl.int32)
        full, total = full * live, total * live

    upcoming = 0
    if LISTED:
        upcoming = tile_number(0, full, 0, list_ptr, capacity, True)
    row_max = tl.full([BLOCK_T], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_T], tl.float32)
    accumulator = tl.zeros([BLOCK_T, BLOCK_DV], tl.float32)
    if LISTED or MASK == 0:
        for i in range(0, full):
            number, upcoming = walked_tile(i, upcoming, full, total, 0, list_ptr, capacity, LISTED)
            start = number * BLOCK_S
            key = start + tl.arange(0, BLOCK_S)
            k = load_rows(k_base, key, stride_ks, column, keys, D, False)
            scores = product(q, tl.trans(k), PRECISION)
            if NATURAL:
                scores *= scale
            v = load_rows(v_base, key, stride_vs, column_v, keys, DV, False)
            row_max, row_sum, accumulator = _online_step(
                scores, scale, row_max, row_sum, accumulator, v, start, dropout_row, seed, limit,
                False, DROPOUT, NATURAL, PRECISION,
            )  # fmt: skip
    if MASKED:
        for i in range(full, total):
            number, upcoming = walked_tile(i, upcoming, full, total, 0, list_ptr, capacity, LISTED)
            start = number * BLOCK_S
            key = start + tl.arange(0, BLOCK_S)
            k = load_rows(k_base, key, stride_ks, column, end, D, BOUNDED)
            scores, visible = visible_scores(
                product(q, tl.trans(k), PRECISION), query[:, None], key[None, :], scale, end, mask_base,
                stride_mt, stride_ms, queries, keys, BOUNDED, False, CAUSAL, MASK, MASK_ROWS, NATURAL,
            )  # fmt: skip
            v = load_rows(v_base, key, stride_vs, column_v, end, DV, BOUNDED)
            row_max, row_sum, accumulator = _online_step(
                scores, scale, row_max, row_sum, accumulator, v, start, dropout_row, seed, limit,
                True, DROPOUT, NATURAL, PRECISION,
            )  # fmt: skip

    if query_length_ptr is not None:
        real = query < query_end
        row_sum = tl.where(real, row_sum, 0.0)
        accumulator = tl.where(real[:, None], accumulator, 0.0)
    # A row that sees nothing has l = 0: output 0, and m = 0 keeps the backward free of infinities.
    some_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    share = divide(1.0, some_sum)
    row_max = tl.where(row_sum == 0.0, 0.0, row_max)
    stat = bh.to(tl.int64) * queries + query
    shift = row_max
    if not NATURAL:
        shift += tl.log2(some_sum)
    tl.store(shift_ptr + stat, shift, mask=query < queries)
    tl.store(norm_ptr + stat, row_sum, mask=query < queries)
    if DROPOUT:
        share *= keep_scale
    accumulator *= share[:, None]
    out_base = out_ptr + b * stride_ob + h * stride_oh + begin * stride_ot
    # Behind a packed sequence lies the next.
    rows = query_end if PACKED else queries
    store_rows(out_base, query, stride_ot, column_v, accumulator, rows, DV)

    # Keys beyond ``end`` were loaded as 0, so only a mask or causality can hide what is not finite.
    if CAUSAL or MASK != 0:
        if any_not_finite(accumulator):
            tl.debug_barrier()  # other threads stored the first result
            CHUNK: tl.constexpr = 32 if BLOCK_DV > 32 else BLOCK_DV
            PIECE: tl.constexpr = 16
            for first_column in range(0, BLOCK_DV, CHUNK):
                some = first_column + tl.arange(0, CHUNK)
                clean = tl.zeros([BLOCK_T, CHUNK], tl.float32)
                spoilt = tl.zeros([BLOCK_T, CHUNK], tl.float32)
                # In small pieces: this rare walk must not cost the common one registers.
                for j in tl.range(0, total * (BLOCK_S // PIECE), num_stages=1):
                    number = tile_number(
                        j // (BLOCK_S // PIECE), full, 0, list_ptr, capacity, LISTED
                    )
                    start = number * BLOCK_S + j % (BLOCK_S // PIECE) * PIECE
                    key = start + tl.arange(0, PIECE)
                    k = load_rows(k_base, key, stride_ks, column, end, D, BOUNDED)
                    scores, visible = visible_scores(
                        product(q, tl.trans(k), PRECISION), query[:, None], key[None, :], scale, end,
                        mask_base, stride_mt, stride_ms, queries, keys, BOUNDED, False, CAUSAL, MASK,
                        MASK_ROWS, NATURAL,
                    )  # fmt: skip
                    weights = power(scores, row_max[:, None], scale, NATURAL) * share[:, None]
                    if DROPOUT:
                        keep = keep_tile(seed, dropout_row, start, limit, PIECE)
                        weights = tl.where(keep, weights, 0.0)
                    inside = (key < end)[:, None] & (some < DV)[None, :]
                    at = v_base + key.to(tl.int64)[:, None] * stride_vs + some[None, :]
                    v = tl.load(at, mask=inside, other=0.0)
                    finite = tl.abs(v.to(tl.float32)) < float("inf")
                    clean = dot(narrow(weights, v), tl.where(finite, v, 0.0), clean, PRECISION)
                    seen = (visible & (scores == scores)).to(tl.float32).to(v.dtype)
                    other = (~finite).to(tl.float32).to(v.dtype)
                    spoilt = dot(seen, other, spoilt, PRECISION)
                at = out_base + query.to(tl.int64)[:, None] * stride_ot + some[None, :]
                inside = (query < query_end)[:, None] & (some < DV)[None, :] & (spoilt == 0.0)
                store(at, clean, inside)
