"""Norms, alone and behind a residual connection: the public functions."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..dispatch import Call, lookup, make_call, run
from ..fast_path import entry
from ..ops.arguments import (
    AddAnnotatedLayerNormArguments,
    AddLayerNormArguments,
    AddRMSNormArguments,
    AnnotatedLayerNormArguments,
    LayerNormArguments,
    RMSNormArguments,
)
from ..ops.autograd import wants_grad
from ._check import (
    are_tensors,
    casts_itself,
    defers_to_torch,
    require_float,
    require_probability,
    require_same_device,
    require_tensor,
    same_error_as,
    wrong_type,
)

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]

_enter, _enter_add = entry("layer_norm"), entry("add_layer_norm")
_enter_rms, _enter_add_rms = entry("rms_norm"), entry("add_rms_norm")


def _as_sizes(function: str, position: int, normalized_shape: Any) -> tuple[int, ...]:
    integers = (int, torch.SymInt, numbers.Integral)
    if isinstance(normalized_shape, integers) and not isinstance(normalized_shape, bool):
        return (normalized_shape,)  # type: ignore[return-value]
    name, wanted = "normalized_shape", "tuple of ints"
    if not isinstance(normalized_shape, (tuple, list)):
        raise wrong_type(function, name, position, wanted, normalized_shape)
    for place, size in enumerate(normalized_shape):
        if not isinstance(size, integers):
            raise TypeError(
                f"{function}(): argument '{name}' (position {position}) must be {wanted}, but found "
                f"element of type {type(size).__name__} at pos {place}"
            )
    return tuple(normalized_shape)


def _check_norm(given: Any, position: int) -> tuple[tuple[int, ...], float]:
    """Checks the arguments that all norms share; returns normalized_shape and eps.

    Args:
        given: the record of any norm.
        position: index of normalized_shape among the arguments of the public function.
    """
    op, input, weight, eps = type(given).op, given.input, given.weight, given.eps
    bias = getattr(given, "bias", None)
    if eps is None:
        summands = (input, getattr(given, "residual", None))
        wide = any(getattr(one, "dtype", None) is torch.float64 for one in summands)
        eps = _EPS[torch.float64 if wide else torch.float32]
    if not are_tensors((input,), (weight, bias)):
        require_tensor(op, "input", 1, input)
        require_tensor(op, "weight", position + 1, weight, optional=True)
        require_tensor(op, "bias", position + 2, bias, optional=True)
    if type(eps) is not float:
        eps = require_float(op, "eps", eps, position + 3)
    sizes = given.normalized_shape
    if type(sizes) is not tuple or len(sizes) != 1 or type(sizes[0]) is not int:
        sizes = _as_sizes(op, position, sizes)
    if not sizes:
        raise RuntimeError(
            "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least "
            "one element, but got normalized_shape = []"
        )
    device = input.device
    elsewhere = False
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.shape != sizes:
            raise RuntimeError(
                f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape "
                f"{list(tensor.shape)} and normalized_shape = {list(sizes)}"
            )
        elsewhere = elsewhere or tensor.device != device
    if input.shape[-len(sizes) :] != sizes:
        expected = ", ".join(str(s) for s in sizes)
        raise RuntimeError(
            f"Given normalized_shape={list(sizes)}, expected input with shape [*, {expected}], but "
            f"got input of size{list(input.shape)}"
        )
    wrong: Exception | None = None
    if elsewhere:
        wrong = RuntimeError(f"weight and bias must be on the device of input, {device}")
    elif not input.is_floating_point():
        wrong = ValueError(f"input must have a floating-point dtype, not {input.dtype}")
    if wrong is not None:
        same_error_as(partial(F.layer_norm, input, sizes, weight, bias, eps), wrong)
    return sizes, eps


def _check_sum(given: Any, backend: str | None) -> tuple[Tensor, Tensor, float]:
    """Returns the sum's checked operands, cast unless the op casts itself, and dropout_p."""
    op, input, residual = type(given).op, given.input, given.residual
    if residual.shape != input.shape:
        raise ValueError(
            f"residual must have the shape of input, {list(input.shape)}, not "
            f"{list(residual.shape)}"
        )
    if residual.device != input.device:
        require_same_device("input", input, residual=residual)
    if input.dtype != residual.dtype and not casts_itself(op, input, backend):
        dtype = torch.promote_types(input.dtype, residual.dtype)
        input, residual = input.to(dtype), residual.to(dtype)
    return input, residual, require_probability(op, "dropout_p", given.dropout_p)


