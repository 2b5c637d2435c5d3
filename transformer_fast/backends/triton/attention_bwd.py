"""The backward of attention.

With P = softmax(scale * Q K^T + mask), keep flags K' = keep / (1 - p), dW the gradient of the
returned weights (usually absent) and all products elementwise unless written with @:

    dP = K' (dO @ V^T + dW),   delta = rowsum(P dP) = rowsum(dO O) + rowsum(W dW)
    dS = P (dP - delta),   dQ = scale dS @ K,   dK = scale dS^T @ Q,   dV = (P K')^T @ dO

P is recomputed from the saved row_max and row_sum of each row. One kernel computes dQ (a program per tile
of queries). Another one computes dK and dV (a program per tile of keys, which loops over all query
heads of its group). That is 7 matrix products instead of the 5 of a kernel that accumulates dQ with
atomics, but results have the same bits in every run. Accumulators are fp32.

NaN and inf at masked-out positions: scores, and with them P and dS, are replaced where masked out. The
factors of those zeros are cleaned only if the result is not finite, in a second loop, as in the
forward. These factors are K for dQ; Q and dO of fully masked queries for dK and dV.

The gradient of an additive mask is dS summed over the dimensions in which the mask is broadcast.
Rows of dS add up to 0, so a mask that is the same for all keys has the gradient 0 and needs no kernel.
A program computes one tile of the gradient. It loops over all (batch, head, tile) that the mask's tile
was added to, recomputes dS and accumulates it in registers. If there are too few programs, the loop is
split, and the partial sums are added afterwards. So there are no atomics, and no B x H x T x S buffer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import dot, narrow, product, store
from .attention import Problem, gradient_like, make_problem
from .philox import keep_tile
from .runtime import ceil_div, multiprocessors, with_unit_stride
from .tiles import (
    PER_BATCH,
    PER_BATCH_BUT_KEYS,
    Sizes,
    any_not_finite,
    load_rows,
    load_statistics,
    power,
    query_program,
    rows_of,
    sequence,
    sequence_end,
    store_rows,
    tile_number,
    visible_scores,
    walked_tile,
)


@triton.jit
def query_statistics(row_max_ptr, row_sum_ptr, delta_ptr, row, inside, C: tl.constexpr):
    """Returns the ``statistics`` of a tile's queries, for `tile_gradients`."""
    base, share = load_statistics(row_max_ptr, row_sum_ptr, row, inside, C.NATURAL)
    return row, base, share, tl.load(delta_ptr + row, mask=inside, other=0.0)


