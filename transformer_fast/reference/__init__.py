"""The specification: one short eager function per op, every edge case decided.

Every backend's entry has the signature of the function of the same name here.
"""

from .attention import *
from .chunked_loss import *
from .cross_entropy import *
from .dropout import *
from .feed_forward import *
from .layer_norm import *
from .layer_norm import __all__ as _norms
from .layer_norm import annotated_layer_norm as annotated_layer_norm
from .linear import *

#: The ops, in the order in which they are told of. Everything else that is kept by op follows.
OPS = (
    *_norms,
    "attention",
    "linear",
    "feed_forward",
    "cross_entropy",
    "linear_cross_entropy",
)
