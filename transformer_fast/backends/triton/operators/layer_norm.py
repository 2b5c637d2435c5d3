"""layer_norm and add_layer_norm on Triton."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .... import reference
from ....autograd import AddLayerNorm, LayerNorm, needs_function, register
from .define import absent, define


def _run(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor | None, ...]:
    from ..layer_norm import add_layer_norm_forward, layer_norm_forward

    if residual is None:
        output, mean, rstd = layer_norm_forward(input, normalized_shape, weight, bias, eps)
        return output, None, mean, rstd
    return add_layer_norm_forward(
        input, residual, normalized_shape, weight, bias, eps, dropout_p, seed
    )


def _fake(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, ...]:
    output = input.new_empty(input.shape)
    rows = input.new_empty((input.numel() // math.prod(normalized_shape),), dtype=torch.float32)
    total = absent(input) if residual is None else torch.empty_like(output)
    return output, total, rows, torch.empty_like(rows)


def _run_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor | None, ...]:
    from ..layer_norm import add_layer_norm_backward

    dinput, dx, dweight, dbias = add_layer_norm_backward(
        grad,
        grad_sum,
        x,
        normalized_shape,
        weight,
        mean,
        rstd,
        dropout_p,
        seed,
        need_weight,
        need_bias,
    )
    if dinput is dx:
        # Results of an operator may not share memory.
        return dx.clone() if dropout_p > 0.0 else None, dx, dweight, dbias
    return dinput, dx, dweight, dbias


def _fake_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, ...]:
    dx = x.new_empty(x.shape)
    kind = x if weight is None else weight
    shape = tuple(normalized_shape)
    return (
        torch.empty_like(dx) if dropout_p > 0.0 else absent(grad),
        dx,
        kind.new_empty(shape) if need_weight else absent(grad),
        kind.new_empty(shape) if need_bias else absent(grad),
    )


_forward = define(
    "triton_layer_norm(Tensor input, Tensor? residual, SymInt[] normalized_shape, Tensor? weight,"
    " Tensor? bias, float eps, float dropout_p, Tensor? seed)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
)
_backward = define(
    "triton_layer_norm_backward(Tensor grad, Tensor? grad_sum, Tensor x, SymInt[] normalized_shape,"
    " Tensor? weight, Tensor mean, Tensor rstd, float dropout_p, Tensor? seed, bool need_weight,"
    " bool need_bias) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)


def _layer_norm_forward(
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...]:
    output, _, mean, rstd = _forward(input, None, normalized_shape, weight, bias, eps, 0.0, None)
    return output, mean, rstd


def _layer_norm_backward(
    grad: Tensor,
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    wants: Sequence[bool],
) -> tuple[Tensor, ...]:
    _, dinput, dweight, dbias = _backward(
        grad, None, input, normalized_shape, weight, mean, rstd, 0.0, None, wants[1], wants[2]
    )
    return dinput, dweight, dbias


def _add_layer_norm_forward(
    input: Tensor,
    residual: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, ...]:
    return _forward(  # type: ignore[no-any-return]
        input, residual, normalized_shape, weight, bias, eps, dropout_p, seed
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
) -> tuple[Tensor, ...]:
    dinput, dresidual, dweight, dbias = _backward(
        grad, grad_sum, sum, normalized_shape, weight, mean, rstd, dropout_p, seed,
        wants[2], wants[3],
    )  # fmt: skip
    return dinput if dropout_p > 0.0 else dresidual, dresidual, dweight, dbias


register("layer_norm", "triton", _layer_norm_forward, _layer_norm_backward)
register("add_layer_norm", "triton", _add_layer_norm_forward, _add_layer_norm_backward)


def layer_norm(
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    if input.numel() == 0:
        return reference.layer_norm(input, normalized_shape, weight, bias, eps)
    if needs_function(input, weight, bias):
        return LayerNorm.apply("triton", input, normalized_shape, weight, bias, eps)  # type: ignore[no-untyped-call, no-any-return]
    return _layer_norm_forward(input, normalized_shape, weight, bias, eps)[0]


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    arguments = (input, residual, normalized_shape, weight, bias, eps, dropout_p, seed)
    if input.numel() == 0:
        return reference.add_layer_norm(*arguments)
    if needs_function(input, residual, weight, bias):
        return AddLayerNorm.apply("triton", *arguments)  # type: ignore[no-untyped-call, no-any-return]
    normalized, total, _, _ = _add_layer_norm_forward(*arguments)
    return normalized, total
