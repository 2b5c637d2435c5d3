"""Pairs for `autograd` of the CPU kernels: those of `native_pairs`, and what is the CPU's alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import autograd
from .native_pairs import register

_ops = torch.ops.transformer_fast


def _wide(tensor: Tensor | None) -> Tensor | None:
    """In float32; what is no half type stays as it is."""
    halves = (torch.bfloat16, torch.float16)
    return tensor.float() if tensor is not None and tensor.dtype in halves else tensor


def _as_it_is(tensor: Tensor | None) -> Tensor | None:
    return tensor


def _like(gradient: Tensor, tensor: Tensor | None) -> Tensor:
    return gradient if tensor is None else gradient.to(tensor.dtype)


def _attention_forward(
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
    return _ops.cpu_attention(  # type: ignore[no-any-return]
        query, key, value, attn_mask, key_lengths, is_causal, scale, dropout_p, seed, need_weights
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if query.dtype is torch.float32 and not wants[3]:
        return _ops.cpu_attention_backward(  # type: ignore[no-any-return]
            grad, grad_weights, query, key, value, attn_mask, key_lengths, is_causal, scale,
            dropout_p, seed, output, weights, shift, norm, *wants,
        )  # fmt: skip
    # The gradients of probabilities are there for float32 only.
    given = _wide if grad_weights is not None else _as_it_is
    found = _ops.cpu_attention_backward(
        given(grad), given(grad_weights), given(query), given(key), given(value), given(attn_mask),
        key_lengths, is_causal, scale, dropout_p, seed, given(output), given(weights), shift,
        norm, *wants,
    )  # fmt: skip
    return tuple(  # type: ignore[return-value]
        _like(gradient, tensor)
        for gradient, tensor in zip(found, (query, key, value, attn_mask), strict=True)
    )


autograd.register("attention", "cpu", _attention_forward, _attention_backward)
register("cpu")
