"""Cross entropy of logits with label smoothing ("Attention Is All You Need", section 5.4).

    loss[n] = (1 - s) * -log p[n, target[n]] + s * mean over v of -log p[n, v]

with logits (..., C), target (...) and ``p = softmax(logits)``, computed in at least fp32. Where
``target[n] == ignore_index`` the loss is 0 and the row has no gradient, whatever its logits are. A row
without finite logits has the loss NaN, as in PyTorch.

Behind a linear layer the logits need far more memory than all other tensors: the backends compute them
in chunks (`ops.chunked_loss`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .linear import linear

__all__ = ["cross_entropy", "linear_cross_entropy"]


def cross_entropy(
    input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    ignored = target == ignore_index
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    x = x.masked_fill(ignored[..., None], 0.0)
    log_p = torch.log_softmax(x, dim=-1)
    losses = -log_p.gather(-1, target.masked_fill(ignored, 0)[..., None])[..., 0]
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
    """``summed``: a hint that the caller will add up the losses; then all have the same gradient."""
    logits = linear(input, weight, bias, None, None)
    return cross_entropy(logits, target, ignore_index, label_smoothing)