def check_layer_norm(given: Any, backend: str | None = None) -> Call:
    sizes, eps = _check_norm(given, 2)
    if sizes is not given.normalized_shape or eps is not given.eps:
        given = given._replace(normalized_shape=sizes, eps=eps)
    return make_call(given, wants_grad(*given.tensors()))


def check_add_layer_norm(given: Any, backend: str | None = None) -> Call:
    sizes, eps = _check_norm(given, 3)
    require_tensor(given.op, "residual", 2, given.residual)
    input, residual, p = _check_sum(given, backend)
    given = given._replace(
        input=input, residual=residual, normalized_shape=sizes, eps=eps, dropout_p=p
    )
    return make_call(given, wants_grad(*given.tensors()))


def check_annotated_layer_norm(given: Any, backend: str | None = None) -> Call:
    """Returns the unchecked `Call` of the Annotated Transformer's norm; residual: optional."""
    return make_call(given, wants_grad(*given.tensors()))


#: PyTorch's default ``eps`` of RMS norms: the machine epsilon of the statistics' dtype.
_EPS = {
    dtype: torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> Tensor:
    """Normalise over the trailing dimensions, like `torch.nn.functional.layer_norm`.

    ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, biased variance.

    Args:
        input: (..., *normalized_shape), floating point; bfloat16 and float16 keep fp32 statistics.
        normalized_shape: the trailing sizes that are normalised together.
        weight: normalized_shape; None: ones.
        bias: normalized_shape; None: zeros.
        eps: added to the variance, inside the square root.
        backend: None: the dispatcher chooses; a named backend never falls back.

    Raises:
        RuntimeError: shapes or devices do not match (PyTorch's wording).
        NotImplementedError: the named backend does not support the call.

    Source: Ba, Kiros, Hinton 2016; "Attention Is All You Need", section 3.1.
    """
    if backend is None:
        result = _enter(input, normalized_shape, weight, bias, eps)
        if result is not None:
            return result  # type: ignore[no-any-return]
    tensors = (input, weight, bias)
    replay, insert = lookup("layer_norm", tensors, (normalized_shape, eps, backend))
    if replay is not None:
        return replay(*tensors)  # type: ignore[no-any-return]
    if defers_to_torch("layer_norm", backend, *tensors):
        shape = _as_sizes("layer_norm", 2, normalized_shape)
        return F.layer_norm(input, list(shape), weight, bias, eps)
    arguments = LayerNormArguments(input, normalized_shape, weight, bias, eps)
    return run(check_layer_norm(arguments, backend), backend, insert)  # type: ignore[no-any-return]


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Residual connection and layer norm in one pass: ``(layer_norm(sum), sum)``.

    ``sum = residual + dropout(input, dropout_p)``

    Args:
        input: (..., *normalized_shape), the sub-layer's output.
        residual: same shape, the sub-layer's input.
        normalized_shape, weight, bias, eps, backend: as in `layer_norm`.
        dropout_p: probability in [0, 1] of dropping an element of ``input``; 0: no dropout.

    Raises:
        ValueError: residual's shape differs, or dropout_p is outside [0, 1].
        RuntimeError, NotImplementedError: as in `layer_norm`.

    Source: "Attention Is All You Need", section 3.1, LayerNorm(x + Sublayer(x)), and 5.4.
    """
    if backend is None:
        results = _enter_add(input, residual, normalized_shape, weight, bias, eps, dropout_p)
        if results is not None:
            return results  # type: ignore[no-any-return]
    tensors = (input, residual, weight, bias)
    replay, insert = lookup("add_layer_norm", tensors, (normalized_shape, eps, dropout_p, backend))
    if replay is not None:
        return replay(*tensors)  # type: ignore[no-any-return]
    if defers_to_torch("add_layer_norm", backend, *tensors):
        shape = _as_sizes("add_layer_norm", 3, normalized_shape)
        total = residual + F.dropout(input, dropout_p)
        return F.layer_norm(total, list(shape), weight, bias, eps), total
    arguments = AddLayerNormArguments(
        input, residual, normalized_shape, weight, bias, eps, dropout_p
    )
    return run(check_add_layer_norm(arguments, backend), backend, insert)  # type: ignore[no-any-return]


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Divide by the root mean square, like `torch.nn.functional.rms_norm`.

    ``y = x / sqrt(mean(x^2) + eps) * weight``, the mean over the trailing dimensions.

    Args:
        input: (..., *normalized_shape), floating point; bfloat16 and float16 keep fp32 statistics.
        normalized_shape: the trailing sizes that are normalised together.
        weight: normalized_shape; None: ones.
        eps: added to the mean square; None: the machine epsilon (float32's for bfloat16 and float16).
        backend: None: the dispatcher chooses; a named backend never falls back.

    Raises:
        RuntimeError: shapes or devices do not match (PyTorch's wording).
        NotImplementedError: the named backend does not support the call.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """
    if backend is None:
        result = _enter_rms(input, normalized_shape, weight, eps)
        if result is not None:
            return result  # type: ignore[no-any-return]
    tensors = (input, weight)
    replay, insert = lookup("rms_norm", tensors, (normalized_shape, eps, backend))
    if replay is not None:
        return replay(*tensors)  # type: ignore[no-any-return]
    is_complex = isinstance(input, Tensor) and input.is_complex()
    if defers_to_torch("rms_norm", backend, *tensors, also=is_complex):
        return F.rms_norm(input, list(_as_sizes("rms_norm", 2, normalized_shape)), weight, eps)
    arguments = RMSNormArguments(input, normalized_shape, weight, eps)
    return run(check_layer_norm(arguments, backend), backend, insert)  # type: ignore[no-any-return]


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Residual connection and RMS norm in one pass: ``(rms_norm(sum), sum)``.

    ``sum = residual + dropout(input, dropout_p)``

    Args:
        input: (..., *normalized_shape), the sub-layer's output.
        residual: same shape, the sub-layer's input.
        normalized_shape, weight, eps, backend: as in `rms_norm`.
        dropout_p: probability in [0, 1] of dropping an element of ``input``; 0: no dropout.

    Raises:
        ValueError, RuntimeError, NotImplementedError: as in `add_layer_norm`.

    Source: Zhang and Sennrich 2019; "Attention Is All You Need", sections 3.1 and 5.4.
    """
    if backend is None:
        results = _enter_add_rms(input, residual, normalized_shape, weight, eps, dropout_p)
        if results is not None:
            return results  # type: ignore[no-any-return]
    tensors = (input, residual, weight)
    replay, insert = lookup("add_rms_norm", tensors, (normalized_shape, eps, dropout_p, backend))
    if replay is not None:
        return replay(*tensors)  # type: ignore[no-any-return]
    if defers_to_torch("add_rms_norm", backend, *tensors):
        shape = _as_sizes("add_rms_norm", 3, normalized_shape)
        total = residual + F.dropout(input, dropout_p)
        return F.rms_norm(total, list(shape), weight, eps), total
    arguments = AddRMSNormArguments(input, residual, normalized_shape, weight, eps, dropout_p)
    return run(check_add_layer_norm(arguments, backend), backend, insert)  # type: ignore[no-any-return]


def annotated_layer_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    unbiased: bool = True,
    *,
    backend: str | None = None,
) -> Tensor:
    """The Annotated Transformer's norm over the last dimension.

    ``y = weight * (x - mean(x)) / (std(x) + eps) + bias``; ``unbiased``: which standard deviation.

    Source: "The Annotated Transformer" (Rush 2018).
    """
    if defers_to_torch("annotated_layer_norm", backend, input, weight, bias):
        return reference.annotated_layer_norm(input, weight, bias, eps, unbiased)
    arguments = AnnotatedLayerNormArguments(input, weight, bias, eps, unbiased)
    return run(check_annotated_layer_norm(arguments), backend)  # type: ignore[no-any-return]


def add_annotated_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    unbiased: bool,
    dropout_p: float,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """``(norm(sum), sum)`` with ``sum = residual + dropout(input, dropout_p)``."""
    tensors = (input, residual, weight, bias)
    if defers_to_torch("add_annotated_layer_norm", backend, *tensors):
        total = residual + F.dropout(input, dropout_p)
        return reference.annotated_layer_norm(total, weight, bias, eps, unbiased), total
    arguments = AddAnnotatedLayerNormArguments(*tensors, eps, unbiased, dropout_p)
    return run(check_annotated_layer_norm(arguments), backend)  # type: ignore[no-any-return]
