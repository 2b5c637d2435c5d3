"""linear: activation(input @ weight.T + bias) + residual.

input (..., K), weight (N, K), bias (N,), residual (..., N). The products of the backward that no
epilogue follows go to torch (cuBLAS); there is nothing to gain there. So does the forward's product of
few rows; see `matmul`.
"""

from __future__ import annotations

from torch import Tensor

from .activation import CODES, NONE
from .matmul import Epilogue, follow, matmul
from .runtime import with_unit_stride


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
        result = follow(
            grad.contiguous(),
            Epilogue(
                activation=CODES[activation],
                backward=True,
                saved=z.reshape(grad.shape).contiguous(),
                make_sums=need_bias,
            ),
        )
        grad = result.output
        grad_bias = None if result.sums is None else result.sums.to(weight.dtype)
    elif need_bias:
        grad_bias = grad.sum(0)
    return (
        (grad @ weight).view(input.shape) if need_input else None,
        grad.t() @ x if need_weight else None,
        grad_bias,
    )
