"""The position-wise feed-forward network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .function import Function, once, only, pairs


class FeedForward(Function):
    @staticmethod
    def forward(
        backend: str,
        input: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        bias2: Tensor | None,
        activation: str,
        dropout_p: float,
        seed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        return pairs["feed_forward"][backend].forward(  # type: ignore[no-any-return]
            input, weight1, bias1, weight2, bias2, activation, dropout_p, seed
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        backend, input, weight1, bias1, weight2, _, activation, dropout_p, seed = inputs
        _, preactivation = results
        ctx.backend, ctx.activation, ctx.dropout_p = backend, activation, dropout_p
        ctx.mark_non_differentiable(preactivation)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, weight1, bias1, weight2, seed, preactivation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 9
        input, weight1, bias1, weight2, seed, preactivation = ctx.saved_tensors
        wants = ctx.needs_input_grad[1:6]
        with torch.no_grad():
            found = pairs["feed_forward"][ctx.backend].backward(
                grad,
                input,
                weight1,
                bias1,
                weight2,
                ctx.activation,
                ctx.dropout_p,
                seed,
                preactivation,
                wants,
            )
        found = once("feed_forward", only(wants, found), grad, input, weight1, bias1, weight2)
        return None, *found, None, None, None
