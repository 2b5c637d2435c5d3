"""Cross entropy of logits with label smoothing, and its gradient.

    loss[n] = (1 - s) * (lse[n] - x[n, target[n]]) + s * (lse[n] - mean over v of x[n, v])
    dx[n, v] = grad[n] * (exp(x[n, v] - lse[n]) - (1 - s) * (v == target[n]) - s / V)

x, dx: (N, V) with any strides; target: (N,); loss, grad: (N,) fp32. The log-sum-exp lse of a row is
saved as the sum of two fp32 numbers, because rounding an lse of 100 to one would cost the
probabilities 6 bits. All arithmetic is in fp32. A row whose target is ignore_index is not read.

Forward: a program reads its rows once, block by block, and rescales the sums of exponentials whenever
the maximum grows. A long row has a program of its own; short rows share one. Backward: a program per
block. No atomics, so results are the same in every run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import config
from .arithmetic import divide, store
from .runtime import ceil_div, launch


class Logits(NamedTuple):
    """Logits and targets of a loss."""

    data: Any  # (N, V)
    stride_row: Any
    stride_column: Any
    target: Any  # (N,)
    stride_target: Any


@triton.jit
def _target(x, row, rows, ignore_index):
    """Returns the target classes, and whether each row counts (is inside and not ignored)."""
    at = x.target + row * x.stride_target
    target = tl.load(at, mask=row < rows, other=0).to(tl.int64)
    return target, (row < rows) & (target != ignore_index)


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def cross_entropy_forward_kernel(
    x,
    loss_ptr,  # (N,) fp32
    lse_ptr,  # (N, 2) fp32: lse rounded to fp32, and its rounding error
    rows, columns, ignore_index,
    confidence,  # 1 - s
    smoothing,  # s
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    SMOOTH: tl.constexpr,  # s != 0
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    target, counted = _target(x, row, rows, ignore_index)
    x_row = x.data + row * x.stride_row
    # A target that is not a class gives the loss NaN, because a kernel cannot raise an exception.
    is_class = counted & (target >= 0) & (target < columns)
    x_target = tl.load(x_row + target * x.stride_column, mask=is_class, other=float("nan"))
    x_target = x_target.to(tl.float32)
    # Sums the differences from the target's logit, because logits far from 0 would lose precision.
    origin = tl.where(tl.abs(x_target) < float("inf"), x_target, 0.0)
    maximum = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    exponentials = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    if SMOOTH:
        distances = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for first in range(0, columns, BLOCK_COLUMNS):
        column = first + tl.arange(0, BLOCK_COLUMNS)
        inside = counted[:, None] & (column < columns)[None, :]
        at = x_row[:, None] + column.to(tl.int64)[None, :] * x.stride_column
        logit = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(maximum, tl.max(logit, 1))
        # While all logits are -inf the shift is 0, because -inf - -inf would be NaN.
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        exponentials *= tl.exp(maximum - shift)[:, None]
        exponentials += tl.exp(logit - shift[:, None])
        maximum = larger
        if SMOOTH:
            distances += tl.where(inside, logit - origin[:, None], 0.0)
    log_sum = tl.log(tl.sum(exponentials, 1))
    loss = confidence * ((maximum - x_target) + log_sum)
    if SMOOTH:
        mean = divide(tl.sum(distances, 1), columns * 1.0)
        loss += smoothing * ((maximum - origin) - mean + log_sum)
    tl.store(loss_ptr + row, tl.where(counted, loss, 0.0), mask=row < rows)
    lse = tl.where(counted, maximum.to(tl.float64) + log_sum.to(tl.float64), 0.0)
    high = lse.to(tl.float32)
    tl.store(lse_ptr + 2 * row, high, mask=row < rows)
    tl.store(lse_ptr + 2 * row + 1, (lse - high.to(tl.float64)).to(tl.float32), mask=row < rows)


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def cross_entropy_backward_kernel(
    grad_ptr,  # (N,), stride_grad
    x,
    lse_ptr,  # (N, 2) fp32
    dx_ptr,  # (N, V), contiguous
    stride_grad, rows, columns, ignore_index,
    confidence,  # 1 - s
    share,  # s / V
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(columns, BLOCK_COLUMNS)
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = (program % blocks) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    column = column.to(tl.int64)
    target, counted = _target(x, row, rows, ignore_index)
    # Grad, lse and logits of ignored rows are read as 0, so their gradient is 0 times a finite number.
    grad = tl.load(grad_ptr + row * stride_grad, mask=counted, other=0.0).to(tl.float32)
    high = tl.load(lse_ptr + 2 * row, mask=counted, other=0.0)
    low = tl.load(lse_ptr + 2 * row + 1, mask=counted, other=0.0)
    in_row = (column < columns)[None, :]
    at = x.data + row[:, None] * x.stride_row + column[None, :] * x.stride_column
    logit = tl.load(at, mask=counted[:, None] & in_row, other=0.0).to(tl.float32)
    p = tl.exp((logit - high[:, None]) - low[:, None])
    wanted = tl.where(column[None, :] == target[:, None], confidence, 0.0)
    dx = grad[:, None] * ((p - share) - wanted)
    at = dx_ptr + row[:, None] * columns + column[None, :]
    store(at, dx, (row < rows)[:, None] & in_row)


def _logits(input: Tensor, target: Tensor) -> Logits:
    return Logits(input, input.stride(0), input.stride(1), target, target.stride(0))


def cross_entropy_forward(
    input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Returns losses (N,), and the log-sum-exp (N, 2) saved for backward, both in fp32."""
    rows, columns = input.shape
    losses = torch.empty(rows, dtype=torch.float32, device=input.device)
    lse = torch.empty((rows, 2), dtype=torch.float32, device=input.device)
    tile = config.cross_entropy(columns)
    launch(
        cross_entropy_forward_kernel, (ceil_div(rows, tile.rows),), _logits(input, target), losses,
        lse, rows, columns, ignore_index, 1.0 - label_smoothing, label_smoothing,
        warps=tile.warps, stages=tile.stages, BLOCK_ROWS=tile.rows, BLOCK_COLUMNS=tile.columns,
        SMOOTH=label_smoothing != 0.0,
    )  # fmt: skip
    return losses, lse


def cross_entropy_backward(
    grad: Tensor, input: Tensor, target: Tensor, lse: Tensor, ignore_index: int,
    label_smoothing: float,
) -> Tensor:  # fmt: skip
    """Returns the gradient of input, contiguous."""
    rows, columns = input.shape
    grad_input = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    tile = config.cross_entropy(columns)
    launch(
        cross_entropy_backward_kernel,
        (ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns),), grad,
        _logits(input, target), lse, grad_input, grad.stride(0), rows, columns, ignore_index,
        1.0 - label_smoothing, label_smoothing / columns, warps=tile.warps, stages=tile.stages,
        BLOCK_ROWS=tile.rows, BLOCK_COLUMNS=tile.columns,
    )  # fmt: skip
    return grad_input
