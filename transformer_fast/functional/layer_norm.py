"""Norms, alone and behind a residual connection: the public functions."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import call_cache, reference
from .._context import is_plain_eager
from ..dispatch import Call
from ..fast_path import ADD_LAYER_NORM, FLOAT, LAYER_NORM, direct_kernel, rows
from ..ops.autograd import wants_grad
from ..ops.layer_norm import NORMS
from ..reference.dropout import draw_seed
from ._check import (
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


def _run(
    op: str,
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: int | Sequence[int],
    affine: tuple[Tensor | None, ...],
    eps: float | None,
    dropout_p: float,
    backend: str | None,
) -> Any:
    """A norm, or one behind a residual connection, on the dispatcher's road."""
    adds = op not in NORMS
    tensors = given = (input, residual, *affine) if adds else (input, *affine)
    key, replay = call_cache.lookup(op, given, (normalized_shape, eps, dropout_p, backend))
    if replay is not None:
        return replay(*given)
    norm, position = (NORMS[op[4:]], 3) if adds else (NORMS[op], 2)
    is_complex = not norm.has_bias and isinstance(input, Tensor) and input.is_complex()
    if defers_to_torch(op, backend, *given, also=is_complex and not adds):
        shape = list(_as_sizes(op, position, normalized_shape))
        if not adds:
            return norm.pytorch(input, shape, *affine, eps)
        total = residual + F.dropout(input, dropout_p)  # type: ignore[operator]
        return norm.pytorch(total, shape, *affine, eps), total
    require_tensor(op, "input", 1, input)
    if adds:
        require_tensor(op, "residual", 2, residual)
    if eps is None:
        wide = input.dtype is torch.float64 or (adds and residual.dtype is torch.float64)  # type: ignore[union-attr]
        eps = _EPS[torch.float64 if wide else torch.float32]
    weight, bias = (*affine, None)[:2]
    if weight is not None:
        require_tensor(op, "weight", position + 1, weight)
    if bias is not None:
        require_tensor(op, "bias", position + 2, bias)
    if type(eps) is not float:
        eps = require_float(op, "eps", eps, position + 3)
    sizes: Any = normalized_shape
    if type(sizes) is not tuple or len(sizes) != 1 or type(sizes[0]) is not int:
        sizes = _as_sizes(op, position, sizes)
    if not sizes:
        raise RuntimeError(
            "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least "
            "one element, but got normalized_shape = []"
        )
    for tensor in affine:
        if tensor is not None and tensor.shape != sizes:
            name = "weight" if tensor is weight else "bias"
            raise RuntimeError(
                f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape "
                f"{list(tensor.shape)} and normalized_shape = {list(sizes)}"
            )
    if input.shape[-len(sizes) :] != sizes:
        expected = ", ".join(str(s) for s in sizes)
        raise RuntimeError(
            f"Given normalized_shape={list(sizes)}, expected input with shape [*, {expected}], but "
            f"got input of size{list(input.shape)}"
        )
    wrong: Exception | None = None
    device = input.device
    if (weight is not None and weight.device != device) or (
        bias is not None and bias.device != device
    ):
        wrong = RuntimeError(f"weight and bias must be on the device of input, {device}")
    elif not input.is_floating_point():
        wrong = ValueError(f"input must have a floating-point dtype, not {input.dtype}")
    if wrong is not None:
        same_error_as(partial(F.layer_norm, input, sizes, weight, bias, eps), wrong)
    if residual is None:
        call = Call(op, tensors, wants_grad(*tensors), normalized_shape=sizes)
        return call_cache.run(key, given, call, (input, sizes, *affine, eps), backend)
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
    p = require_probability(op, "dropout_p", dropout_p)
    tensors = (input, residual, *affine)
    call = Call(op, tensors, wants_grad(*tensors), p, normalized_shape=sizes)
    arguments = (input, residual, sizes, *affine, eps, p, None)
    return call_cache.run(key, given, call, arguments, backend)


