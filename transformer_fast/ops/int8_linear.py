"""Operators of the linear layer and the feed-forward network with 8-bit products, and their rules."""

from __future__ import annotations

from .operator import Operator, Rule

# A row's scale depends on all of its values, so inner dimensions cannot be cut. ``packed``: the
# backend's own copy of a weight, which its operators without it look up.
_LINEAR = Rule("input:...i weight:oi scale:o bias:o residual:...o", "...o", ".o", ".oi")
LINEAR = Operator(
    "int8_linear(Tensor input, Tensor weight, Tensor scale, Tensor? bias, Tensor? residual,"
    " int activation) -> Tensor",
    _LINEAR,
)
LINEAR_PACKED = Operator(
    "int8_linear_packed(Tensor input, Tensor weight, Tensor scale, Tensor? packed, Tensor? bias,"
    " Tensor? residual, int activation) -> Tensor",
    _LINEAR,
)
_FEED_FORWARD = Rule(
    "input:...m weight1:fm scale1:f bias1:f weight2:of scale2:o bias2:o", "...o", ".o", ".mf .fo"
)
FEED_FORWARD = Operator(
    "int8_feed_forward(Tensor input, Tensor weight1, Tensor scale1, Tensor? bias1, Tensor weight2,"
    " Tensor scale2, Tensor? bias2, int activation) -> Tensor",
    _FEED_FORWARD,
)
FEED_FORWARD_PACKED = Operator(
    "int8_feed_forward_packed(Tensor input, Tensor weight1, Tensor scale1, Tensor? packed1,"
    " Tensor? bias1, Tensor weight2, Tensor scale2, Tensor? packed2, Tensor? bias2, int activation)"
    " -> Tensor",
    _FEED_FORWARD,
)
