"""cross_entropy and linear_cross_entropy on Triton."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from .... import reference
from ....functional.cross_entropy import BACKWARD, FORWARD, cross_entropy_on
from .define import implement
from .linear import linear


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    from ..cross_entropy import cross_entropy_forward

    return cross_entropy_forward(*arguments)


def _backward(*arguments: Any) -> Tensor:
    from ..cross_entropy import cross_entropy_backward

    return cross_entropy_backward(*arguments)


implement(FORWARD, _forward)
implement(BACKWARD, _backward)
_cross_entropy = cross_entropy_on("triton")


def cross_entropy(
    input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    run = _cross_entropy if input.numel() else reference.cross_entropy
    return run(input, target, ignore_index, label_smoothing)


reference.register_losses("triton", linear, cross_entropy)
linear_cross_entropy = partial(reference.in_parts, "triton")
