"""Kernels for one shape of step, chosen once: thousands of equal calls need not be checked again.

Each function here takes the sizes of the calls to come and gives a function that makes them, on
the kernel that the dispatcher chooses. Under autocast matrix products run in its dtype, as the
public functions do it; the weights are then cast once, where they are bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...dispatch import Call, select
from .layers import FeedForwardWeights, NormWeights

#: (input (N, M)) -> (N, Mout)
Linear = Callable[[Tensor], Tensor]
#: (sub-layer's output, residual) -> (next sub-layer's input, its residual)
AddNorm = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of matrix products with ``tensor``: its own, or autocast's."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def _cast(first: Tensor, *others: Tensor | None) -> tuple[torch.dtype | None, Any]:
    """(None, the tensors), or (autocast's dtype, the tensors in it)."""
    dtype = product_dtype(first)
    if dtype == first.dtype:
        return None, (first, *others)
    return dtype, (first.to(dtype), *(None if t is None else t.to(dtype) for t in others))


def bind_linear(rows: int, weight: Tensor, bias: Tensor | None) -> Linear:
    dtype, (w, b) = _cast(weight, bias)
    sample = w.new_empty((rows, w.shape[1]))
    run = select(Call("linear", (sample, w, b, None), False)).run
    if dtype is not None:
        return lambda x: run(x.to(dtype), w, b, None, None)
    return lambda x: run(x, w, b, None, None)


def bind_feed_forward(rows: int, weights: FeedForwardWeights) -> Linear:
    f = weights
    dtype, (w1, b1, w2, b2) = _cast(f.weight1, f.bias1, f.weight2, f.bias2)
    activation = f.activation
    sample = w1.new_empty((rows, w1.shape[1]))
    call = Call("feed_forward", (sample, w1, b1, w2, b2), False, activation=activation)
    run = select(call).run
    if dtype is not None:
        return lambda x: run(x.to(dtype), w1, b1, w2, b2, activation, 0.0, None)
    return lambda x: run(x, w1, b1, w2, b2, activation, 0.0, None)


def bind_attention(
    query: Tensor, key: Tensor, mask: Tensor | None, key_lengths: Tensor | None, is_causal: bool
) -> Callable[..., Any]:
    """The kernel's own function; its arguments are those of ``reference.attention``."""
    tensors = (query, key, key)
    call = Call(
        "attention", tensors, False, mask=mask, is_causal=is_causal, key_lengths=key_lengths
    )
    return select(call).run


def bind_layer_norm(sample: Tensor, norm: NormWeights) -> Linear:
    """Layer norm of (N, M), N and M the sample's."""
    if norm.module is not None:
        return norm.module
    shape, weight, bias, eps = sample.shape[-1:], norm.weight, norm.bias, norm.eps
    run = select(Call("layer_norm", (sample, weight, bias), False)).run
    return lambda x: run(x, shape, weight, bias, eps)


def bind_add_norm(sample: Tensor, norm: NormWeights | None, norm_first: bool) -> AddNorm:
    """Residual sum and the norm behind it.

    Post-norm: the normalised sum is the next residual too. Pre-norm: the sum itself is. Without a
    norm (pre-norm's end, where there is no final norm) the sum is both.
    """
    if norm is None or norm.module is not None:
        module = None if norm is None else norm.module

        def by_module(y: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            total = residual + y
            normalized = total if module is None else module(total)
            return normalized, total if norm_first else normalized

        return by_module

    shape, weight, bias, eps = sample.shape[-1:], norm.weight, norm.bias, norm.eps
    run = select(Call("add_layer_norm", (sample, sample, weight, bias), False)).run
    casts = product_dtype(sample) != sample.dtype

    def fused(y: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if casts:
            y = y.to(residual.dtype)
        normalized, total = run(y, residual, shape, weight, bias, eps, 0.0, None)
        return normalized, total if norm_first else normalized

    return fused
