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
from .philox import keep_tile
from .runtime import ceil_div
from .tiles import (
    PER_BATCH_BUT_KEYS,
    load_rows,
    load_share,
    power,
    rows_of,
    sequence_end,
    visible_scores,
)

if TYPE_CHECKING:
    from .attention import Problem


@triton.jit(do_not_specialize=PER_BATCH_BUT_KEYS)
def attention_weights_kernel(
    q_heads, k_heads, mask, lists, shift_ptr, norm_ptr,
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
    shift = tl.load(shift_ptr + row, mask=query < queries, other=0.0)
    weights = power(scores, shift[:, None], call.scale, C.NATURAL)
    if C.NATURAL:
        weights *= load_share(norm_ptr, row, query < queries)[:, None]
    if C.DROPOUT:
        keep = keep_tile(tl.load(call.seed), row, start, limit, C.BLOCK_S)
        weights = tl.where(keep, weights * call.keep_scale, 0.0)
    weights = tl.where(visible, weights, 0.0)
    inside = (query < queries)[:, None] & (key < keys)[None, :]
    at = weight_ptr + row[:, None] * keys + key[None, :]
    store(at, weights, inside)


def attention_weights(problem: Problem, shift: Tensor, norm: Tensor) -> Tensor:
    """(B, H, T, S) weights of a call whose forward returned ``shift`` and ``norm``."""
    batch, heads, queries, keys = problem.sizes
    weights = problem.query.new_empty(problem.sizes)
    tile = problem.tile("attention_weights")
    programs = ceil_div(queries, tile.queries) * ceil_div(keys, tile.keys) * batch * heads
    own = (problem.query, problem.key)
    problem.launch(attention_weights_kernel, programs, tile, own, shift, norm, weights)
    return weights
