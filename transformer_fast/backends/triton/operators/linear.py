"""linear on Triton."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .... import reference
from ....autograd import Linear, needs_function, register
from .define import define, given


def _run(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    save: bool,
) -> tuple[Tensor, ...]:
    from ..linear import linear_forward

    output, z = linear_forward(input, weight, bias, activation, residual, save)
    return output, given(z, output)


def _run_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    activation: str | None,
    z: Tensor,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor | None, ...]:
    from ..linear import linear_backward

    return linear_backward(grad, input, weight, activation, z, need_input, need_weight, need_bias)


_forward = define(
    "triton_linear(Tensor input, Tensor weight, Tensor? bias, str? activation, Tensor? residual,"
    " bool save) -> (Tensor, Tensor)",
    _run,
)
_backward = define(
    "triton_linear_backward(Tensor grad, Tensor input, Tensor weight, str? activation, Tensor z,"
    " bool need_input, bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor)",
    _run_backward,
)


def _linear_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
) -> tuple[Tensor, ...]:
    save = activation is not None
    return _forward(input, weight, bias, activation, residual, save)  # type: ignore[no-any-return]


def _linear_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    activation: str | None,
    preactivation: Tensor,
    wants: Sequence[bool],
) -> tuple[Tensor, ...]:
    return _backward(grad, input, weight, activation, preactivation, *wants)  # type: ignore[no-any-return]


register("linear", "triton", _linear_forward, _linear_backward)


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
) -> Tensor:
    if input.numel() == 0 or weight.numel() == 0:
        return reference.linear(input, weight, bias, activation, residual)
    if needs_function(input, weight, bias, residual):
        return Linear.apply("triton", input, weight, bias, activation, residual)[0]  # type: ignore[no-untyped-call, no-any-return]
    output: Tensor = _forward(input, weight, bias, activation, residual, False)[0]
    return output
