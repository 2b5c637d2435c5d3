"""Attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..reference.attention import attention
from .function import Function, differentiates_again, gradients, only, pairs, savable, vjp


def _if_there(query_lengths: Tensor | None, longest: Any) -> tuple[Any, ...]:
    """Only backends that take query lengths, or packed sequences, are given any."""
    if query_lengths is None:
        return ()
    return (query_lengths,) if longest is None else (query_lengths, longest)


class Attention(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
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
        longest: tuple[int, int] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        output, weights, shift, norm = pairs["attention"][backend].forward(
            query, key, value, attn_mask, key_lengths, is_causal, scale, dropout_p, seed,
            need_weights, *_if_there(query_lengths, longest),
        )  # fmt: skip
        if not need_weights:
            weights = None
        ctx.backend, ctx.need_weights = backend, need_weights
        ctx.is_causal, ctx.scale, ctx.dropout_p, ctx.longest = is_causal, scale, dropout_p, longest
        ctx.set_materialize_grads(False)
        if attn_mask is not None:
            attn_mask = savable(attn_mask)
        ctx.save_for_backward(
            query, key, value, attn_mask, key_lengths, seed, output, weights, shift, norm,
            query_lengths,
        )  # fmt: skip
        # Kernels give a view, of memory in the order (B, T, H, Dv). Autograd lets nobody write into
        # views that were made in a function; this is the same memory, with the same version.
        return output.detach(), weights

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, grad_weights: Tensor | None
    ) -> tuple[Any, ...]:
        if grad is None and grad_weights is None:
            return (None,) * 13
        saved = ctx.saved_tensors
        query, key, value, mask, lengths, seed, output, weights, shift, norm, query_lengths = saved
        wants = ctx.needs_input_grad[1:5]
        if differentiates_again():

            def formula(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None) -> Any:
                both = attention(
                    q, k, v, m, lengths, ctx.is_causal, ctx.scale, ctx.dropout_p, seed, True,
                    ctx.need_weights, query_lengths, ctx.longest,
                )  # fmt: skip
                return both if ctx.need_weights else both[0]

            grads = (grad, grad_weights) if ctx.need_weights else (grad,)
            return None, *vjp(formula, (query, key, value, mask), wants, grads), *(None,) * 8
        found = gradients(
            pairs["attention"][ctx.backend].backward,
            torch.zeros_like(output) if grad is None else grad,
            grad_weights, query, key, value, mask, lengths, ctx.is_causal, ctx.scale,
            ctx.dropout_p, seed, output, weights, shift, norm, wants,
            *_if_there(query_lengths, ctx.longest),
        )  # fmt: skip
        dquery, dkey, dvalue, dmask = only(wants, found)
        return None, dquery, dkey, dvalue, dmask, *(None,) * 8
