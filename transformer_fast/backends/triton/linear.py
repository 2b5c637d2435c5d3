"""linear: activation(input @ weight.T + bias) + residual.

input (..., K), weight (N, K), bias (N,), residual (..., N). The products of the backward that no
epilogue follows go to torch (cuBLAS); there is nothing to gain there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import CODES, NONE, activation_slope
from .arithmetic import store
from .matmul import Epilogue, matmul
from .runtime import launch, with_unit_stride


@triton.jit
def activation_backward_kernel(
    dy_ptr,  # (M, N)
    z_ptr,  # (M, N): what the activation was applied to
    dz_ptr,  # (M, N)
    sum_ptr,  # (tiles of M, N) fp32 or None
    rows,
    columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    across = tl.cdiv(columns, BLOCK_N)
    program = tl.program_id(0)
    tile_m = program // across
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = program % across * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    place = m[:, None] * columns + n[None, :]
    dy = tl.load(dy_ptr + place, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + place, mask=inside, other=0.0).to(tl.float32)
    dz = dy * activation_slope(z, ACTIVATION)
    store(dz_ptr + place, dz, inside)
    if sum_ptr is not None:
        at = sum_ptr + tile_m.to(tl.int64) * columns + n
        tl.store(at, tl.sum(tl.where(inside, dz, 0.0), 0), mask=n < columns)


def as_matrix(tensor: Tensor) -> Tensor:
    """(..., C) as (N, C) with unit stride in C; a view wherever the strides allow."""
    return with_unit_stride(tensor.reshape(-1, tensor.shape[-1]))


def linear_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor | None]:
    """(output, z): z is what the activation was applied to, if ``save`` and there is one."""
    shape = (*input.shape[:-1], weight.shape[0])
    if residual is not None:
        residual = residual.reshape(-1, shape[-1]).contiguous()
    code = CODES[activation]
    result = matmul(
        as_matrix(input),
        weight.t(),
        Epilogue(
            activation=code,
            bias=None if bias is None else bias.contiguous(),
            residual=residual,
            save_z=save and code != NONE,
        ),
    )
    return result.output.view(shape), result.z


def linear_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    activation: str | None,
    z: Tensor | None,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias; that of the residual is ``grad_output`` itself."""
    columns = weight.shape[0]
    grad = grad_output.reshape(-1, columns)
    x = input.reshape(-1, weight.shape[1])
    grad_bias = None
    if activation is not None:
        assert z is not None
        grad, sums = _activation_backward(grad, z, CODES[activation], need_bias)
        grad_bias = None if sums is None else sums.to(weight.dtype)
    elif need_bias:
        grad_bias = grad.sum(0)
    return (
        (grad @ weight).view(input.shape) if need_input else None,
        grad.t() @ x if need_weight else None,
        grad_bias,
    )


def _activation_backward(
    grad: Tensor, z: Tensor, code: int, need_sums: bool
) -> tuple[Tensor, Tensor | None]:
    grad, z = grad.contiguous(), z.reshape(grad.shape).contiguous()
    rows, columns = grad.shape
    block_m, block_n = 64, 64
    down = triton.cdiv(rows, block_m)
    result = torch.empty_like(grad)
    sums = None
    if need_sums:
        sums = torch.empty((down, columns), dtype=torch.float32, device=grad.device)
    launch(
        activation_backward_kernel,
        (down * triton.cdiv(columns, block_n),),
        grad,
        z,
        result,
        sums,
        rows,
        columns,
        warps=4,
        stages=1,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        ACTIVATION=code,
    )
    return result, None if sums is None else sums.sum(0)
