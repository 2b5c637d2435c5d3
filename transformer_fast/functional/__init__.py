"""torch.nn.functional with our ops in place of torch's, plus those torch lacks.

Names that are not ours are `torch.nn.functional`'s own.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as _torch_functional

from .attention import scaled_dot_product_attention, varlen_attn
from .cross_entropy import cross_entropy, linear_cross_entropy
from .feed_forward import feed_forward
from .layer_norm import add_layer_norm, layer_norm
from .linear import linear

__all__ = [
    "add_layer_norm",
    "cross_entropy",
    "feed_forward",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "scaled_dot_product_attention",
    "varlen_attn",
]


def __getattr__(name: str) -> Any:
    return getattr(_torch_functional, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *dir(_torch_functional)})
