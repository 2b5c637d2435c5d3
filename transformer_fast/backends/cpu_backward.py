"""The gradients of the CPU kernels: pairs for `autograd`.

A training step multiplies by weights that it changes. So few rows are faster by PyTorch's products,
which read weights as they are, than by kernels that pack them first: which few was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import _native, autograd

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


_aten = torch.ops.aten
_ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}
#: (gradient of an activation's result, what it was applied to) -> gradient of that
_SLOPE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda grad, x: _aten.threshold_backward(grad, x, 0),
    "gelu": lambda grad, x: _aten.gelu_backward(grad, x),
    "gelu_tanh": lambda grad, x: _aten.gelu_backward(grad, x, approximate="tanh"),
    "silu": lambda grad, x: _aten.silu_backward(grad, x),
}


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether the CPU multiplies matrices of this type faster than float32."""
    return (
        dtype == torch.bfloat16
        and _native.module is not None
        and _native.module.isa() in ("avx512_bf16", "amx")
    )


#: Rows of float32 that PyTorch's products serve better. A dozen are not among them: the kernels
#: read weights for those as they are, too. On CPUs that are not Intel's MKL does without AVX-512,
#: and takes two to four times as long as the kernels.
_FEW_ROWS = range(16, 129) if _native.module is not None and _native.module.is_intel() else range(0)
#: The same where `_multiplies`: forward and backward of a linear map, and the feed-forward network.
_FEW_HALF_ROWS, _FEW_HALF_GRADIENTS, _FEW_HALF_HIDDEN = range(1, 257), range(1, 24), range(1, 32)
#: More outputs make so deep sums that PyTorch's product gives an input's gradient faster.
_DEEP = 8192


def _by_products(input: Tensor, few_half: range) -> bool:
    """Whether PyTorch's products of matrices serve a step of training better."""
    # One traced program serves any number of rows.
    if torch.compiler.is_compiling():
        return False
    rows = input.numel() // max(1, input.shape[-1])
    if input.dtype == torch.float32:
        return rows in _FEW_ROWS
    return rows in few_half and _multiplies(input.dtype)


def _dropped(x: Tensor, p: float, seed: Tensor | None) -> Tensor:
    return _ops.cpu_dropout(x, p, seed) if p > 0.0 else x  # type: ignore[no-any-return]


def _products(
    grad: Tensor, input: Tensor, weight: Tensor, wants: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias of a linear map, by PyTorch's products."""
    # reshape(-1, 0) would not know how many rows.
    rows, columns = torch.atleast_2d(grad).flatten(0, -2), torch.atleast_2d(input).flatten(0, -2)
    none = input.new_empty((0,))
    return (
        grad @ weight if wants[0] else none,
        rows.t() @ columns if wants[1] else none,
        rows.sum(0) if wants[2] else none,  # in fp32, rounded once
    )


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
        _like(_shaped(dweight, normalized_shape, wants[1]), weight),
        _like(_shaped(dbias, normalized_shape, wants[2]), weight),
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
        _like(_shaped(dweight, normalized_shape, wants[2]), weight),
        _like(_shaped(dbias, normalized_shape, wants[3]), weight),
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
        if residual is None and _by_products(input, _FEW_HALF_ROWS):
            output = torch.nn.functional.linear(input, weight, bias)
        else:
            output = _ops.cpu_linear(input, weight, None, bias, residual, 0)
        return output, output.new_empty((0,))
    return _ops.cpu_linear_with_preactivation(  # type: ignore[no-any-return]
        input, weight, bias, residual, ACTIVATIONS[activation]
    )


def _linear_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    preactivation: Tensor,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    if activation is None and _by_products(input, _FEW_HALF_GRADIENTS):
        return _products(grad, input, weight, wants)
    deep = weight.shape[0] > _DEEP and activation is None and not torch.compiler.is_compiling()
    product = wants[0] and deep and _multiplies(grad.dtype)
    dinput, dweight, dbias = _ops.cpu_linear_backward(
        grad, input, weight, preactivation, ACTIVATIONS[activation],
        wants[0] and not product, wants[1], wants[2],
    )  # fmt: skip
    return grad @ weight if product else dinput, dweight, dbias


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
    if _by_products(input, _FEW_HALF_HIDDEN):
        preactivation = _linear_forward(input, weight1, bias1, None, None)[0]
        hidden = _dropped(_ACTIVATE[activation](preactivation), dropout_p, seed)
        return _linear_forward(hidden, weight2, bias2, None, None)[0], preactivation
    return _ops.cpu_feed_forward_training(  # type: ignore[no-any-return]
        input, weight1, bias1, weight2, bias2, ACTIVATIONS[activation], dropout_p, seed, True
    )


def _feed_forward_backward(
    grad: Tensor,
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
    preactivation: Tensor,
    wants: Sequence[bool],
) -> tuple[Tensor, ...]:
    if _by_products(input, _FEW_HALF_HIDDEN):
        hidden = _dropped(_ACTIVATE[activation](preactivation), dropout_p, seed)
        _, dweight2, dbias2 = _products(grad, hidden, weight2, (False, *wants[3:5]))
        dhidden = _dropped(grad @ weight2, dropout_p, seed)
        slope = _SLOPE[activation](dhidden, preactivation)
        return (*_products(slope, input, weight1, wants[:3]), dweight2, dbias2)
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
