"""The gradients of the CPU kernels: pairs for `autograd`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import autograd

_ops = torch.ops.transformer_fast

#: Numbered as in csrc/cpu/activation.h.
ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}


_HALVES = (torch.bfloat16, torch.float16)


def _wide(tensor: Tensor | None) -> Tensor | None:
    """In float32; what is no half type stays as it is."""
    return tensor.float() if tensor is not None and tensor.dtype in _HALVES else tensor


def _as_it_is(tensor: Tensor | None) -> Tensor | None:
    return tensor


def _like(gradient: Tensor, tensor: Tensor | None) -> Tensor:
    return gradient if tensor is None else gradient.to(tensor.dtype)


def _shaped(flat: Tensor, shape: tuple[int, ...], wanted: bool) -> Tensor:
    return flat.view(shape) if wanted and len(shape) > 1 else flat


def _layer_norm_forward(
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    output, _, mean, rstd = _ops.cpu_layer_norm(
        input, None, weight, bias, math.prod(normalized_shape), eps, 0.0, None
    )
    return output, mean, rstd


def _layer_norm_backward(
    grad: Tensor,
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    dinput, _, dweight, dbias = _ops.cpu_layer_norm_backward(
        grad, None, input, mean, rstd, _wide(weight), math.prod(normalized_shape), 0.0, None,
        wants[0], False, wants[1], wants[2],
    )  # fmt: skip
    return (
        dinput,
        _shaped(dweight, normalized_shape, wants[1]).to(grad.dtype),
        _shaped(dbias, normalized_shape, wants[2]).to(grad.dtype),
    )


def _add_layer_norm_forward(
    input: Tensor,
    residual: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _ops.cpu_layer_norm(  # type: ignore[no-any-return]
        input, residual, weight, bias, math.prod(normalized_shape), eps, dropout_p, seed
    )


def _add_layer_norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    sum: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    drops = dropout_p > 0.0
    dsource, dinput, dweight, dbias = _ops.cpu_layer_norm_backward(
        grad, grad_sum, sum, mean, rstd, _wide(weight), math.prod(normalized_shape), dropout_p,
        seed, wants[1] or (wants[0] and not drops), wants[0] and drops, wants[2], wants[3],
    )  # fmt: skip
    return (
        dinput if drops else dsource,
        dsource,
        _shaped(dweight, normalized_shape, wants[2]).to(grad.dtype),
        _shaped(dbias, normalized_shape, wants[3]).to(grad.dtype),
    )


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
    # The gradients of probabilities are there for float32 only.
    wide = _wide if grad_weights is not None else _as_it_is
    found = _ops.cpu_attention_backward(
        wide(grad), wide(grad_weights), wide(query), wide(key), wide(value), wide(attn_mask),
        key_lengths, is_causal, scale, dropout_p, seed, wide(output), wide(weights), shift,
        norm, *wants,
    )  # fmt: skip
    return tuple(  # type: ignore[return-value]
        _like(gradient, tensor)
        for gradient, tensor in zip(found, (query, key, value, attn_mask), strict=True)
    )


def _linear_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if activation is None:
        output = _ops.cpu_linear(input, weight, None, bias, residual, 0)
        return output, output.new_empty((0,))
    return _ops.cpu_linear_with_preactivation(  # type: ignore[no-any-return]
        input, weight, bias, residual, ACTIVATIONS[activation]
    )


def _linear_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    activation: str | None,
    preactivation: Tensor,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return _ops.cpu_linear_backward(  # type: ignore[no-any-return]
        grad, input, weight, preactivation, ACTIVATIONS[activation], *wants
    )


def _feed_forward_forward(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return _ops.cpu_feed_forward_training(  # type: ignore[no-any-return]
        input, weight1, bias1, weight2, bias2, ACTIVATIONS[activation], dropout_p, seed, True
    )


def _feed_forward_backward(
    grad: Tensor,
    input: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
    preactivation: Tensor,
    wants: Sequence[bool],
) -> tuple[Tensor, ...]:
    return _ops.cpu_feed_forward_backward(  # type: ignore[no-any-return]
        grad, input, weight1, weight2, preactivation, ACTIVATIONS[activation], dropout_p, seed,
        *wants,
    )  # fmt: skip


def _register() -> None:
    autograd.register("layer_norm", "cpu", _layer_norm_forward, _layer_norm_backward)
    autograd.register("add_layer_norm", "cpu", _add_layer_norm_forward, _add_layer_norm_backward)
    autograd.register("attention", "cpu", _attention_forward, _attention_backward)
    autograd.register("linear", "cpu", _linear_forward, _linear_backward)
    autograd.register("feed_forward", "cpu", _feed_forward_forward, _feed_forward_backward)


_register()
