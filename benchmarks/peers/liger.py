"""Liger Kernel's LayerNorm, on GPUs."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from . import Offer

NAME = "Liger"
PACKAGES = ("liger-kernel",)


def op(op: str, arguments: tuple[Any, ...]) -> Offer:
    if op != "layer_norm":
        return None
    input, shape, weight, bias, _ = arguments
    if input.device.type != "cuda":
        return "it runs on cuda tensors"
    if weight is None or bias is None:
        return "it wants weight and bias"
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    size = math.prod(shape)

    def run(
        input: Tensor, shape: tuple[int, ...], weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        rows = input.reshape(-1, size)
        normalized = LigerLayerNormFunction.apply(rows, weight.flatten(), bias.flatten(), eps)
        return normalized.view_as(input)

    return run
