"""Kernels for one shape of step, chosen once: thousands of equal calls need not be checked again.

Each function here takes the sizes of the calls to come and gives a function that makes them, on
the kernel that the dispatcher chooses. Under autocast matrix products run in its dtype, as the
public functions do it; the weights are then cast once, where they are bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _native, dispatch
from ...autograd import wants_grad
from ...dispatch import Call, select
from ...nn.fusion import Kind, Norm, Sublayer
from .layers import Stack

#: (input (N, M)) -> (N, Mout)
Linear = Callable[[Tensor], Tensor]
#: (sub-layer's output, its residual) -> their sum, normalised if that is the stack's way
Join = Callable[[Tensor, Tensor], Tensor]


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of matrix products with ``tensor``: its own, or autocast's."""
    kind = tensor.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and tensor.dtype != torch.float64:
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


def bind_feed_forward(rows: int, f: Sublayer, activation: Any) -> Linear:
    dtype, (w1, b1, w2, b2) = _cast(f.weight1, f.bias1, f.weight2, f.bias2)
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


def bind_layer_norm(sample: Tensor, norm: Norm) -> Linear:
    """Layer norm of (N, M), N and M the sample's."""
    if norm.module is not None:
        return norm.module
    shape, weight, bias, eps = sample.shape[-1:], norm.weight, norm.bias, norm.eps
    run = select(Call("layer_norm", (sample, weight, bias), False)).run
    return lambda x: run(x, shape, weight, bias, eps)


def bind_enter(sample: Tensor, norm: Norm, norm_first: bool) -> Linear | None:
    """What comes before a sub-layer: pre-norm stacks' norm, or nothing."""
    return bind_layer_norm(sample, norm) if norm_first else None


def bind_join(sample: Tensor, norm: Norm, norm_first: bool) -> Join:
    """What comes behind a sub-layer: the residual connection, and post-norm stacks' norm."""
    casts = product_dtype(sample) != sample.dtype
    module = norm.module
    if norm_first:
        return torch.add
    if module is not None:
        return lambda y, residual: module(y + residual)
    shape, weight, bias, eps = sample.shape[-1:], norm.weight, norm.bias, norm.eps
    run = select(Call("add_layer_norm", (sample, sample, weight, bias), False)).run
    if casts:
        return lambda y, x: run(y.to(x.dtype), x, shape, weight, bias, eps, 0.0, None)[0]
    return lambda y, x: run(y, x, shape, weight, bias, eps, 0.0, None)[0]


def bind_stack(
    sample: Tensor,
    cache: Tensor,
    stack: Stack,
    memories: Sequence[Tensor],
    mask: Tensor | None,
    key_lengths: Tensor | None,
) -> Callable[..., Tensor] | None:
    """All layers in one call, or None where they have to be composed of single kernels."""
    parameters: list[Tensor | None] = []
    eps: list[float] = []
    activation = stack.layers[0].activation
    for layer in stack.layers:
        for one in layer.sublayers:
            if one.norm.module is not None or layer.activation != activation:
                return None
            # The memory's keys and values are there already.
            first = one.of_query() if one.kind == Kind.CROSS_ATTENTION else one[1:3]
            parameters += *first, *one[3:5], *one.norm[:2]
            eps.append(one.norm.eps)
    tensors = (sample, cache, *memories, *parameters)
    call = Call("decode_step", tensors, wants_grad(*tensors), activation=activation)
    kernel = dispatch.find(call)
    if kernel is None or sample.shape[0] == 0 or dispatch.is_traced():
        return None
    return kernel.run(  # type: ignore[no-any-return]
        parameters, eps, stack.norm_first, activation, sample.shape[0], memories, mask, key_lengths
    )


def empty_cache(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory for keys and values, on the CPU of that kept for large tensors.

    Every step touches all of it, a little in each of thousands of places.
    """
    none = like.new_empty(0, dtype=dtype)
    if _native.module is None or type(none) is not Tensor or not none.is_cpu:
        return like.new_empty(shape, dtype=dtype)
    return torch.ops.transformer_fast.cpu_uninitialized(none, shape)
