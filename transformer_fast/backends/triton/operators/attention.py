"""attention on Triton."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from .... import reference
from ....autograd import Attention, needs_function, register
from .define import define


def _run(
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
    longest: Sequence[int] | None = None,
) -> tuple[Tensor | None, ...]:
    from ..attention import attention_forward, make_problem
    from ..attention_weights import attention_weights

    arguments = (
        query, key, value, attn_mask, key_lengths, is_causal, scale, dropout_p, seed,
        query_lengths, longest,
    )  # fmt: skip
    output, shift, norm = attention_forward(*arguments)
    weights = attention_weights(make_problem(*arguments), shift, norm) if need_weights else None
    return output, weights, shift, norm


def _run_backward(
    grad: Tensor,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    output: Tensor,
    weights: Tensor | None,
    shift: Tensor,
    norm: Tensor,
    need_mask: bool,
    query_lengths: Tensor | None = None,
    longest: Sequence[int] | None = None,
) -> tuple[Tensor | None, ...]:
    from ..attention_bwd import attention_backward

    return attention_backward(
        grad,
        grad_weights,
        query,
        key,
        value,
        attn_mask,
        key_lengths,
        is_causal,
        scale,
        dropout_p,
        seed,
        output,
        weights,
        shift,
        norm,
        need_mask,
        query_lengths,
        longest,
    )


_forward = define(
    "triton_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask,"
    " Tensor? key_lengths, bool is_causal, float scale, float dropout_p, Tensor? seed,"
    " bool need_weights, Tensor? query_lengths=None, SymInt[]? longest=None)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _run,
)
_backward = define(
    "triton_attention_backward(Tensor grad, Tensor? grad_weights, Tensor query, Tensor key,"
    " Tensor value, Tensor? attn_mask, Tensor? key_lengths, bool is_causal, float scale,"
    " float dropout_p, Tensor? seed, Tensor output, Tensor? weights, Tensor shift, Tensor norm,"
    " bool need_mask, Tensor? query_lengths=None, SymInt[]? longest=None)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
)


def _attention_backward(
    grad: Tensor,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    output: Tensor,
    weights: Tensor | None,
    shift: Tensor,
    norm: Tensor,
    wants: Sequence[bool],
    query_lengths: Tensor | None = None,
    longest: Sequence[int] | None = None,
) -> tuple[Tensor, ...]:
    return _backward(  # type: ignore[no-any-return]
        grad, grad_weights, query, key, value, attn_mask, key_lengths, is_causal, scale, dropout_p,
        seed, output, weights, shift, norm, wants[3], query_lengths, longest,
    )  # fmt: skip


register("attention", "triton", _forward, _attention_backward)


def attention(
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
    longest: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    if query.numel() == 0 or value.numel() == 0:
        return reference.attention(
            query, key, value, attn_mask, key_lengths, is_causal, scale, dropout_p, seed,
            enable_gqa, need_weights, query_lengths, longest,
        )  # fmt: skip
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    arguments = (
        query, key, value, attn_mask, key_lengths, is_causal, scale, dropout_p, seed, need_weights,
        query_lengths, longest,
    )  # fmt: skip
    if needs_function(query, key, value, attn_mask):
        return Attention.apply("triton", *arguments)  # type: ignore[no-untyped-call, no-any-return]
    output, weights, _, _ = _forward(*arguments)
    return output, weights if need_weights else None
