"""feed_forward on Triton."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .... import reference
from ....functional.feed_forward import BACKWARD, TRAINING, feed_forward_on
from .define import implement


def _forward(*arguments: Any) -> tuple[Tensor | None, ...]:
    from ..feed_forward import forward

    return forward(*arguments)


def _backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    from ..feed_forward import backward

    return backward(*arguments)


implement(TRAINING, _forward)
implement(BACKWARD, _backward)
_run = feed_forward_on("triton")


def feed_forward(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    arguments = (input, weight1, bias1, weight2, bias2, activation, dropout_p, seed)
    if input.numel() == 0 or weight1.numel() == 0 or weight2.numel() == 0:
        return reference.feed_forward(*arguments)
    return _run(*arguments)
