"""The feed-forward network: the public function and its checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..dispatch import Call, lookup, run
from ..fast_path import entry
from ..ops.arguments import FeedForwardArguments
from ..ops.autograd import wants_grad
from ..reference.linear import activate
from ._check import (
    are_tensors,
    autocast,
    casts_itself,
    defers_to_torch,
    named_activation,
    require_probability,
    require_rows,
    require_same_device,
    require_tensor,
)
from .linear import dtype_problem, weight_problem

__all__ = ["feed_forward"]

_enter = entry("feed_forward")


def feed_forward(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    activation: str | Callable[[Tensor], Tensor] = "relu",
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """The position-wise feed-forward network: ``dropout(act(x W1^T + b1)) W2^T + b2``.

    Args:
        input: (..., M).
        weight1: (F, M); bias1: (F,); None: zeros.
        weight2: (Mout, F); bias2: (Mout,); None: zeros.
        activation: "relu", "gelu" (erf), "gelu_tanh", "silu", or a callable.
        dropout_p: probability in [0, 1] of dropping a hidden value; 0: no dropout.
        backend: None: the dispatcher chooses; a named backend never falls back.

    Raises:
        RuntimeError, ValueError: shapes, dtypes or devices do not match, the
            activation is unknown, or dropout_p is outside [0, 1].
        NotImplementedError: the named backend does not support the call.

    Source: "Attention Is All You Need", section 3.3.
    """
    if backend is None:
        result = _enter(input, weight1, bias1, weight2, bias2, activation, dropout_p)
        if result is not None:
            return result  # type: ignore[no-any-return]
    given = (input, weight1, bias1, weight2, bias2)
    replay, insert = lookup("feed_forward", given, (activation, dropout_p, backend))
    if replay is not None:
        return replay(*given)  # type: ignore[no-any-return]
    if defers_to_torch("feed_forward", backend, *given):
        hidden = activate(F.linear(input, weight1, bias1), named_activation(activation))
        return F.linear(F.dropout(hidden, dropout_p), weight2, bias2)
    arguments = FeedForwardArguments(*given, activation, dropout_p)
    return run(check_feed_forward(arguments, backend), backend, insert)  # type: ignore[no-any-return]


def check_feed_forward(given: FeedForwardArguments, backend: str | None = None) -> Call:
    input, weight1, bias1, weight2, bias2, activation, dropout_p, _ = given
    if not are_tensors((input, weight1, weight2), (bias1, bias2)):
        require_tensor("feed_forward", "input", 1, input)
        require_tensor("feed_forward", "weight1", 2, weight1)
        require_tensor("feed_forward", "bias1", 3, bias1, optional=True)
        require_tensor("feed_forward", "weight2", 4, weight2)
        require_tensor("feed_forward", "bias2", 5, bias2, optional=True)
    if activation is None:
        raise ValueError("activation must be a name or a callable, not None")
    activation = named_activation(activation)
    require_rows("input", input)
    p = require_probability("feed_forward", "dropout_p", dropout_p)
    wrong = weight_problem(("input", "weight1", "bias1"), input.shape[-1], weight1, bias1)
    if wrong is None:
        names = ("the hidden block", "weight2", "bias2")
        wrong = weight_problem(names, weight1.shape[0], weight2, bias2)
    if wrong is not None:
        raise ValueError(wrong)
    require_same_device("input", input, weight1=weight1, bias1=bias1, weight2=weight2, bias2=bias2)
    tensors: tuple[Any, ...] = given.tensors()
    if not casts_itself("feed_forward", input, backend):
        tensors = x, w1, b1, w2, b2 = autocast(*tensors)
        wrong = dtype_problem(x, weight1=w1, bias1=b1, weight2=w2, bias2=b2)  # type: ignore[arg-type]
        if wrong is not None:
            raise ValueError(wrong)
    arguments = FeedForwardArguments(*tensors, activation, p)  # type: ignore[call-arg]
    return Call("feed_forward", tensors, wants_grad(*tensors), arguments)
