"""A linear layer with activation and residual: activation(input @ weight.T + bias) + residual."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

__all__ = ["ACTIVATIONS", "activate", "linear"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


def activate(input: Tensor, activation: str | Callable[[Tensor], Tensor] | None) -> Tensor:
    if activation is None:
        return input
    return ACTIVATIONS[activation](input) if isinstance(activation, str) else activation(input)


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | Callable[[Tensor], Tensor] | None,
    residual: Tensor | None,
) -> Tensor:
    y = activate(F.linear(input, weight, bias), activation)
    return y if residual is None else y + residual
