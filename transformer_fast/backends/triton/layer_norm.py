"""LayerNorm, and residual + dropout + LayerNorm in one pass.

    sum = residual + dropout(input),   y = (sum - mean) / sqrt(variance + eps) * weight + bias

x, residual, y, sum: (N, C), C the size of ``normalized_shape``; weight, bias: (C,); mean, rstd:
(N,) fp32, saved for the backward. Everything between load and store is fp32; statistics take two
passes over registers, one over memory.

Forward: a program takes several short rows (one warp holds 1024 elements, so up to C = 1024 no
reduction leaves its warp). Backward: a fixed number of programs walk over the rows, read x and dy
once and keep their shares of dweight and dbias in registers; a second, small kernel adds the
shares up. No atomics: results are the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import config
from .arithmetic import narrow, store
from .philox import dropout_arguments, keep_elements, keep_tile, seed_for
from .runtime import launch, multiprocessors, with_unit_stride


@triton.jit
def _keep(
    seed,
    rows,
    limit,
    COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    DROPOUT_COLUMNS: tl.constexpr,
):
    if DROPOUT_COLUMNS == COLUMNS:
        return keep_tile(seed, rows, 0, limit, BLOCK_COLUMNS)
    # normalized_shape has several dimensions; dropout counts columns of the last one only.
    flat = rows[:, None] * COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    return keep_elements(seed, flat // DROPOUT_COLUMNS, flat % DROPOUT_COLUMNS, limit)


@triton.jit(do_not_specialize=["rows", "limit"])
def layer_norm_forward_kernel(
    x_ptr,  # (N, C), stride_x between rows
    residual_ptr,  # (N, C) or None
    weight_ptr,  # (C,) or None
    bias_ptr,  # (C,) or None
    y_ptr,  # (N, C)
    sum_ptr,  # (N, C) or None: residual + dropout(x)
    mean_ptr,  # (N,) fp32
    rstd_ptr,  # (N,) fp32
    seed_ptr,  # () int64 or None
    stride_x,
    stride_residual,
    rows,
    eps,
    limit,
    keep_scale,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    DROPOUT_COLUMNS: tl.constexpr,  # 0: no dropout
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    place = row[:, None] * COLUMNS + column[None, :]
    x = tl.load(x_ptr + row[:, None] * stride_x + column[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32)
    if DROPOUT_COLUMNS:
        seed = tl.load(seed_ptr)
        keep = _keep(seed, row, limit, COLUMNS, BLOCK_COLUMNS, DROPOUT_COLUMNS)
        x = tl.where(keep, x * keep_scale, 0.0)
    if residual_ptr is not None:
        at = residual_ptr + row[:, None] * stride_residual + column[None, :]
        residual = tl.load(at, mask=inside, other=0.0)
        x += residual.to(tl.float32)
        # The statistics are those of the sum that is returned, and that the backward reads.
        rounded = narrow(x, residual)
        tl.store(sum_ptr + place, rounded, mask=inside)
        x = rounded.to(tl.float32)
    mean = tl.sum(x, 1) / COLUMNS
    centred = tl.where((column < COLUMNS)[None, :], x - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, 1) / COLUMNS
    rstd = 1.0 / tl.sqrt_rn(variance + eps)
    y = centred * rstd[:, None]
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column < COLUMNS, other=0.0)
        y *= weight.to(tl.float32)[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column < COLUMNS, other=0.0)
        y += bias.to(tl.float32)[None, :]
    store(y_ptr + place, y, inside)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "limit"])
def layer_norm_backward_kernel(
    dy_ptr,  # (N, C), stride_dy between rows
    dsum_ptr,  # (N, C) or None: gradient of the returned sum
    x_ptr,  # (N, C): what was normalised, stride_x between rows
    weight_ptr,  # (C,) or None
    mean_ptr,  # (N,) fp32
    rstd_ptr,  # (N,) fp32
    seed_ptr,  # () int64 or None
    dx_ptr,  # (N, C): gradient of x (of residual)
    dinput_ptr,  # (N, C) or None: gradient of input, behind the dropout
    partial_ptr,  # (2, programs, C) fp32 or None: shares of dweight and dbias
    stride_dy,
    stride_dsum,
    stride_x,
    rows,
    limit,
    keep_scale,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    DROPOUT_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,  # chunks under way at once
):
    column = tl.arange(0, BLOCK_COLUMNS)
    in_row = column < COLUMNS
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    if partial_ptr is not None:
        dweight = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    if DROPOUT_COLUMNS:
        seed = tl.load(seed_ptr)
    program = tl.program_id(0)
    chunks = tl.cdiv(rows, BLOCK_ROWS)
    for chunk in tl.range(program, chunks, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(chunk, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        inside = (row < rows)[:, None] & in_row[None, :]
        place = row[:, None] * COLUMNS + column[None, :]
        at = row[:, None] * stride_dy + column[None, :]
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        at = row[:, None] * stride_x + column[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        xhat = (x - mean[:, None]) * rstd[:, None]
        if partial_ptr is not None:
            dweight += dy * xhat
            dbias += dy
        dxhat = dy
        if weight_ptr is not None:
            dxhat = dy * weight[None, :]
        slope = tl.sum(dxhat * xhat, 1) / COLUMNS
        offset = tl.sum(dxhat, 1) / COLUMNS
        dx = (dxhat - (xhat * slope[:, None] + offset[:, None])) * rstd[:, None]
        if dsum_ptr is not None:
            at = row[:, None] * stride_dsum + column[None, :]
            dx += tl.load(dsum_ptr + at, mask=inside, other=0.0).to(tl.float32)
        store(dx_ptr + place, dx, inside)
        if DROPOUT_COLUMNS:
            keep = _keep(seed, row, limit, COLUMNS, BLOCK_COLUMNS, DROPOUT_COLUMNS)
            dinput = tl.where(keep, dx * keep_scale, 0.0)
            store(dinput_ptr + place, dinput, inside)
    if partial_ptr is not None:
        at = partial_ptr + program.to(tl.int64) * COLUMNS + column
        tl.store(at, tl.sum(dweight, 0), mask=in_row)
        at += tl.num_programs(0).to(tl.int64) * COLUMNS
        tl.store(at, tl.sum(dbias, 0), mask=in_row)


@triton.jit(do_not_specialize=["shares"])
def column_sum_kernel(
    partial_ptr,  # (2, shares, columns) fp32
    first_ptr,  # (columns,) or None: sum of partial[0]
    second_ptr,  # (columns,) or None: sum of partial[1]
    shares,
    columns,
    BLOCK_SHARES: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    which = tl.program_id(1)
    base = partial_ptr + which * tl.cast(shares, tl.int64) * columns
    total = tl.zeros([BLOCK_SHARES, BLOCK_COLUMNS], tl.float32)
    for first in range(0, shares, BLOCK_SHARES):
        share = first + tl.arange(0, BLOCK_SHARES)
        inside = (share < shares)[:, None] & (column < columns)[None, :]
        at = base + share.to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(at, mask=inside, other=0.0)
    result = tl.sum(total, 0)
    if first_ptr is not None:
        at = first_ptr + column
        store(at, result, (column < columns) & (which == 0))
    if second_ptr is not None:
        at = second_ptr + column
        store(at, result, (column < columns) & (which == 1))


def sum_shares(partial: Tensor, first: Tensor | None, second: Tensor | None) -> None:
    """Add (2, shares, columns) fp32 up over the shares, in a fixed order, into two vectors."""
    _, shares, columns = partial.shape
    block_shares, block_columns = 32, 32
    launch(
        column_sum_kernel,
        (triton.cdiv(columns, block_columns), 2),
        partial,
        first,
        second,
        shares,
        columns,
        warps=4,
        stages=2,
        BLOCK_SHARES=block_shares,
        BLOCK_COLUMNS=block_columns,
    )


def _as_rows(tensor: Tensor, columns: int) -> Tensor:
    """(N, C) with unit stride in C; a view wherever the strides allow."""
    return with_unit_stride(tensor.reshape(-1, columns))


def _vector(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.reshape(-1).contiguous()


def _forward(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    columns = math.prod(normalized_shape)
    output = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    total = None if residual is None else torch.empty_like(output)
    rows = input.numel() // columns
    mean = torch.empty(rows, dtype=torch.float32, device=input.device)
    rstd = torch.empty_like(mean)
    x = _as_rows(input, columns)
    r = None if residual is None else _as_rows(residual, columns)
    drop = dropout_arguments(dropout_p)
    tile = config.layer_norm_forward(columns)
    launch(
        layer_norm_forward_kernel,
        (triton.cdiv(rows, tile.rows),),
        x,
        r,
        _vector(weight),
        _vector(bias),
        output,
        total,
        mean,
        rstd,
        seed_for(drop, seed, input.device),
        x.stride(0),
        0 if r is None else r.stride(0),
        rows,
        eps,
        drop.limit,
        drop.scale,
        warps=tile.warps,
        stages=1,
        COLUMNS=columns,
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=tile.columns,
        DROPOUT_COLUMNS=normalized_shape[-1] if drop.active else 0,
    )
    return output, total, mean, rstd


def _backward(
    grad_output: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    columns = math.prod(normalized_shape)
    rows = x.numel() // columns
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    drop = dropout_arguments(dropout_p)
    grad_input = torch.empty_like(grad_x) if drop.active else grad_x
    kind = x.dtype if weight is None else weight.dtype
    shape = tuple(normalized_shape)
    grad_weight = x.new_empty(shape, dtype=kind) if need_weight else None
    grad_bias = x.new_empty(shape, dtype=kind) if need_bias else None
    tile = config.layer_norm_backward(columns, x.element_size())
    programs = min(
        triton.cdiv(rows, tile.rows), tile.per_multiprocessor * multiprocessors(x.device)
    )
    partial = None
    if need_weight or need_bias:
        partial = torch.empty((2, programs, columns), dtype=torch.float32, device=x.device)
    dy, x = _as_rows(grad_output, columns), _as_rows(x, columns)
    dsum = None if grad_sum is None else _as_rows(grad_sum, columns)
    launch(
        layer_norm_backward_kernel,
        (programs,),
        dy,
        dsum,
        x,
        _vector(weight),
        mean,
        rstd,
        seed_for(drop, seed, x.device),
        grad_x,
        grad_input if drop.active else None,
        partial,
        dy.stride(0),
        0 if dsum is None else dsum.stride(0),
        x.stride(0),
        rows,
        drop.limit,
        drop.scale,
        warps=tile.warps,
        stages=tile.stages,
        COLUMNS=columns,
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=tile.columns,
        DROPOUT_COLUMNS=normalized_shape[-1] if drop.active else 0,
        STAGES=tile.stages,
    )
    if partial is not None:
        sum_shares(partial, grad_weight, grad_bias)
    return grad_input, grad_x, grad_weight, grad_bias


def layer_norm_forward(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, mean, rstd); the last two are (N,) fp32, for the backward."""
    output, _, mean, rstd = _forward(input, None, normalized_shape, weight, bias, eps, 0.0, None)
    return output, mean, rstd


def layer_norm_backward(
    grad_output: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias."""
    return _backward(
        grad_output,
        None,
        input,
        normalized_shape,
        weight,
        mean,
        rstd,
        0.0,
        None,
        need_weight,
        need_bias,
    )[1:]


def add_layer_norm_forward(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(normalized, sum, mean, rstd) with sum = residual + dropout(input)."""
    output, total, mean, rstd = _forward(
        input, residual, normalized_shape, weight, bias, eps, dropout_p, seed
    )
    assert total is not None
    return output, total, mean, rstd


def add_layer_norm_backward(
    grad_normalized: Tensor,
    grad_sum: Tensor | None,
    sum: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of input, residual, weight and bias; the first two are one tensor without dropout."""
    return _backward(
        grad_normalized,
        grad_sum,
        sum,
        normalized_shape,
        weight,
        mean,
        rstd,
        dropout_p,
        seed,
        need_weight,
        need_bias,
    )
