"""PyTorch's equivalent of each op, as a user would write it, with the reference's signature.

For comparison only: unlike `backends.torch` they accept masks under which NaN at masked positions
can reach the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import taking_query_lengths
from ..reference.linear import activate


def _behind_sum(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(input: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        *given, dropout_p, _ = rest
        total = residual + (F.dropout(input, dropout_p) if dropout_p else input)
        return norm(total, *given), total

    return run


def _joined_mask(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    is_causal: bool,
) -> tuple[Tensor | None, bool]:
    """SDPA takes a mask or is_causal, not both; lengths it does not take."""
    keys = key.shape[-2]
    if key_lengths is not None:
        real = torch.arange(keys, device=key.device) < key_lengths[:, None]
        real = real[:, None, None, :]
        if mask is None:
            mask = real
        elif mask.dtype == torch.bool:
            mask = mask & real
        else:
            mask = mask.masked_fill(~real, -math.inf)
    if mask is not None and is_causal:
        past = torch.ones(query.shape[-2], keys, dtype=torch.bool, device=key.device).tril()
        mask = mask & past if mask.dtype == torch.bool else mask.masked_fill(~past, -math.inf)
        is_causal = False
    return mask, is_causal


@taking_query_lengths
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    seed: Tensor | None,
    enable_gqa: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    mask, is_causal = _joined_mask(query, key, attn_mask, key_lengths, is_causal)
    if not need_weights:
        output = F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return output, None
    # What torch.nn.MultiheadAttention does when it is asked for the weights.
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=key.device).tril()
    if mask is not None:
        hides = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if hides else scores + mask
    weights = torch.softmax(scores, dim=-1)
    if dropout_p:
        weights = F.dropout(weights, dropout_p)
    return weights @ value, weights


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | Callable[[Tensor], Tensor] | None,
    residual: Tensor | None,
) -> Tensor:
    y = activate(F.linear(input, weight, bias), activation)
    return y if residual is None else y + residual


def feed_forward(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str | Callable[[Tensor], Tensor],
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    hidden = activate(F.linear(input, weight1, bias1), activation)
    return F.linear(F.dropout(hidden, dropout_p) if dropout_p else hidden, weight2, bias2)


def cross_entropy(
    input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    return F.cross_entropy(
        input,
        target,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    logits = F.linear(input, weight, bias)
    return cross_entropy(logits, target, ignore_index, label_smoothing)


OPS: dict[str, Callable[..., Any]] = {
    "layer_norm": F.layer_norm,
    "add_layer_norm": _behind_sum(F.layer_norm),
    "rms_norm": F.rms_norm,
    "add_rms_norm": _behind_sum(F.rms_norm),
    "attention": attention,
    "linear": linear,
    "feed_forward": feed_forward,
    "cross_entropy": cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
}


def why_not(dropout_p: float) -> str | None:
    """Why the results of these cannot be checked, as a sentence, or None."""
    if dropout_p != 0.0:
        return "PyTorch drops other elements for the same seed, so its result cannot be checked"
    return None
