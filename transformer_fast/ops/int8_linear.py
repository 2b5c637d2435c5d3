"""Operators of the linear layer and the feed-forward network with 8-bit products, and their rules."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .arguments import Int8FeedForwardArguments, Int8LinearArguments
from .linear import CODES
from .operator import Operator, Rule

#: Largest number of columns of a weight: sums of more products of 8 bits could overflow 32 bits.
DEEPEST = 65536

# A row's scale depends on all of its values, so inner dimensions cannot be sharded. ``packed``: the
# backend's packed copy of a weight; operators without this argument look it up.
_LINEAR = Rule("input:...i weight:oi scale:o bias:o residual:...o factors:i", "...o", ".o", ".oi")
LINEAR = Operator(
    "int8_linear(Tensor input, Tensor weight, Tensor scale, Tensor? bias, Tensor? residual,"
    " Tensor? factors, int activation) -> Tensor",
    _LINEAR,
)
LINEAR_PACKED = Operator(
    "int8_linear_packed(Tensor input, Tensor weight, Tensor scale, Tensor? packed, Tensor? bias,"
    " Tensor? residual, Tensor? factors, int activation) -> Tensor",
    _LINEAR,
)
_FEED_FORWARD = Rule(
    "input:...m weight1:fm scale1:f bias1:f weight2:of scale2:o bias2:o factors1:m factors2:f",
    "...o", ".o", ".mf .fo",
)  # fmt: skip
FEED_FORWARD = Operator(
    "int8_feed_forward(Tensor input, Tensor weight1, Tensor scale1, Tensor? bias1, Tensor weight2,"
    " Tensor scale2, Tensor? bias2, Tensor? factors1, Tensor? factors2, int activation) -> Tensor",
    _FEED_FORWARD,
)
FEED_FORWARD_PACKED = Operator(
    "int8_feed_forward_packed(Tensor input, Tensor weight1, Tensor scale1, Tensor? packed1,"
    " Tensor? bias1, Tensor weight2, Tensor scale2, Tensor? packed2, Tensor? bias2,"
    " Tensor? factors1, Tensor? factors2, int activation) -> Tensor",
    _FEED_FORWARD,
)


def int8_linear_on(backend: str) -> Callable[[Int8LinearArguments], Tensor]:
    """Returns the function that the dispatcher runs for a backend with operators."""

    def run(arguments: Int8LinearArguments) -> Tensor:
        input, weight, scale, bias, activation, residual, factors = arguments
        return LINEAR.of[backend](  # type: ignore[no-any-return]
            input, weight, scale, bias, residual, factors, CODES[activation]
        )

    return run


def int8_feed_forward_on(backend: str) -> Callable[[Int8FeedForwardArguments], Tensor]:
    def run(arguments: Int8FeedForwardArguments) -> Tensor:
        *tensors, activation, factors1, factors2 = arguments
        return FEED_FORWARD.of[backend](*tensors, factors1, factors2, CODES[activation])  # type: ignore[no-any-return]

    return run
