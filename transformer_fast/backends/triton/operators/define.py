"""Definition of operators."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .... import memo
from ....functional import _operator
from .. import plans

_is_compiling = torch.compiler.is_compiling
_library = torch.library.Library("transformer_fast", "FRAGMENT")
_RUNTIME = __name__.rpartition(".operators.")[0] + ".runtime"


def define(schema: str, implementation: Callable[..., Any]) -> Any:
    """Define the operator ``triton_...`` of that schema; what is returned calls it (`_implement`)."""
    _library.define(schema)
    name = schema.partition("(")[0]
    _operator.register_fakes(name)
    return _implement(getattr(torch.ops.transformer_fast, name).default, implementation)


def implement(operator: _operator.Operator, implementation: Callable[..., Any]) -> None:
    """Add this backend's overload of the operator."""
    operator.of["triton"] = _implement(operator.define("triton"), implementation)


def _implement(overload: Any, implementation: Callable[..., Any]) -> Any:
    """Implements an operator; what is returned calls it.

    Where the implementation gives None the operator gives `absent` of its first argument; who calls it
    by what is returned here may get either. While launches are recorded (`runtime.record_launches`) the
    implementation itself is called, for torch would answer meta tensors with the fake.
    """
    planned = plans.Planned(implementation)

    def operator(*arguments: Any) -> Any:
        results = planned(*arguments)
        if type(results) is not tuple:
            return results
        return tuple([absent(arguments[0]) if one is None else one for one in results])

    for place in ("CUDA", "CPU"):
        _library.impl(overload.name().partition("::")[2], operator, place)
    required = sum(not one.has_default_value() for one in overload._schema.arguments)

    def call(*arguments: Any) -> Any:
        if _is_compiling():
            return overload(*arguments)
        # PyTorch leaves defaults at the end out, too, and plans are kept by what it hands over.
        while len(arguments) > required and arguments[-1] is None:
            arguments = arguments[:-1]
        if memo.quiet():
            # PyTorch's way to an operator in Python takes longer than all else.
            result = planned.replay(arguments)
            if result is not NotImplemented:
                return result
        runtime = sys.modules.get(_RUNTIME)
        if runtime is not None and (runtime.recording() or plans.recorder() is not None):
            return implementation(*arguments)
        return overload(*arguments)

    return call


def absent(like: Tensor) -> Tensor:
    """Stands for a result that was not asked for."""
    return like.new_empty((0,))
