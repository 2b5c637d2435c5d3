"""The Annotated Transformer's layer norm, on the kernels of the usual one.

``y = weight * (x - mean(x)) / (std(x) + eps) + bias``; "The Annotated Transformer" (Rush 2018).
With s the biased standard deviation and std = k s (k = sqrt(M / (M - 1)), or 1 if biased too):

    y = weight * (x - mean) / s * f + bias,    f = 1 / (k + eps / s) per row

so the usual kernel does the statistics and the first product, and its backward all but one term of
the order eps / s: dx = LN_backward(f g) + (x - mean) S eps f^2 / (M s^4) per row, with
S = sum(g weight (x - mean)).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..autograd import differentiates_again, vjp
from ..dispatch import Call, select
from ..functional._check import is_torchs, wants_grad
from ..functional.layer_norm import BACKWARD, TRAINING
from ..reference.dropout import draw_seed, dropout

#: Keeps rows of equal values finite; far below the square of anything that is not noise.
_TINY = 1e-30


def layer_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, unbiased: bool
) -> Tensor:
    """The norm alone; see the module."""
    return _run(input, None, weight, bias, eps, unbiased, 0.0)[0]


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    unbiased: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """``(norm(sum), sum)`` with ``sum = residual + dropout(input, dropout_p)``."""
    return _run(input, residual, weight, bias, eps, unbiased, dropout_p)


def _run(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    unbiased: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    op = "layer_norm" if residual is None else "add_layer_norm"
    tensors = (input, weight, bias) if residual is None else (input, residual, weight, bias)
    if is_torchs(*tensors):
        total = input if residual is None else residual + F.dropout(input, dropout_p)
        return reference.annotated_layer_norm(total, weight, bias, eps, unbiased), total
    backend = select(Call(op, tensors, wants_grad(*tensors), dropout_p)).backend
    seed = draw_seed(input.device) if 0.0 < dropout_p < 1.0 else None
    half = input.dtype in (torch.float16, torch.bfloat16)
    if half or backend not in TRAINING.of:
        return _plain(input, residual, weight, bias, eps, unbiased, dropout_p, seed)
    y, total = _OutsideNorm.apply(
        backend, input, residual, weight, bias, eps, unbiased, dropout_p, seed
    )
    return y, input if residual is None else total


def _plain(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    unbiased: bool,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The definition, in PyTorch; statistics of half types in fp32."""
    total = input if residual is None else residual + dropout(input, dropout_p, seed)
    return reference.annotated_layer_norm(total, weight, bias, eps, unbiased), total


class _OutsideNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        backend: str,
        input: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        unbiased: bool,
        dropout_p: float,
        seed: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        y, total, mean, rstd = TRAINING.of[backend](
            input, residual, weight, None, 1, _TINY, dropout_p, seed
        )
        if residual is None:
            total = input
        f = (_ratio(input.shape[-1], unbiased) + eps * rstd).reciprocal_()
        per_row = f.view(*input.shape[:-1], 1)
        y = y.mul_(per_row) if bias is None else torch.addcmul(bias, y, per_row)
        ctx.backend, ctx.eps, ctx.dropout_p, ctx.unbiased = backend, eps, dropout_p, unbiased
        ctx.has_bias = bias is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, weight, mean, rstd, f, seed)
        return y, None if residual is None else total

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None) -> tuple[Any, ...]:
        total, weight, mean, rstd, f, seed = ctx.saved_tensors
        _, want_input, want_residual, want_weight, want_bias, *_ = ctx.needs_input_grad
        if grad is None:
            grad = torch.zeros_like(total)
        size = total.shape[-1]
        if differentiates_again():
            bias = grad.new_zeros(size) if ctx.has_bias else None
            dtotal, dweight, dbias = vjp(
                lambda x, w, b: reference.annotated_layer_norm(x, w, b, ctx.eps, ctx.unbiased),
                (total, weight, bias),
                (want_input or want_residual, want_weight, want_bias),
                (grad,),
            )
            if dtotal is not None and grad_sum is not None:
                dtotal = dtotal + grad_sum
            dinput = None
            if want_input:
                assert dtotal is not None
                dinput = dropout(dtotal, ctx.dropout_p, seed)
            dresidual = dtotal if want_residual else None
            return None, dinput, dresidual, dweight, dbias, None, None, None, None
        rows = (*total.shape[:-1], 1)
        # What the usual norm's backward does not know: f itself depends on x.
        centred = total - mean.view(rows)
        scaled = grad if weight is None else grad * weight
        slope = torch.linalg.vecdot(scaled, centred).view(rows)
        steep = rstd * f  # in this order nothing overflows where s is 0
        slope = slope * (ctx.eps * steep * steep * rstd * rstd / size).view(rows)
        rest = centred.mul_(slope)
        if grad_sum is not None:
            rest = rest.add_(grad_sum)
        drops = ctx.dropout_p > 0.0
        dtotal, dinput, dweight, _ = BACKWARD.of[ctx.backend](
            grad * f.view(rows), rest, total, weight, mean, rstd, 1, ctx.dropout_p, seed,
            want_residual or (want_input and not drops), want_input and drops, want_weight, False,
        )  # fmt: skip
        if not drops:
            dinput = dtotal
        dbias = grad.flatten(0, -2).sum(0) if want_bias and ctx.has_bias else None
        return (
            None, dinput if want_input else None, dtotal if want_residual else None,
            dweight if want_weight else None, dbias, None, None, None, None,
        )  # fmt: skip


def _ratio(size: int, unbiased: bool) -> float:
    """std over the biased standard deviation."""
    return math.sqrt(size / (size - 1)) if unbiased else 1.0
