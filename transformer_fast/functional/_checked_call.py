"""Checks the arguments of a public function and returns the call that it would dispatch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..dispatch import Call
from ..ops.arguments import RECORDS
from .attention import check_attention, scaled_dot_product_attention
from .cross_entropy import (
    check_cross_entropy,
    check_linear_cross_entropy,
    cross_entropy,
    linear_cross_entropy,
)
from .feed_forward import check_feed_forward, feed_forward
from .int8_linear import (
    check_int8_feed_forward,
    check_int8_linear,
    int8_feed_forward,
    int8_linear,
)
from .layer_norm import (
    add_annotated_layer_norm,
    add_layer_norm,
    add_rms_norm,
    annotated_layer_norm,
    check_add_layer_norm,
    check_annotated_layer_norm,
    check_layer_norm,
    layer_norm,
    rms_norm,
)
from .linear import check_linear, linear

#: Public function -> (its op, the function that checks the op's arguments record).
_OF_RECORD: dict[Callable[..., Any], tuple[str, Callable[..., Call]]] = {
    scaled_dot_product_attention: ("attention", check_attention),
    layer_norm: ("layer_norm", check_layer_norm),
    add_layer_norm: ("add_layer_norm", check_add_layer_norm),
    rms_norm: ("rms_norm", check_layer_norm),
    add_rms_norm: ("add_rms_norm", check_add_layer_norm),
    annotated_layer_norm: ("annotated_layer_norm", check_annotated_layer_norm),
    add_annotated_layer_norm: ("add_annotated_layer_norm", check_annotated_layer_norm),
    linear: ("linear", check_linear),
    feed_forward: ("feed_forward", check_feed_forward),
    int8_linear: ("int8_linear", check_int8_linear),
    int8_feed_forward: ("int8_feed_forward", check_int8_feed_forward),
}
#: Op -> its function. Some have no public name.
FUNCTIONS = {op: function for function, (op, _) in _OF_RECORD.items()}
#: Functions whose arguments differ from those of the op -> their check.
_OF_ARGUMENTS: dict[Callable[..., Any], Callable[..., Call]] = {
    cross_entropy: check_cross_entropy,
    linear_cross_entropy: check_linear_cross_entropy,
}


def checked_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    """Returns the `Call` that a public function builds from these arguments, or raises its error."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    backend = bound.arguments.pop("backend")
    if function in _OF_ARGUMENTS:
        return _OF_ARGUMENTS[function](**bound.arguments)
    op, check = _OF_RECORD[function]
    return check(RECORDS[op](**bound.arguments), backend)
