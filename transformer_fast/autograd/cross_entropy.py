"""Cross entropy of logits, and of the linear map that gives them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference
from .function import Function, differentiates_again, only, pairs, vjp


class CrossEntropy(Function):
    @staticmethod
    def forward(
        backend: str, input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
    ) -> tuple[Tensor, Tensor]:
        pair = pairs["cross_entropy"][backend]
        return pair.forward(input, target, ignore_index, label_smoothing)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        ctx.backend, input, target, ctx.ignore_index, ctx.label_smoothing = inputs
        _, known = results
        ctx.mark_non_differentiable(known)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, target, known)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
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
        with torch.no_grad():
            (dinput,) = pairs["cross_entropy"][ctx.backend].backward(
                grad, input, target, known, ctx.ignore_index, ctx.label_smoothing, wants
            )
        return None, dinput, None, None, None


class LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        backend: str,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        label_smoothing: float,
    ) -> tuple[Tensor, Tensor]:
        return pairs["linear_cross_entropy"][backend].forward(  # type: ignore[no-any-return]
            input, weight, bias, target, ignore_index, label_smoothing
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        ctx.backend, input, weight, bias, target, ctx.ignore_index, ctx.label_smoothing = inputs
        _, known = results
        ctx.mark_non_differentiable(known)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, weight, bias, target, known)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 7
        input, weight, bias, target, known = ctx.saved_tensors
        wants = ctx.needs_input_grad[1:4]
        if differentiates_again():
            found = vjp(
                lambda x, w, b: reference.linear_cross_entropy(
                    x, w, b, target, ctx.ignore_index, ctx.label_smoothing
                ),
                (input, weight, bias), wants, (grad,),
            )  # fmt: skip
            return None, *found, None, None, None
        with torch.no_grad():
            found = pairs["linear_cross_entropy"][ctx.backend].backward(
                grad, input, weight, bias, target, known, ctx.ignore_index, ctx.label_smoothing,
                wants,
            )  # fmt: skip
        return None, *only(wants, found), None, None, None
