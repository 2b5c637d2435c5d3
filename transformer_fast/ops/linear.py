"""Operators of the linear layer, their rules, and autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..reference.linear import activate
from .arguments import LinearArguments
from .autograd import (
    Function,
    called_directly,
    differentiates_again,
    gradients,
    mask_unwanted,
    placeholder,
    vjp,
    wanted,
)
from .operator import Operator, Rule

#: Codes of activations, the same as in csrc/types.h, csrc/cuda/epilogue.cuh and
#: Triton's arithmetic.py.
CODES: dict[Any, int] = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}

# ``keep``: True if the preactivation is saved for the backward of an activation. Results that are
# not requested are empty. ``packed``: the backend's packed copy of the weight; operators without
# this argument look it up.
_TENSORS = "input:...i weight:oi bias:o+i residual:...o+i grad:...o preactivation:...o"
_RULE = Rule(_TENSORS, "...o", ".oi", ".oi", if_linear="i")
INFERENCE = Operator(
    "linear(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, int activation) -> Tensor",
    _RULE,
)
PACKED = Operator(
    "linear_packed(Tensor input, Tensor weight, Tensor? packed, Tensor? bias, Tensor? residual,"
    " int activation) -> Tensor",
    _RULE,
)
TRAINING = Operator(
    "linear_training(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, int activation,"
    " bool keep) -> (Tensor output, Tensor preactivation)",
    Rule(_TENSORS, "...o ...o?keep", ".oi", ".oi", if_linear="i"),
)
BACKWARD = Operator(
    "linear_backward(Tensor grad, Tensor input, Tensor weight, Tensor? preactivation,"
    " int activation, bool want_input, bool want_weight, bool want_bias)"
    " -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
    Rule(
        _TENSORS, "...i?want_input oi?want_weight o=i?want_bias", ".oi",
        ".oi?want_input .oi?want_weight",
    ),
)  # fmt: skip


def linear_on(backend: str) -> Callable[[LinearArguments], Tensor]:
    """Returns the function that the dispatcher runs for a backend with operators."""

    def run(arguments: LinearArguments) -> Tensor:
        input, weight, bias, activation, residual = arguments
        if torch.is_grad_enabled():
            result = LinearFunction.recorded((backend, activation), (input, weight, bias, residual))
            if result is not None:
                return result[0]  # type: ignore[no-any-return]
        code = CODES[activation]
        if backend in INFERENCE.of:
            return INFERENCE.of[backend](input, weight, bias, residual, code)  # type: ignore[no-any-return]
        return TRAINING.of[backend](input, weight, bias, residual, code, False)[0]  # type: ignore[no-any-return]

    return run


@called_directly
class LinearFunction(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, options: tuple[str, str | None], *tensors: Any
    ) -> tuple[Tensor, Tensor]:
        input, weight, bias, residual = tensors
        backend, activation = ctx.options = options
        output, preactivation = TRAINING.of[backend](
            input, weight, bias, residual, CODES[activation], activation is not None
        )
        if preactivation is not None and (activation is None or torch.compiler.is_compiling()):
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
        """``grad_preactivation`` is None except in a second derivative: users never get it."""
        if grad_preactivation is not None and torch.compiler.is_compiling():
            grad_preactivation = None  # always zeros here
        wants = ctx.needs_input_grad[1:4]
        residual = grad if ctx.needs_input_grad[4] else None
        if (grad is None and grad_preactivation is None) or not any(wants):
            return None, None, None, None, residual
        backend, activation = ctx.options
        input, weight, preactivation = ctx.saved_tensors
        if wants[0] and wants[1] and grad is not None:
            wants = wanted(ctx, grad.numel() * input.shape[-1])[1:4]
        grads: Sequence[Tensor | None]
        if grad is None or grad_preactivation is not None or differentiates_again():
            if grad is not None and activation is not None:
                (grad,) = vjp(lambda z: activate(z, activation), (preactivation,), (True,), (grad,))
            grads = products(total(grad, grad_preactivation), input, weight, wants)
        else:
            outputs, lead = grad.shape[-1], grad.shape[:-1]
            if input is None:
                columns = 1 if weight is None else weight.shape[1]
                input = placeholder(grad, *lead, columns)
            if weight is None:
                weight = placeholder(grad, outputs, input.shape[-1])
            grads = gradients(
                BACKWARD.of[backend], grad, input, weight, preactivation, CODES[activation],
                *wants,
            )  # fmt: skip
        return None, *mask_unwanted(wants, grads), residual


def total(grad: Any, other: Any) -> Any:
    if grad is None or other is None:
        return other if grad is None else grad
    return grad + other


def products(
    grad: Tensor, input: Any, weight: Any, wants: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of a linear layer's input, weight and bias, in plain PyTorch."""
    return (
        grad @ weight if wants[0] else None,
        _rows(grad).t() @ _rows(input) if wants[1] else None,
        _rows(grad).sum(0) if wants[2] else None,
    )


def _rows(tensor: Tensor) -> Tensor:
    # The number of rows is ambiguous in reshape(-1, 0).
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
