"""Position-wise feed-forward network: dropout(activation(x W1^T + b1)) W2^T + b2.

input (..., M), weight1 (F, M), bias1 (F,), weight2 (N, F), bias2 (N,). The forward is two products
with epilogues.

Saved for backward is one (rows, F) tensor. For relu it is the hidden values, which determine the
derivative. For other activations it is the pre-activation, from which the backward recomputes the
hidden values. Derivative, dropout and the sums for bias1 are in the epilogue of grad_output @ W2.
Products without an epilogue call PyTorch (cuBLAS), and so do all products of few rows (see `matmul`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .arithmetic import RELU
from .linear import as_matrix
from .matmul import Epilogue, matmul
from .philox import dropout_arguments


def forward(
    input: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None,
    activation: int, dropout_p: float, seed: Tensor | None, keep: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Implements `ops.feed_forward.TRAINING`."""
    first = matmul(
        as_matrix(input),
        weight1.t(),
        Epilogue(
            activation=activation,
            bias=None if bias1 is None else bias1.contiguous(),
            dropout=dropout_arguments(dropout_p),
            seed=seed,
            save_z=keep and activation != RELU,
        ),
    )
    second = matmul(
        first.output, weight2.t(), Epilogue(bias=None if bias2 is None else bias2.contiguous())
    )
    lead = input.shape[:-1]
    output = second.output.view(*lead, weight2.shape[0])
    if not keep:
        return output, None
    kept: Any = first.output if activation == RELU else first.z
    return output, kept.view(*lead, weight1.shape[0])


def backward(
    grad: Tensor, input: Tensor, weight1: Tensor, weight2: Tensor, kept: Tensor, activation: int,
    dropout_p: float, seed: Tensor | None, want_input: bool, want_weight1: bool, want_bias1: bool,
    want_weight2: bool, want_bias2: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Implements `ops.feed_forward.BACKWARD`."""
    grad = as_matrix(grad)
    saved = as_matrix(kept).contiguous()
    result = matmul(
        grad,
        weight2,
        Epilogue(
            activation=activation,
            backward=True,
            saved=saved,
            dropout=dropout_arguments(dropout_p),
            seed=seed,
            make_hidden=activation != RELU,
            make_sums=want_bias1,
        ),
    )
    hidden: Any = saved if activation == RELU else result.hidden
    x = input.reshape(-1, weight1.shape[1])
    return (
        (result.output @ weight1).view(input.shape) if want_input else None,
        result.output.t() @ x if want_weight1 else None,
        None if result.sums is None else result.sums.to(weight1.dtype),
        grad.t() @ hidden if want_weight2 else None,
        grad.sum(0) if want_bias2 else None,
    )
