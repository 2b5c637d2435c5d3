"""xFormers' memory-efficient attention, on GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import Offer

NAME = "xFormers"
PACKAGES = ("xformers",)


def bias(query: Tensor, keys: int, mask: Tensor | None, lengths: Tensor | None) -> Tensor | None:
    """What is added to the scores (B, H, T, S) for masks that it has no class for."""
    if mask is None and lengths is None:
        return None
    b, h, t, _ = query.shape
    shape = (b, h, t, keys)
    added = torch.zeros(shape, dtype=query.dtype, device=query.device)
    if mask is not None:
        shown = mask.expand(shape)
        added = added.masked_fill(~shown, -torch.inf) if mask.dtype == torch.bool else added + shown
    if lengths is not None:
        hidden = torch.arange(keys, device=query.device) >= lengths[:, None]
        added = added.masked_fill(hidden[:, None, None], -torch.inf)
    return added


def op(op: str, arguments: tuple[Any, ...]) -> Offer:
    if op != "attention":
        return None
    query, key, _, mask, lengths, causal, _, dropout_p, _, _, need_weights, ends = arguments
    if query.device.type != "cuda":
        return "it runs on cuda tensors"
    if dropout_p:
        return "it drops other elements for the same seed"
    if need_weights:
        return "it gives no weights"
    if ends is not None:
        return "it takes no query lengths"
    if query.shape[1] != key.shape[1]:
        return "grouped heads take another form of call"
    if causal and (mask is not None or lengths is not None):
        return "it has no class for a causal mask beside another"
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    def run(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, None]:
        mask, lengths, causal, scale = rest[:4]
        added = LowerTriangularMask() if causal else bias(query, key.shape[2], mask, lengths)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return memory_efficient_attention(q, k, v, attn_bias=added, scale=scale).transpose(
            1, 2
        ), None

    return run
