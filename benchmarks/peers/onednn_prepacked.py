"""oneDNN's linear with weights packed beforehand: what torch.compile uses for frozen models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import Offer

NAME = "oneDNN prepacked"

_POST_OPS: dict[str | None, tuple[str, str]] = {
    None: ("none", ""),
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
}


def available() -> str | None:
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN"
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this torch has no mkldnn._linear_pointwise"
    return None


def _packed(
    weight: Tensor, bias: Tensor | None, activation: str | None, rows: int
) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    name, algorithm = _POST_OPS[activation]

    def run(x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, name, [], algorithm)

    return run


def op(op: str, arguments: tuple[Any, ...]) -> Offer:
    if op not in ("linear", "feed_forward"):
        return None
    x = arguments[0]
    if x.device.type != "cpu":
        return "it runs on cpu tensors"
    rows = x.numel() // x.shape[-1]
    if op == "linear":
        _, weight, bias, activation, residual = arguments
        first = _packed(weight, bias, activation, rows)
        if residual is None:
            return lambda x, *rest: first(x)
        return lambda x, *rest: first(x) + rest[-1]
    _, weight1, bias1, weight2, bias2, activation, dropout_p, _ = arguments
    if dropout_p:
        return "it has no dropout"
    first = _packed(weight1, bias1, activation, rows)
    second = _packed(weight2, bias2, None, rows)
    return lambda x, *rest: second(first(x))
