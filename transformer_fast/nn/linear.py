"""Drop-in `torch.nn.Linear`."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import functional
from .swapped import Swapped
from .tracing import by_torch, is_torchs


class Linear(Swapped, torch.nn.Linear):
    """`torch.nn.Linear`, run by `transformer_fast.functional.linear`.

    ``y = x W^T + b`` over the last dimension: (*, in_features) to (*, out_features), W of shape
    (out_features, in_features). Arguments, attributes and state_dict are torch's.

    Source: "Attention Is All You Need", sections 3.2.2 (projections) and 3.4.
    """

    def forward(self, input: Tensor) -> Tensor:
        if is_torchs(input):
            return by_torch(self, super().forward, input)
        return functional.linear(input, self.weight, self.bias)
