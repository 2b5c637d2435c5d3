"""The linear layer: the public function and its checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..dispatch import Call, lookup, run
from ..fast_path import entry
from ..ops.arguments import LinearArguments
from ..ops.autograd import wants_grad
from ._check import (
    are_tensors,
    autocast,
    casts_itself,
    defers_to_torch,
    named_activation,
    require_same_device,
    require_tensor,
    same_error_as,
)

__all__ = ["linear"]

_enter = entry("linear")


def weight_problem(
    names: tuple[str, str, str], columns: int, weight: Tensor, bias: Tensor | None
) -> str | None:
    """Returns an error message if the shapes of a linear layer do not fit, else None. ``names``: of
    input, weight and bias."""
    sizes = weight.shape
    if len(sizes) != 2:
        return (
            f"{names[1]} must be a matrix (out_features, in_features), not of shape {list(sizes)}"
        )
    if sizes[1] != columns:
        return (
            f"{names[0]} has {columns} features, but {names[1]} of shape {list(sizes)} takes "
            f"{sizes[1]}"
        )
    if bias is not None and bias.shape != sizes[:1]:
        return (
            f"{names[2]} must have shape [{sizes[0]}], one value per row of {names[1]}, not "
            f"{list(bias.shape)}"
        )
    return None


def dtype_problem(input: Tensor, **others: Tensor | None) -> str | None:
    """Returns an error message if an argument has another dtype than input, else None."""
    dtype = input.dtype
    for name, tensor in others.items():
        if tensor is not None and tensor.dtype != dtype:
            return f"{name} must have the dtype of input, {dtype}, not {tensor.dtype}"
    return None


def require_shape_of_result(input: Tensor, weight: Tensor, residual: Tensor) -> None:
    shape = (*input.shape[:-1], weight.shape[0])
    if residual.shape != shape:
        raise ValueError(
            f"residual must have the shape of the result, {list(shape)}, not {list(residual.shape)}"
        )


def _bias_row(bias: Tensor, columns: int) -> Tensor:
    """Returns the bias with one value per column if it broadcasts to that, else unchanged."""
    if bias.numel() == 1:
        return bias.reshape(1).expand(columns)
    if bias.numel() == columns == bias.shape[-1]:
        return bias.reshape(columns)
    return bias


def _fits(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Fast validity check, for small inputs; on failure the full check raises the precise error."""
    sizes, rows = input.shape, weight.shape
    if len(rows) != 2 or len(sizes) == 0 or sizes[-1] != rows[1]:
        return False
    dtype, device = input.dtype, input.device
    if weight.dtype != dtype or weight.device != device:
        return False
    if bias is None:
        return True
    columns = bias.shape
    return (
        len(columns) == 1
        and columns[0] == rows[0]
        and bias.dtype == dtype
        and bias.device == device
    )


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | Callable[[Tensor], Tensor] | None = None,
    residual: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Linear layer with optional activation and residual: ``act(x W^T + b) + residual``.

    Args:
        input: (..., in_features).
        weight: (out_features, in_features), like `torch.nn.Linear.weight`; or (in_features,), for a
            result without the last dimension.
        bias: (out_features,), or broadcastable to it; None: zeros.
        activation: "relu", "gelu" (erf), "gelu_tanh", "silu", a callable, or None.
        residual: tensor of the result's shape, added last; None: no residual.
        backend: None: the dispatcher chooses; a named backend never falls back.

    Raises:
        RuntimeError, ValueError: shapes, dtypes or devices do not match; the activation is unknown.
        NotImplementedError: the named backend does not support the call.

    Source: "Attention Is All You Need", section 3.2.2 (projections).
    """
    if backend is None and residual is None:
        result = _enter(input, weight, bias, activation)
        if result is not None:
            return result  # type: ignore[no-any-return]
    tensors = (input, weight, bias, residual)
    replay, insert = lookup("linear", tensors, (activation, backend))
    if replay is not None:
        return replay(*tensors)  # type: ignore[no-any-return]
    if defers_to_torch("linear", backend, *tensors):
        return reference.linear(input, weight, bias, activation, residual)
    arguments = LinearArguments(input, weight, bias, activation, residual)
    result = run(check_linear(arguments, backend), backend, insert)
    return result.squeeze(-1) if weight.dim() == 1 else result  # type: ignore[no-any-return]


def check_linear(given: LinearArguments, backend: str | None = None) -> Call:
    """A 1-D weight becomes a matrix of one row."""
    input, weight, bias, activation, residual = given
    if isinstance(weight, Tensor) and weight.dim() == 1 and weight.shape == input.shape[-1:]:
        weight = weight.unsqueeze(0)
        residual = None if residual is None else residual.unsqueeze(-1)
    tensors: tuple[Tensor | None, ...] = (input, weight, bias, residual)
    if not are_tensors((input, weight), (bias, residual)):
        require_tensor("linear", "input", 1, input)
        require_tensor("linear", "weight", 2, weight)
        require_tensor("linear", "bias", 3, bias, optional=True)
        require_tensor("linear", "residual", None, residual, optional=True)
    if activation is not None:
        activation = named_activation(activation)
    if cast := not casts_itself("linear", input, backend):
        tensors = autocast(*tensors)
    elif residual is not None:
        tensors = (input, weight, bias, *autocast(residual))
    input, weight, bias, residual = tensors  # type: ignore[assignment]
    if residual is not None or not _fits(input, weight, bias):
        try:
            require_same_device("input", input, weight=weight, bias=bias, residual=residual)
        except RuntimeError as error:
            same_error_as(partial(F.linear, input, weight, bias), error)
        if bias is not None and bias.shape != weight.shape[:1] and weight.dim() == 2:
            bias = _bias_row(bias, weight.shape[0])
        if input.dim() == 0:
            wrong: str | None = "input must have at least one dimension, not 0"
        else:
            wrong = weight_problem(("input", "weight", "bias"), input.shape[-1], weight, bias)
        if cast:
            wrong = wrong or dtype_problem(input, weight=weight, bias=bias)
        if wrong is not None:
            # Not a lambda, whose cell variables would slow down every call.
            same_error_as(partial(F.linear, input, weight, bias), ValueError(wrong))
        if residual is not None:
            require_shape_of_result(input, weight, residual)
            wrong = dtype_problem(input, residual=residual) if cast else None
            if wrong is not None:
                raise ValueError(wrong)
    tensors = (input, weight, bias, residual)
    arguments = LinearArguments(input, weight, bias, activation, residual)
    return Call("linear", tensors, wants_grad(*tensors), arguments)
