"""LayerNorm, RMSNorm and The Annotated Transformer's norm, and residual + dropout + norm in one pass.

    sum = residual + dropout(input),   y = (sum - mean) * rstd * weight + bias

x, residual, y, sum: (N, C), C the size of ``normalized_shape``; weight, bias: (C,); mean, rstd:
(N,) fp32, saved for backward. All arithmetic is in fp32. Statistics take two passes over registers,
but only one over memory.

Forward: a program has several short rows. One warp has 1024 elements, so up to C = 1024 reductions
are within a warp. Backward: a fixed number of programs loop over the rows, read x and dy once, and
accumulate partial dweight and dbias in registers; a second, small kernel adds the partial sums. No
atomics, so results are the same in every run.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import config
from .arithmetic import divide, narrow, store
from .philox import dropout_arguments, keep_elements, keep_tile, seed_for
from .runtime import ceil_div, constant, launch, multiprocessors, with_unit_stride

#: Kinds, as in ``functional/layer_norm.py``.
RMS = tl.constexpr(1)
ANNOTATED = tl.constexpr(2)


class Rows(NamedTuple):
    """A tensor (N, C) with unit stride in C, or None."""

    data: Any
    stride: Any


class Constants(NamedTuple):
    COLUMNS: int
    KIND: int
    BLOCK_ROWS: int
    BLOCK_COLUMNS: int
    DROPOUT_COLUMNS: int  # 0: no dropout
    STAGES: int  # pipeline stages: chunks whose loads are in flight


@triton.jit
def _load(x, row, column, inside):
    return tl.load(x.data + row[:, None] * x.stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _keep(seed, rows, limit, C: tl.constexpr):
    if C.DROPOUT_COLUMNS == C.COLUMNS:
        return keep_tile(seed, rows, 0, limit, C.BLOCK_COLUMNS)
    # normalized_shape has several dimensions; the dropout pattern counts columns in the last one only.
    flat = rows[:, None] * C.COLUMNS + tl.arange(0, C.BLOCK_COLUMNS)[None, :]
    return keep_elements(seed, flat // C.DROPOUT_COLUMNS, flat % C.DROPOUT_COLUMNS, limit)


@triton.jit(do_not_specialize=["rows", "limit"])
def layer_norm_forward_kernel(
    x_rows,
    residual_rows,
    weight_ptr,  # (C,) or None
    bias_ptr,  # (C,) or None
    y_ptr,  # (N, C)
    sum_ptr,  # (N, C) or None: residual + dropout(x)
    mean_ptr,  # (N,) fp32
    rstd_ptr,  # (N,) fp32
    seed_ptr,  # () int64 or None
    rows, eps, limit, keep_scale,
    C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * C.BLOCK_ROWS + tl.arange(0, C.BLOCK_ROWS)
    column = tl.arange(0, C.BLOCK_COLUMNS)
    inside = (row < rows)[:, None] & (column < C.COLUMNS)[None, :]
    place = row[:, None] * C.COLUMNS + column[None, :]
    x = _load(x_rows, row, column, inside).to(tl.float32)
    if C.DROPOUT_COLUMNS:
        seed = tl.load(seed_ptr)
        keep = _keep(seed, row, limit, C)
        x = tl.where(keep, x * keep_scale, 0.0)
    if residual_rows.data is not None:
        residual = _load(residual_rows, row, column, inside)
        x += residual.to(tl.float32)
        # The statistics are those of the rounded sum, which is returned and read by the backward.
        rounded = narrow(x, residual)
        tl.store(sum_ptr + place, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if C.KIND == RMS:
        mean = tl.zeros([C.BLOCK_ROWS], tl.float32)
        centred = x
    else:
        mean = divide(tl.sum(x, 1), C.COLUMNS * 1.0)
        centred = tl.where((column < C.COLUMNS)[None, :], x - mean[:, None], 0.0)
    square = tl.sum(centred * centred, 1)
    if C.KIND < ANNOTATED:
        rstd = divide(1.0, tl.sqrt_rn(divide(square, C.COLUMNS * 1.0) + eps))
    else:
        terms = C.COLUMNS - 1.0 if C.KIND == ANNOTATED else C.COLUMNS * 1.0
        rstd = divide(1.0, tl.sqrt_rn(divide(square, terms)) + eps)
    y = centred * rstd[:, None]
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column < C.COLUMNS, other=0.0)
        y *= weight.to(tl.float32)[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column < C.COLUMNS, other=0.0)
        y += bias.to(tl.float32)[None, :]
    store(y_ptr + place, y, inside)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "limit"])
def layer_norm_backward_kernel(
    dy_rows,
    dsum_rows,  # gradient of the returned sum
    x_rows,  # what was normalised
    weight_ptr,  # (C,) or None
    mean_ptr,  # (N,) fp32
    rstd_ptr,  # (N,) fp32
    seed_ptr,  # () int64 or None
    dx_ptr,  # (N, C): gradient of x (of residual)
    dinput_ptr,  # (N, C) or None: gradient of input, before the dropout
    partial_ptr,  # (2, programs, C) fp32 or None: partial sums of dweight and dbias
    rows, limit, keep_scale,
    C: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, C.BLOCK_COLUMNS)
    in_row = column < C.COLUMNS
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    if partial_ptr is not None:
        dweight = tl.zeros([C.BLOCK_ROWS, C.BLOCK_COLUMNS], tl.float32)
        dbias = tl.zeros([C.BLOCK_ROWS, C.BLOCK_COLUMNS], tl.float32)
    if C.DROPOUT_COLUMNS:
        seed = tl.load(seed_ptr)
    program = tl.program_id(0)
    chunks = tl.cdiv(rows, C.BLOCK_ROWS)
    for chunk in tl.range(program, chunks, tl.num_programs(0), num_stages=C.STAGES):
        row = tl.cast(chunk, tl.int64) * C.BLOCK_ROWS + tl.arange(0, C.BLOCK_ROWS)
        inside = (row < rows)[:, None] & in_row[None, :]
        place = row[:, None] * C.COLUMNS + column[None, :]
        dy = _load(dy_rows, row, column, inside).to(tl.float32)
        x = _load(x_rows, row, column, inside).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        xhat = (x - mean[:, None]) * rstd[:, None]
        if partial_ptr is not None:
            dweight += dy * xhat
            dbias += dy
        dxhat = dy
        if weight_ptr is not None:
            dxhat = dy * weight[None, :]
        slope = tl.sum(dxhat * xhat, 1)
        if C.KIND < ANNOTATED:
            slope = divide(slope, C.COLUMNS * 1.0)
        else:  # 0 for rows of equal elements, like the gradient of PyTorch's std
            terms = C.COLUMNS - 1.0 if C.KIND == ANNOTATED else C.COLUMNS * 1.0
            square = tl.sum(tl.where(inside, xhat * xhat, 0.0), 1)
            root = tl.sqrt_rn(square * terms)
            slope = tl.where(square == 0.0, 0.0, divide(slope, tl.where(square == 0.0, 1.0, root)))
        if C.KIND == RMS:
            dx = (dxhat - xhat * slope[:, None]) * rstd[:, None]
        else:
            offset = divide(tl.sum(dxhat, 1), C.COLUMNS * 1.0)
            dx = (dxhat - (xhat * slope[:, None] + offset[:, None])) * rstd[:, None]
        if dsum_rows.data is not None:
            dx += _load(dsum_rows, row, column, inside).to(tl.float32)
        store(dx_ptr + place, dx, inside)
        if C.DROPOUT_COLUMNS:
            keep = _keep(seed, row, limit, C)
            dinput = tl.where(keep, dx * keep_scale, 0.0)
            store(dinput_ptr + place, dinput, inside)
    if partial_ptr is not None:
        at = partial_ptr + program.to(tl.int64) * C.COLUMNS + column
        tl.store(at, tl.sum(dweight, 0), mask=in_row)
        at += tl.num_programs(0).to(tl.int64) * C.COLUMNS
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
    """Adds up (2, shares, columns) fp32 over the shares, in a fixed order, into two vectors."""
    _, shares, columns = partial.shape
    block_shares, block_columns = 32, 32
    launch(
        column_sum_kernel, (ceil_div(columns, block_columns), 2), partial, first, second, shares,
        columns, warps=4, stages=2, BLOCK_SHARES=block_shares, BLOCK_COLUMNS=block_columns,
    )  # fmt: skip


def _rows(tensor: Tensor | None, columns: int) -> Rows:
    """Reshapes to (N, columns) with unit stride in columns; a view if the strides allow."""
    if tensor is None:
        return Rows(None, 0)
    if tensor.dim() != 2 or tensor.shape[1] != columns:
        tensor = tensor.reshape(-1, columns)
    tensor = with_unit_stride(tensor)
    return Rows(tensor, tensor.stride(0))


def _options(tile: config.RowTile, columns: int, kind: int, dropout_columns: int) -> dict[str, Any]:
    """Returns the launch options of kernels with this tile, `Constants` included."""
    constants = Constants(columns, kind, tile.rows, tile.columns, dropout_columns, tile.stages)
    return {"warps": tile.warps, "stages": tile.stages, "C": constant(constants)}


def _vector(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or (tensor.dim() == 1 and tensor.is_contiguous()):
        return tensor
    return tensor.reshape(-1).contiguous()


def forward(
    input: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, dims: int,
    eps: float, kind: int, dropout_p: float, seed: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Implements `ops.layer_norm.TRAINING`; the sum is None without residual."""
    lead = input.dim() - dims
    columns = math.prod(input.shape[lead:])
    output = torch.empty_like(input, memory_format=torch.contiguous_format)
    total = None if residual is None else torch.empty_like(output)
    mean = input.new_empty(input.shape[:lead], dtype=torch.float32)
    rstd = torch.empty_like(mean)
    if input.numel() == 0:
        return output, total, mean, rstd
    rows = input.numel() // columns
    drop = dropout_arguments(dropout_p)
    tile = config.layer_norm_forward(columns)
    launch(
        layer_norm_forward_kernel, (ceil_div(rows, tile.rows),), _rows(input, columns),
        _rows(residual, columns), _vector(weight), _vector(bias), output, total, mean, rstd,
        seed_for(drop, seed, input.device), rows, eps, drop.limit, drop.scale,
        **_options(tile, columns, kind, input.shape[-1] if drop.active else 0),
    )  # fmt: skip
    return output, total, mean, rstd


