"""Cross entropy of logits with label smoothing ("Attention Is All You Need", section 5.4).

    loss[n] = (1 - s) * -log p[n, target[n]] + s * mean over v of -log p[n, v]

with ``p = softmax(logits)``, in fp32 at least; 0 where ``target[n] == ignore_index``, and then
nothing of that row counts. Without finite logits a row's loss is NaN, as PyTorch's is.

Behind a linear map the logits of a vocabulary are far larger than all else: see `chunked_loss`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .chunked_loss import chunked_loss, register_losses
from .linear import linear

__all__ = ["cross_entropy", "linear_cross_entropy"]


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
    return chunked_loss(
        "reference", input, weight, bias, target, ignore_index, label_smoothing, summed
    )


register_losses("reference", linear, cross_entropy)
