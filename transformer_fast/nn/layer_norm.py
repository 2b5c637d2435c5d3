"""Drop-in `torch.nn.LayerNorm` and `torch.nn.RMSNorm`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..functional.layer_norm import layer_norm, rms_norm
from .drop_in import DropIn
from .tracing import by_torch, is_torchs

__all__ = ["LayerNorm", "RMSNorm"]


class LayerNorm(DropIn, torch.nn.LayerNorm):
    """`torch.nn.LayerNorm`, run by `transformer_fast.functional.layer_norm`.

    ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the trailing
    ``normalized_shape``, with the biased variance and fp32 statistics for half types. Arguments,
    attributes and state_dict are torch's.

    Source: Ba, Kiros, Hinton 2016; "Attention Is All You Need", section 3.1.
    """

    def forward(self, input: Tensor) -> Tensor:
        # Module.__getattr__ takes a tenth of a small call.
        parameters = self._parameters
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:  # parametrised
            weight, bias = self.weight, self.bias
        if type(input) is not Tensor and is_torchs(input):
            return by_torch(self, super().forward, input)
        return layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(DropIn, torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`, run by `transformer_fast.functional.rms_norm`.

    ``y = x / sqrt(mean(x^2) + eps) * weight`` over the trailing ``normalized_shape``, with fp32
    statistics for half types. Arguments, attributes and state_dict are torch's.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """

    def forward(self, x: Tensor) -> Tensor:
        if is_torchs(x):
            return by_torch(self, super().forward, x)
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)
