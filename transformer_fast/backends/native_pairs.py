"""Pairs for `autograd` around the operators of the native libraries, ``cpu_*`` and ``cuda_*``.

Operators of the two that do the same take the same arguments: each function here serves both, and
``backend`` says whose operator it calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import autograd

_ops = torch.ops.transformer_fast

#: Numbered as in csrc/cpu/simd/activation.h and csrc/cuda/epilogue.cuh.
ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}

_HALVES = (torch.bfloat16, torch.float16)


def wide(tensor: Tensor | None) -> Tensor | None:
    """In float32; what is no half type stays as it is."""
    return tensor.float() if tensor is not None and tensor.dtype in _HALVES else tensor


def on(device: torch.device, seed: Tensor | None) -> Tensor | None:
    return seed if seed is None or seed.device == device else seed.to(device)


def _layer_norm_forward(
    backend: str,
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    output, _, mean, rstd = getattr(_ops, f"{backend}_layer_norm")(
        input, None, weight, bias, math.prod(normalized_shape), eps, 0.0, None
    )
    return output, mean, rstd


def _layer_norm_backward(
    backend: str,
    grad: Tensor,
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    wants: Sequence[bool],
) -> tuple[Tensor, ...]:
    # Not by way of the sum's: within a model each frame of Python takes some microseconds.
    in_float = grad.dtype is torch.float32
    if backend == "cpu" and not in_float:
        weight = wide(weight)
    dinput, _, dweight, dbias = getattr(_ops, f"{backend}_layer_norm_backward")(
        grad, None, input, mean, rstd, weight, math.prod(normalized_shape), 0.0, None,
        wants[0], False, wants[1], wants[2],
    )  # fmt: skip
    if len(normalized_shape) == 1 and in_float:
        return dinput, dweight, dbias
    return dinput, *_shaped((dweight, dbias), wants[1:], normalized_shape, grad.dtype)


def _shaped(
    flat: Sequence[Tensor], wants: Sequence[bool], shape: tuple[int, ...], dtype: torch.dtype
) -> list[Tensor]:
    """Gradients of weight and bias, which operators give in one dimension and in float32."""
    return [
        (each.view(shape) if wanted and len(shape) > 1 else each).to(dtype)
        for each, wanted in zip(flat, wants, strict=True)
    ]


def _add_layer_norm_forward(
    backend: str,
    input: Tensor,
    residual: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return getattr(_ops, f"{backend}_layer_norm")(  # type: ignore[no-any-return]
        input, residual, weight, bias, math.prod(normalized_shape), eps, dropout_p,
        on(input.device, seed),
    )  # fmt: skip


def _add_layer_norm_backward(
    backend: str,
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
) -> tuple[Tensor, ...]:
    drops = dropout_p > 0.0
    if backend == "cpu":
        weight = wide(weight)
    dsource, dinput, *parameters = getattr(_ops, f"{backend}_layer_norm_backward")(
        grad, grad_sum, sum, mean, rstd, weight, math.prod(normalized_shape), dropout_p,
        on(sum.device, seed), wants[1] or (wants[0] and not drops), wants[0] and drops,
        wants[2], wants[3],
    )  # fmt: skip
    if len(normalized_shape) > 1 or grad.dtype is not torch.float32:
        parameters = _shaped(parameters, wants[2:], normalized_shape, grad.dtype)
    return dinput if drops else dsource, dsource, *parameters


def _linear_backward(
    backend: str,
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    activation: str | None,
    preactivation: Tensor,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return getattr(_ops, f"{backend}_linear_backward")(  # type: ignore[no-any-return]
        grad, input, weight, preactivation, ACTIVATIONS[activation], *wants
    )


def feed_forward_forward(
    backend: str,
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
    keep: bool = True,
) -> tuple[Tensor, Tensor]:
    """``keep``: whether a backward follows."""
    return getattr(_ops, f"{backend}_feed_forward_training")(  # type: ignore[no-any-return]
        input, weight1, bias1, weight2, bias2, ACTIVATIONS[activation], dropout_p,
        on(input.device, seed), keep,
    )  # fmt: skip


def _feed_forward_backward(
    backend: str,
    grad: Tensor,
    input: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
    saved: Tensor,
    wants: Sequence[bool],
) -> tuple[Tensor, ...]:
    return getattr(_ops, f"{backend}_feed_forward_backward")(  # type: ignore[no-any-return]
        grad, input, weight1, weight2, saved, ACTIVATIONS[activation], dropout_p,
        on(grad.device, seed), *wants,
    )  # fmt: skip


def _cross_entropy_forward(
    backend: str, input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    operator = getattr(_ops, f"{backend}_cross_entropy")
    return operator(input, target, ignore_index, label_smoothing)  # type: ignore[no-any-return]


def _cross_entropy_backward(
    backend: str,
    grad: Tensor,
    input: Tensor,
    target: Tensor,
    known: Tensor,
    ignore_index: int,
    label_smoothing: float,
    wants: Sequence[bool],
) -> tuple[Tensor]:
    operator = getattr(_ops, f"{backend}_cross_entropy_backward")
    return (operator(grad, input, target, known, ignore_index, label_smoothing),)


def register(backend: str, linear_forward: Callable[..., Any]) -> None:
    """The pairs of a backend; the forward of its linear map is its own."""
    for op, forward, backward in (
        ("layer_norm", _layer_norm_forward, _layer_norm_backward),
        ("add_layer_norm", _add_layer_norm_forward, _add_layer_norm_backward),
        ("feed_forward", feed_forward_forward, _feed_forward_backward),
        ("cross_entropy", _cross_entropy_forward, _cross_entropy_backward),
    ):
        autograd.register(
            op, backend, partial(forward, backend), partial(backward, backend),
            keeps_preactivation=backend == "cpu",  # of relu CUDA's keeps the hidden units
        )  # fmt: skip
    autograd.register("linear", backend, linear_forward, partial(_linear_backward, backend))
