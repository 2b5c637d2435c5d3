"""The backward kernels of attention; `attention_bwd` holds their launchers.

With P = softmax(scale * Q K^T + mask), keep flags K' = keep / (1 - p), dW the gradient of the
returned weights (usually absent) and all products elementwise unless written with @:

    dP = K' (dO @ V^T + dW),   delta = rowsum(P dP) = rowsum(dO O) + rowsum(W dW)
    dS = P (dP - delta),   dQ = scale dS @ K,   dK = scale dS^T @ Q,   dV = (P K')^T @ dO

P is computed again from the saved shift and norm of each row. One kernel makes dQ (a program per tile of
queries), one dK and dV (a program per tile of keys, walking over all query heads of its group):
7 matrix products instead of the 5 of a kernel that adds dQ up with atomics, and the same bits in
every run. Accumulators are fp32.

NaN at hidden places: scores, and with them P and dS, are replaced where hidden. What is multiplied
by those zeros (K for dQ; Q and dO of queries that see nothing for dK, dV) is cleaned only if the
result is not finite, in a second walk, as in the forward.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import dot, narrow, store
from .attention_gradient_tile import load_share, tile_gradients
from .tiles import (
    PER_BATCH,
    any_not_finite,
    load_rows,
    sequence,
    store_rows,
    tile_number,
    walked_tile,
)


@triton.jit(do_not_specialize=PER_BATCH)
def attention_backward_query_kernel(
    q_ptr,  # (B, H, T, D)
    k_ptr,  # (B, Hkv, S, D)
    v_ptr,  # (B, Hkv, S, DV)
    out_ptr,  # (B, H, T, DV)
    do_ptr,  # (B, H, T, DV)
    dw_ptr,  # (B, H, T, S) contiguous, or None
    extra_ptr,  # (B, H, T) fp32, rowsum(W dW), or None
    mask_ptr,
    length_ptr,
    query_length_ptr,
    seed_ptr,
    count_ptr,
    number_ptr,
    shift_ptr,  # (B, H, T) fp32
    norm_ptr,  # (B, H, T) fp32
    delta_ptr,  # (B, H, T) fp32, written here for the other kernels
    dq_ptr,  # (B, H, T, D)
    stride_qb, stride_qh, stride_qt,
    stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_ot,
    stride_gb, stride_gh, stride_gt,
    stride_dqb, stride_dqh, stride_dqt,
    stride_mb, stride_mh, stride_mt, stride_ms,
    stride_length, stride_query_length,
    stride_list_b, stride_list_h, capacity,
    heads, group, queries, keys,
    scale, grad_scale,
    limit, keep_scale,
    D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, MASK_ROWS: tl.constexpr, LISTED: tl.constexpr,
    RAGGED: tl.constexpr, PACKED: tl.constexpr,
    DROPOUT: tl.constexpr, NATURAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(queries, BLOCK_T)
    program = tl.program_id(0)
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
    at = q_ptr + b * stride_qb + h * stride_qh + begin * stride_qt
    q = load_rows(at, query, stride_qt, column, query_end, D, True)
    at = do_ptr + b * stride_gb + h * stride_gh + begin * stride_gt
    do = load_rows(at, query, stride_gt, column_v, query_end, DV, True)
    at = out_ptr + b * stride_ob + h * stride_oh + begin * stride_ot
    out = load_rows(at, query, stride_ot, column_v, query_end, DV, True)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    row = bh.to(tl.int64) * queries + query
    if extra_ptr is not None:
        delta += tl.load(extra_ptr + row, mask=query < query_end, other=0.0)
    tl.store(delta_ptr + row, delta, mask=query < queries)
    shift = tl.load(shift_ptr + row, mask=query < queries, other=0.0)
    share = shift
    if NATURAL:
        share = load_share(norm_ptr, row, query < queries)
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
        list_row = b * stride_list_b + h * stride_list_h + tile
        full = tl.load(count_ptr + list_row * 2)
        total = tl.load(count_ptr + list_row * 2 + 1)
        list_ptr = number_ptr + list_row * 2 * capacity
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
    dq = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    if LISTED or MASK == 0:
        for i in range(0, full):
            number, upcoming = walked_tile(i, upcoming, full, total, 0, list_ptr, capacity, LISTED)
            start = number * BLOCK_S
            key = start + tl.arange(0, BLOCK_S)
            k = load_rows(k_base, key, stride_ks, column, keys, D, False)
            v = load_rows(v_base, key, stride_vs, column_v, keys, DV, False)
            _, dscores = tile_gradients(
                q, k, v, do, query, key, start, row, shift, share, delta, dw_ptr, seed, scale, end,
                mask_base, stride_mt, stride_ms, query_end, keys, limit, keep_scale,
                False, False, BOUNDED, False, CAUSAL, MASK, MASK_ROWS, DROPOUT, NATURAL, PRECISION,
            )  # fmt: skip
            dq = dot(narrow(dscores, k), k, dq, PRECISION)
    if MASKED:
        for i in range(full, total):
            number, upcoming = walked_tile(i, upcoming, full, total, 0, list_ptr, capacity, LISTED)
            start = number * BLOCK_S
            key = start + tl.arange(0, BLOCK_S)
            k = load_rows(k_base, key, stride_ks, column, end, D, BOUNDED)
            v = load_rows(v_base, key, stride_vs, column_v, end, DV, BOUNDED)
            _, dscores = tile_gradients(
                q, k, v, do, query, key, start, row, shift, share, delta, dw_ptr, seed, scale, end,
                mask_base, stride_mt, stride_ms, query_end, keys, limit, keep_scale,
                True, False, BOUNDED, False, CAUSAL, MASK, MASK_ROWS, DROPOUT, NATURAL, PRECISION,
            )  # fmt: skip
            dq = dot(narrow(dscores, k), k, dq, PRECISION)
    if query_length_ptr is not None:
        dq = tl.where((query < query_end)[:, None], dq, 0.0)
    dq_base = dq_ptr + b * stride_dqb + h * stride_dqh + begin * stride_dqt
    # Behind a packed sequence lies the next.
    rows = query_end if PACKED else queries
    store_rows(dq_base, query, stride_dqt, column, dq * grad_scale, rows, D)

    # Keys beyond ``end`` were loaded as 0, so only a mask or causality can hide what is not finite.
    if CAUSAL or MASK != 0:
        if any_not_finite(dq):
            tl.debug_barrier()  # other threads stored the first result
            PIECE: tl.constexpr = 16
            CHUNK: tl.constexpr = 32 if BLOCK_D > 32 else BLOCK_D
            PIECES: tl.constexpr = BLOCK_S // PIECE
            # In small pieces: this rare walk must not cost the common one registers.
            for first_column in range(0, BLOCK_D, CHUNK):
                some = first_column + tl.arange(0, CHUNK)
                clean = tl.zeros([BLOCK_T, CHUNK], tl.float32)
                for j in tl.range(0, total * PIECES, num_stages=1):
                    number = tile_number(j // PIECES, full, 0, list_ptr, capacity, LISTED)
                    start = number * BLOCK_S + j % PIECES * PIECE
                    key = start + tl.arange(0, PIECE)
                    k = load_rows(k_base, key, stride_ks, column, end, D, BOUNDED)
                    v = load_rows(v_base, key, stride_vs, column_v, end, DV, BOUNDED)
                    _, dscores = tile_gradients(
                        q, k, v, do, query, key, start, row, shift, share, delta, dw_ptr, seed, scale,
                        end, mask_base, stride_mt, stride_ms, query_end, keys, limit, keep_scale,
                        True, False, BOUNDED, False, CAUSAL, MASK, MASK_ROWS, DROPOUT, NATURAL, PRECISION,
                    )  # fmt: skip
                    inside = (key < end)[:, None] & (some < D)[None, :]
                    piece_at = k_base + key.to(tl.int64)[:, None] * stride_ks + some[None, :]
                    piece = tl.load(piece_at, mask=inside, other=0.0)
                    # A visible key that is not finite has made dscores NaN already.
                    piece = tl.where(tl.abs(piece.to(tl.float32)) < float("inf"), piece, 0.0)
                    clean = dot(narrow(dscores, piece), piece, clean, PRECISION)
                clean_at = dq_base + query.to(tl.int64)[:, None] * stride_dqt + some[None, :]
                inside = (query < query_end)[:, None] & (some < D)[None, :]
                store(clean_at, clean * grad_scale, inside)


@triton.jit(do_not_specialize=PER_BATCH)
def attention_backward_key_kernel(
    q_ptr,  # (B, H, T, D)
    k_ptr,  # (B, Hkv, S, D)
    v_ptr,  # (B, Hkv, S, DV)
    do_ptr,  # (B, H, T, DV)
    dw_ptr,  # (B, H, T, S) contiguous, or None
    mask_ptr,
    length_ptr,
    query_length_ptr,
    seed_ptr,
    count_ptr,  # lists by keys
    number_ptr,
    shift_ptr,
    norm_ptr,
    delta_ptr,  # (B, H, T) fp32, from the kernel of dQ
    dk_ptr,  # (B, Hkv, S, D)
    dv_ptr,  # (B, Hkv, S, DV)
    stride_qb, stride_qh, stride_qt,
    stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs,
    stride_gb, stride_gh, stride_gt,
    stride_dkb, stride_dkh, stride_dks,
    stride_dvb, stride_dvh, stride_dvs,
    stride_mb, stride_mh, stride_mt, stride_ms,
    stride_length, stride_query_length,
    stride_list_b, stride_list_h, capacity,
    key_heads, group, queries, keys,
    scale, grad_scale,
    limit, keep_scale,
    D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, MASK_ROWS: tl.constexpr, LISTED: tl.constexpr,
    RAGGED: tl.constexpr,  # queries is no multiple of BLOCK_T, and there are no lengths of them
    RAGGED_KEYS: tl.constexpr,  # keys is no multiple of BLOCK_S, where a mask has no entries
    PACKED: tl.constexpr,
    DROPOUT: tl.constexpr, NATURAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(keys, BLOCK_S)
    program = tl.program_id(0)
    tile = program % tiles
    bh = program // tiles
    b, hk = (bh // key_heads).to(tl.int64), (bh % key_heads).to(tl.int64)
    start = tile * BLOCK_S
    key = start + tl.arange(0, BLOCK_S)
    column, column_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    key_begin, end = sequence(length_ptr, stride_length, b, keys, stride_list_h, PACKED)
    k_base = k_ptr + b * stride_kb + hk * stride_kh + key_begin * stride_ks
    k = load_rows(k_base, key, stride_ks, column, end, D, True)
    v_base = v_ptr + b * stride_vb + hk * stride_vh + key_begin * stride_vs
    v = load_rows(v_base, key, stride_vs, column_v, end, DV, True)
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)
    begin, query_end = sequence(
        query_length_ptr, stride_query_length, b, queries, stride_list_b, PACKED
    )
    all_tiles = tl.cdiv(query_end, BLOCK_T)
    if start >= end:
        all_tiles = 0
    BOUND_QUERIES: tl.constexpr = RAGGED or query_length_ptr is not None

    dk = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_S, BLOCK_DV], tl.float32)
    for member in range(0, group):
        h = hk * group + member
        q_base = q_ptr + b * stride_qb + h * stride_qh + begin * stride_qt
        do_base = do_ptr + b * stride_gb + h * stride_gh + begin * stride_gt
        row_base = (b * key_heads * group + h) * queries
        mask_base = mask_ptr
        if MASK != 0:
            mask_base = mask_ptr + b * stride_mb + h * stride_mh
        list_ptr = number_ptr
        first = 0
        first_full = 0
        if LISTED:
            list_row = b * stride_list_b + h * stride_list_h + tile
            live = (all_tiles > 0).to(tl.int32)
            full = tl.load(count_ptr + list_row * 2) * live
            total = tl.load(count_ptr + list_row * 2 + 1) * live
            list_ptr = number_ptr + list_row * 2 * capacity
        else:
            # Tiles of queries on the diagonal come last in the walk and first in the tensor, where
            # the one that has the last query is the last of all.
            end_full = all_tiles
            if query_length_ptr is not None:
                end_full = tl.minimum(query_end // BLOCK_T, all_tiles)
            if CAUSAL:
                first = tl.minimum(start // BLOCK_T, all_tiles)
                first_full = tl.minimum(tl.cdiv(start + BLOCK_S - 1, BLOCK_T), all_tiles)
            total = all_tiles - first
            full = tl.maximum(end_full - first_full, 0)
            if MASK != 0:
                full = 0
        unmasked = full
        if LISTED and query_length_ptr is not None:
            unmasked = full * 0  # tiles that the mask shows may lie beyond the last query
        upcoming = 0
        if LISTED:
            upcoming = tile_number(0, full, 0, list_ptr, capacity, True)
        if LISTED or MASK == 0:
            for i in range(0, unmasked):
                number, upcoming = walked_tile(
                    i, upcoming, full, total, first_full, list_ptr, capacity, LISTED
                )
                query = number * BLOCK_T + tl.arange(0, BLOCK_T)
                q = load_rows(q_base, query, stride_qt, column, query_end, D, BOUND_QUERIES)
                do = load_rows(do_base, query, stride_gt, column_v, query_end, DV, BOUND_QUERIES)
                row = row_base + query
                shift = tl.load(shift_ptr + row, mask=query < query_end, other=0.0)
                share = shift
                if NATURAL:
                    share = load_share(norm_ptr, row, query < query_end)
                delta = tl.load(delta_ptr + row, mask=query < query_end, other=0.0)
                kept, dscores = tile_gradients(
                    q, k, v, do, query, key, start, row, shift, share, delta, dw_ptr, seed, scale,
                    end, mask_base, stride_mt, stride_ms, query_end, keys, limit, keep_scale,
                    False, True, False, BOUND_QUERIES, CAUSAL, MASK, MASK_ROWS, DROPOUT, NATURAL,
                    PRECISION,
                )  # fmt: skip
                dv = dot(narrow(kept, do), do, dv, PRECISION)
                dk = dot(narrow(dscores, q), q, dk, PRECISION)
        if CAUSAL or MASK != 0 or query_length_ptr is not None:
            for i in range(unmasked, total):
                number, upcoming = walked_tile(
                    i, upcoming, full, total, first - full, list_ptr, capacity, LISTED
                )
                if query_length_ptr is not None and not LISTED:
                    number += tl.where(number >= first_full, full, 0)
                query = number * BLOCK_T + tl.arange(0, BLOCK_T)
                q = load_rows(q_base, query, stride_qt, column, query_end, D, BOUND_QUERIES)
                do = load_rows(do_base, query, stride_gt, column_v, query_end, DV, BOUND_QUERIES)
                row = row_base + query
                shift = tl.load(shift_ptr + row, mask=query < query_end, other=0.0)
                share = shift
                if NATURAL:
                    share = load_share(norm_ptr, row, query < query_end)
                delta = tl.load(delta_ptr + row, mask=query < query_end, other=0.0)
                kept, dscores = tile_gradients(
                    q, k, v, do, query, key, start, row, shift, share, delta, dw_ptr, seed, scale,
                    end, mask_base, stride_mt, stride_ms, query_end, keys, limit, keep_scale,
                    True, True, RAGGED_KEYS, BOUND_QUERIES, CAUSAL, MASK, MASK_ROWS, DROPOUT, NATURAL,
                    PRECISION,
                )  # fmt: skip
                dv = dot(narrow(kept, do), do, dv, PRECISION)
                dk = dot(narrow(dscores, q), q, dk, PRECISION)
    # Hidden keys of this tile may hold anything, and only their own rows have it.
    seen = (key < end)[:, None]
    dk_base = dk_ptr + b * stride_dkb + hk * stride_dkh + key_begin * stride_dks
    dv_base = dv_ptr + b * stride_dvb + hk * stride_dvh + key_begin * stride_dvs
    dk, dv = tl.where(seen, dk * grad_scale, 0.0), tl.where(seen, dv, 0.0)
    rows = end if PACKED else keys
    store_rows(dk_base, key, stride_dks, column, dk, rows, D)
    store_rows(dv_base, key, stride_dvs, column_v, dv, rows, DV)

    # Only a mask makes queries that see nothing.
    if MASK != 0:
        if any_not_finite(dk) | any_not_finite(dv):
            tl.debug_barrier()  # other threads stored the first result
            PIECE: tl.constexpr = 16
            WIDEST: tl.constexpr = BLOCK_D if BLOCK_D > BLOCK_DV else BLOCK_DV
            CHUNK: tl.constexpr = 32 if WIDEST > 32 else WIDEST
            pieces = tl.cdiv(query_end, PIECE)
            # In small pieces: this rare walk must not cost the common one registers.
            for first_column in range(0, WIDEST, CHUNK):
                some = first_column + tl.arange(0, CHUNK)
                dk_clean = tl.zeros([BLOCK_S, CHUNK], tl.float32)
                dv_clean = tl.zeros([BLOCK_S, CHUNK], tl.float32)
                for j in tl.range(0, group * pieces, num_stages=1):
                    h = hk * group + j // pieces
                    query = j % pieces * PIECE + tl.arange(0, PIECE)
                    row = (b * key_heads * group + h) * queries + query
                    inside = query < query_end
                    shift = tl.load(shift_ptr + row, mask=inside, other=0.0)
                    share = shift
                    if NATURAL:
                        share = load_share(norm_ptr, row, inside)
                    delta = tl.load(delta_ptr + row, mask=inside, other=0.0)
                    # Other than 0: a norm that is NaN belongs to a query that sees something.
                    sees = (tl.load(norm_ptr + row, mask=inside, other=0.0) != 0.0)[:, None]
                    at = query.to(tl.int64)[:, None]
                    q_at = q_ptr + b * stride_qb + h * stride_qh + at * stride_qt
                    do_at = do_ptr + b * stride_gb + h * stride_gh + at * stride_gt
                    q = tl.load(
                        q_at + column[None, :], mask=sees & (column < D)[None, :], other=0.0
                    )
                    inside = sees & (column_v < DV)[None, :]
                    do = tl.load(do_at + column_v[None, :], mask=inside, other=0.0)
                    mask_base = mask_ptr + b * stride_mb + h * stride_mh
                    kept, dscores = tile_gradients(
                        q, k, v, do, query, key, start, row, shift, share, delta, dw_ptr, seed,
                        scale, end, mask_base, stride_mt, stride_ms, query_end, keys, limit, keep_scale,
                        True, True, RAGGED_KEYS, True, CAUSAL, MASK, MASK_ROWS, DROPOUT, NATURAL,
                        PRECISION,
                    )  # fmt: skip
                    piece = tl.load(
                        do_at + some[None, :], mask=sees & (some < DV)[None, :], other=0.0
                    )
                    dv_clean = dot(narrow(kept, piece), piece, dv_clean, PRECISION)
                    piece = tl.load(
                        q_at + some[None, :], mask=sees & (some < D)[None, :], other=0.0
                    )
                    dk_clean = dot(narrow(dscores, piece), piece, dk_clean, PRECISION)
                dk_clean = tl.where(seen, dk_clean * grad_scale, 0.0)
                dv_clean = tl.where(seen, dv_clean, 0.0)
                inside = (key < keys)[:, None]
                at = dk_base + key.to(tl.int64)[:, None] * stride_dks + some[None, :]
                store(at, dk_clean, inside & (some < D)[None, :])
                at = dv_base + key.to(tl.int64)[:, None] * stride_dvs + some[None, :]
                store(at, dv_clean, inside & (some < DV)[None, :])
