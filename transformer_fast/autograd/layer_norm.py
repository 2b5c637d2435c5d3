"""LayerNorm, alone and behind a residual connection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..reference.dropout import dropout
from .function import Function, differentiates_again, gradients, only, pairs, vjp


class LayerNorm(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        backend: str,
        input: Tensor,
        normalized_shape: tuple[int, ...],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        output, mean, rstd = pairs["layer_norm"][backend].forward(
            input, normalized_shape, weight, bias, eps
        )
        ctx.backend, ctx.normalized_shape, ctx.eps = backend, normalized_shape, eps
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad
        ctx.save_for_backward(
            input if needs[1] or needs[3] else None, weight if needs[1] else None, mean, rstd
        )
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 6
        input, weight, mean, rstd = ctx.saved_tensors
        if input is None:
            input = grad.detach()  # the bias has the same gradient whatever the input was
        needs = ctx.needs_input_grad
        wants = needs[1], needs[3], needs[4]
        if differentiates_again():
            dinput, dweight, dbias = _by_formula(ctx, grad, input, weight, wants)
            return None, dinput, None, dweight, dbias, None
        found = gradients(
            "layer_norm", ctx.backend, grad, input, ctx.normalized_shape, weight, mean, rstd, wants
        )
        dinput, dweight, dbias = only(wants, found)
        return None, dinput, None, dweight, dbias, None


def _by_formula(
    ctx: Any, grad: Tensor, input: Tensor, weight: Tensor | None, wants: tuple[bool, bool, bool]
) -> list[Tensor | None]:
    shape = tuple(ctx.normalized_shape)
    # The gradients of weight and bias depend on neither.
    if wants[1] and weight is None:
        weight = grad.new_ones(shape)
    bias = grad.new_zeros(shape) if wants[2] else None
    return vjp(
        lambda x, w, b: reference.layer_norm(x, shape, w, b, ctx.eps),
        (input, weight, bias), wants, (grad,),
    )  # fmt: skip


class AddLayerNorm(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        backend: str,
        input: Tensor,
        residual: Tensor,
        normalized_shape: tuple[int, ...],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        dropout_p: float,
        seed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        output, sum, mean, rstd = pairs["add_layer_norm"][backend].forward(
            input, residual, normalized_shape, weight, bias, eps, dropout_p, seed
        )
        ctx.backend, ctx.normalized_shape = backend, normalized_shape
        ctx.eps, ctx.dropout_p = eps, dropout_p
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad
        ctx.save_for_backward(sum, weight if needs[1] or needs[2] else None, mean, rstd, seed)
        return output, sum

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, grad_sum: Tensor | None
    ) -> tuple[Any, ...]:
        if grad is None and grad_sum is None:
            return (None,) * 9
        sum, weight, mean, rstd, seed = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wants = needs[1], needs[2], needs[4], needs[5]
        if grad is None:
            grad = torch.zeros_like(sum)
        if differentiates_again():
            dsum, dweight, dbias = _by_formula(
                ctx, grad, sum, weight, (needs[1] or needs[2], needs[4], needs[5])
            )
            if dsum is not None and grad_sum is not None:
                dsum = dsum + grad_sum
            dinput = None
            if needs[1]:
                assert dsum is not None
                dinput = dropout(dsum, ctx.dropout_p, seed)
            dresidual = dsum if needs[2] else None
            return None, dinput, dresidual, None, dweight, dbias, None, None, None
        found = gradients(
            "add_layer_norm", ctx.backend, grad, grad_sum, sum, ctx.normalized_shape, weight, mean,
            rstd, ctx.dropout_p, seed, wants,
        )  # fmt: skip
        dinput, dresidual, dweight, dbias = only(wants, found)
        return None, dinput, dresidual, None, dweight, dbias, None, None, None
