"""Cross entropy of logits with label smoothing ("Attention Is All You Need", section 5.4).

    loss[n] = (1 - s) * -log p[n, target[n]] + s * mean over v of -log p[n, v]

with ``p = softmax(logits)``, in fp32 at least; 0 where ``target[n] == ignore_index``, and then
nothing of that row counts. Without finite logits a row's loss is NaN, as PyTorch's is.

Behind a linear map the logits of a vocabulary are far larger than all else, so they are made for
some rows at a time, and the gradients with them where it is known that all rows' losses count alike;
else they are made once more for gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .linear import linear


def cross_entropy(
    input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    ignored = target == ignore_index
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    x = x.masked_fill(ignored[:, None], 0.0)
    log_p = torch.log_softmax(x, dim=-1)
    losses = -log_p.gather(1, target.masked_fill(ignored, 0)[:, None])[:, 0]
    if label_smoothing != 0.0:
        losses = (1.0 - label_smoothing) * losses - label_smoothing * log_p.mean(dim=-1)
    return losses.masked_fill(ignored, 0.0)


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    summed: bool = False,
) -> Tensor:
    """``summed``: the caller will add the losses up, so all have the same gradient (a hint)."""

    def losses(x: Tensor, w: Tensor, b: Tensor | None, t: Tensor) -> Tensor:
        logits = linear(x, w, b, None, None)
        return cross_entropy(logits, t, ignore_index, label_smoothing)

    return in_parts(losses, input, weight, bias, target, ignore_index, summed)


#: So many logits are in memory at a time; of a very large vocabulary those of `_LEAST_ROWS`.
MOST_LOGITS = 2**24
_LEAST_ROWS = 64

_Losses = Callable[[Tensor, Tensor, "Tensor | None", Tensor], Tensor]


class Gradients(Protocol):
    """Losses, and gradients of input, weight and bias (those of the latter two in fp32 at least),
    worked out for so many rows at a time; without ``grad`` those of the losses' sum."""

    def __call__(
        self,
        grad: Tensor | None,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        rows: int,
        wants: Sequence[bool],
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]: ...


def in_parts(
    losses: _Losses,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    summed: bool,
    gradients: Gradients | None = None,
) -> Tensor:
    """``losses(input, weight, bias, target)``, for as many rows at a time as `MOST_LOGITS` allow.

    A backend may have ``gradients`` of its own, an operator; else they are those of ``losses``, and
    a program that is traced makes all logits at once. So do transforms of `torch.func`, forward mode
    and second derivatives.
    """
    rows = max(_LEAST_ROWS, MOST_LOGITS // max(1, weight.shape[0]))
    if (
        (torch.compiler.is_compiling() and gradients is None)
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or input.shape[0] <= rows
    ):
        return losses(input, weight, bias, target)
    work = gradients or partial(_gradients, losses)
    if not (torch.is_grad_enabled() and any_requires_grad(input, weight, bias)):
        return work(None, input, weight, bias, target, rows, (False,) * 3)[0]
    # How the losses' gradient lies in memory, by which it is known that they count alike, is not
    # known while a program is traced: gradients worked out with the losses would be so for nothing.
    summed = summed and not torch.compiler.is_compiling()
    return _InParts.apply(  # type: ignore[no-any-return]
        losses, work, rows, summed, ignore_index, input, weight, bias, target
    )


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        losses: _Losses,
        work: Gradients,
        rows: int,
        summed: bool,
        ignore_index: int,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
    ) -> Tensor:
        wants = ctx.needs_input_grad[5:8] if summed else (False,) * 3
        result, *found = work(None, input, weight, bias, target, rows, wants)
        ctx.losses, ctx.work, ctx.rows, ctx.ignore_index = losses, work, rows, ignore_index
        ctx.summed = summed
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, weight, bias, target, *found)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 9
        input, weight, bias, target, *found = ctx.saved_tensors
        wants = ctx.needs_input_grad[5:8]
        primals = (input, weight, bias)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            found = _derivatives(ctx.losses, primals, target, grad, wants)
        elif ctx.summed and grad.stride(0) == 0:
            found = _times(grad[0], found, primals, target == ctx.ignore_index)
        else:
            _, *found = ctx.work(grad, *primals, target, ctx.rows, wants)
            found = [
                None if f is None or p is None else f.to(p.dtype)
                for f, p in zip(found, primals, strict=True)
            ]
        return (None,) * 5 + (*found, None)