def backward(
    grad: Tensor, grad_sum: Tensor | None, source: Tensor, weight: Tensor | None, mean: Tensor,
    rstd: Tensor, dims: int, kind: int, dropout_p: float, seed: Tensor | None, want_source: bool,
    want_input: bool, want_weight: bool, want_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Implements `ops.layer_norm.BACKWARD`; gradients that are not requested are None."""
    shape = source.shape[-dims:]
    columns = math.prod(shape)
    grad_source = torch.empty_like(source, memory_format=torch.contiguous_format)
    drop = dropout_arguments(dropout_p)
    grad_input = torch.empty_like(grad_source) if drop.active else None
    grad_weight = source.new_empty(shape) if want_weight else None
    grad_bias = source.new_empty(shape) if want_bias else None
    if source.numel() == 0:
        sums = (each if each is None else each.zero_() for each in (grad_weight, grad_bias))
        return grad_source, grad_input, *sums  # type: ignore[return-value]
    rows = source.numel() // columns
    tile = config.layer_norm_backward(columns, source.element_size())
    programs = min(
        ceil_div(rows, tile.rows), tile.per_multiprocessor * multiprocessors(source.device)
    )
    partial = None
    if want_weight or want_bias:
        partial = torch.empty((2, programs, columns), dtype=torch.float32, device=source.device)
    launch(
        layer_norm_backward_kernel, (programs,), _rows(grad, columns), _rows(grad_sum, columns),
        _rows(source, columns), _vector(weight), mean, rstd, seed_for(drop, seed, source.device),
        grad_source, grad_input, partial, rows, drop.limit, drop.scale,
        **_options(tile, columns, kind, shape[-1] if drop.active else 0),
    )  # fmt: skip
    if partial is not None:
        sum_shares(partial, grad_weight, grad_bias)
    return (
        grad_source if want_source else None,
        grad_input if want_input else None,
        grad_weight,
        grad_bias,
    )
