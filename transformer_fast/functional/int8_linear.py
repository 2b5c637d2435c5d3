"""Linear layer and feed-forward network with 8-bit products: the public functions and their checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._context import has_tangents, is_plain_eager, values_are_known
from ..dispatch import Call, make_call, run
from ..fast_path import direct_kernel
from ..ops.arguments import Int8FeedForwardArguments, Int8LinearArguments
from ..ops.autograd import wants_grad
from ..ops.int8_linear import DEEPEST
from ..reference.linear import ACTIVATIONS
from ._check import (
    autocast,
    defers_to_torch,
    named_activation,
    require_floating,
    require_rows,
    require_same_device,
    require_tensor,
)
from .linear import dtype_problem, require_shape_of_result, weight_problem

__all__ = ["int8_feed_forward", "int8_linear", "quantize_weight"]


def quantize_weight(weight: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantizes a weight for `int8_linear`: ``weight ~ values * scale[:, None] * factors``.

    With ``w = weight / factors``: ``scale = max|w| / 127`` for each output, and
    ``values = round(w / scale)``, half to even.

    Args:
        weight: (out_features, in_features), floating-point and finite.
        factors: float32 (in_features,): `int8_linear` multiplies the input by them; None: ones.

    Returns:
        values, int8 (out_features, in_features), and scale, float32 (out_features,). Pass
        ``nn.Parameter(values, requires_grad=False)`` so that the packed copy is kept between calls.

    Raises:
        ValueError: the weight is not a floating-point matrix; the weight, or weight / factors, has
            NaN or infinity (not checked while tracing); factors have another shape or dtype.
    """
    require_tensor("quantize_weight", "weight", 1, weight)
    require_floating("weight", weight)
    _require_dense(weight=weight)
    if weight.dim() != 2:
        raise ValueError(
            f"weight must be a matrix (out_features, in_features), not of shape {list(weight.shape)}"
        )
    require_tensor("quantize_weight", "factors", 2, factors, optional=True)
    _check_factors("factors", factors, weight.shape[1])
    with torch.no_grad():
        if values_are_known(weight):
            wide = weight.to(torch.float32)
            if not wide.isfinite().all():
                raise ValueError("weight must be finite, and it has NaN or infinity")
            if factors is not None and not (wide / factors).isfinite().all():
                raise ValueError("weight / factors must be finite, and it has NaN or infinity")
        return reference.quantize_weight(weight, factors)


