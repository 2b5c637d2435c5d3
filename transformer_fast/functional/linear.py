"""Public linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..dispatch import Call, select
from ._check import (
    autocast,
    named_activation,
    require_activation,
    require_floating,
    require_optional_tensor,
    require_same_device,
    require_tensor,
    wants_grad,
)


def check_weight(
    input_name: str,
    columns: int,
    weight_name: str,
    weight: Tensor,
    bias_name: str,
    bias: Tensor | None,
) -> None:
    if weight.dim() != 2:
        raise ValueError(
            f"{weight_name} must be a matrix (out_features, in_features), not of shape "
            f"{list(weight.shape)}"
        )
    if weight.shape[1] != columns:
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied: {input_name} has {columns} features and "
            f"{weight_name} takes {weight.shape[1]} ({weight.shape[0]}x{weight.shape[1]})"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(
            f"{bias_name} must have shape [{weight.shape[0]}], one value per row of {weight_name}, "
            f"not {list(bias.shape)}"
        )


def check_one_dtype(first_name: str, first: Tensor, **others: Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.dtype != first.dtype:
            raise RuntimeError(
                f"{first_name} and {name} must have the same dtype, but got {first.dtype} and "
                f"{tensor.dtype}"
            )


def prepare_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | Callable[[Tensor], Tensor] | None = None,
    residual: Tensor | None = None,
) -> tuple[Call, tuple[Any, ...]]:
    require_tensor("linear", "input", 1, input)
    require_tensor("linear", "weight", 2, weight)
    require_optional_tensor("linear", "bias", 3, bias)
    require_optional_tensor("linear", "residual", 5, residual)
    require_activation(activation)
    require_floating("input", input)
    if input.dim() == 0:
        raise RuntimeError(
            "both arguments to linear need to be at least 1D, but they are 0D and 2D"
        )
    check_weight("input", input.shape[-1], "weight", weight, "bias", bias)
    require_same_device("input", input, weight=weight, bias=bias, residual=residual)
    if residual is not None and residual.shape != (*input.shape[:-1], weight.shape[0]):
        raise ValueError(
            f"residual must have the shape of the result, {[*input.shape[:-1], weight.shape[0]]}, "
            f"not {list(residual.shape)}"
        )
    tensors = autocast(input, weight, bias, residual)
    check_one_dtype("input", tensors[0], weight=tensors[1], bias=tensors[2], residual=tensors[3])  # type: ignore[arg-type]
    activation = named_activation(activation)
    call = Call("linear", tensors, wants_grad(*tensors), activation=activation)
    return call, (*tensors[:3], activation, tensors[3])


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | Callable[[Tensor], Tensor] | None = None,
    residual: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """A linear map, then optionally an activation and a residual: ``act(x W^T + b) + residual``.

    Args:
        input: (..., in_features).
        weight: (out_features, in_features), like `torch.nn.Linear.weight`.
        bias: (out_features,); None means zeros.
        activation: "relu", "gelu" (erf), "gelu_tanh", "silu", a callable, or None for none.
        residual: (..., out_features), added last; None means nothing.
        backend: None lets the dispatcher choose; a name never falls back.

    Raises:
        RuntimeError, ValueError: shapes, dtypes or devices that do not fit; an unknown activation.
        NotImplementedError: the named backend cannot take the call.

    Source: "Attention Is All You Need", section 3.2.2 (projections).
    """
    call, arguments = prepare_linear(input, weight, bias, activation=activation, residual=residual)
    return select(call, backend).run(*arguments)
