"""`torch.nn.functional` with fused ops.

Ours: `cross_entropy`, `layer_norm`, `linear`, `rms_norm` and `scaled_dot_product_attention`, with
PyTorch's arguments and more; `add_layer_norm`, `add_rms_norm`, `feed_forward`, `linear_cross_entropy`
and `varlen_attn`. Every other name is `torch.nn.functional`'s own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as _torch_functional

from .attention import scaled_dot_product_attention, varlen_attn
from .cross_entropy import cross_entropy, linear_cross_entropy
from .feed_forward import feed_forward
from .layer_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from .linear import linear

if TYPE_CHECKING:
    from torch.nn.functional import *  # type: ignore[assignment]  # noqa: F403

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "cross_entropy",
    "feed_forward",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "rms_norm",
    "scaled_dot_product_attention",
    "varlen_attn",
]


if not TYPE_CHECKING:  # so that type checkers report names that do not exist

    def __getattr__(name: str) -> Any:
        try:
            return getattr(_torch_functional, name)
        except AttributeError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*__all__, *dir(_torch_functional)})
