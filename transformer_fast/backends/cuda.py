"""CUDA C++ kernels for NVIDIA GPUs (``csrc/cuda``), where launches decide: short kernels whose host
time from Python would be several times their own.

The operators are in a library of their own that is loaded only with a PyTorch that has CUDA
(`_native.load_cuda`). Tests load one whose kernels were compiled for the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import _native, autograd
from ..autograd import AddLayerNorm, CrossEntropy, LayerNorm, needs_function
from ..dispatch import Call, Kernel, register

_ops = torch.ops.transformer_fast
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
#: The oldest generation that the library has code for, as compute capability.
OLDEST = (8, 0)


def _on(device: torch.device, seed: Tensor | None) -> Tensor | None:
    return seed if seed is None or seed.device == device else seed.to(device)


def layer_norm(
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    if needs_function(input, weight, bias):
        return LayerNorm.apply("cuda", input, normalized_shape, weight, bias, eps)[0]  # type: ignore[no-any-return]
    return _layer_norm_forward(input, normalized_shape, weight, bias, eps)[0]


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    arguments = (input, residual, normalized_shape, weight, bias, eps, dropout_p, seed)
    if needs_function(input, residual, weight, bias):
        return AddLayerNorm.apply("cuda", *arguments)[:2]  # type: ignore[no-any-return]
    return _add_layer_norm_forward(*arguments)[:2]


def cross_entropy(
    input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    if needs_function(input):
        return CrossEntropy.apply("cuda", input, target, ignore_index, label_smoothing)[0]  # type: ignore[no-any-return]
    return _cross_entropy_forward(input, target, ignore_index, label_smoothing)[0]


def _layer_norm_forward(
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    output, _, mean, rstd = _ops.cuda_layer_norm(
        input, None, weight, bias, math.prod(normalized_shape), eps, 0.0, None
    )
    return output, mean, rstd


def _layer_norm_backward(
    grad: Tensor,
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    dinput, _, dweight, dbias = _ops.cuda_layer_norm_backward(
        grad, None, input, mean, rstd, weight, math.prod(normalized_shape), 0.0, None,
        wants[0], False, wants[1], wants[2],
    )  # fmt: skip
    return dinput, *_shaped(normalized_shape, wants[1:], dweight, dbias)


def _add_layer_norm_forward(
    input: Tensor,
    residual: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _ops.cuda_layer_norm(  # type: ignore[no-any-return]
        input, residual, weight, bias, math.prod(normalized_shape), eps, dropout_p,
        _on(input.device, seed),
    )  # fmt: skip


def _add_layer_norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    sum: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    drops = dropout_p > 0.0
    dsource, dinput, dweight, dbias = _ops.cuda_layer_norm_backward(
        grad, grad_sum, sum, mean, rstd, weight, math.prod(normalized_shape), dropout_p,
        _on(sum.device, seed), wants[1] or (wants[0] and not drops), wants[0] and drops,
        wants[2], wants[3],
    )  # fmt: skip
    parameters = _shaped(normalized_shape, wants[2:], dweight, dbias)
    return dinput if drops else dsource, dsource, *parameters


def _shaped(shape: tuple[int, ...], wants: Sequence[bool], *found: Tensor) -> tuple[Any, ...]:
    return tuple(
        flat.view(shape) if wanted else flat for wanted, flat in zip(wants, found, strict=True)
    )


def _cross_entropy_forward(
    input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    return _ops.cuda_cross_entropy(input, target, ignore_index, label_smoothing)  # type: ignore[no-any-return]


def _cross_entropy_backward(
    grad: Tensor,
    input: Tensor,
    target: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    wants: Sequence[bool],
) -> tuple[Tensor]:
    return (
        _ops.cuda_cross_entropy_backward(grad, input, target, lse, ignore_index, label_smoothing),
    )


def _fake_layer_norm(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized: int,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, ...]:
    rows = input.numel() // normalized if normalized else 0
    output = input.new_empty(input.shape)
    mean = input.new_empty((rows,), dtype=torch.float32)
    total = input.new_empty(input.shape if residual is not None else (0,))
    return output, total, mean, torch.empty_like(mean)


def _fake_layer_norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    source: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    normalized: int,
    dropout_p: float,
    seed: Tensor | None,
    want_source: bool,
    want_input: bool,
    want_weight: bool,
    want_bias: bool,
) -> tuple[Tensor, ...]:
    def empty(wanted: bool, shape: Sequence[int]) -> Tensor:
        return source.new_empty(shape if wanted else (0,))

    return (
        empty(want_source, source.shape),
        empty(want_input, source.shape),
        empty(want_weight, (normalized,)),
        empty(want_bias, (normalized,)),
    )


def _fake_cross_entropy(
    input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    rows = input.shape[:1]
    return input.new_empty(rows, dtype=torch.float32), input.new_empty(rows, dtype=torch.float64)


def _fake_cross_entropy_backward(
    grad: Tensor,
    input: Tensor,
    target: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    return input.new_empty(input.shape)


_FAKES: dict[str, Callable[..., Any]] = {
    "cuda_layer_norm": _fake_layer_norm,
    "cuda_layer_norm_backward": _fake_layer_norm_backward,
    "cuda_cross_entropy": _fake_cross_entropy,
    "cuda_cross_entropy_backward": _fake_cross_entropy_backward,
}


def register_fakes() -> None:
    """For the operators of a library that was loaded."""
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"transformer_fast::{name}", fake)


def _refuse_place(call: Call) -> str | None:
    first = call.tensors[0]
    assert first is not None
    if first.is_cuda:
        capability = torch.cuda.get_device_capability(first.device)
        if capability < OLDEST:
            needed, found = (".".join(map(str, number)) for number in (OLDEST, capability))
            return f"it needs a GPU of compute capability {needed} and this one has {found}"
    return None


def kernels(device: str, unavailable: str | None) -> list[Kernel]:
    """What is registered, for tensors on this kind of device."""
    found = (
        Kernel("layer_norm", "cuda", layer_norm),
        Kernel("add_layer_norm", "cuda", add_layer_norm),
        Kernel("cross_entropy", "cuda", cross_entropy),
    )
    return [
        replace(
            kernel,
            devices=(device,),
            dtypes=_FLOATS,
            gradients=True,
            dropout=True,
            unavailable=unavailable,
            refuses=_refuse_place,
            proven=frozenset(),
        )
        for kernel in found
    ]


autograd.register("layer_norm", "cuda", _layer_norm_forward, _layer_norm_backward)
autograd.register("add_layer_norm", "cuda", _add_layer_norm_forward, _add_layer_norm_backward)
autograd.register("cross_entropy", "cuda", _cross_entropy_forward, _cross_entropy_backward)

if _native.cuda_why_not is None:
    register_fakes()
for _kernel in kernels("cuda", _native.cuda_why_not):
    register(_kernel)
