"""Triton's overloads of the operators (``torch.ops.transformer_fast.<op>.triton``).

Also has the functions that the dispatcher calls. Triton is imported by the first call, not here. Only
the norms' operators support empty tensors; for the others these functions call the reference.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import reference
from ..._context import no_active_modes
from ...ops.attention import attention_on
from ...ops.chunked_loss import chunked_loss, register_losses
from ...ops.cross_entropy import cross_entropy_on
from ...ops.feed_forward import feed_forward_on
from ...ops.linear import linear_on
from ...ops.operator import OPERATORS, Operator
from . import plans

_is_compiling = torch.compiler.is_compiling
_library = torch.library.Library("transformer_fast", "FRAGMENT")
_PACKAGE = __name__.rpartition(".")[0]


def _implement(operator: Operator, implementation: Callable[..., Any]) -> None:
    """Registers this backend's overload of the operator.

    If the implementation returns None for a result, the overload returns `absent` of its first
    argument; ``operator.of["triton"]`` may return either. While launches are recorded
    (`runtime.instead_of_launching`), it calls the implementation directly, because for meta tensors
    PyTorch would call the fake implementation.
    """
    overload = operator.define("triton")
    planned = plans.Planned(implementation)

    def run(*arguments: Any) -> Any:
        results = planned(*arguments)
        if type(results) is not tuple:
            return results
        return tuple([absent(arguments[0]) if one is None else one for one in results])

    for place in ("CUDA", "CPU"):
        _library.impl(overload.name().partition("::")[2], run, place)
    required = sum(not one.has_default_value() for one in overload._schema.arguments)

    def call(*arguments: Any) -> Any:
        if _is_compiling():
            return overload(*arguments)
        # PyTorch's dispatcher omits trailing defaults, and keys of plans must match on both paths.
        while len(arguments) > required and arguments[-1] is None:
            arguments = arguments[:-1]
        if no_active_modes():
            # PyTorch's dispatch to a Python operator would take longer than everything else.
            result = planned.replay(arguments)
            if result is not NotImplemented:
                return result
        runtime = sys.modules.get(_PACKAGE + ".runtime")
        if runtime is not None and (runtime.recording() or plans.recorder() is not None):
            return implementation(*arguments)
        return overload(*arguments)

    operator.of["triton"] = call


def absent(like: Tensor) -> Tensor:
    """Returns the placeholder of a result that was not requested: an empty tensor."""
    return like.new_empty((0,))


def _later(module: str, function: str) -> Callable[..., Any]:
    """Returns a function that imports the module, and with it Triton, at the first call."""

    def run(*arguments: Any) -> Any:
        return getattr(importlib.import_module("." + module, _PACKAGE), function)(*arguments)

    return run


_IMPLEMENTATIONS = {
    "attention_training": _later("attention", "attention_forward"),
    "attention_backward": _later("attention_bwd", "attention_backward"),
    "layer_norm_training": _later("layer_norm", "forward"),
    "layer_norm_backward": _later("layer_norm", "backward"),
    "linear_training": _later("linear", "forward"),
    "linear_backward": _later("linear", "backward"),
    "feed_forward_training": _later("feed_forward", "forward"),
    "feed_forward_backward": _later("feed_forward", "backward"),
    "cross_entropy": _later("cross_entropy", "cross_entropy_forward"),
    "cross_entropy_backward": _later("cross_entropy", "cross_entropy_backward"),
}
for _name, _implementation in _IMPLEMENTATIONS.items():
    _implement(OPERATORS[_name], _implementation)

attention = attention_on("triton", query_lengths=True)


def _unless_empty(
    run: Callable[[Any], Tensor], reference: Callable[..., Tensor], *places: int
) -> Callable[[Any], Tensor]:
    """Wraps ``run`` so that it calls the reference if one of the arguments ``places`` is empty."""

    def either(arguments: Any) -> Tensor:
        empty = 0 in [arguments[place].numel() for place in places]
        return reference(*arguments) if empty else run(arguments)

    return either


linear = _unless_empty(linear_on("triton"), reference.linear, 0, 1)
feed_forward = _unless_empty(feed_forward_on("triton"), reference.feed_forward, 0, 1, 3)
cross_entropy = _unless_empty(cross_entropy_on("triton"), reference.cross_entropy, 0)
register_losses("triton", linear, cross_entropy)
linear_cross_entropy = partial(chunked_loss, "triton")
