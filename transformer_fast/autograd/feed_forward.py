"""The position-wise feed-forward network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference.dropout import dropout
from ..reference.linear import activate
from .function import Function, differentiates_again, gradients, only, pairs, stand_in, vjp
from .linear import products, total


class FeedForward(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
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
        output, kept = pairs["feed_forward"][backend].forward(
            input, weight1, bias1, weight2, bias2, activation, dropout_p, seed
        )
        ctx.backend, ctx.activation, ctx.dropout_p = backend, activation, dropout_p
        ctx.set_materialize_grads(False)
        need_input, need_weight1, need_bias1 = ctx.needs_input_grad[1:4]
        through = need_input or need_weight1 or need_bias1
        compiling = torch.compiler.is_compiling()
        # A second derivative makes the preactivation once more where it is not what was kept.
        ctx.makes = not (compiling or pairs["feed_forward"][backend].keeps_preactivation)
        if compiling or ctx.makes:
            ctx.mark_non_differentiable(kept)
        ctx.save_for_backward(
            input if need_weight1 or ctx.makes else None,
            weight1 if need_input or ctx.makes else None,
            bias1 if ctx.makes else None,
            weight2 if through else None,
            seed,
            kept,
        )
        return output, kept

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, grad_kept: Tensor | None
    ) -> tuple[Any, ...]:
        """``grad_kept`` comes of a second derivative only: nobody else sees that result."""
        if grad_kept is not None and torch.compiler.is_compiling():
            grad_kept = None  # zeros
        if grad is None and grad_kept is None:
            return (None,) * 9
        wants = ctx.needs_input_grad[1:6]
        found: Sequence[Tensor | None]
        if grad is None or grad_kept is not None or differentiates_again():
            found = _by_formula(ctx, grad, grad_kept, wants)
        else:
            input, weight1, _, weight2, seed, kept = ctx.saved_tensors
            hidden, lead = kept.shape[-1], grad.shape[:-1]
            if input is None:
                input = stand_in(grad, *lead, 1 if weight1 is None else weight1.shape[1])
            if weight1 is None:
                weight1 = stand_in(grad, hidden, input.shape[-1])
            if weight2 is None:
                weight2 = stand_in(grad, grad.shape[-1], hidden)
            found = gradients(
                pairs["feed_forward"][ctx.backend].backward,
                grad, input, weight1, weight2, ctx.activation,
                ctx.dropout_p, seed, kept, wants,
            )  # fmt: skip
        return None, *only(wants, found), None, None, None


def _by_formula(
    ctx: Any, grad: Tensor | None, grad_kept: Tensor | None, wants: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    input, weight1, bias1, weight2, seed, z = ctx.saved_tensors
    if ctx.makes:
        z = F.linear(input, weight1, bias1)
    through = any(wants[:3])
    dz = dweight2 = dbias2 = dinput = dweight1 = dbias1 = None
    if grad is not None:

        def rest(z: Tensor, weight2: Tensor) -> Tensor:
            hidden = dropout(activate(z, ctx.activation), ctx.dropout_p, seed)
            return F.linear(hidden, weight2)

        if weight2 is None:  # its gradient does not depend on it
            weight2 = grad.new_zeros((grad.shape[-1], z.shape[-1]))
        if through or wants[3]:
            dz, dweight2 = vjp(rest, (z, weight2), (through, wants[3]), (grad,))
        dbias2 = products(grad, None, None, (False, False, wants[4]))[2]
    if through:
        dinput, dweight1, dbias1 = products(total(dz, grad_kept), input, weight1, wants[:3])
    return dinput, dweight1, dbias1, dweight2, dbias2