def int8_linear(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | Callable[[Tensor], Tensor] | None = None,
    residual: Tensor | None = None,
    factors: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Linear layer with 8-bit products, for inference: ``act(q W^T * scale * s + b) + residual``.

    Each row of the input is rounded to 254 steps of its own size s, 0 included: ``q = round(x / s)``
    with ``s = (max(0, max x) - min(0, min x)) / 254``. Sums of products are exact, and all that follows
    is computed in float32. A row with NaN or infinity gives NaN; other rows do not depend on it.

    Args:
        input: (..., in_features), floating-point.
        weight: int8 (out_features, in_features), from `quantize_weight`.
        scale: float32 (out_features,), from `quantize_weight`.
        bias: (out_features,), in the dtype of input; None: zeros.
        activation: "relu", "gelu" (erf), "gelu_tanh", "silu", a callable, or None.
        residual: tensor of the result's shape, added last; None: no residual.
        factors: float32 (in_features,): multiply the columns of the input before rows are rounded.
            They even out columns with outliers. `quantize_weight` divides the weight by them.
            None: ones.
        backend: None: the dispatcher chooses; a named backend never falls back.

    Raises:
        RuntimeError, ValueError: shapes, dtypes or devices do not match; the activation is unknown.
        NotImplementedError: the call needs gradients, or the named backend does not support it.

    Source: Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference", section 2, with scales found at run time. Factors: Xiao et al.
    2023, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models".
    """
    arguments = Int8LinearArguments(input, weight, scale, bias, activation, residual, factors)
    if backend is None and residual is None:
        function = _direct_kernel("int8_linear", input, activation, (weight, scale, bias, factors))
        if function is not None:
            return function(arguments)  # type: ignore[no-any-return]
    if defers_to_torch("int8_linear", backend, *arguments[:4], residual, factors):
        _require_dense(input=input, weight=weight)
        return reference.int8_linear(*arguments)
    return run(check_int8_linear(arguments, backend), backend)  # type: ignore[no-any-return]


def int8_feed_forward(
    input: Tensor,
    weight1: Tensor,
    scale1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    scale2: Tensor,
    bias2: Tensor | None,
    *,
    activation: str | Callable[[Tensor], Tensor] = "relu",
    factors1: Tensor | None = None,
    factors2: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The position-wise feed-forward network with 8-bit products, for inference: two `int8_linear`.

    The hidden units are rounded to bfloat16, and then to the steps of their row.

    Args:
        input: (..., M), floating-point.
        weight1: int8 (F, M); scale1: float32 (F,), both from `quantize_weight`.
        bias1: (F,), in the dtype of input; None: zeros.
        weight2: int8 (Mout, F); scale2: float32 (Mout,), both from `quantize_weight`.
        bias2: (Mout,), in the dtype of input; None: zeros.
        activation: "relu", "gelu" (erf), "gelu_tanh", "silu", or a callable.
        factors1: float32 (M,), factors of the input's columns; factors2: float32 (F,), factors of
            the hidden units; see `int8_linear`. None: ones.
        backend: None: the dispatcher chooses; a named backend never falls back.

    Raises:
        RuntimeError, ValueError: shapes, dtypes or devices do not match; the activation is unknown.
        NotImplementedError: the call needs gradients, or the named backend does not support it.

    Source: "Attention Is All You Need", section 3.3.
    """
    arguments = Int8FeedForwardArguments(
        input, weight1, scale1, bias1, weight2, scale2, bias2, activation, factors1, factors2
    )
    if backend is None and activation is not None:
        maps = (weight1, scale1, bias1, factors1), (weight2, scale2, bias2, factors2)
        function = _direct_kernel("int8_feed_forward", input, activation, *maps)
        if function is not None:
            return function(arguments)  # type: ignore[no-any-return]
    if defers_to_torch("int8_feed_forward", backend, *arguments[:7], factors1, factors2):
        _require_dense(input=input, weight1=weight1, weight2=weight2)
        return reference.int8_feed_forward(*arguments)
    return run(check_int8_feed_forward(arguments, backend), backend)  # type: ignore[no-any-return]


def _direct_kernel(
    op: str, input: Tensor, activation: Any, *maps: tuple[Any, Any, Any, Any]
) -> Callable[[Any], Any] | None:
    """Returns the CPU kernel of a plain call if all arguments fit, else None.

    The full check takes a seventh of the time of a map of 32 rows with 2^18 weights.
    """
    named = activation is None or (type(activation) is str and activation in ACTIVATIONS)
    if not named or type(input) is not Tensor or input.dim() == 0:
        return None
    tensors, columns = [input], input.shape[-1]
    for weight, scale, bias, factors in maps:
        if (
            is_plain_eager(input, weight, scale, bias, factors) is not False
            or weight is None
            or scale is None
        ):
            return None
        sizes = weight.shape
        if (
            len(sizes) != 2
            or sizes[1] != columns
            or columns > DEEPEST
            or weight.dtype is not torch.int8
            or scale.dtype is not torch.float32
            or scale.shape != sizes[:1]
            or not (weight.is_cpu and scale.is_cpu)
            or weight.layout is not torch.strided
            or (bias is not None and bias.shape != sizes[:1])
            or (factors is not None and not _are_factors(factors, columns))
        ):
            return None
        tensors.append(bias)
        columns = sizes[0]
    return direct_kernel(op, tuple(tensors))


def _are_factors(factors: Tensor, columns: int) -> bool:
    return factors.dtype is torch.float32 and factors.shape == (columns,) and factors.is_cpu


def check_int8_linear(given: Int8LinearArguments, backend: str | None = None) -> Call:
    input, weight, scale, bias, activation, residual, factors = given
    _require_tensors("int8_linear", input=input, weight=weight, scale=scale)
    require_tensor("int8_linear", "bias", 4, bias, optional=True)
    require_tensor("int8_linear", "residual", None, residual, optional=True)
    require_tensor("int8_linear", "factors", None, factors, optional=True)
    activation = named_activation(activation)
    _require_no_gradients("int8_linear", input, scale, bias, residual, factors)
    require_rows("input", input)
    _require_wide(input)
    require_same_device(
        "input", input, weight=weight, scale=scale, bias=bias, residual=residual, factors=factors
    )
    input, bias, residual = autocast(input, bias, residual)  # type: ignore[assignment]
    names = ("input", "weight", "scale", "bias", "factors")
    _check_map(names, input.shape[-1], weight, scale, bias, factors)
    if residual is not None:
        require_shape_of_result(input, weight, residual)
    if (wrong := dtype_problem(input, bias=bias, residual=residual)) is not None:
        raise ValueError(wrong)
    checked = given._replace(input=input, bias=bias, activation=activation, residual=residual)
    return make_call(checked, False)


def check_int8_feed_forward(given: Int8FeedForwardArguments, backend: str | None = None) -> Call:
    input, weight1, scale1, bias1, weight2, scale2, bias2, activation, factors1, factors2 = given
    _require_tensors("int8_feed_forward", input=input, weight1=weight1, scale1=scale1)
    require_tensor("int8_feed_forward", "bias1", 4, bias1, optional=True)
    require_tensor("int8_feed_forward", "weight2", 5, weight2)
    require_tensor("int8_feed_forward", "scale2", 6, scale2)
    require_tensor("int8_feed_forward", "bias2", 7, bias2, optional=True)
    require_tensor("int8_feed_forward", "factors1", None, factors1, optional=True)
    require_tensor("int8_feed_forward", "factors2", None, factors2, optional=True)
    if activation is None:
        raise ValueError("activation must be a name or a callable, not None")
    activation = named_activation(activation)
    _require_no_gradients(
        "int8_feed_forward", input, scale1, bias1, scale2, bias2, factors1, factors2
    )
    require_rows("input", input)
    _require_wide(input)
    require_same_device(
        "input", input, weight1=weight1, scale1=scale1, bias1=bias1, weight2=weight2,
        scale2=scale2, bias2=bias2, factors1=factors1, factors2=factors2,
    )  # fmt: skip
    input, bias1, bias2 = autocast(input, bias1, bias2)  # type: ignore[assignment]
    names = ("input", "weight1", "scale1", "bias1", "factors1")
    _check_map(names, input.shape[-1], weight1, scale1, bias1, factors1)
    names = ("the hidden block", "weight2", "scale2", "bias2", "factors2")
    _check_map(names, weight1.shape[0], weight2, scale2, bias2, factors2)
    if (wrong := dtype_problem(input, bias1=bias1, bias2=bias2)) is not None:
        raise ValueError(wrong)
    checked = given._replace(input=input, bias1=bias1, bias2=bias2, activation=activation)
    return make_call(checked, False)


def _require_tensors(function: str, **tensors: Any) -> None:
    for position, (name, tensor) in enumerate(tensors.items(), 1):
        require_tensor(function, name, position, tensor)


def _require_dense(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.layout != torch.strided:
            raise ValueError(f"{name} must be dense, not {tensor.layout}")


def _require_wide(input: Tensor) -> None:
    if input.dtype.itemsize == 1:
        raise ValueError(f"input must be float32, bfloat16, float16 or float64, not {input.dtype}")


def _require_no_gradients(function: str, *tensors: Tensor | None) -> None:
    if wants_grad(*tensors) or has_tangents(*tensors):
        raise NotImplementedError(
            f"{function} has no gradients: call it under torch.no_grad(), or train with the weights "
            "before quantize_weight, which transformer_fast.restore(model) brings back"
        )


def _check_map(
    names: tuple[str, str, str, str, str],
    columns: int,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    factors: Tensor | None,
) -> None:
    """``names``: the names of input, weight, scale, bias and factors in errors."""
    if weight.dtype != torch.int8:
        raise ValueError(f"{names[1]} must be int8, from quantize_weight, not {weight.dtype}")
    wrong = weight_problem((names[0], names[1], names[3]), columns, weight, bias)
    if wrong is not None:
        raise ValueError(wrong)
    if scale.dtype != torch.float32 or scale.shape != weight.shape[:1]:
        raise ValueError(
            f"{names[2]} must be float32 of shape [{weight.shape[0]}], one value per row of "
            f"{names[1]}, not {scale.dtype} of shape {list(scale.shape)}"
        )
    _check_factors(names[4], factors, columns)


def _check_factors(name: str, factors: Tensor | None, columns: int) -> None:
    if factors is not None and (factors.dtype != torch.float32 or factors.shape != (columns,)):
        raise ValueError(
            f"{name} must be float32 of shape [{columns}], one value per column of the input, not "
            f"{factors.dtype} of shape {list(factors.shape)}"
        )
