"""Public feed_forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .. import memo, small
from ..dispatch import Call
from ..reference.linear import ACTIVATIONS, activate
from ._check import (
    autocast,
    casts_itself,
    is_torchs,
    named_activation,
    require_activation,
    require_floating,
    require_optional_tensor,
    require_probability,
    require_same_device,
    require_tensor,
    require_unnamed,
    wants_grad,
)
from .linear import dtype_problem, weight_problem


def prepare_feed_forward(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    activation: str | Callable[[Tensor], Tensor] = "relu",
    dropout_p: float = 0.0,
    cast: bool = True,
) -> tuple[Call, tuple[Any, ...]]:
    """``cast``: whether to cast for autocast, which `casts_itself` has PyTorch's ops do."""
    require_tensor("feed_forward", "input", 1, input)
    require_tensor("feed_forward", "weight1", 2, weight1)
    require_optional_tensor("feed_forward", "bias1", 3, bias1)
    require_tensor("feed_forward", "weight2", 4, weight2)
    require_optional_tensor("feed_forward", "bias2", 5, bias2)
    if activation is None:
        raise ValueError("activation must be a name or a callable, not None")
    require_activation(activation)
    require_floating("input", input)
    if input.dim() == 0:
        raise ValueError("input must have at least one dimension, not 0")
    p = require_probability("feed_forward", "dropout_p", dropout_p)
    wrong = weight_problem(("input", "weight1", "bias1"), input.shape[-1], weight1, bias1)
    if wrong is None:
        names = ("the hidden block", "weight2", "bias2")
        wrong = weight_problem(names, weight1.shape[0], weight2, bias2)
    if wrong is not None:
        raise ValueError(wrong)
    require_same_device("input", input, weight1=weight1, bias1=bias1, weight2=weight2, bias2=bias2)
    tensors = (input, weight1, bias1, weight2, bias2)
    if cast:
        tensors = autocast(*tensors)  # type: ignore[assignment]
    x, w1, b1, w2, b2 = tensors
    wrong = dtype_problem(x, weight1=w1, bias1=b1, weight2=w2, bias2=b2)  # type: ignore[arg-type]
    if cast and wrong is not None:
        raise ValueError(wrong)
    activation = named_activation(activation)  # type: ignore[assignment]
    call = Call("feed_forward", tensors, wants_grad(*tensors), p, activation)
    return call, (*tensors, activation, p, None)


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
        weight1: (F, M); bias1: (F,) or None for zeros.
        weight2: (Mout, F); bias2: (Mout,) or None for zeros.
        activation: "relu", "gelu" (erf), "gelu_tanh", "silu", or a callable.
        dropout_p: probability in [0, 1] of dropping a hidden value; 0 means none.
        backend: None lets the dispatcher choose; a name never falls back.

    Raises:
        RuntimeError, ValueError: shapes, dtypes or devices that do not fit, an unknown
            activation, dropout_p outside [0, 1].
        NotImplementedError: the named backend cannot take the call.

    Source: "Attention Is All You Need", section 3.3.
    """
    if (
        backend is None
        and dropout_p == 0.0
        and type(activation) is str
        and activation in ACTIVATIONS
        and small.feed_forward(input, weight1, bias1, weight2, bias2)
    ):
        hidden = ACTIVATIONS[activation](F.linear(input, weight1, bias1))
        return F.linear(hidden, weight2, bias2)
    tensors = (input, weight1, bias1, weight2, bias2)
    key = memo.key_of("feed_forward", tensors, (activation, dropout_p, backend))
    if (again := memo.find(key)) is not None:
        return again(*tensors)
    if is_torchs(input, weight1, bias1, weight2, bias2):
        require_unnamed("feed_forward", backend)
        require_activation(activation)
        hidden = activate(F.linear(input, weight1, bias1), activation)
        return F.linear(F.dropout(hidden, dropout_p), weight2, bias2)
    call, arguments = prepare_feed_forward(
        input,
        weight1,
        bias1,
        weight2,
        bias2,
        activation=activation,
        dropout_p=dropout_p,
        cast=not casts_itself("feed_forward", input, backend),
    )
    return memo.run(key, tensors, call, arguments, backend)
