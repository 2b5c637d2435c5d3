"""Attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..reference.attention import attention
from .function import Function, differentiates_again, only, pairs, vjp


class Attention(Function):
    @staticmethod
    def forward(
        backend: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        key_lengths: Tensor | None,
        is_causal: bool,
        scale: float,
        dropout_p: float,
        seed: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return pairs["attention"][backend].forward(  # type: ignore[no-any-return]
            query, key, value, attn_mask, key_lengths, is_causal, scale, dropout_p, seed,
            need_weights,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        backend, query, key, value, mask, lengths, causal, scale, dropout_p, seed, need = inputs
        output, weights, shift, norm = results
        ctx.backend, ctx.need_weights = backend, need
        ctx.is_causal, ctx.scale, ctx.dropout_p = causal, scale, dropout_p
        if need:
            ctx.mark_non_differentiable(shift, norm)
        else:
            ctx.mark_non_differentiable(weights, shift, norm)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            query, key, value, mask, lengths, seed, output, weights if need else None, shift, norm
        )

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, grad_weights: Tensor | None, *_: Any
    ) -> tuple[Any, ...]:
        if not ctx.need_weights:
            grad_weights = None
        if grad is None and grad_weights is None:
            return (None,) * 11
        saved = ctx.saved_tensors
        query, key, value, mask, lengths, seed, output, weights, shift, norm = saved
        wants = ctx.needs_input_grad[1:5]
        if differentiates_again():

            def formula(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None) -> Any:
                both = attention(
                    q, k, v, m, lengths, ctx.is_causal, ctx.scale, ctx.dropout_p, seed, True,
                    ctx.need_weights,
                )  # fmt: skip
                return both if ctx.need_weights else both[0]

            grads = (grad, grad_weights) if ctx.need_weights else (grad,)
            return None, *vjp(formula, (query, key, value, mask), wants, grads), *(None,) * 6
        with torch.no_grad():
            found = pairs["attention"][ctx.backend].backward(
                torch.zeros_like(output) if grad is None else grad,
                grad_weights,
                query,
                key,
                value,
                mask,
                lengths,
                ctx.is_causal,
                ctx.scale,
                ctx.dropout_p,
                seed,
                output,
                weights,
                shift,
                norm,
                wants,
            )
        dquery, dkey, dvalue, dmask = only(wants, found)
        return None, dquery, dkey, dvalue, dmask, None, None, None, None, None, None
