"""Attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..reference.attention import attention
from .function import Function, differentiates_again, only, pairs, vjp


def _if_there(query_lengths: Tensor | None) -> tuple[Tensor, ...]:
    """Only backends that take query lengths are given any."""
    return () if query_lengths is None else (query_lengths,)


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
        query_lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return pairs["attention"][backend].forward(  # type: ignore[no-any-return]
            query, key, value, attn_mask, key_lengths, is_causal, scale, dropout_p, seed,
            need_weights, *_if_there(query_lengths),
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        backend, query, key, value, mask, lengths, causal, scale, dropout_p, seed, need = inputs[
            :11
        ]
        query_lengths = inputs[11] if len(inputs) > 11 else None
        output, weights, shift, norm = results
        ctx.backend, ctx.need_weights = backend, need
        ctx.is_causal, ctx.scale, ctx.dropout_p = causal, scale, dropout_p
        if need:
            ctx.mark_non_differentiable(shift, norm)
        else:
            ctx.mark_non_differentiable(weights, shift, norm)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            query, key, value, mask, lengths, seed, output, weights if need else None, shift, norm,
            query_lengths,
        )  # fmt: skip

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, grad_weights: Tensor | None, *_: Any
    ) -> tuple[Any, ...]:
        if not ctx.need_weights:
            grad_weights = None
        if grad is None and grad_weights is None:
            return (None,) * 12
        saved = ctx.saved_tensors
        query, key, value, mask, lengths, seed, output, weights, shift, norm, query_lengths = saved
        wants = ctx.needs_input_grad[1:5]
        if differentiates_again():

            def formula(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None) -> Any:
                both = attention(
                    q, k, v, m, lengths, ctx.is_causal, ctx.scale, ctx.dropout_p, seed, True,
                    ctx.need_weights, query_lengths,
                )  # fmt: skip
                return both if ctx.need_weights else both[0]

            grads = (grad, grad_weights) if ctx.need_weights else (grad,)
            return None, *vjp(formula, (query, key, value, mask), wants, grads), *(None,) * 7
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
                *_if_there(query_lengths),
            )
        dquery, dkey, dvalue, dmask = only(wants, found)
        return None, dquery, dkey, dvalue, dmask, *(None,) * 7
