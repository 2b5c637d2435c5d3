"""Pairs for `autograd` around the operators of the native libraries, ``cpu_*`` and ``cuda_*``.

Operators of the two that do the same take the same arguments: each function here serves both, and
``backend`` says whose operator it calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .. import autograd

_ops = torch.ops.transformer_fast


def on(device: torch.device, seed: Tensor | None) -> Tensor | None:
    return seed if seed is None or seed.device == device else seed.to(device)


def _cross_entropy_forward(
    backend: str, input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    operator = getattr(_ops, f"{backend}_cross_entropy")
    return operator(input, target, ignore_index, label_smoothing)  # type: ignore[no-any-return]


def _cross_entropy_backward(
    backend: str,
    grad: Tensor,
    input: Tensor,
    target: Tensor,
    known: Tensor,
    ignore_index: int,
    label_smoothing: float,
    wants: Sequence[bool],
) -> tuple[Tensor]:
    operator = getattr(_ops, f"{backend}_cross_entropy_backward")
    return (operator(grad, input, target, known, ignore_index, label_smoothing),)


def register(backend: str) -> None:
    """The pairs of a backend."""
    autograd.register(
        "cross_entropy", backend,
        partial(_cross_entropy_forward, backend), partial(_cross_entropy_backward, backend),
    )  # fmt: skip
