"""cross_entropy and linear_cross_entropy on Triton."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .... import reference
from ....autograd import CrossEntropy, needs_function, register
from .define import define
from .linear import linear


def _run(
    input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, ...]:
    from ..cross_entropy import cross_entropy_forward

    return cross_entropy_forward(input, target, ignore_index, label_smoothing)


def _run_backward(
    grad: Tensor,
    input: Tensor,
    target: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    from ..cross_entropy import cross_entropy_backward

    return cross_entropy_backward(grad, input, target, lse, ignore_index, label_smoothing)


_forward = define(
    "triton_cross_entropy(Tensor input, Tensor target, int ignore_index, float label_smoothing)"
    " -> (Tensor, Tensor)",
    _run,
)
_backward = define(
    "triton_cross_entropy_backward(Tensor grad, Tensor input, Tensor target, Tensor lse,"
    " int ignore_index, float label_smoothing) -> Tensor",
    _run_backward,
)


def _cross_entropy_forward(
    input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, ...]:
    return _forward(input, target, ignore_index, label_smoothing)  # type: ignore[no-any-return]


def _cross_entropy_backward(
    grad: Tensor,
    input: Tensor,
    target: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    wants: Sequence[bool],
) -> tuple[Tensor, ...]:
    return (_backward(grad, input, target, lse, ignore_index, label_smoothing),)


register("cross_entropy", "triton", _cross_entropy_forward, _cross_entropy_backward)


def cross_entropy(
    input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    if input.numel() == 0:
        return reference.cross_entropy(input, target, ignore_index, label_smoothing)
    if needs_function(input):
        return CrossEntropy.apply("triton", input, target, ignore_index, label_smoothing)  # type: ignore[no-untyped-call, no-any-return]
    losses: Tensor = _forward(input, target, ignore_index, label_smoothing)[0]
    return losses


def _linear_losses(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    logits = linear(input, weight, bias, None, None)
    return cross_entropy(logits, target, ignore_index, label_smoothing)


reference.register_losses("triton", _linear_losses)


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    summed: bool = False,
) -> Tensor:
    """`linear`, then `cross_entropy`, of as many rows at a time as `in_parts` says."""
    return reference.in_parts(
        "triton", input, weight, bias, target, ignore_index, label_smoothing, summed
    )
