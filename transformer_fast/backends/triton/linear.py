"""linear: activation(input @ weight.T + bias) + residual.

input (..., K), weight (N, K), bias (N,), residual (..., N). Backward products without an epilogue
call PyTorch (cuBLAS), because a kernel of ours would not be faster. So does the forward product of
few rows; see `matmul`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .arithmetic import NONE
from .matmul import Epilogue, follow, matmul
from .runtime import with_unit_stride


def as_matrix(tensor: Tensor) -> Tensor:
    """Reshapes (..., C) to (N, C) with unit stride in C; a view if the strides allow."""
    return with_unit_stride(tensor.reshape(-1, tensor.shape[-1]))


def forward(
    input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: int,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Implements `ops.linear.TRAINING`."""
    shape = (*input.shape[:-1], weight.shape[0])
    if residual is not None:
        residual = residual.reshape(-1, shape[-1]).contiguous()
    result = matmul(
        as_matrix(input),
        weight.t(),
        Epilogue(
            activation=activation,
            bias=None if bias is None else bias.contiguous(),
            residual=residual,
            save_z=keep,
        ),
    )
    return result.output.view(shape), None if result.z is None else result.z.view(shape)


def backward(
    grad: Tensor, input: Tensor, weight: Tensor, preactivation: Any, activation: int,
    want_input: bool, want_weight: bool, want_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Implements `ops.linear.BACKWARD`."""
    columns = weight.shape[0]
    grad = grad.reshape(-1, columns)
    x = input.reshape(-1, weight.shape[1])
    grad_bias = None
    if activation != NONE:
        result = follow(
            grad.contiguous(),
            Epilogue(
                activation=activation,
                backward=True,
                saved=preactivation.reshape(grad.shape).contiguous(),
                make_sums=want_bias,
            ),
        )
        grad = result.output
        grad_bias = None if result.sums is None else result.sums.to(weight.dtype)
    elif want_bias:
        grad_bias = grad.sum(0)
    return (
        (grad @ weight).view(input.shape) if want_input else None,
        grad.t() @ x if want_weight else None,
        grad_bias,
    )
