"""The attention weights, made from the shift and norm of each row that the forward saved.

    weights = dropout(exp(scores - shift) / norm),  0 where hidden

(B, H, T, S) in the input's dtype: what multiplied V. One program per tile; nothing is read twice but
q and k, and attention itself stays free of the T x S matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import product, store
from .attention_gradient_tile import load_share
from .philox import keep_tile
from .runtime import ceil_div, launch
from .tiles import load_rows, power, sequence_end, visible_scores

if TYPE_CHECKING:
    from .attention import Problem


@triton.jit(do_not_specialize=["queries", "limit", "stride_length", "stride_query_length"])
def attention_weights_kernel(
    q_ptr, k_ptr, mask_ptr, length_ptr, query_length_ptr, seed_ptr, shift_ptr, norm_ptr,
    weight_ptr,  # (B, H, T, S) contiguous
    stride_qb, stride_qh, stride_qt,
    stride_kb, stride_kh, stride_ks,
    stride_mb, stride_mh, stride_mt, stride_ms,
    stride_length, stride_query_length,
    heads, group, queries, keys,
    scale, limit, keep_scale,
    D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, MASK_ROWS: tl.constexpr,
    DROPOUT: tl.constexpr, NATURAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(queries, BLOCK_T), tl.cdiv(keys, BLOCK_S)
    program = tl.program_id(0)
    start = program % across * BLOCK_S
    rest = program // across
    query = rest % down * BLOCK_T + tl.arange(0, BLOCK_T)
    bh = rest // down
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    key = start + tl.arange(0, BLOCK_S)
    column = tl.arange(0, BLOCK_D)
    end = sequence_end(length_ptr, stride_length, b, keys)
    query_end = sequence_end(query_length_ptr, stride_query_length, b, queries)
    at = q_ptr + b * stride_qb + h * stride_qh
    q = load_rows(at, query, stride_qt, column, query_end, D, True)
    at = k_ptr + b * stride_kb + (h // group) * stride_kh
    k = load_rows(at, key, stride_ks, column, end, D, True)
    mask_base = mask_ptr
    if MASK != 0:
        mask_base = mask_ptr + b * stride_mb + h * stride_mh
    scores, visible = visible_scores(
        product(q, tl.trans(k), PRECISION), query[:, None], key[None, :], scale, end, mask_base,
        stride_mt, stride_ms, query_end, keys, True, query_length_ptr is not None, CAUSAL, MASK,
        MASK_ROWS, NATURAL,
    )  # fmt: skip
    row = bh.to(tl.int64) * queries + query
    shift = tl.load(shift_ptr + row, mask=query < queries, other=0.0)
    weights = power(scores, shift[:, None], scale, NATURAL)
    if NATURAL:
        weights *= load_share(norm_ptr, row, query < queries)[:, None]
    if DROPOUT:
        keep = keep_tile(tl.load(seed_ptr), row, start, limit, BLOCK_S)
        weights = tl.where(keep, weights * keep_scale, 0.0)
    weights = tl.where(visible, weights, 0.0)
    inside = (query < queries)[:, None] & (key < keys)[None, :]
    at = weight_ptr + row[:, None] * keys + key[None, :]
    store(at, weights, inside)


def attention_weights(problem: Problem, shift: Tensor, norm: Tensor) -> Tensor:
    """(B, H, T, S) weights of a call whose forward returned ``shift`` and ``norm``."""
    q, k, mask = problem.query, problem.key, problem.mask
    batch, heads, queries, keys = problem.sizes
    weights = q.new_empty(problem.sizes)
    tile = problem.tile("attention_weights")
    tiles = ceil_div(queries, tile.queries) * ceil_div(keys, tile.keys)
    launch(
        attention_weights_kernel,
        (tiles * batch * heads,),
        q,
        k,
        mask.data,
        problem.lengths,
        problem.query_lengths,
        problem.seed,
        shift,
        norm,
        weights,
        *q.stride()[:3],
        *k.stride()[:3],
        *mask.strides,
        problem.stride_length,
        problem.stride_query_length,
        heads,
        problem.group,
        queries,
        keys,
        problem.kernel_scale,
        problem.dropout.limit,
        problem.dropout.scale,
        **problem.options(tile),
    )
    return weights
