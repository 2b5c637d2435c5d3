"""LayerNorm, alone and behind a residual connection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .function import Function, once, only, pairs


class LayerNorm(Function):
    @staticmethod
    def forward(
        backend: str,
        input: Tensor,
        normalized_shape: tuple[int, ...],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        pair = pairs["layer_norm"][backend]
        return pair.forward(input, normalized_shape, weight, bias, eps)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.backend, input, ctx.normalized_shape, weight, _, _ = inputs
        _, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, weight, mean, rstd)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 6
        input, weight, mean, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wants = needs[1], needs[3], needs[4]
        with torch.no_grad():
            found = pairs["layer_norm"][ctx.backend].backward(
                grad, input, ctx.normalized_shape, weight, mean, rstd, wants
            )
        dinput, dweight, dbias = once("layer_norm", only(wants, found), grad, input, weight)
        return None, dinput, None, dweight, dbias, None


class AddLayerNorm(Function):
    @staticmethod
    def forward(
        backend: str,
        input: Tensor,
        residual: Tensor,
        normalized_shape: tuple[int, ...],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        dropout_p: float,
        seed: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return pairs["add_layer_norm"][backend].forward(  # type: ignore[no-any-return]
            input, residual, normalized_shape, weight, bias, eps, dropout_p, seed
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.backend, _, _, ctx.normalized_shape, weight, _, _, ctx.dropout_p, seed = inputs
        _, sum, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sum, weight, mean, rstd, seed)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, *_: Any
    ) -> tuple[Any, ...]:
        if grad is None and grad_sum is None:
            return (None,) * 9
        sum, weight, mean, rstd, seed = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wants = needs[1], needs[2], needs[4], needs[5]
        with torch.no_grad():
            found = pairs["add_layer_norm"][ctx.backend].backward(
                torch.zeros_like(sum) if grad is None else grad,
                grad_sum,
                sum,
                ctx.normalized_shape,
                weight,
                mean,
                rstd,
                ctx.dropout_p,
                seed,
                wants,
            )
        dinput, dresidual, dweight, dbias = once(
            "add_layer_norm", only(wants, found), grad, grad_sum, sum, weight
        )
        return None, dinput, dresidual, None, dweight, dbias, None, None, None
