"""Layer normalisation (Ba et al. 2016; "Attention Is All You Need" section 5.4 and 3.1).

    y = (x - mean) / sqrt(variance + eps) * weight + bias

with the biased variance over the trailing dimensions ``normalized_shape``. Computed in two passes,
because E[x^2] - E[x]^2 cancels. Statistics of bfloat16 and float16 are in fp32. The module also has
RMS normalisation and the variants that add a residual first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dropout import dropout

__all__ = ["layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm"]  # noqa: RUF022 - the order of OPS


def layer_norm(
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    half = input.dtype in (torch.float16, torch.bfloat16)
    x = input.float() if half else input
    centred = x - x.mean(dim=dims, keepdim=True)
    variance = (centred * centred).mean(dim=dims, keepdim=True)
    y = centred * torch.rsqrt(variance + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(input.dtype)


def rms_norm(
    input: Tensor, normalized_shape: tuple[int, ...], weight: Tensor | None, eps: float
) -> Tensor:
    """``input / sqrt(mean(input^2) + eps) * weight`` (Zhang and Sennrich 2019)."""
    dims = tuple(range(-len(normalized_shape), 0))
    x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    y = x * torch.rsqrt((x * x).mean(dim=dims, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    return y.to(input.dtype)


def annotated_layer_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    unbiased: bool = True,
) -> Tensor:
    """The Annotated Transformer's ``weight * (x - mean) / (std + eps) + bias``, last dimension."""
    x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    std, mean = torch.std_mean(x, dim=-1, keepdim=True, correction=int(unbiased))
    y = (x - mean) / (std + eps)
    y = y if weight is None else weight * y
    y = y if bias is None else y + bias
    return y.to(input.dtype)


def add_annotated_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    unbiased: bool,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    total = residual + dropout(input, dropout_p, seed)
    return annotated_layer_norm(total, weight, bias, eps, unbiased), total


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
    total = residual + dropout(input, dropout_p, seed)
    return layer_norm(total, normalized_shape, weight, bias, eps), total


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    total = residual + dropout(input, dropout_p, seed)
    return rms_norm(total, normalized_shape, weight, eps), total