@triton.jit
def tile_gradients(
    q, k, v, do, query, key, start, statistics, dw_ptr, mask, b, h, seed, call, end, queries,
    sizes, MASKED: tl.constexpr, TRANSPOSED: tl.constexpr, BOUNDED: tl.constexpr,
    BOUND_QUERIES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Returns (P K', dS) of the tile of ``query`` [T] and ``key`` [S], as [T, S] or transposed.

    BOUNDED: False if no key is beyond ``end``, or if the caller clears the columns of such keys in dS
    and the mask has elements for them.
    """
    row, base, share, delta = statistics
    if TRANSPOSED:
        scores = product(k, tl.trans(q), C.PRECISION)
        dweights = product(v, tl.trans(do), C.PRECISION)
        query_at, key_at, row_at = query[None, :], key[:, None], row[None, :]
        base, delta, share = base[None, :], delta[None, :], share[None, :]
    else:
        scores = product(q, tl.trans(k), C.PRECISION)
        dweights = product(do, tl.trans(v), C.PRECISION)
        query_at, key_at, row_at = query[:, None], key[None, :], row[:, None]
        base, delta, share = base[:, None], delta[:, None], share[:, None]
    if MASKED:
        scores, visible = visible_scores(
            scores, query_at, key_at, call.scale, end, mask, b, h, queries, sizes.keys, BOUNDED,
            BOUND_QUERIES, C,
        )  # fmt: skip
    elif C.NATURAL:
        scores *= call.scale
    weights = power(scores, base, call.scale, C.NATURAL)
    if C.NATURAL:
        weights *= share
    if dw_ptr is not None:
        inside = (query_at < queries) & (key_at < sizes.keys)
        at = dw_ptr + row_at * sizes.keys + key_at
        dweights += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    kept = weights
    if C.DROPOUT:
        keep = keep_tile(seed, row, start, sizes.limit, key.shape[0])
        if TRANSPOSED:
            keep = tl.trans(keep)
        dweights = tl.where(keep, dweights * call.keep_scale, 0.0)
        kept = tl.where(keep, weights * call.keep_scale, 0.0)
    dscores = weights * (dweights - delta)
    if MASKED:
        dscores = tl.where(visible, dscores, 0.0)
        kept = tl.where(visible, kept, 0.0)
    return kept, dscores


@triton.jit(do_not_specialize=PER_BATCH)
def attention_backward_query_kernel(
    q_heads, k_heads, v_heads, out_heads, do_heads, dq_heads, mask, lists,
    dw_ptr,  # (B, H, T, S) contiguous, or None
    row_max_ptr,  # (B, H, T) fp32
    row_sum_ptr,  # (B, H, T) fp32
    delta_ptr,  # (B, H, T) fp32, written here for the other kernels
    extra_ptr,  # (B, H, T) fp32, rowsum(W dW), or None
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
    at = rows_of(q_heads, p.b, p.h, p.begin)
    q = load_rows(at, query, q_heads.stride_t, column, p.query_end, C.D, True)
    at = rows_of(do_heads, p.b, p.h, p.begin)
    do = load_rows(at, query, do_heads.stride_t, column_v, p.query_end, C.DV, True)
    at = rows_of(out_heads, p.b, p.h, p.begin)
    out = load_rows(at, query, out_heads.stride_t, column_v, p.query_end, C.DV, True)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    if extra_ptr is not None:
        delta += tl.load(extra_ptr + p.row, mask=query < p.query_end, other=0.0)
    tl.store(delta_ptr + p.row, delta, mask=query < queries)
    base, share = load_statistics(row_max_ptr, row_sum_ptr, p.row, query < queries, C.NATURAL)
    statistics = (p.row, base, share, delta)

    PLAIN: tl.constexpr = numbers is not None or C.MASK == 0
    MASKED: tl.constexpr = C.CAUSAL or C.MASK != 0 or C.BOUNDED
    dq = tl.zeros([C.BLOCK_T, C.BLOCK_D], tl.float32)
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
                v = load_rows(
                    v_base, key, v_heads.stride_t, column_v, p.end, C.DV, HIDES and C.BOUNDED
                )
                _, dscores = tile_gradients(
                    q, k, v, do, query, key, start, statistics, dw_ptr, mask, p.b, p.h, p.seed,
                    call, p.end, p.query_end, sizes, HIDES, False, C.BOUNDED, False, C,
                )  # fmt: skip
                dq = dot(narrow(dscores, k), k, dq, C.PRECISION)
    if call.query_lengths is not None:
        dq = tl.where((query < p.query_end)[:, None], dq, 0.0)
    dq_base = rows_of(dq_heads, p.b, p.h, p.begin)
    # A packed sequence is followed by the next, which must not be overwritten.
    rows = p.query_end if C.PACKED else queries
    store_rows(dq_base, query, dq_heads.stride_t, column, dq * call.grad_scale, rows, C.D)

    # Keys beyond ``end`` were loaded as 0. So a product of NaN or inf with a probability of 0 comes
    # only from keys that a mask or causality hides. Rows with such a sum are computed again without
    # these keys.
    if C.CAUSAL or C.MASK != 0:
        if any_not_finite(dq):
            tl.debug_barrier()  # other threads stored the first result
            PIECE: tl.constexpr = 16
            CHUNK: tl.constexpr = 32 if C.BLOCK_D > 32 else C.BLOCK_D
            PIECES: tl.constexpr = C.BLOCK_S // PIECE
            # In small pieces, so that this rare loop does not need registers of the common one.
            for first_column in range(0, C.BLOCK_D, CHUNK):
                some = first_column + tl.arange(0, CHUNK)
                clean = tl.zeros([C.BLOCK_T, CHUNK], tl.float32)
                for j in tl.range(0, p.total * PIECES, num_stages=1):
                    number = tile_number(j // PIECES, p.full, 0, numbers, p.list_at, capacity)
                    start = number * C.BLOCK_S + j % PIECES * PIECE
                    key = start + tl.arange(0, PIECE)
                    k = load_rows(k_base, key, k_heads.stride_t, column, p.end, C.D, C.BOUNDED)
                    v = load_rows(v_base, key, v_heads.stride_t, column_v, p.end, C.DV, C.BOUNDED)
                    _, dscores = tile_gradients(
                        q, k, v, do, query, key, start, statistics, dw_ptr, mask, p.b, p.h, p.seed,
                        call, p.end, p.query_end, sizes, True, False, C.BOUNDED, False, C,
                    )  # fmt: skip
                    inside = (key < p.end)[:, None] & (some < C.D)[None, :]
                    piece_at = k_base + key.to(tl.int64)[:, None] * k_heads.stride_t + some[None, :]
                    piece = tl.load(piece_at, mask=inside, other=0.0)
                    # A visible key that is not finite has already made dscores NaN.
                    piece = tl.where(tl.abs(piece.to(tl.float32)) < float("inf"), piece, 0.0)
                    clean = dot(narrow(dscores, piece), piece, clean, C.PRECISION)
                clean_at = dq_base + query.to(tl.int64)[:, None] * dq_heads.stride_t + some[None, :]
                inside = (query < p.query_end)[:, None] & (some < C.D)[None, :]
                store(clean_at, clean * call.grad_scale, inside)


@triton.jit(do_not_specialize=PER_BATCH)
def attention_backward_key_kernel(
    q_heads, k_heads, v_heads, do_heads, dk_heads, dv_heads, mask,
    lists,  # by keys
    dw_ptr,  # (B, H, T, S) contiguous, or None
    row_max_ptr,
    row_sum_ptr,
    delta_ptr,  # (B, H, T) fp32, from the kernel of dQ
    call,
    queries, keys, stride_length, stride_query_length, stride_list_b, stride_list_h, capacity, limit,
    C: tl.constexpr,
):  # fmt: skip
    sizes = Sizes(
        queries, keys, stride_length, stride_query_length, stride_list_b, stride_list_h, capacity, limit
    )  # fmt: skip
    tiles = tl.cdiv(keys, C.BLOCK_S)
    program = tl.program_id(0)
    tile = program % tiles
    bh = program // tiles
    b, hk = (bh // call.key_heads).to(tl.int64), (bh % call.key_heads).to(tl.int64)
    start = tile * C.BLOCK_S
    key = start + tl.arange(0, C.BLOCK_S)
    column, column_v = tl.arange(0, C.BLOCK_D), tl.arange(0, C.BLOCK_DV)
    key_begin, end = sequence(call.lengths, stride_length, b, keys, stride_list_h, C.PACKED)
    k_base, v_base = rows_of(k_heads, b, hk, key_begin), rows_of(v_heads, b, hk, key_begin)
    k = load_rows(k_base, key, k_heads.stride_t, column, end, C.D, True)
    v = load_rows(v_base, key, v_heads.stride_t, column_v, end, C.DV, True)
    seed = 0
    if C.DROPOUT:
        seed = tl.load(call.seed)
    begin, query_end = sequence(
        call.query_lengths, stride_query_length, b, queries, stride_list_b, C.PACKED
    )
    all_tiles = tl.cdiv(query_end, C.BLOCK_T)
    if start >= end:
        all_tiles = 0
    counts, numbers = lists
    LISTED: tl.constexpr = numbers is not None
    PLAIN: tl.constexpr = LISTED or C.MASK == 0
    MASKED: tl.constexpr = C.CAUSAL or C.MASK != 0 or call.query_lengths is not None

    dk = tl.zeros([C.BLOCK_S, C.BLOCK_D], tl.float32)
    dv = tl.zeros([C.BLOCK_S, C.BLOCK_DV], tl.float32)
    for member in range(0, call.group):
        h = hk * call.group + member
        q_base = rows_of(q_heads, b, h, begin)
        do_base = rows_of(do_heads, b, h, begin)
        row_base = (b * call.key_heads * call.group + h) * queries
        first = 0
        first_full = 0
        list_at = 0
        if LISTED:
            list_row = b * stride_list_b + h * stride_list_h + tile
            live = (all_tiles > 0).to(tl.int32)
            full = tl.load(counts + list_row * 2) * live
            total = tl.load(counts + list_row * 2 + 1) * live
            list_at = list_row * 2 * capacity
        else:
            # Tiles on the diagonal come last in the loop, although they are first in the tensor. The
            # tile with the last query is the last one in both.
            end_full = all_tiles
            if call.query_lengths is not None:
                end_full = tl.minimum(query_end // C.BLOCK_T, all_tiles)
            if C.CAUSAL:
                first = tl.minimum(start // C.BLOCK_T, all_tiles)
                first_full = tl.minimum(tl.cdiv(start + C.BLOCK_S - 1, C.BLOCK_T), all_tiles)
            total = all_tiles - first
            full = tl.maximum(end_full - first_full, 0)
            if C.MASK != 0:
                full = 0
        unmasked = full
        if LISTED and call.query_lengths is not None:
            unmasked = full * 0  # tiles that are fully visible by the mask may have padding queries
        upcoming = 0
        if LISTED:
            upcoming = tile_number(0, full, 0, numbers, list_at, capacity)
        for HIDES in tl.static_range(2):  # fully visible tiles, then partially visible ones
            if MASKED if HIDES else PLAIN:
                for i in range(unmasked if HIDES else 0, total if HIDES else unmasked):
                    number, upcoming = walked_tile(
                        i, upcoming, full, total, first - full if HIDES else first_full, numbers,
                        list_at, capacity,
                    )  # fmt: skip
                    if HIDES and call.query_lengths is not None and not LISTED:
                        number += tl.where(number >= first_full, full, 0)
                    query = number * C.BLOCK_T + tl.arange(0, C.BLOCK_T)
                    q = load_rows(
                        q_base, query, q_heads.stride_t, column, query_end, C.D, C.BOUNDED
                    )
                    do = load_rows(
                        do_base, query, do_heads.stride_t, column_v, query_end, C.DV, C.BOUNDED
                    )
                    statistics = query_statistics(
                        row_max_ptr, row_sum_ptr, delta_ptr, row_base + query, query < query_end, C
                    )
                    kept, dscores = tile_gradients(
                        q, k, v, do, query, key, start, statistics, dw_ptr, mask, b, h, seed, call, end,
                        query_end, sizes, HIDES, True, C.RAGGED_KEYS, C.BOUNDED, C,
                    )  # fmt: skip
                    dv = dot(narrow(kept, do), do, dv, C.PRECISION)
                    dk = dot(narrow(dscores, q), q, dk, C.PRECISION)
    # Padding keys of this tile may have any values. They affect only their own rows, set to 0 here.
    seen = (key < end)[:, None]
    dk_base = rows_of(dk_heads, b, hk, key_begin)
    dv_base = rows_of(dv_heads, b, hk, key_begin)
    dk, dv = tl.where(seen, dk * call.grad_scale, 0.0), tl.where(seen, dv, 0.0)
    rows = end if C.PACKED else keys
    store_rows(dk_base, key, dk_heads.stride_t, column, dk, rows, C.D)
    store_rows(dv_base, key, dv_heads.stride_t, column_v, dv, rows, C.DV)

    # Queries are fully masked only if there is a mask.
    if C.MASK != 0:
        if any_not_finite(dk) | any_not_finite(dv):
            tl.debug_barrier()  # other threads stored the first result
            PIECE: tl.constexpr = 16
            WIDEST: tl.constexpr = C.BLOCK_D if C.BLOCK_D > C.BLOCK_DV else C.BLOCK_DV
            CHUNK: tl.constexpr = 32 if WIDEST > 32 else WIDEST
            pieces = tl.cdiv(query_end, PIECE)
            # In small pieces, so that this rare loop does not need registers of the common one.
            for first_column in range(0, WIDEST, CHUNK):
                some = first_column + tl.arange(0, CHUNK)
                dk_clean = tl.zeros([C.BLOCK_S, CHUNK], tl.float32)
                dv_clean = tl.zeros([C.BLOCK_S, CHUNK], tl.float32)
                for j in tl.range(0, call.group * pieces, num_stages=1):
                    h = hk * call.group + j // pieces
                    query = j % pieces * PIECE + tl.arange(0, PIECE)
                    row = (b * call.key_heads * call.group + h) * queries + query
                    inside = query < query_end
                    statistics = query_statistics(
                        row_max_ptr, row_sum_ptr, delta_ptr, row, inside, C
                    )
                    # Not > 0: a query that is not fully masked may have the sum NaN.
                    sees = (tl.load(row_sum_ptr + row, mask=inside, other=0.0) != 0.0)[:, None]
                    position = query.to(tl.int64)[:, None]
                    q_at = rows_of(q_heads, b, h, 0) + position * q_heads.stride_t
                    do_at = rows_of(do_heads, b, h, 0) + position * do_heads.stride_t
                    inside = sees & (column < C.D)[None, :]
                    q = tl.load(q_at + column[None, :], mask=inside, other=0.0)
                    inside = sees & (column_v < C.DV)[None, :]
                    do = tl.load(do_at + column_v[None, :], mask=inside, other=0.0)
                    kept, dscores = tile_gradients(
                        q, k, v, do, query, key, start, statistics, dw_ptr, mask, b, h, seed, call,
                        end, query_end, sizes, True, True, C.RAGGED_KEYS, True, C,
                    )  # fmt: skip
                    inside = sees & (some < C.DV)[None, :]
                    piece = tl.load(do_at + some[None, :], mask=inside, other=0.0)
                    dv_clean = dot(narrow(kept, piece), piece, dv_clean, C.PRECISION)
                    inside = sees & (some < C.D)[None, :]
                    piece = tl.load(q_at + some[None, :], mask=inside, other=0.0)
                    dk_clean = dot(narrow(dscores, piece), piece, dk_clean, C.PRECISION)
                dk_clean = tl.where(seen, dk_clean * call.grad_scale, 0.0)
                dv_clean = tl.where(seen, dv_clean, 0.0)
                inside = (key < keys)[:, None]
                at = dk_base + key.to(tl.int64)[:, None] * dk_heads.stride_t + some[None, :]
                store(at, dk_clean, inside & (some < C.D)[None, :])
                at = dv_base + key.to(tl.int64)[:, None] * dv_heads.stride_t + some[None, :]
                store(at, dv_clean, inside & (some < C.DV)[None, :])


@triton.jit(do_not_specialize=(*PER_BATCH_BUT_KEYS, "batch", "mask_batch", "mask_queries"))
def attention_bias_kernel(
    q_heads, k_heads, v_heads, do_heads, mask, lists, dw_ptr, row_max_ptr, row_sum_ptr, delta_ptr,
    share_ptr,  # (splits, Bm, Hm, Tm, S)
    batch, mask_batch, mask_heads, mask_queries, splits,
    call,
    queries, keys, stride_length, stride_query_length, stride_list_b, stride_list_h, capacity, limit,
    C: tl.constexpr,
):  # fmt: skip
    sizes = Sizes(
        queries, keys, stride_length, stride_query_length, stride_list_b, stride_list_h, capacity, limit
    )  # fmt: skip
    down, across = tl.cdiv(queries, C.BLOCK_T), tl.cdiv(keys, C.BLOCK_S)
    own_down = tl.cdiv(mask_queries, C.BLOCK_T)
    program = tl.program_id(0)
    tile_s = program % across
    rest = program // across
    own_t = rest % own_down
    rest = rest // own_down
    own_h = rest % mask_heads
    rest = rest // mask_heads
    own_b = rest % mask_batch
    split = rest // mask_batch

    # Ranges of the loop.
    many_t = down if C.SUM_T else 1
    many_h = call.heads // mask_heads
    items = many_t * many_h * (batch // mask_batch)
    each = tl.cdiv(items, splits)
    if C.CAUSAL and not C.SUM_T:
        if tile_s * C.BLOCK_S > own_t * C.BLOCK_T + C.BLOCK_T - 1:
            items = 0
    start = tile_s * C.BLOCK_S
    key = start + tl.arange(0, C.BLOCK_S)
    column, column_v = tl.arange(0, C.BLOCK_D), tl.arange(0, C.BLOCK_DV)
    seed = 0
    if C.DROPOUT:
        seed = tl.load(call.seed)
    total = tl.zeros([C.BLOCK_T, C.BLOCK_S], tl.float32)
    for item in range(split * each, tl.minimum(split * each + each, items)):
        tile_t = own_t + item % many_t
        left = item // many_t
        h = (own_h + left % many_h).to(tl.int64)
        b = (own_b + left // many_h).to(tl.int64)
        query = tile_t * C.BLOCK_T + tl.arange(0, C.BLOCK_T)
        end = sequence_end(call.lengths, stride_length, b, keys)
        query_end = sequence_end(call.query_lengths, stride_query_length, b, queries)
        at = rows_of(q_heads, b, h, 0)
        q = load_rows(at, query, q_heads.stride_t, column, query_end, C.D, True)
        at = rows_of(do_heads, b, h, 0)
        do = load_rows(at, query, do_heads.stride_t, column_v, query_end, C.DV, True)
        at = rows_of(k_heads, b, h // call.group, 0)
        k = load_rows(at, key, k_heads.stride_t, column, end, C.D, True)
        at = rows_of(v_heads, b, h // call.group, 0)
        v = load_rows(at, key, v_heads.stride_t, column_v, end, C.DV, True)
        row = (b * call.heads + h) * queries + query
        statistics = query_statistics(row_max_ptr, row_sum_ptr, delta_ptr, row, query < queries, C)
        _, dscores = tile_gradients(
            q, k, v, do, query, key, start, statistics, dw_ptr, mask, b, h, seed, call, end,
            query_end, sizes, True, False, True, True, C,
        )  # fmt: skip
        total += dscores

    base = ((split * mask_batch + own_b).to(tl.int64) * mask_heads + own_h) * mask_queries
    if C.SUM_T:
        store(share_ptr + base * keys + key, tl.sum(total, 0), key < keys)
    else:
        t = own_t * C.BLOCK_T + tl.arange(0, C.BLOCK_T)
        at = share_ptr + (base + t)[:, None] * keys + key[None, :]
        inside = (t < mask_queries)[:, None] & (key < keys)[None, :]
        store(at, total, inside)


class Given(NamedTuple):
    """Gradients of the results, and the statistics saved by the forward."""

    grad_output: Tensor
    grad_weights: Tensor | None
    row_max: Tensor
    row_sum: Tensor


def _query_gradient(
    problem: Problem, given: Given, output: Tensor, extra: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes dQ and delta."""
    q, k, v = problem.query, problem.key, problem.value
    batch, heads, queries, keys = problem.sizes
    grad_query = gradient_like(q, problem.packed)
    delta = torch.empty_like(given.row_max)
    tile = problem.tile("attention_backward_query")
    lists = problem.lists(tile)
    problem.launch(
        attention_backward_query_kernel, ceil_div(queries, tile.queries) * batch * heads, tile,
        (q, k, v, output, given.grad_output, grad_query), *given[1:], delta, extra, lists=lists,
        BOUNDED=problem.lengths is not None or keys % tile.keys != 0,
    )  # fmt: skip
    return grad_query, delta


def _key_gradients(problem: Problem, given: Given, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Computes dK and dV."""
    q, k, v = problem.query, problem.key, problem.value
    batch, _, queries, keys = problem.sizes
    grad_key = gradient_like(k, problem.packed)
    grad_value = gradient_like(v, problem.packed)
    tile = problem.tile("attention_backward_key")
    lists = problem.lists(tile, by_keys=True)
    problem.launch(
        attention_backward_key_kernel, ceil_div(keys, tile.keys) * batch * k.shape[1], tile,
        (q, k, v, given.grad_output, grad_key, grad_value), *given[1:], delta, lists=lists,
        BOUNDED=problem.query_lengths is not None or queries % tile.queries != 0,
        RAGGED_KEYS=problem.mask.data is not None and keys % tile.keys != 0,
    )  # fmt: skip
    return grad_key, grad_value


def _mask_gradient(problem: Problem, given: Given, owner: Tensor, delta: Tensor) -> Tensor:
    q, k, v = problem.query, problem.key, problem.value
    batch, heads, queries, _ = problem.sizes
    # By the mask's sizes, not its strides: autograd itself sums the gradient of an expanded mask.
    shape = (*(1,) * (4 - owner.dim()), *owner.shape)
    if shape[3] == 1:
        # Rows of dS add up to 0.
        return torch.zeros(owner.shape, dtype=owner.dtype, device=owner.device)
    tile = problem.tile("attention_bias")
    own_tiles = ceil_div(shape[2], tile.queries) * ceil_div(shape[3], tile.keys)
    programs = shape[0] * shape[1] * own_tiles
    items = (batch // shape[0]) * (heads // shape[1])
    items *= ceil_div(queries, tile.queries) if shape[2] == 1 else 1
    splits = max(1, min(items, 4 * multiprocessors(q.device) // programs))
    kind = owner.dtype if splits == 1 else torch.float32
    shares = torch.empty((splits, *shape), dtype=kind, device=q.device)
    problem.launch(
        attention_bias_kernel, splits * programs, tile, (q, k, v, given.grad_output), *given[1:],
        delta, shares, batch, *shape[:3], splits, SUM_T=shape[2] == 1,
    )  # fmt: skip
    total = shares[0] if splits == 1 else shares.sum(0).to(owner.dtype)
    return total.reshape(owner.shape)


def attention_backward(
    grad_output: Tensor, grad_weights: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
    attn_mask: Tensor | None, key_lengths: Tensor | None, is_causal: bool, scale: float,
    dropout_p: float, seed: Tensor | None, output: Tensor, weights: Tensor | None, row_max: Tensor,
    row_sum: Tensor, want_query: bool, want_key: bool, want_value: bool, want_mask: bool,
    *packed: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The operator ``attention_backward``: gradients of query, key, value and the additive attn_mask.

    ``output``, ``row_max`` and ``row_sum`` are results of the forward. ``grad_weights`` is the gradient
    of the returned weights; ``weights`` are required only with it.
    """
    problem = make_problem(
        query, key, value, attn_mask, key_lengths, is_causal, scale, dropout_p, seed, *packed
    )
    grad_output = with_unit_stride(grad_output)
    extra = None
    if grad_weights is not None:
        assert weights is not None
        grad_weights = grad_weights.contiguous()
        extra = (weights.float() * grad_weights.float()).sum(-1)
    given = Given(grad_output, grad_weights, row_max, row_sum)
    grad_query, delta = _query_gradient(problem, given, output, extra)
    grad_key, grad_value = _key_gradients(problem, given, delta)
    if problem.sizes[3] == 1:
        # With one key the weight is constant, so both gradients are 0. Multiplying by 0 keeps NaN.
        grad_query.mul_(0.0)
        grad_key.mul_(0.0)
    grad_mask = None
    if want_mask:
        assert attn_mask is not None
        grad_mask = _mask_gradient(problem, given, attn_mask, delta)
    return (
        grad_query if want_query else None,
        grad_key if want_key else None,
        grad_value if want_value else None,
        grad_mask,
    )
