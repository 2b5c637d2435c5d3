"""Drop-in `torch.nn.CrossEntropyLoss`."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import functional
from .drop_in import DropIn
from .tracing import by_torch, is_torchs


class CrossEntropyLoss(DropIn, torch.nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss`, run by `transformer_fast.functional.cross_entropy`.

    ``(1 - s) * -log p[target] + s * mean of -log p`` with ``p = softmax(input)``, reduced over what
    is not ``ignore_index``. Arguments and attributes are torch's; with class weights, or
    probabilities as target, PyTorch computes.

    Source: "Attention Is All You Need", section 5.4.
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        if type(input) is not Tensor and is_torchs(input):
            return by_torch(self, super().forward, input, target)
        return functional.cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )
