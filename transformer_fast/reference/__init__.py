"""The specification: one short eager function per op, every edge case decided.

Every backend's entry has the signature of the function of the same name here.
"""

from .attention import attention
from .dropout import dropout
from .feed_forward import feed_forward
from .layer_norm import add_layer_norm, layer_norm
from .linear import activate, linear

__all__ = [
    "activate",
    "add_layer_norm",
    "attention",
    "dropout",
    "feed_forward",
    "layer_norm",
    "linear",
]
