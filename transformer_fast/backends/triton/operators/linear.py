"""linear on Triton."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .... import reference
from ....functional.linear import BACKWARD, TRAINING, linear_on
from .define import implement


def _forward(*arguments: Any) -> tuple[Tensor | None, ...]:
    from ..linear import forward

    return forward(*arguments)


def _backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    from ..linear import backward

    return backward(*arguments)


implement(TRAINING, _forward)
implement(BACKWARD, _backward)
_run = linear_on("triton")


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
) -> Tensor:
    if input.numel() == 0 or weight.numel() == 0:
        return reference.linear(input, weight, bias, activation, residual)
    return _run(input, weight, bias, activation, residual)
