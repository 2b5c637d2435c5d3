"""Attention of one query per sequence (decoding), split over the keys.

With T = 1 each head has one row of scores, and keys and values are read once. So memory bandwidth is
the limit, and B x H rows are too few to occupy the GPU. Therefore the keys of each (batch, key head)
are split over several programs, the query heads that share them are in one tile, and a second kernel
merges the partial results. If there is one split, the program writes the result itself.

The unpadded keys (``key_lengths``) are split evenly. The number of splits depends on shapes only, so a
CUDA graph can be replayed as the cache grows.

These kernels require that the mask is the same for all heads of a tile. Then a masked-out value is
masked out for all of them, and it is read as 0, even if it is NaN or inf.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import config
from .arithmetic import divide, product, store
from .runtime import ceil_div, launch, multiprocessors, next_power_of_2
from .tiles import (
    PER_BATCH,
    load_rows,
    online_softmax,
    power,
    rows_of,
    sequence_end,
    store_statistics,
    visible_scores,
)

if TYPE_CHECKING:
    from .attention import Problem


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


def decodes(problem: Problem) -> bool:
    """True if the kernels of this file support the call."""
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


def attention_decode(problem: Problem, output: Tensor, row_max: Tensor, row_sum: Tensor) -> None:
    """Computes ``output``, ``row_max`` and ``row_sum``, as returned by `attention.attention_forward`."""
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
