"""The linear map with its epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..reference.linear import activate
from .function import Function, differentiates_again, gradients, only, pairs, stand_in, vjp


class Linear(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        backend: str,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        output, preactivation = pairs["linear"][backend].forward(
            input, weight, bias, activation, residual
        )
        ctx.backend, ctx.activation = backend, activation
        if activation is None or torch.compiler.is_compiling():
            ctx.mark_non_differentiable(preactivation)
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad
        ctx.save_for_backward(
            input if needs[2] else None, weight if needs[1] else None, preactivation
        )
        return output, preactivation

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, grad_preactivation: Tensor | None
    ) -> tuple[Any, ...]:
        """``grad_preactivation`` comes of a second derivative only: nobody else sees that result."""
        if grad_preactivation is not None and torch.compiler.is_compiling():
            grad_preactivation = None  # zeros
        wants = ctx.needs_input_grad[1:4]
        residual = grad if ctx.needs_input_grad[5] else None
        if (grad is None and grad_preactivation is None) or not any(wants):
            return None, None, None, None, None, residual
        input, weight, preactivation = ctx.saved_tensors
        found: Sequence[Tensor | None]
        if grad is None or grad_preactivation is not None or differentiates_again():
            if grad is not None and ctx.activation is not None:
                z = preactivation.reshape(grad.shape)
                (grad,) = vjp(lambda z: activate(z, ctx.activation), (z,), (True,), (grad,))
            found = products(total(grad, grad_preactivation), input, weight, wants)
        else:
            outputs, lead = grad.shape[-1], grad.shape[:-1]
            if input is None:
                columns = 1 if weight is None else weight.shape[1]
                input = stand_in(grad, *lead, columns)
            if weight is None:
                weight = stand_in(grad, outputs, input.shape[-1])
            found = gradients(
                pairs["linear"][ctx.backend].backward,
                grad,
                input,
                weight,
                ctx.activation,
                preactivation,
                wants,
            )
        return None, *only(wants, found), None, residual


def total(grad: Tensor | None, other: Tensor | None) -> Tensor:
    if grad is None or other is None:
        result = other if grad is None else grad
        assert result is not None
        return result
    return grad + other.reshape(grad.shape)


def products(
    grad: Tensor, input: Tensor | None, weight: Tensor | None, wants: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias of a linear map, in plain PyTorch."""
    dinput = dweight = dbias = None
    if wants[0]:
        assert weight is not None
        dinput = grad @ weight
    if wants[1]:
        assert input is not None
        dweight = _rows(grad).t() @ _rows(input)
    if wants[2]:
        dbias = _rows(grad).sum(0)
    return dinput, dweight, dbias


def _rows(tensor: Tensor) -> Tensor:
    columns = tensor.shape[-1]
    # reshape(-1, 0) would not know how many rows.
    return tensor.reshape(tensor.numel() // columns if columns else 0, columns)
