"""What the operators of `native_pairs` and `cpu_backward` return, without computing it: for
torch.compile and opcheck."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _native


def _fake_dropout(input: Tensor, p: float, seed: Tensor | None) -> Tensor:
    return input.new_empty(input.shape)


def fake_layer_norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    source: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    normalized: int,
    dropout_p: float,
    seed: Tensor | None,
    want_source: bool,
    want_input: bool,
    want_weight: bool,
    want_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        source.new_empty(source.shape if want_source else (0,)),
        source.new_empty(source.shape if want_input else (0,)),
        mean.new_empty((normalized if want_weight else 0,)),
        mean.new_empty((normalized if want_bias else 0,)),
    )


def _gradient_like(tensor: Tensor, wanted: bool) -> Tensor:
    if not wanted:
        return tensor.new_empty((0,))
    # Heads and positions in memory as the tensor has them.
    if tensor.stride(1) < tensor.stride(2):
        return tensor.transpose(1, 2).new_empty(tensor.transpose(1, 2).shape).transpose(1, 2)
    return tensor.new_empty(tensor.shape)


def fake_attention_backward(
    grad: Tensor,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    output: Tensor | None,
    weights: Tensor | None,
    shift: Tensor,
    norm: Tensor,
    want_query: bool,
    want_key: bool,
    want_value: bool,
    want_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if want_mask:
        assert mask is not None
        grad_mask = mask.new_empty(mask.shape)
    else:
        grad_mask = query.new_empty((0,))
    return (
        _gradient_like(query, want_query),
        _gradient_like(key, want_key),
        _gradient_like(value, want_value),
        grad_mask,
    )


def _fake_linear_with_preactivation(
    input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: int
) -> tuple[Tensor, Tensor]:
    shape = (*input.shape[:-1], weight.shape[0])
    return input.new_empty(shape), input.new_empty(shape)


def fake_linear_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    preactivation: Tensor | None,
    activation: int,
    want_input: bool,
    want_weight: bool,
    want_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        input.new_empty(input.shape if want_input else (0,)),
        weight.new_empty(weight.shape if want_weight else (0,)),
        weight.new_empty((weight.shape[0] if want_bias else 0,)),
    )


def fake_feed_forward_training(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: int,
    dropout_p: float,
    seed: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    lead = input.shape[:-1]
    return (
        input.new_empty((*lead, weight2.shape[0])),
        input.new_empty((*lead, weight1.shape[0]) if keep else (0,)),
    )


def fake_feed_forward_backward(
    grad: Tensor,
    input: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    preactivation: Tensor,
    activation: int,
    dropout_p: float,
    seed: Tensor | None,
    want_input: bool,
    want_weight1: bool,
    want_bias1: bool,
    want_weight2: bool,
    want_bias2: bool,
) -> tuple[Tensor, ...]:
    return (
        input.new_empty(input.shape if want_input else (0,)),
        weight1.new_empty(weight1.shape if want_weight1 else (0,)),
        weight1.new_empty((weight1.shape[0] if want_bias1 else 0,)),
        weight2.new_empty(weight2.shape if want_weight2 else (0,)),
        weight2.new_empty((weight2.shape[0] if want_bias2 else 0,)),
    )


def _fake_embedding_backward(grad: Tensor, tokens: Tensor, rows: int, padding: int) -> Tensor:
    return grad.new_empty((rows, grad.shape[-1]))


def register_fakes() -> None:
    if _native.module is not None:
        fakes: dict[str, Callable[..., Any]] = {
            "cpu_dropout": _fake_dropout,
            "cpu_layer_norm_backward": fake_layer_norm_backward,
            "cpu_attention_backward": fake_attention_backward,
            "cpu_linear_with_preactivation": _fake_linear_with_preactivation,
            "cpu_linear_backward": fake_linear_backward,
            "cpu_feed_forward_training": fake_feed_forward_training,
            "cpu_feed_forward_backward": fake_feed_forward_backward,
            "cpu_embedding_backward": _fake_embedding_backward,
        }
        for name, fake in fakes.items():
            torch.library.register_fake(f"transformer_fast::{name}", fake)
