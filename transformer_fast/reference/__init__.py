"""The specification: one short eager function per op, every edge case decided.

Every backend's entry has the signature of the function of the same name here.
"""

from .attention import attention as attention
from .attention import taking_query_lengths as taking_query_lengths
from .attention import values_are_known as values_are_known
from .attention import visible_places as visible_places
from .chunked_loss import chunked_gradients as chunked_gradients
from .chunked_loss import chunked_loss as chunked_loss
from .chunked_loss import recomputed_losses as recomputed_losses
from .chunked_loss import register_losses as register_losses
from .cross_entropy import cross_entropy as cross_entropy
from .cross_entropy import linear_cross_entropy as linear_cross_entropy
from .dropout import dropout as dropout
from .feed_forward import feed_forward as feed_forward
from .layer_norm import add_layer_norm as add_layer_norm
from .layer_norm import add_rms_norm as add_rms_norm
from .layer_norm import annotated_layer_norm as annotated_layer_norm
from .layer_norm import layer_norm as layer_norm
from .layer_norm import rms_norm as rms_norm
from .linear import ACTIVATIONS as ACTIVATIONS
from .linear import activate as activate
from .linear import linear as linear

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
