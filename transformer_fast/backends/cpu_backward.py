"""Pairs for `autograd` of the CPU kernels: those of `native_pairs`, and what is the CPU's alone."""

from __future__ import annotations

import torch
from torch import Tensor

from .native_pairs import ACTIVATIONS, register

_ops = torch.ops.transformer_fast


def _linear_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if activation is None:
        output = _ops.cpu_linear(input, weight, None, bias, residual, 0)
        return output, output.new_empty((0,))
    return _ops.cpu_linear_with_preactivation(  # type: ignore[no-any-return]
        input, weight, bias, residual, ACTIVATIONS[activation]
    )


register("cpu", _linear_forward)
