"""Pairs for `autograd` around the operators of the native libraries, ``cpu_*`` and ``cuda_*``.

Operators of the two that do the same take the same arguments: each function here serves both, and
``backend`` says whose operator it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import autograd

_ops = torch.ops.transformer_fast

#: Numbered as in csrc/cpu/simd/activation.h and csrc/cuda/epilogue.cuh.
ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}


def on(device: torch.device, seed: Tensor | None) -> Tensor | None:
    return seed if seed is None or seed.device == device else seed.to(device)


def _linear_backward(
    backend: str,
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    activation: str | None,
    preactivation: Tensor,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return getattr(_ops, f"{backend}_linear_backward")(  # type: ignore[no-any-return]
        grad, input, weight, preactivation, ACTIVATIONS[activation], *wants
    )


def feed_forward_forward(
    backend: str,
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
    keep: bool = True,
) -> tuple[Tensor, Tensor]:
    """``keep``: whether a backward follows."""
    return getattr(_ops, f"{backend}_feed_forward_training")(  # type: ignore[no-any-return]
        input, weight1, bias1, weight2, bias2, ACTIVATIONS[activation], dropout_p,
        on(input.device, seed), keep,
    )  # fmt: skip


def _feed_forward_backward(
    backend: str,
    grad: Tensor,
    input: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
    saved: Tensor,
    wants: Sequence[bool],
) -> tuple[Tensor, ...]:
    return getattr(_ops, f"{backend}_feed_forward_backward")(  # type: ignore[no-any-return]
        grad, input, weight1, weight2, saved, ACTIVATIONS[activation], dropout_p,
        on(grad.device, seed), *wants,
    )  # fmt: skip


def register(backend: str, linear_forward: Callable[..., Any]) -> None:
    """The pairs of a backend; the forward of its linear map is its own."""
    for op, forward, backward in (("feed_forward", feed_forward_forward, _feed_forward_backward),):
        autograd.register(
            op, backend, partial(forward, backend), partial(backward, backend),
            keeps_preactivation=backend == "cpu",  # of relu CUDA's keeps the hidden units
        )  # fmt: skip
    autograd.register("linear", backend, linear_forward, partial(_linear_backward, backend))
