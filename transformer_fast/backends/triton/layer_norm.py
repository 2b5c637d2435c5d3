"""LayerNorm, RMSNorm and The Annotated Transformer's norm, and residual + dropout + norm in one pass.

    sum = residual + dropout(input),   y = (sum - mean) * rstd * weight + bias

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


def forward(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    dims: int,
    eps: float,
    kind: int,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """`functional.layer_norm.TRAINING`; no sum without residual."""
    lead = input.dim() - dims
    columns = math.prod(input.shape[lead:])
    output = torch.empty_like(input, memory_format=torch.contiguous_format)
    total = None if residual is None else torch.empty_like(output)
    mean = input.new_empty(input.shape[:lead], dtype=torch.float32)
    rstd = torch.empty_like(mean)
    if input.numel() == 0:
        return output, total, mean, rstd
    rows = input.numel() // columns
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
        KIND=kind,
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=tile.columns,
        DROPOUT_COLUMNS=input.shape[-1] if drop.active else 0,
    )
    return output, total, mean, rstd


def backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    source: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dims: int,
    kind: int,
    dropout_p: float,
    seed: Tensor | None,
    want_source: bool,
    want_input: bool,
    want_weight: bool,
    want_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """`functional.layer_norm.BACKWARD`; None for what is not wanted."""
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
    dy, x = _as_rows(grad, columns), _as_rows(source, columns)
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
        grad_source,
        grad_input,
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
        KIND=kind,
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=tile.columns,
        DROPOUT_COLUMNS=shape[-1] if drop.active else 0,
        STAGES=tile.stages,
    )
    if partial is not None:
        sum_shares(partial, grad_weight, grad_bias)
    return (
        grad_source if want_source else None,
        grad_input if want_input else None,
        grad_weight,
        grad_bias,
    )
