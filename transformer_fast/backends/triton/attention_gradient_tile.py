"""What the backward kernels of attention share: P and dS of a tile; see attention_bwd_kernel.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import divide, product
from .philox import keep_tile
from .tiles import power, visible_scores


@triton.jit
def load_share(norm_ptr, row, inside):
    """What the exponential of natural scores is still to be multiplied by."""
    norm = tl.load(norm_ptr + row, mask=inside, other=0.0)
    # Rows that see nothing have the norm 0 and no weights.
    return tl.where(norm == 0.0, 0.0, divide(1.0, tl.where(norm == 0.0, 1.0, norm)))


@triton.jit
def tile_gradients(
    q, k, v, do,
    query, key, start,
    row, shift, share, delta,
    dw_ptr, seed, scale, end,
    mask_base, stride_mt, stride_ms,
    queries, keys, limit, keep_scale,
    MASKED: tl.constexpr, TRANSPOSED: tl.constexpr, BOUNDED: tl.constexpr,
    BOUND_QUERIES: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, MASK_ROWS: tl.constexpr,
    DROPOUT: tl.constexpr, NATURAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(P K', dS) of the tile of ``query`` [T] and ``key`` [S], as [T, S], or transposed.

    BOUNDED is False where no key is beyond ``end``, or where it does not matter: columns of dS that
    the caller clears, of keys that a mask has entries for.
    """
    if TRANSPOSED:
        scores = product(k, tl.trans(q), PRECISION)
        dweights = product(v, tl.trans(do), PRECISION)
        query_at, key_at, row_at = query[None, :], key[:, None], row[None, :]
        shift, delta = shift[None, :], delta[None, :]
        if NATURAL:
            share = share[None, :]
    else:
        scores = product(q, tl.trans(k), PRECISION)
        dweights = product(do, tl.trans(v), PRECISION)
        query_at, key_at, row_at = query[:, None], key[None, :], row[:, None]
        shift, delta = shift[:, None], delta[:, None]
        if NATURAL:
            share = share[:, None]
    if MASKED:
        scores, visible = visible_scores(
            scores, query_at, key_at, scale, end, mask_base, stride_mt, stride_ms, queries, keys,
            BOUNDED, BOUND_QUERIES, CAUSAL, MASK, MASK_ROWS, NATURAL,
        )  # fmt: skip
    elif NATURAL:
        scores *= scale
    weights = power(scores, shift, scale, NATURAL)
    if NATURAL:
        weights *= share
    if dw_ptr is not None:
        inside = (query_at < queries) & (key_at < keys)
        dweights += tl.load(dw_ptr + row_at * keys + key_at, mask=inside, other=0.0).to(tl.float32)
    kept = weights
    if DROPOUT:
        keep = keep_tile(seed, row, start, limit, key.shape[0])
        if TRANSPOSED:
            keep = tl.trans(keep)
        dweights = tl.where(keep, dweights * keep_scale, 0.0)
        kept = tl.where(keep, weights * keep_scale, 0.0)
    dscores = weights * (dweights - delta)
    if MASKED:
        dscores = tl.where(visible, dscores, 0.0)
        kept = tl.where(visible, kept, 0.0)
    return kept, dscores
