"""Losses: the public functions and their checks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import fast_path
from ..dispatch import Call, make_call, run
from ..ops.arguments import CrossEntropyArguments, LinearCrossEntropyArguments
from ..ops.autograd import wants_grad
from ._check import (
    autocast,
    defers_to_torch,
    require_float,
    require_same_device,
    require_tensor,
    same_error_as,
)
from .linear import dtype_problem, weight_problem

__all__ = ["cross_entropy", "linear_cross_entropy"]

_PYTORCHS = (
    "cross_entropy with class weights, with probabilities as target or with size_average or reduce is "
    "PyTorch's; backend must be None"
)
_PYTORCHS_LINEAR = (
    "linear_cross_entropy with class weights, with probabilities as target, with more than two "
    "dimensions of weights or with options is that of PyTorch 2.13"
)
_REDUCTIONS = ("mean", "sum", "none")
_enter = fast_path.entry("cross_entropy")
_enter_linear = fast_path.entry("linear_cross_entropy")


def _is_floating(target: Any) -> bool:
    """True if the targets are class probabilities."""
    return isinstance(target, Tensor) and target.is_floating_point()


def _check_options(reduction: str, label_smoothing: float) -> float:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{reduction} is not a valid value for reduction")
    smoothing = float(require_float("cross_entropy", "label_smoothing", label_smoothing))
    if not 0.0 <= smoothing <= 1.0:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {smoothing}")
    return smoothing


def _check_target(target: Tensor, ignore_index: int, classes: int) -> int | None:
    """Checks the values of targets. Returns how many are not ignored, or None if they are not read.

    Raises:
        IndexError: a target is out of range (PyTorch's error).
    """
    counted, wrong = fast_path.count_targets(target, classes, ignore_index)
    if wrong is not None:
        raise IndexError(f"Target {wrong} is out of bounds.")
    return counted


def _reduced(
    call: Call,
    classes: int,
    backend: str | None,
    shape: torch.Size,
    reduction: str,
    dtype: torch.dtype,
) -> Tensor:
    """Runs a checked call and reduces its losses; ``shape`` is the target's shape."""
    target, ignore_index = call.arguments.target, call.arguments.ignore_index
    counted = _check_target(target, ignore_index, classes)
    losses: Tensor = run(call, backend)
    if reduction == "none":
        return losses.to(dtype).view(shape)
    total = losses.sum()
    if reduction == "mean":
        # Not `mean`: the gradient of a sum is one value, expanded.
        total = total / ((target != ignore_index).sum() if counted is None else counted)
    return total.to(dtype)


def _result_dtype(input: Tensor) -> torch.dtype:
    """Returns the dtype of the losses: input's, but at least float32 under autocast."""
    if not input.is_meta and torch.is_autocast_enabled(input.device.type):
        return torch.promote_types(input.dtype, torch.float32)
    return input.dtype


def _run_pytorchs(input: Tensor, target: Tensor, weight: Tensor | None, *options: Any) -> Tensor:
    """Runs PyTorch's op, on CPUs in float32 for logits of low precision.

    In low precision PyTorch's CPU op rounds each log-probability and adds the losses in that dtype.
    In bfloat16 a sum beyond 256 no longer grows by losses below 1, and float16 overflows at 65504.
    """
    tensors = input, target, weight
    if (
        isinstance(input, Tensor)
        and input.is_cpu
        and input.dtype in (torch.bfloat16, torch.float16)
        and not any(
            isinstance(x, Tensor) and x.is_floating_point() and x.dtype is not input.dtype
            for x in tensors
        )
    ):
        wide = (
            x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in tensors
        )
        return F.cross_entropy(*wide, *options).to(_result_dtype(input))  # type: ignore[arg-type]
    return F.cross_entropy(*tensors, *options)


def _as_rows(input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Reshapes (C,), (N, C) or (N, C, d1, ...) to (N, C) or (N, d1 * ..., C); flattens the target.

    A view where the strides allow: planes of classes are not copied.
    """
    if input.dim() == 1:
        return input.unsqueeze(0), target.reshape(1)
    if input.dim() > 2:
        return input.flatten(2).transpose(1, 2), target.flatten(1)
    return input, target


def _fits(input: Tensor, target: Tensor) -> bool:
    if (
        input.dim() == 0
        or not input.is_floating_point()
        or target.dtype != torch.int64
        or target.device != input.device
    ):
        return False
    if input.dim() == 1:
        return target.dim() == 0 and input.shape[0] > 0
    return target.shape == (input.shape[0], *input.shape[2:]) and input.shape[1] > 0


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    backend: str | None = None,
) -> Tensor:
    """`torch.nn.functional.cross_entropy`: ``(1 - s) * -log p[target] + s * mean of -log p``.

    ``p = softmax(input)``, and the sum of the losses, in fp32 for bfloat16 and float16. Calls with class
    weights or probabilities as targets run on PyTorch.

    Args:
        input: logits (C,), (N, C) or (N, C, d1, ...).
        target: int64 (), (N,) or (N, d1, ...): a class in [0, C), or ignore_index.
        weight, size_average, reduce: as in PyTorch; calls with one of them run on PyTorch.
        ignore_index: targets with this value have loss 0 and do not count, even if logits are NaN.
        reduction: "mean" over the targets that are not ignored, "sum", or "none" for target's shape.
        label_smoothing: s in [0, 1].
        backend: None: the dispatcher chooses; a named backend never falls back.

    Raises:
        IndexError: a target is no class (on the CPU). RuntimeError, ValueError: shapes, dtypes or
            devices do not match; the reduction is unknown; s is outside [0, 1].
        NotImplementedError: logits are integers or complex; or the named backend does not support the
            call.

    Source: "Attention Is All You Need", section 5.4; Szegedy et al. 2015, section 7.
    """
    if backend is None:
        loss = _enter(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
        if loss is not None:
            return loss  # type: ignore[no-any-return]
    others = weight is not None or size_average is not None or reduce is not None
    probable = _is_floating(target)
    deferred = defers_to_torch("cross_entropy", backend, input, target)
    if deferred or others or probable:
        if backend is not None:
            raise NotImplementedError(_PYTORCHS)
        function = F.cross_entropy if deferred else _run_pytorchs
        return function(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    call = check_cross_entropy(
        input, target, None, None, ignore_index, None, reduction, label_smoothing
    )
    classes = call.arguments.input.shape[-1]
    return _reduced(call, classes, backend, target.shape, reduction, _result_dtype(input))


def check_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    size_average: bool | None,
    ignore_index: int,
    reduce: bool | None,
    reduction: str,
    label_smoothing: float,
) -> Call:
    if not (weight is size_average is reduce is None) or _is_floating(target):
        raise NotImplementedError(_PYTORCHS)
    require_tensor("cross_entropy", "input", 1, input)
    require_tensor("cross_entropy", "target", 2, target)
    smoothing = _check_options(reduction, label_smoothing)
    if target.dtype == torch.uint8:
        target = target.long()
    if not _fits(input, target):
        same_error_as(
            partial(F.cross_entropy, input, target, ignore_index=ignore_index),
            ValueError(
                f"target of {target.dtype} and shape {list(target.shape)} on {target.device} does "
                f"not fit input of {input.dtype} and shape {list(input.shape)} on {input.device}"
            ),
        )
    rows, flat = _as_rows(input, target)
    return make_call(CrossEntropyArguments(rows, flat, ignore_index, smoothing), wants_grad(rows))


def _losses(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    reduction: str,
    ignored: int,
    smoothing: float,
) -> Tensor:
    """Runs PyTorch's linear layer and loss, with all logits in memory."""
    logits = F.linear(input, weight, bias)
    return F.cross_entropy(logits, target, None, None, ignored, None, reduction, smoothing)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    backend: str | None = None,
) -> Tensor:
    """Cross entropy of ``input W^T + b``; many logits are computed in chunks.

    Computes `torch.nn.functional.linear_cross_entropy` (PyTorch 2.13). Calls with class weights,
    probabilities as target, weights of more than two dimensions or ``options`` run on PyTorch's. The
    logits are computed in chunks of at most 2^24 logits, or of 64 rows. In eager training the CPU's fp32
    kernel keeps the logits if there are at most 2^22 (16 MiB); else its backward computes them again.
    That of other kernels does so with reduction "none". Otherwise the forward computes the gradients
    with the losses, which takes fp32 sums of the weight's size. All logits are computed at once in
    programs of torch.compile under transforms of torch.func, and in programs of torch.export on
    backends other than `cpu`.

    Args:
        input: (in_features,) or (N, in_features).
        linear_weight: (C, in_features), like `torch.nn.Linear.weight`.
        target, reduction, label_smoothing, backend: as in `cross_entropy`, for logits (N, C).
        linear_bias: (C,); None: zeros.
        ignore_index: None: -100.
        weight, options: as in PyTorch; calls with one of them run on PyTorch.

    Raises:
        IndexError, RuntimeError, ValueError, NotImplementedError: as in `cross_entropy`.

    Source: "Attention Is All You Need", sections 3.4 and 5.4.
    """
    ignored = -100 if ignore_index is None else ignore_index
    if backend is None and weight is None and options is None:
        loss = _enter_linear(
            input, linear_weight, target, linear_bias, reduction, ignored, label_smoothing
        )
        if loss is not None:
            return loss  # type: ignore[no-any-return]
    probable = _is_floating(target)
    deep = isinstance(linear_weight, Tensor) and linear_weight.dim() > 2
    if weight is not None or options is not None or probable or deep:
        theirs = getattr(F, "linear_cross_entropy", None)
        if backend is not None or theirs is None:
            raise NotImplementedError(_PYTORCHS_LINEAR)
        result: Tensor = theirs(
            input, linear_weight, target, linear_bias=linear_bias, weight=weight,
            reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing,
            options=options,
        )  # fmt: skip
        return result
    name = "linear_cross_entropy"
    if defers_to_torch(name, backend, input, linear_weight, target, linear_bias):
        return _losses(
            input, linear_weight, linear_bias, target, reduction, ignored, label_smoothing
        )
    call = check_linear_cross_entropy(
        input, linear_weight, target, linear_bias, None, reduction, ignored, label_smoothing, None
    )
    classes = linear_weight.shape[0]
    return _reduced(call, classes, backend, target.shape, reduction, _result_dtype(input))


def check_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int | None,
    label_smoothing: float,
    options: Any,
) -> Call:
    deep = isinstance(linear_weight, Tensor) and linear_weight.dim() > 2
    if not (weight is options is None) or _is_floating(target) or deep:
        raise NotImplementedError(_PYTORCHS_LINEAR)
    name, ignored = "linear_cross_entropy", -100 if ignore_index is None else ignore_index
    require_tensor(name, "input", 1, input)
    require_tensor(name, "linear_weight", 2, linear_weight)
    require_tensor(name, "target", 3, target)
    require_tensor(name, "linear_bias", None, linear_bias, optional=True)
    smoothing = _check_options(reduction, label_smoothing)
    x, w, b = autocast(input, linear_weight, linear_bias)
    assert x is not None
    assert w is not None
    if not x.is_floating_point():
        same_error_as(
            partial(_losses, x, w, b, target, reduction, ignored, smoothing),
            ValueError(f"input must have a floating-point dtype, not {x.dtype}"),
        )
    require_same_device("input", x, linear_weight=w, linear_bias=b, target=target)
    names = "input", "linear_weight", "linear_bias"
    wrong: str | None = None
    if x.dim() not in (1, 2):
        wrong = f"input must be (in_features,) or (N, in_features), not of shape {list(x.shape)}"
    wrong = wrong or weight_problem(names, x.shape[-1], w, b)
    wrong = wrong or dtype_problem(x, linear_weight=w, linear_bias=b)
    if wrong is None and (
        target.dtype != torch.int64 or target.shape != x.shape[:-1] or w.shape[0] == 0
    ):
        wrong = (
            f"target must hold a class, int64, for each row of input, {list(x.shape[:-1])}, not "
            f"{target.dtype} of shape {list(target.shape)}"
        )
    if wrong is not None:
        raise ValueError(wrong)
    arguments = LinearCrossEntropyArguments(
        x.reshape(-1, x.shape[-1]),
        w,
        b,
        target.reshape(-1),
        ignored,
        smoothing,
        reduction != "none",
    )
    return make_call(arguments, wants_grad(*arguments.tensors()))
