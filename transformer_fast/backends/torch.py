"""PyTorch's own fused ops, where they are the fastest thing that takes the call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import Call, Kernel, register


def layer_norm(
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


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
    total = residual + input
    return F.layer_norm(total, normalized_shape, weight, bias, eps), total


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
    output = F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=enable_gqa)
    return output, None


def cross_entropy(
    input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    # For half types PyTorch rounds the log-probabilities.
    return F.cross_entropy(
        input.to(torch.promote_types(input.dtype, torch.float32)),
        target,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )


def _refuse_attention(call: Call) -> str | None:
    if call.mask is not None or call.key_lengths is not None or call.is_causal:
        return (
            "PyTorch lets NaN at hidden places through, and what a row with nothing to attend to "
            "gives depends on its path, so it takes unmasked calls only"
        )
    if call.need_weights:
        return "PyTorch's fused attention returns no weights"
    return None


def _refuse_layer_norm(call: Call) -> str | None:
    x = call.tensors[0]
    assert x is not None
    if call.needs_grad and x.device.type == "cpu" and x.dtype in (torch.float16, torch.bfloat16):
        return "PyTorch's CPU backward keeps half types' statistics in the half type"
    return None


register(Kernel("layer_norm", "torch", layer_norm, gradients=True, refuses=_refuse_layer_norm))
register(
    Kernel("add_layer_norm", "torch", add_layer_norm, gradients=True, refuses=_refuse_layer_norm)
)
register(Kernel("cross_entropy", "torch", cross_entropy, gradients=True))
register(Kernel("attention", "torch", attention, gradients=True, refuses=_refuse_attention))
