"""Cross entropy on the CPU kernels, with and without the linear map before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import autograd
from ..autograd import CrossEntropy, LinearCrossEntropy, needs_function
from ..autograd.function import only
from ..dispatch import kernels
from ..reference import in_parts, register_losses

_ops = torch.ops.transformer_fast


def cross_entropy(
    input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    if needs_function(input):
        return CrossEntropy.apply("cpu", input, target, ignore_index, label_smoothing)
    return _ops.cpu_cross_entropy(input, target, ignore_index, label_smoothing)[0]


def _linear_losses(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    (own,) = (kernel for kernel in kernels("linear") if kernel.backend == "cpu")
    logits = own.run(input, weight, bias, None, None)
    return cross_entropy(logits, target, ignore_index, label_smoothing)


def _linear_gradients(
    grad: Tensor | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    rows: int,
    ignore_index: int,
    label_smoothing: float,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    result, *found = _ops.cpu_linear_cross_entropy_gradients(
        grad, input, weight, bias, target, rows, ignore_index, label_smoothing, *wants
    )
    return (result, *only(wants, found))  # type: ignore[return-value]


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    summed: bool = False,
) -> Tensor:
    """An operator makes a part of the logits at a time."""
    if input.dtype != torch.float32:
        return in_parts("cpu", input, weight, bias, target, ignore_index, label_smoothing, summed)
    if needs_function(input, weight, bias):
        return LinearCrossEntropy.apply(
            "cpu", input, weight, bias, target, ignore_index, label_smoothing
        )
    return _ops.cpu_linear_cross_entropy(
        input, weight, bias, target, ignore_index, label_smoothing
    )[0]


def _linear_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> tuple[Tensor, Tensor]:
    return _ops.cpu_linear_cross_entropy(  # type: ignore[no-any-return]
        input, weight, bias, target, ignore_index, label_smoothing
    )


def _linear_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    known: Tensor,
    ignore_index: int,
    label_smoothing: float,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return _ops.cpu_linear_cross_entropy_backward(  # type: ignore[no-any-return]
        grad, input, weight, bias, target, known, ignore_index, label_smoothing, *wants
    )


def _register() -> None:
    autograd.register("linear_cross_entropy", "cpu", _linear_forward, _linear_backward)
    register_losses("cpu", _linear_losses, _linear_gradients)


_register()