#: PyTorch's default ``eps`` of RMS norms: the machine epsilon of the type that statistics have.
_EPS = {
    dtype: torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


def _is_row(
    input: Tensor, shape: tuple[Any, ...], weight: Tensor | None, bias: Tensor | None
) -> bool:
    """Whether the last dimension is normalised, and nothing is wrong with the shapes."""
    return (
        len(shape) == 1
        and type(shape[0]) is int
        and input.shape[-1:] == shape
        and (weight is None or weight.shape == shape)
        and (bias is None or bias.shape == shape)
    )


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
    if backend is None and type(eps) is float and type(normalized_shape) is tuple:
        grad = is_plain_eager(input, weight, bias)
        if grad is not None:
            limit = LAYER_NORM
            if (
                input.dtype is FLOAT
                and input.numel() < limit.below[grad]
                and (not grad or rows(input, weight) <= limit.rows)
            ):
                return torch.layer_norm(input, normalized_shape, weight, bias, eps)
            if _is_row(input, normalized_shape, weight, bias) and (
                run := direct_kernel("layer_norm", input, weight, bias)
            ):
                return run(input, normalized_shape, weight, bias, eps)  # type: ignore[no-any-return]
    return _run(  # type: ignore[no-any-return]
        "layer_norm", input, None, normalized_shape, (weight, bias), eps, 0.0, backend
    )


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
    if (
        backend is None
        and type(eps) is float
        and type(dropout_p) is float
        and 0.0 <= dropout_p < 1.0
        and type(normalized_shape) is tuple
        and (grad := is_plain_eager(input, residual, weight, bias)) is not None
        and residual is not None
        and input.shape == residual.shape
    ):
        limit = ADD_LAYER_NORM
        if (
            dropout_p == 0.0
            and input.dtype is residual.dtype is FLOAT
            and input.numel() < limit.below[grad]
            and (not grad or rows(input, weight) <= limit.rows)
        ):
            total = residual + input
            return torch.layer_norm(total, normalized_shape, weight, bias, eps), total
        if _is_row(input, normalized_shape, weight, bias) and (
            run := direct_kernel("add_layer_norm", input, residual, weight, bias)
        ):
            seed = draw_seed(input.device) if dropout_p else None
            return run(input, residual, normalized_shape, weight, bias, eps, dropout_p, seed)  # type: ignore[no-any-return]
    return _run(  # type: ignore[no-any-return]
        "add_layer_norm", input, residual, normalized_shape, (weight, bias), eps, dropout_p, backend
    )


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
    if (
        backend is None
        and (eps is None or type(eps) is float)
        and type(normalized_shape) is tuple
        and is_plain_eager(input, weight) is not None
        and _is_row(input, normalized_shape, weight, None)
        and (run := direct_kernel("rms_norm", input, weight))
    ):
        return run(input, normalized_shape, weight, _EPS[input.dtype] if eps is None else eps)  # type: ignore[no-any-return]
    return _run("rms_norm", input, None, normalized_shape, (weight,), eps, 0.0, backend)  # type: ignore[no-any-return]


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
    if (
        backend is None
        and (eps is None or type(eps) is float)
        and type(dropout_p) is float
        and 0.0 <= dropout_p < 1.0
        and type(normalized_shape) is tuple
        and is_plain_eager(input, residual, weight) is not None
        and residual is not None
        and input.shape == residual.shape
        and _is_row(input, normalized_shape, weight, None)
        and (run := direct_kernel("add_rms_norm", input, residual, weight))
    ):
        seed = draw_seed(input.device) if dropout_p else None
        eps = _EPS[input.dtype] if eps is None else eps
        return run(input, residual, normalized_shape, weight, eps, dropout_p, seed)  # type: ignore[no-any-return]
    return _run(  # type: ignore[no-any-return]
        "add_rms_norm", input, residual, normalized_shape, (weight,), eps, dropout_p, backend
    )


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
    tensors = (input, weight, bias)
    if defers_to_torch("annotated_layer_norm", backend, *tensors):
        return reference.annotated_layer_norm(input, weight, bias, eps, unbiased)
    call = Call(
        "annotated_layer_norm", tensors, wants_grad(*tensors),
        normalized_shape=tuple(input.shape[-1:]),
    )  # fmt: skip
    return call_cache.run(None, tensors, call, (*tensors, eps, unbiased), backend)  # type: ignore[no-any-return]


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
    call = Call(
        "add_annotated_layer_norm", tensors, wants_grad(*tensors), dropout_p,
        normalized_shape=tuple(input.shape[-1:]),
    )  # fmt: skip
    arguments = (*tensors, eps, unbiased, dropout_p, None)
    return call_cache.run(None, tensors, call, arguments, backend)  # type: ignore[no-any-return]
