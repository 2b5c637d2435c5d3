"""Cross entropy of logits with label smoothing ("Attention Is All You Need", section 5.4).

    loss[n] = (1 - s) * -log p[n, target[n]] + s * mean over v of -log p[n, v]

with ``p = softmax(logits)``, in fp32 at least; 0 where ``target[n] == ignore_index``, and then
nothing of that row counts. Without finite logits a row's loss is NaN, as PyTorch's is.

Behind a linear map the logits of a vocabulary are far larger than all else, so they are made for
some rows at a time, and for gradients once more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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
) -> Tensor:
    def losses(x: Tensor, w: Tensor, b: Tensor | None, t: Tensor) -> Tensor:
        logits = linear(x, w, b, None, None)
        return cross_entropy(logits, t, ignore_index, label_smoothing)

    return in_parts(losses, input, weight, bias, target)


#: So many logits are in memory at a time; of a very large vocabulary those of `_LEAST_ROWS`.
MOST_LOGITS = 2**24
_LEAST_ROWS = 64
#: A copy of the weights in fp32, and their gradients, take longer than what they save in so few.
_FEW_PARTS = 4


def in_parts(
    losses: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
) -> Tensor:
    """``losses(input, weight, bias, target)``, for as many rows at a time as `MOST_LOGITS` allow.

    What a part keeps for gradients is forgotten and worked out again. Where there are more than
    `_FEW_PARTS`, the gradients of half types' weights are added up in fp32. A program that is traced,
    or transformed by `torch.func`, makes all logits at once: the former serves any number of rows,
    the latter cannot forget.
    """
    rows = max(_LEAST_ROWS, MOST_LOGITS // max(1, weight.shape[0]))
    if (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or input.shape[0] <= rows
    ):
        return losses(input, weight, bias, target)
    if not (torch.is_grad_enabled() and any_requires_grad(input, weight, bias)):
        parts = zip(input.split(rows), target.split(rows), strict=True)
        return torch.cat([losses(x, weight, bias, t) for x, t in parts])
    dtype = input.dtype
    many = input.shape[0] > _FEW_PARTS * rows
    wide = torch.promote_types(dtype, torch.float32) if many else dtype
    w, b = weight.to(wide), None if bias is None else bias.to(wide)

    def part(x: Tensor, t: Tensor) -> Tensor:
        return losses(x, w.to(dtype), None if b is None else b.to(dtype), t)

    parts = zip(input.split(rows), target.split(rows), strict=True)
    return torch.cat(
        [checkpoint(part, x, t, use_reentrant=False, preserve_rng_state=False) for x, t in parts]
    )


def any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)
