"""Operators of the losses, their rules, and autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import reference
from .arguments import CrossEntropyArguments, LinearCrossEntropyArguments
from .autograd import (
    Function,
    called_directly,
    differentiates_again,
    gradients,
    gradients_of,
    mask_unwanted,
    vjp,
    wanted,
)
from .chunked_loss import chunked_gradients, recomputed_losses
from .operator import Operator, Rule

_OPTIONS = "int ignore_index, float label_smoothing"
# statistics: (..., 2) float32, saved for the backward.
_TENSORS = "input:...c target:... grad:... statistics:...2"
FORWARD = Operator(
    f"cross_entropy(Tensor input, Tensor target, {_OPTIONS}) -> (Tensor losses, Tensor statistics)",
    Rule(_TENSORS, "...:float32 ...2:float32", by="."),
)
BACKWARD = Operator(
    "cross_entropy_backward(Tensor grad, Tensor input, Tensor target, Tensor statistics,"
    f" {_OPTIONS}) -> Tensor",
    Rule(_TENSORS, "@input/planes", by="."),
)
_LINEAR = "Tensor input, Tensor weight, Tensor? bias, Tensor target"
_LINEAR_TENSORS = "input:ri weight:ci bias:c target:r grad:r statistics:r2"
_WANTS = "bool want_input, bool want_weight, bool want_bias"
_GRADIENTS = "Tensor grad_input, Tensor grad_weight, Tensor grad_bias"
# For the operators that return gradients: they also compute the logits.
_PRODUCTS = "rci rci?want_input rci?want_weight"
LINEAR_FORWARD = Operator(
    f"linear_cross_entropy({_LINEAR}, {_OPTIONS}) -> (Tensor losses, Tensor statistics)",
    Rule(_LINEAR_TENSORS, "r r2", by="r", products="rci"),
)
LINEAR_BACKWARD = Operator(
    f"linear_cross_entropy_backward(Tensor grad, {_LINEAR}, Tensor statistics, {_OPTIONS}, {_WANTS})"
    f" -> ({_GRADIENTS})",
    Rule(_LINEAR_TENSORS, "ri?want_input ci?want_weight c?want_bias", by="r", products=_PRODUCTS),
)
# The losses, and the gradients of sum(grad * losses); without grad, of sum(losses).
LINEAR_GRADIENTS = Operator(
    f"linear_cross_entropy_gradients(Tensor? grad, {_LINEAR}, SymInt part_rows, {_OPTIONS},"
    f" {_WANTS}) -> (Tensor losses, {_GRADIENTS})",
    Rule(
        _LINEAR_TENSORS, "r:wide ri?want_input ci:wide?want_weight c:wide?want_bias", by="r",
        products=_PRODUCTS,
    ),
)  # fmt: skip
for _backend in ("reference", "torch", "triton"):
    LINEAR_GRADIENTS.define(_backend)
    torch.library.impl(
        f"transformer_fast::linear_cross_entropy_gradients.{_backend}",
        "default",
        partial(chunked_gradients, _backend),
    )


def cross_entropy_on(
    backend: str, in_groups: bool = False
) -> Callable[[CrossEntropyArguments], Tensor]:
    """Returns the function that the dispatcher runs for a backend with operators.

    Args:
        in_groups: True if these support logits (N, I, C); else they get (rows, C).
    """

    def run(arguments: CrossEntropyArguments) -> Tensor:
        input, target = arguments[:2]
        options: tuple[Any, ...] = arguments[2:]
        if input.dim() > 2 and not in_groups:
            rows = input.reshape(-1, input.shape[-1])
            losses = run(CrossEntropyArguments(rows, target.reshape(-1), *options))
            return losses.view(target.shape)
        if torch.is_grad_enabled():
            result = LossFunction.recorded((backend, *options), (input, None, None, target))
            if result is not None:
                return result  # type: ignore[no-any-return]
        return FORWARD.of[backend](*arguments)[0]  # type: ignore[no-any-return]

    return run


def linear_cross_entropy_on(backend: str) -> Callable[[LinearCrossEntropyArguments], Tensor]:
    """Returns the function for a backend whose operators compute a chunk of the logits at a time."""

    def run(arguments: LinearCrossEntropyArguments) -> Tensor:
        given = arguments[:6]
        result = LossFunction.recorded((backend, *given[4:]), given[:4])
        return LINEAR_FORWARD.of[backend](*given)[0] if result is None else result  # type: ignore[no-any-return]

    return run


@called_directly
class LossFunction(Function):
    """Losses of logits: the input, or with a weight the result of a linear layer."""

    @staticmethod
    def forward(ctx: Any, options: tuple[str, int, float], *tensors: Any) -> Tensor:  # type: ignore[override]
        input, weight, _, target = tensors
        backend, *rest = ctx.options = options
        if weight is None:
            losses, statistics = FORWARD.of[backend](input, target, *rest)
        else:
            losses, statistics = LINEAR_FORWARD.of[backend](*tensors, *rest)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, statistics)
        return losses  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if grad is None:
            return gradients_of(ctx)
        input, weight, bias, target, statistics = ctx.saved_tensors
        wants, (backend, *options) = ctx.needs_input_grad[1:4], ctx.options
        if weight is not None and wants[0] and wants[1]:
            wants = wanted(ctx, input.numel() * weight.shape[0])[1:4]
        if differentiates_again():

            def formula(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
                if w is None:
                    return reference.cross_entropy(x, target, *options)
                return recomputed_losses(LinearCrossEntropyArguments(x, w, b, target, *options))

            grads = vjp(formula, (input, weight, bias), wants, (grad,))
        elif weight is None:
            dinput = gradients(BACKWARD.of[backend], grad, input, target, statistics, *options)
            grads = [dinput, None, None]
        else:
            grads = gradients(
                LINEAR_BACKWARD.of[backend], grad, input, weight, bias, target, statistics,
                *options, *wants,
            )  # fmt: skip
        return None, *mask_unwanted(wants, grads), None
