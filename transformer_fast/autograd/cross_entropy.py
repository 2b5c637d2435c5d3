"""Cross entropy of logits, and of the linear map that gives them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import reference
from .function import Function, differentiates_again, gradients, only, pairs, vjp


class CrossEntropy(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        backend: str,
        input: Tensor,
        target: Tensor,
        ignore_index: int,
        label_smoothing: float,
    ) -> Tensor:
        losses, known = pairs["cross_entropy"][backend].forward(
            input, target, ignore_index, label_smoothing
        )
        ctx.backend = backend
        ctx.ignore_index, ctx.label_smoothing = ignore_index, label_smoothing
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, target, known)
        return losses  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 5
        input, target, known = ctx.saved_tensors
        wants = (ctx.needs_input_grad[1],)
        if differentiates_again():
            (dinput,) = vjp(
                lambda x: reference.cross_entropy(
                    x, target, ctx.ignore_index, ctx.label_smoothing
                ),
                (input,), wants, (grad,),
            )  # fmt: skip
            return None, dinput, None, None, None
        (dinput,) = gradients(
            pairs["cross_entropy"][ctx.backend].backward,
            grad, input, target, known, ctx.ignore_index,
            ctx.label_smoothing, wants,
        )  # fmt: skip
        return None, dinput, None, None, None


class LinearCrossEntropy(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        backend: str,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        label_smoothing: float,
    ) -> Tensor:
        losses, known = pairs["linear_cross_entropy"][backend].forward(
            input, weight, bias, target, ignore_index, label_smoothing
        )
        ctx.backend = backend
        ctx.ignore_index, ctx.label_smoothing = ignore_index, label_smoothing
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, weight, bias, target, known)
        return losses  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 7
        input, weight, bias, target, known = ctx.saved_tensors
        wants = ctx.needs_input_grad[1:4]
        if differentiates_again():
            found = vjp(
                lambda x, w, b: reference.recomputed_losses(
                    x, w, b, target, ctx.ignore_index, ctx.label_smoothing
                ),
                (input, weight, bias), wants, (grad,),
            )  # fmt: skip
            return None, *found, None, None, None
        found = gradients(
            pairs["linear_cross_entropy"][ctx.backend].backward,
            grad, input, weight, bias, target, known,
            ctx.ignore_index, ctx.label_smoothing, wants,
        )  # fmt: skip
        return None, *only(wants, found), None, None, None
