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
from torch import Tensor

from . import config
from .layer_norm_kernel import (
    column_sum_kernel,
    layer_norm_backward_kernel,
    layer_norm_forward_kernel,
)
from .philox import dropout_arguments, seed_for
from .runtime import ceil_div, launch, multiprocessors, with_unit_stride


def sum_shares(partial: Tensor, first: Tensor | None, second: Tensor | None) -> None:
    """Add (2, shares, columns) fp32 up over the shares, in a fixed order, into two vectors."""
    _, shares, columns = partial.shape
    block_shares, block_columns = 32, 32
    launch(
        column_sum_kernel,
        (ceil_div(columns, block_columns), 2),
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
    if tensor.dim() != 2 or tensor.shape[1] != columns:
        tensor = tensor.reshape(-1, columns)
    return with_unit_stride(tensor)


def _vector(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or (tensor.dim() == 1 and tensor.is_contiguous()):
        return tensor
    return tensor.reshape(-1).contiguous()


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
    output = torch.empty_like(input, memory_format=torch.contiguous_format)
    total = None if residual is None else torch.empty_like(output)
    rows = input.numel() // columns
    mean = input.new_empty(rows, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    x = _as_rows(input, columns)
    r = None if residual is None else _as_rows(residual, columns)
    drop = dropout_arguments(dropout_p)
    tile = config.layer_norm_forward(columns)
    launch(
        layer_norm_forward_kernel,
        (ceil_div(rows, tile.rows),),
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
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    drop = dropout_arguments(dropout_p)
    grad_input = torch.empty_like(grad_x) if drop.active else grad_x
    kind = x.dtype if weight is None else weight.dtype
    shape = tuple(normalized_shape)
    grad_weight = x.new_empty(shape, dtype=kind) if need_weight else None
    grad_bias = x.new_empty(shape, dtype=kind) if need_bias else None
    tile = config.layer_norm_backward(columns, x.element_size())
    programs = min(ceil_div(rows, tile.rows), tile.per_multiprocessor * multiprocessors(x.device))
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
