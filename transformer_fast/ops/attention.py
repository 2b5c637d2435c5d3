"""Operators of attention, their rules, and autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import reference
from .autograd import (
    Function,
    differentiates_again,
    gradients,
    mask_unwanted,
    savable,
    vjp,
)
from .operator import Operator, Rule

# Softmax statistics saved for the backward: two (B, H, T) fp32 tensors, the same in every backend.
# ``row_max`` is the maximum of a row's scores (scaled, with the mask, in natural units), or a number
# near it. ``row_sum`` is the sum of exp(score - row_max). Both are 0 for a fully masked row. The
# log-sum-exp is row_max + log(row_sum). Saving only that would not be accurate enough: where a mask adds
# finfo.min to all of a row, it rounds to row_max, and gradients of the row are S times too large. For
# scores with a standard deviation of 1000 the largest error of the gradients triples.
#
# Of packed sequences ``longest_queries`` and ``longest_keys`` are not negative.
_CALL = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? key_lengths, bool is_causal,"
    " float scale, float dropout_p, Tensor? seed"
)
_LENGTHS = "Tensor? query_lengths=None, SymInt longest_queries=-1, SymInt longest_keys=-1"
_TENSORS = (
    "query:bhtd key:bhsd value:bhse mask:bhts key_lengths:b query_lengths:b grad:bhte"
    " grad_weights:bhts output:bhte weights:bhts row_max:bht row_sum:bht"
)
INFERENCE = Operator(
    f"attention({_CALL}, bool need_weights, bool contiguous=False)"
    " -> (Tensor output, Tensor weights)",
    Rule(_TENSORS, "bhte/attention bhts?need_weights", by="bh", products="bhtsd bhtse"),
)
TRAINING = Operator(
    f"attention_training({_CALL}, bool need_weights, {_LENGTHS}, bool contiguous=False)"
    " -> (Tensor output, Tensor weights, Tensor row_max, Tensor row_sum)",
    Rule(
        _TENSORS, "bhte/attention BhTs?need_weights BhT:float32 BhT:float32", by="bh",
        products="bhtsd bhtse",
    ),
)  # fmt: skip
BACKWARD = Operator(
    f"attention_backward(Tensor grad, Tensor? grad_weights, {_CALL}, Tensor output, Tensor? weights,"
    " Tensor row_max, Tensor row_sum, bool want_query, bool want_key, bool want_value,"
    f" bool want_mask, {_LENGTHS})"
    " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_mask)",
    Rule(
        _TENSORS, "@query/?want_query @key/?want_key @value/?want_value @mask?want_mask", by="bh",
        # One of them for the probabilities, which are worked out again.
        products="bhtsd bhtse bhtse bhtsd bhtsd",
    ),
)  # fmt: skip


def attention_on(
    backend: str, query_lengths: bool = False
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """What the dispatcher runs for a backend with operators; ``query_lengths``: which take those."""

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        key_lengths: Tensor | None,
        is_causal: bool,
        scale: float | None,
        dropout_p: float,
        seed: Tensor | None,
        enable_gqa: bool,
        need_weights: bool,
        query_lengths: Tensor | None = None,
        longest: tuple[int, int] | None = None,
        contiguous: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if scale is None:
            scale = 1.0 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
        call = (
            query, key, value, attn_mask, key_lengths, is_causal, scale, dropout_p, seed,
            need_weights,
        )  # fmt: skip
        if query_lengths is not None and by_padding is not None:
            return by_padding(
                *call[:-1], enable_gqa, need_weights, query_lengths, longest, contiguous
            )
        found = AttentionFunction.recorded(backend, *call, query_lengths, longest, contiguous)
        if found is not None:
            return found  # type: ignore[no-any-return]
        if backend in INFERENCE.of:
            output, weights = INFERENCE.of[backend](*call, bool(contiguous))
        else:
            rest = _rest(query_lengths, longest, contiguous)
            output, weights, *_ = TRAINING.of[backend](*call, *rest)
        return output, weights if need_weights else None

    by_padding = None if query_lengths else reference.supports_query_lengths(run)
    return run


def _rest(
    query_lengths: Tensor | None, longest: tuple[int, int] | None, contiguous: bool | None = None
) -> tuple[Any, ...]:
    """The operators' last arguments, as far as they are not the defaults."""
    if contiguous:
        return query_lengths, *(longest or (-1, -1)), True
    if query_lengths is None:
        return ()
    return (query_lengths,) if longest is None else (query_lengths, *longest)


class AttentionFunction(Function):
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
        contiguous: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        output, weights, row_max, row_sum = TRAINING.of[backend](
            query, key, value, attn_mask, key_lengths, is_causal, scale, dropout_p, seed,
            need_weights, *_rest(query_lengths, longest, contiguous),
        )  # fmt: skip
        if not need_weights:
            weights = None
        ctx.backend, ctx.need_weights = backend, need_weights
        ctx.is_causal, ctx.scale, ctx.dropout_p, ctx.longest = is_causal, scale, dropout_p, longest
        ctx.set_materialize_grads(False)
        if attn_mask is not None:
            attn_mask = savable(attn_mask)
        ctx.save_for_backward(
            query, key, value, attn_mask, key_lengths, seed, output, weights, row_max, row_sum,
            query_lengths,
        )  # fmt: skip
        # Some kernels give a view. Autograd lets nobody write into views that were made in a function;
        # this is the same memory, with the same version.
        return output.detach(), weights

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, grad_weights: Tensor | None
    ) -> tuple[Any, ...]:
        if grad is None and grad_weights is None:
            return (None,) * 14
        saved = ctx.saved_tensors
        query, key, value, mask, lengths, seed, output, weights, *rows, query_lengths = saved
        row_max, row_sum = rows
        wants = ctx.needs_input_grad[1:5]
        if differentiates_again():

            def formula(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None) -> Any:
                both = reference.attention(
                    q, k, v, m, lengths, ctx.is_causal, ctx.scale, ctx.dropout_p, seed, True,
                    ctx.need_weights, query_lengths, ctx.longest,
                )  # fmt: skip
                return both if ctx.need_weights else both[0]

            grads = (grad, grad_weights) if ctx.need_weights else (grad,)
            return None, *vjp(formula, (query, key, value, mask), wants, grads), *(None,) * 9
        found = gradients(
            BACKWARD.of[ctx.backend], torch.zeros_like(output) if grad is None else grad,
            grad_weights, query, key, value, mask, lengths, ctx.is_causal, ctx.scale,
            ctx.dropout_p, seed, output, weights, row_max, row_sum, *wants,
            *_rest(query_lengths, ctx.longest),
        )  # fmt: skip
        dquery, dkey, dvalue, dmask = mask_unwanted(wants, found)
        return None, dquery, dkey, dvalue, dmask, *(None,) * 9
