"""The CPU kernel of The Annotated Transformer's layer norm, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _native, dispatch, reference
from ..autograd import differentiates_again, needs_function, vjp


def fits(input: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether `annotated_layer_norm` takes these tensors."""
    return (
        _native.module is not None
        and not dispatch.is_traced()
        and not dispatch.transforms(input, weight, bias)
        and dispatch.named_backend() in (None, "cpu")
        and input.dim() > 0
        and input.shape[-1] == weight.numel() > 1
        and all(
            type(t) in (Tensor, torch.nn.Parameter) and t.is_cpu and t.dtype == torch.float32
            for t in (input, weight, bias)
        )
    )


class _AnnotatedLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        output, mean, rstd = torch.ops.transformer_fast.cpu_annotated_layer_norm(
            input, weight, bias, eps
        )
        ctx.eps = eps
        ctx.save_for_backward(input, weight, mean, rstd)
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        input, weight, mean, rstd = ctx.saved_tensors
        wants = ctx.needs_input_grad[:3]
        if differentiates_again():
            bias = torch.zeros_like(weight)  # the gradients do not depend on it
            return *vjp(
                lambda x, w, b: reference.annotated_layer_norm(x, w, b, ctx.eps),
                (input, weight, bias), wants, (grad,),
            ), None  # fmt: skip
        found = torch.ops.transformer_fast.cpu_annotated_layer_norm_backward(
            grad, input, mean, rstd, weight, *wants
        )
        return *(t if want else None for t, want in zip(found, wants, strict=True)), None


def annotated_layer_norm(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """``weight * (input - mean) / (std + eps) + bias`` over the last dimension, std unbiased."""
    if needs_function(input, weight, bias):
        return _AnnotatedLayerNorm.apply(input, weight, bias, eps)  # type: ignore[no-any-return]
    return torch.ops.transformer_fast.cpu_annotated_layer_norm(  # type: ignore[no-any-return]
        input, weight, bias, eps
    )[0]
