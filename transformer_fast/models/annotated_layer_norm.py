"""The layer norm of The Annotated Transformer, which is not the usual one."""

from __future__ import annotations

import torch
from torch import Tensor

from ..functional.layer_norm import annotated_layer_norm


class AnnotatedLayerNorm(torch.nn.Module):
    """``y = weight * (x - mean(x)) / (std(x) + eps) + bias`` with the unbiased std.

    `LayerNorm` divides by ``sqrt(var + eps)`` with the biased variance; weights trained with one
    need the same one later. It runs on the kernels that `RMSNorm` runs on.

    Args:
        d_model: size M of the last dimension, at least 2 (one value has no unbiased std).
        eps: added to the std, outside the root.

    Source: "The Annotated Transformer" (Rush 2018; Huang et al. 2022), class LayerNorm.
    """

    def __init__(
        self,
        d_model: int,
        eps: float = 1e-6,
        *,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if d_model < 2:
            raise ValueError(f"d_model must be at least 2 for an unbiased std, not {d_model}")
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(d_model, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(d_model, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return annotated_layer_norm(input, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
