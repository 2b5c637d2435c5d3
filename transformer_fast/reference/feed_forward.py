"""Position-wise feed-forward network ("Attention Is All You Need", section 3.3).

FFN(x) = dropout(activation(x W1^T + b1)) W2^T + b2
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import linear

from .dropout import dropout
from .linear import activate

__all__ = ["feed_forward"]


def feed_forward(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str | Callable[[Tensor], Tensor],
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    hidden = activate(linear(input, weight1, bias1), activation)
    return linear(dropout(hidden, dropout_p, seed), weight2, bias2)
