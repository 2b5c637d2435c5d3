"""Position-wise feed-forward network: dropout(activation(x W1^T + b1)) W2^T + b2.

input (..., M), weight1 (F, M), bias1 (F,), weight2 (N, F), bias2 (N,). Two products with their
epilogues. Kept for the backward is one (rows, F) tensor: the hidden values for relu, whose derivative
they tell, and what the activation was applied to for the others, from which the backward makes the
hidden values again on its way. There the derivative, the dropout and the sums for bias1 sit in the
epilogue of grad_output @ W2; the products that no epilogue follows go to torch (cuBLAS), and so do all
of few rows (see `matmul`).
"""

from __future__ import annotations

from torch import Tensor

from .activation import CODES, RELU
from .linear import as_matrix
from .matmul import Epilogue, matmul
from .philox import dropout_arguments


def feed_forward_forward(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor | None]:
    """(output, saved): ``saved`` is the (rows, F) tensor the backward needs, if ``save``."""
    code = CODES[activation]
    first = matmul(
        as_matrix(input),
        weight1.t(),
        Epilogue(
            activation=code,
            bias=None if bias1 is None else bias1.contiguous(),
            dropout=dropout_arguments(dropout_p),
            seed=seed,
            save_z=save and code != RELU,
        ),
    )
    second = matmul(
        first.output, weight2.t(), Epilogue(bias=None if bias2 is None else bias2.contiguous())
    )
    output = second.output.view(*input.shape[:-1], weight2.shape[0])
    if not save:
        return output, None
    return output, first.output if code == RELU else first.z


def feed_forward_backward(
    grad_output: Tensor,
    input: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
    saved: Tensor,
    need_input: bool,
    need_bias1: bool,
    need_bias2: bool,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor, Tensor | None]:
    """Gradients of input, weight1, bias1, weight2 and bias2."""
    code = CODES[activation]
    grad = as_matrix(grad_output)
    result = matmul(
        grad,
        weight2,
        Epilogue(
            activation=code,
            backward=True,
            saved=saved,
            dropout=dropout_arguments(dropout_p),
            seed=seed,
            make_hidden=code != RELU,
            make_sums=need_bias1,
        ),
    )
    hidden = saved if code == RELU else result.hidden
    assert hidden is not None
    x = input.reshape(-1, weight1.shape[1])
    return (
        (result.output @ weight1).view(input.shape) if need_input else None,
        result.output.t() @ x,
        None if result.sums is None else result.sums.to(weight1.dtype),
        grad.t() @ hidden,
        grad.sum(0) if need_bias2 else None,
    )
