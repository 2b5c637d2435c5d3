"""Attention of one query per sequence (decoding), split over the keys.

With T = 1 there is one row of work per head and the keys and values are read once: memory is the
limit, and B x H rows are too few to fill the machine. So the keys of each (batch, key head) are split
over several programs, the query heads that share them sit in one tile, and a second kernel merges the
shares; a program that has all keys writes the result itself. The split is even over the keys that are
really there (``key_lengths``), and how many there are depends on shapes only, so a CUDA graph can be
replayed as the cache grows.

It is used where what a query may see is the same for all heads of a tile; then a hidden value is hidden
from all of them and is simply read as 0, whatever it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import config
from .arithmetic import divide, dot, narrow, product, store
from .runtime import ceil_div, launch, multiprocessors, next_power_of_2
from .tiles import PER_BATCH, largest, load_rows, power, sequence_end, visible_scores

if TYPE_CHECKING:
    from .attention import Problem


@triton.jit(do_not_specialize=PER_BATCH)
def attention_decode_kernel(
    q_ptr,  # (B, H, 1, D)
    k_ptr,  # (B, Hkv, S, D)
    v_ptr,  # (B, Hkv, S, DV)
    mask_ptr,
    length_ptr,
    out_ptr,  # (B, H, splits, DV) fp32: values of the share, not yet divided
    max_ptr,  # (B, H, splits) fp32
    sum_ptr,  # (B, H, splits) fp32; with WHOLE these three are output, shift and norm
    stride_qb, stride_qh,
    stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs,
    stride_mb, stride_mh, stride_ms,
    stride_length,
    stride_ob, stride_oh,
    key_heads, keys, splits, scale,
    GROUP: tl.constexpr, BLOCK_H: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
    MASK: tl.constexpr, NATURAL: tl.constexpr, PRECISION: tl.constexpr,
    WHOLE: tl.constexpr,  # one split, whose share is the result
):  # fmt: skip
    program = tl.program_id(0)
    split = program % splits
    pair = program // splits
    b, hk = (pair // key_heads).to(tl.int64), (pair % key_heads).to(tl.int64)
    member = tl.arange(0, BLOCK_H)
    column, column_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q_base = q_ptr + b * stride_qb + hk * GROUP * stride_qh
    q = load_rows(q_base, member, stride_qh, column, GROUP, D, True)
    k_base = k_ptr + b * stride_kb + hk * stride_kh
    v_base = v_ptr + b * stride_vb + hk * stride_vh
    mask_base = mask_ptr
    if MASK != 0:
        # With GROUP > 1 the mask does not depend on the head.
        mask_base = mask_ptr + b * stride_mb + hk * stride_mh
    end = sequence_end(length_ptr, stride_length, b, keys)
    each = tl.cdiv(tl.cdiv(end, splits), BLOCK_S) * BLOCK_S
    last = tl.minimum(split * each + each, end)
    row_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_H], tl.float32)
    accumulator = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    for start in range(split * each, last, BLOCK_S):
        key = start + tl.arange(0, BLOCK_S)
        k = load_rows(k_base, key, stride_ks, column, end, D, True)
        scores, visible = visible_scores(
            product(q, tl.trans(k), PRECISION), member[:, None] * 0, key[None, :], scale, end, mask_base,
            0, stride_ms, 1, keys, True, False, False, MASK, False, NATURAL,
        )  # fmt: skip
        v = load_rows(v_base, key, stride_vs, column_v, end, DV, True)
        if MASK != 0:
            seen = tl.max((visible & (member[:, None] >= 0)).to(tl.int32), 0)
            v = tl.where((seen > 0)[:, None], v, 0.0)
        new_max = tl.maximum(row_max, largest(scores, scale, NATURAL))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = power(scores, base[:, None], scale, NATURAL)
        shrink = power(row_max, base, 1.0, NATURAL)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        accumulator = dot(narrow(weights, v), v, accumulator * shrink[:, None], PRECISION)
        row_max = new_max
    row = ((b * key_heads + hk) * GROUP + member) * splits + split
    at = row[:, None] * DV
    if WHOLE:
        some = tl.where(row_sum == 0.0, 1.0, row_sum)
        accumulator = divide(accumulator, some[:, None])
        row_max = tl.where(row_sum == 0.0, 0.0, row_max)
        if not NATURAL:
            row_max += tl.log2(some)
        at = b * stride_ob + (hk * GROUP + member)[:, None] * stride_oh
    tl.store(max_ptr + row, row_max, mask=member < GROUP)
    tl.store(sum_ptr + row, row_sum, mask=member < GROUP)
    inside = (member < GROUP)[:, None] & (column_v < DV)[None, :]
    store(out_ptr + at + column_v[None, :], accumulator, inside)


@triton.jit(do_not_specialize=PER_BATCH)
def attention_merge_kernel(
    share_ptr,  # (B, H, splits, DV) fp32
    max_ptr,  # (B, H, splits) fp32
    sum_ptr,  # (B, H, splits) fp32
    out_ptr,  # (B, H, 1, DV)
    shift_ptr,  # (B, H, 1) fp32
    norm_ptr,  # (B, H, 1) fp32
    stride_ob, stride_oh,
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
    norm = tl.sum(sums * factor, 0)
    some = tl.where(norm == 0.0, 1.0, norm)
    # A share of keys that are all hidden has the factor 0 and finite values.
    out = divide(tl.sum(shares * factor[:, None], 0), some)
    shift = tl.where(norm == 0.0, 0.0, base)
    if not NATURAL:
        shift += tl.log2(some)
    tl.store(shift_ptr + row, shift)
    tl.store(norm_ptr + row, norm)
    at = out_ptr + (row // heads) * stride_ob + (row % heads) * stride_oh + column
    store(at, out, column < DV)


def decodes(problem: Problem) -> bool:
    """Whether this is a call for the kernels of this file."""
    _, _, queries, _ = problem.sizes
    uniform = problem.mask.strides[1] == 0 or problem.group == 1
    return (
        queries == 1
        and not problem.causal
        and problem.query_lengths is None
        and not problem.dropout.active
        and problem.group <= 64
        and uniform
    )


def attention_decode(problem: Problem, output: Tensor, shift: Tensor, norm: Tensor) -> None:
    """Fill ``output``, ``shift`` and ``norm`` as `attention.attention_forward` returns them."""
    q, k, v, mask = problem.query, problem.key, problem.value, problem.mask
    batch, heads, _, keys = problem.sizes
    tile = config.attention_decode(problem.architecture, max(problem.head), problem.half)
    pairs = batch * k.shape[1]
    splits = min(ceil_div(2 * multiprocessors(q.device), pairs), ceil_div(keys, tile.each), 64)
    head_value = v.shape[-1]
    whole = splits == 1
    shares, maxima, sums = output, shift, norm
    if not whole:
        parts = (batch, heads, splits)
        shares = torch.empty((*parts, head_value), dtype=torch.float32, device=q.device)
        maxima = torch.empty(parts, dtype=torch.float32, device=q.device)
        sums = torch.empty_like(maxima)
    constants = problem.constants()
    launch(
        attention_decode_kernel,
        (pairs * splits,),
        q,
        k,
        v,
        mask.data,
        problem.lengths,
        shares,
        maxima,
        sums,
        *q.stride()[:2],
        *k.stride()[:3],
        *v.stride()[:3],
        *mask.strides[:2],
        mask.strides[3],
        problem.stride_length,
        *output.stride()[:2],
        k.shape[1],
        keys,
        splits,
        problem.kernel_scale,
        warps=tile.warps,
        stages=tile.stages,
        GROUP=problem.group,
        BLOCK_H=max(16, next_power_of_2(problem.group)),
        BLOCK_S=tile.keys,
        WHOLE=whole,
        **{
            name: constants[name]
            for name in ("D", "DV", "BLOCK_D", "BLOCK_DV", "MASK", "NATURAL", "PRECISION")
        },
    )
    if whole:
        return
    launch(
        attention_merge_kernel,
        (batch * heads,),
        shares,
        maxima,
        sums,
        output,
        shift,
        norm,
        *output.stride()[:2],
        heads,
        splits,
        warps=4,
        stages=1,
        DV=head_value,
        BLOCK_DV=constants["BLOCK_DV"],
        BLOCK=next_power_of_2(splits),
        NATURAL=problem.natural,
    )
