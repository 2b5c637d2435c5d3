"""The linear map with its epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .function import Function, once, only, pairs


class Linear(Function):
    @staticmethod
    def forward(
        backend: str,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        pair = pairs["linear"][backend]
        return pair.forward(input, weight, bias, activation, residual)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        ctx.backend, input, weight, bias, ctx.activation, _ = inputs
        _, preactivation = results
        ctx.mark_non_differentiable(preactivation)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, weight, bias, preactivation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 6
        input, weight, bias, preactivation = ctx.saved_tensors
        wants = ctx.needs_input_grad[1:4]
        found: Sequence[Tensor | None] = (None, None, None)
        if any(wants):
            with torch.no_grad():
                found = pairs["linear"][ctx.backend].backward(
                    grad, input, weight, bias, ctx.activation, preactivation, wants
                )
        dinput, dweight, dbias = once("linear", only(wants, found), grad, input, weight)
        return None, dinput, dweight, dbias, None, grad if ctx.needs_input_grad[5] else None
