"""Linear layer and feed-forward network with 8-bit products, for inference.

    y = activation(float(sum_k q[i, k] w[j, k]) * scale[j] * s[i] + bias[j]) + residual[i, j]

w: signed 8 bits, one scale per output, from `quantize_weight`. q: the row's values, times the factors of
their columns if there are any, in 254 steps of s[i], found at run time; they and the sums are exact
integers, and every other operation is rounded by itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .linear import activate

__all__ = ["int8_feed_forward", "int8_linear", "quantize_weight"]

#: A row or an output whose values span less counts as zeros: the inverse of its scale could overflow.
NARROWEST = 2.0**-100
#: Steps of a row. Both ends may be rounded outwards, so these take 256 values, in unsigned 8 bits.
STEPS = 254.0
#: Largest magnitude of a weight, in signed 8 bits.
LARGEST = 127.0


def quantize_weight(weight: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns int8 values (N, K) and their float32 scales (N,):
    ``weight ~ values * scale[:, None] * factors``.

    weight: (N, K), finite.
    """
    wide = weight.to(torch.float32)
    wide = wide if factors is None else wide / factors.to(torch.float32)
    size = wide.abs().amax(-1, keepdim=True) if wide.shape[-1] else wide.new_zeros(len(wide), 1)
    inverse, scale = _scales(size, LARGEST, NARROWEST)
    return torch.round(wide * inverse).to(torch.int8), scale.squeeze(-1)


def int8_linear(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: str | Callable[[Tensor], Tensor] | None,
    residual: Tensor | None,
    factors: Tensor | None = None,
) -> Tensor:
    wide = torch.promote_types(input.dtype, torch.float32)
    y = _linear(input, weight, scale, bias, factors, activation, wide)
    return (y if residual is None else y + residual.to(wide)).to(input.dtype)


def int8_feed_forward(
    input: Tensor,
    weight1: Tensor,
    scale1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    scale2: Tensor,
    bias2: Tensor | None,
    activation: str | Callable[[Tensor], Tensor],
    factors1: Tensor | None = None,
    factors2: Tensor | None = None,
) -> Tensor:
    """The hidden units are rounded to bfloat16 before they are quantised."""
    wide = torch.promote_types(input.dtype, torch.float32)
    hidden = _linear(input, weight1, scale1, bias1, factors1, activation, wide).to(torch.bfloat16)
    return _linear(hidden, weight2, scale2, bias2, factors2, None, wide).to(input.dtype)


def _linear(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    factors: Tensor | None,
    activation: str | Callable[[Tensor], Tensor] | None,
    wide: torch.dtype,
) -> Tensor:
    """Returns the result before the residual in ``wide``, the dtype of all that follows the sums."""
    quantized, row_scale = quantize_rows(input, factors)
    # fp64 holds the integer sums exactly, whatever their order; adding 0 makes -0 the integer 0.
    sums = quantized.to(torch.float64) @ weight.to(torch.float64).t() + 0.0
    y = sums.to(wide) * scale.to(wide) * row_scale.to(wide)
    return activate(y if bias is None else y + bias.to(wide), activation)


def quantize_rows(input: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the integers q and the scales (..., 1), found in float32 in every dtype of the input.

    A row with NaN or infinity has zeros and a scale of NaN.
    """
    x = input.to(torch.float32)
    x = x if factors is None else x * factors.to(torch.float32)
    if x.shape[-1] == 0:
        return x, x.new_zeros(*x.shape[:-1], 1)
    finite = x.isfinite().all(-1, keepdim=True)
    # Half of the range, since all of it may exceed float32.
    half = torch.where(finite, width_of(0.5 * x), 0.0)
    inverse, scale = _scales(half, STEPS / 2, NARROWEST / 2)
    quantized = torch.round(torch.where(finite, x, 0.0) * inverse)
    return quantized, torch.where(finite, scale, torch.nan)


def width_of(x: Tensor) -> Tensor:
    """Returns the width (..., 1) of the range of each row, extended to include 0."""
    return x.amax(-1, keepdim=True).clamp(min=0.0) - x.amin(-1, keepdim=True).clamp(max=0.0)


def _scales(width: Tensor, steps: float, narrowest: float) -> tuple[Tensor, Tensor]:
    """Returns steps / width and width / steps, both 0 where the width is below ``narrowest``."""
    # PyTorch multiplies by the rounded reciprocal of a number, but divides by a tensor.
    count = torch.full_like(width, steps)
    wide = width >= narrowest
    return torch.where(wide, count / width, 0.0), torch.where(wide, width / count, 0.0)
