"""The specification: one short eager function per op, every edge case decided.

Every backend's entry has the signature of the function of the same name here.
"""

from .attention import attention, taking_query_lengths, values_are_known, visible_places
from .chunked_loss import chunked_gradients, chunked_loss, recomputed_losses, register_losses
from .cross_entropy import cross_entropy, linear_cross_entropy
from .dropout import dropout
from .feed_forward import feed_forward
from .layer_norm import (
    add_layer_norm,
    add_rms_norm,
    annotated_layer_norm,
    layer_norm,
    rms_norm,
)
from .linear import ACTIVATIONS, activate, linear

#: The ops, in the order in which they are told of. Everything else that is kept by op follows.
OPS = (
    "layer_norm",
    "add_layer_norm",
    "rms_norm",
    "add_rms_norm",
    "attention",
    "linear",
    "feed_forward",
    "cross_entropy",
    "linear_cross_entropy",
)

__all__ = [
    "ACTIVATIONS",
    "OPS",
    "activate",
    "add_layer_norm",
    "add_rms_norm",
    "annotated_layer_norm",
    "attention",
    "chunked_gradients",
    "chunked_loss",
    "cross_entropy",
    "dropout",
    "feed_forward",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "recomputed_losses",
    "register_losses",
    "rms_norm",
    "taking_query_lengths",
    "values_are_known",
    "visible_places",
]
