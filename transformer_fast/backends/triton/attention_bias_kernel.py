"""The gradient of an additive mask, summed over the dimensions in which the mask is broadcast.

    dMask = sum over broadcast dimensions of dS

Rows of dS add up to 0, so a mask that is the same for all keys has the gradient 0 and never comes
here. A program makes one tile of the gradient. It walks over all (batch, head, tile) that the mask's tile
was added to, computes dS again and adds it up in registers; where that leaves too few programs the
walk is split and the shares are added afterwards. No atomics, and no buffer of B x H x T x S.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import store
from .attention_gradient_tile import load_share, tile_gradients
from .tiles import load_rows, sequence_end


@triton.jit(
    do_not_specialize=[
        "batch",
        "queries",
        "mask_batch",
        "mask_queries",
        "splits",
        "limit",
        "stride_length",
        "stride_query_length",
    ]
)
def attention_bias_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dw_ptr, mask_ptr, length_ptr, query_length_ptr, seed_ptr,
    shift_ptr, norm_ptr, delta_ptr,
    share_ptr,  # (splits, Bm, Hm, Tm, S)
    stride_qb, stride_qh, stride_qt,
    stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs,
    stride_gb, stride_gh, stride_gt,
    stride_mb, stride_mh, stride_mt, stride_ms,
    stride_length, stride_query_length,
    batch, heads, group, queries, keys,
    mask_batch, mask_heads, mask_queries, splits,
    scale, limit, keep_scale,
    D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    SUM_T: tl.constexpr,  # the mask does not depend on the query
    CAUSAL: tl.constexpr, MASK: tl.constexpr, MASK_ROWS: tl.constexpr,
    DROPOUT: tl.constexpr, NATURAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(queries, BLOCK_T), tl.cdiv(keys, BLOCK_S)
    own_down = tl.cdiv(mask_queries, BLOCK_T)
    program = tl.program_id(0)
    tile_s = program % across
    rest = program // across
    own_t = rest % own_down
    rest = rest // own_down
    own_h = rest % mask_heads
    rest = rest // mask_heads
    own_b = rest % mask_batch
    split = rest // mask_batch

    # What the walk runs over.
    many_t = down if SUM_T else 1
    many_h = heads // mask_heads
    items = many_t * many_h * (batch // mask_batch)
    each = tl.cdiv(items, splits)
    if CAUSAL and not SUM_T:
        if tile_s * BLOCK_S > own_t * BLOCK_T + BLOCK_T - 1:
            items = 0
    start = tile_s * BLOCK_S
    key = start + tl.arange(0, BLOCK_S)
    column, column_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)
    total = tl.zeros([BLOCK_T, BLOCK_S], tl.float32)
    for item in range(split * each, tl.minimum(split * each + each, items)):
        tile_t = own_t + item % many_t
        left = item // many_t
        h = (own_h + left % many_h).to(tl.int64)
        b = (own_b + left // many_h).to(tl.int64)
        query = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
        end = sequence_end(length_ptr, stride_length, b, keys)
        query_end = sequence_end(query_length_ptr, stride_query_length, b, queries)
        at = q_ptr + b * stride_qb + h * stride_qh
        q = load_rows(at, query, stride_qt, column, query_end, D, True)
        at = do_ptr + b * stride_gb + h * stride_gh
        do = load_rows(at, query, stride_gt, column_v, query_end, DV, True)
        at = k_ptr + b * stride_kb + (h // group) * stride_kh
        k = load_rows(at, key, stride_ks, column, end, D, True)
        at = v_ptr + b * stride_vb + (h // group) * stride_vh
        v = load_rows(at, key, stride_vs, column_v, end, DV, True)
        row = (b * heads + h) * queries + query
        shift = tl.load(shift_ptr + row, mask=query < queries, other=0.0)
        share = shift
        if NATURAL:
            share = load_share(norm_ptr, row, query < queries)
        delta = tl.load(delta_ptr + row, mask=query < queries, other=0.0)
        _, dscores = tile_gradients(
            q, k, v, do, query, key, start, row, shift, share, delta, dw_ptr, seed, scale, end,
            mask_ptr + b * stride_mb + h * stride_mh, stride_mt, stride_ms, query_end, keys, limit,
            keep_scale, True, False, True, True, CAUSAL, MASK, MASK_ROWS, DROPOUT, NATURAL, PRECISION,
        )  # fmt: skip
        total += dscores

    base = ((split * mask_batch + own_b).to(tl.int64) * mask_heads + own_h) * mask_queries
    if SUM_T:
        store(share_ptr + base * keys + key, tl.sum(total, 0), key < keys)
    else:
        t = own_t * BLOCK_T + tl.arange(0, BLOCK_T)
        at = share_ptr + (base + t)[:, None] * keys + key[None, :]
        inside = (t < mask_queries)[:, None] & (key < keys)[None, :]
        store(at, total, inside)
