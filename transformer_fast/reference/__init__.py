"""The reference implementation: one short eager function per op, which defines every edge case.

A backend implements an op by a function of the record with the same arguments (`ops.arguments`).
"""

from .attention import *
from .cross_entropy import *
from .dropout import *
from .feed_forward import *
from .int8_linear import *
from .layer_norm import *
from .layer_norm import __all__ as _norms
from .layer_norm import add_annotated_layer_norm as add_annotated_layer_norm
from .layer_norm import annotated_layer_norm as annotated_layer_norm
from .linear import *

#: Ops with gradients.
DIFFERENTIABLE = (
    *_norms,
    "attention",
    "linear",
    "feed_forward",
    "cross_entropy",
    "linear_cross_entropy",
)
#: All ops, in the order of every list and table by op.
OPS = (*DIFFERENTIABLE, "int8_linear", "int8_feed_forward")
#: Ops that are dispatched like `OPS`, but have no row of their own in the op table.
ANNOTATED = ("annotated_layer_norm", "add_annotated_layer_norm")