def _leaves(
    tensors: Sequence[Tensor | None], wants: Sequence[bool]
) -> tuple[list[Tensor | None], list[Tensor]]:
    """The tensors without their history, and which of them gradients are wanted of."""
    own = [
        None if tensor is None else tensor.detach().requires_grad_(want)
        for tensor, want in zip(tensors, wants, strict=True)
    ]
    return own, [t for t, want in zip(own, wants, strict=True) if want and t is not None]


def _gradients(
    losses: _Losses,
    grad: Tensor | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    rows: int,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """`Gradients` of any losses. Sums are in fp32 at least."""
    (w, b), shared = _leaves((weight, bias), wants[1:])
    assert w is not None
    wide = torch.promote_types(weight.dtype, torch.float32)
    results: list[Tensor] = []
    inputs: list[Tensor] = []
    sums = [torch.zeros_like(leaf, dtype=wide, requires_grad=False) for leaf in shared]
    for begin in range(0, input.shape[0], rows):
        part = slice(begin, begin + rows)
        (x,), own = _leaves((input[part],), wants[:1])
        assert x is not None
        with torch.set_grad_enabled(any(wants)):
            result = losses(x, w, b, target[part])
        results.append(result.detach())
        if not any(wants):
            continue
        given = torch.ones_like(result) if grad is None else grad[part]
        found = torch.autograd.grad(result, own + shared, given)
        inputs += found[: len(own)]
        for total, one in zip(sums, found[len(own) :], strict=True):
            total.add_(one)
    rest = iter(sums)
    return (
        torch.cat(results),
        torch.cat(inputs) if wants[0] else None,
        next(rest) if wants[1] else None,
        next(rest) if wants[2] else None,
    )


def _derivatives(
    losses: _Losses,
    primals: Sequence[Tensor | None],
    target: Tensor,
    grad: Tensor,
    wants: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients that can be differentiated themselves, of all logits at once."""
    # One tensor may stand in several places, each with a gradient of its own.
    own = [p if p is None else p.view_as(p) for p in primals]
    x, w, b = own
    assert x is not None
    assert w is not None
    sought = [p for p, want in zip(own, wants, strict=True) if want and p is not None]
    found = iter(torch.autograd.grad(losses(x, w, b, target), sought, grad, create_graph=True))
    return [next(found) if want else None for want in wants]


def _times(
    factor: Tensor,
    found: Sequence[Tensor | None],
    primals: Sequence[Tensor | None],
    ignored: Tensor,
) -> list[Tensor | None]:
    """Gradients of the losses' sum as those of ``factor`` times it, in the dtypes of the primals.

    What is of ignored rows only stays 0 even if the factor, which may be one by their number, is not
    finite; no value is waited for.
    """
    factor = torch.where(ignored.all(), 0.0, factor)
    results: list[Tensor | None] = []
    for tensor, primal in zip(found, primals, strict=True):
        if tensor is None or primal is None:
            results.append(None)
            continue
        if tensor.dtype == primal.dtype or type(tensor) is not Tensor or not tensor.is_cpu:
            results.append((tensor * factor).to(primal.dtype))
            continue
        # Through the cache: PyTorch converts by way of copies.
        result = torch.empty_like(tensor, dtype=primal.dtype)
        parts = (t.view(-1).split(2**18) for t in (result, tensor))
        for to, of in zip(*parts, strict=True):
            torch.mul(of, factor, out=to)
        results.append(result)
    if results[0] is not None:
        results[0].masked_fill_(ignored[:, None], 0.0)
    return results


def any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)
