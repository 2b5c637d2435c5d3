"""Drop-in `torch.nn.Linear`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..functional.linear import linear
from .drop_in import DropIn
from .tracing import by_torch, is_torchs


class Linear(DropIn, torch.nn.Linear):
    """`torch.nn.Linear`, run by `transformer_fast.functional.linear`.

    ``y = x W^T + b`` over the last dimension: (*, in_features) to (*, out_features), W of shape
    (out_features, in_features). Arguments, attributes and state_dict are torch's.

    Source: "Attention Is All You Need", sections 3.2.2 (projections) and 3.4.
    """

    def forward(self, input: Tensor) -> Tensor:
        # Module.__getattr__ takes a tenth of a small call.
        parameters = self._parameters
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:  # parametrised
            weight, bias = self.weight, self.bias  # type: ignore[assignment]
        if type(input) is not Tensor and is_torchs(input):
            return by_torch(self, super().forward, input)
        return linear(input, weight, bias)  # type: ignore[arg-type]
