"""The optimiser, its learning rates, and the clipping and scaling of gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["adamw", "clip_gradients", "linear_schedule", "paper_schedule", "parameter_groups"]


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns the trainable parameters: matrices with weight decay, vectors and embedding tables without.

    A table that is also the output's weight counts as a table.

    Raises:
        ValueError: no parameter is trainable, or weight_decay is negative.
    """
    if not weight_decay >= 0.0:
        raise ValueError(f"weight_decay must be at least 0, not {weight_decay}")
    tables = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    groups: tuple[list[Tensor], list[Tensor]] = ([], [])
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[parameter.dim() < 2 or id(parameter) in tables].append(parameter)
    if not any(groups):
        raise ValueError("model has no trainable parameters")
    decays = (weight_decay, 0.0)
    return [
        {"params": group, "weight_decay": decay}
        for group, decay in zip(groups, decays, strict=True)
        if group
    ]


def adamw(
    model: torch.nn.Module,
    lr: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-9,
    weight_decay: float = 0.0,
    fused: bool = True,
) -> torch.optim.AdamW:
    """Returns AdamW on `parameter_groups`, with the paper's betas and eps.

    Without weight decay it is the paper's Adam. Create it after moving, wrapping or sharding the model
    (`parallelise`).

    Args:
        model: the module whose trainable parameters are updated.
        lr: the rate that the schedule scales; `paper_schedule` with a d_model expects 1.0.
        betas, eps, fused: as in `torch.optim.AdamW`.
        weight_decay: for matrices only, see `parameter_groups`.

    Raises:
        ValueError: as `parameter_groups` and torch.optim.AdamW.

    Source: "Attention Is All You Need", section 5.3; Loshchilov and Hutter 2017.
    """
    return torch.optim.AdamW(
        parameter_groups(model, weight_decay), lr=lr, betas=betas, eps=eps, fused=fused
    )


def clip_gradients(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scale all gradients so that their total 2-norm is at most max_norm; returns the norm before.

    Args:
        max_norm: positive; None: do not scale.

    Raises:
        ValueError: max_norm is not positive.
    """
    if max_norm is not None and not max_norm > 0.0:
        raise ValueError(f"max_norm must be above 0, or None, not {max_norm}")
    wanted = list(parameters)
    gradients = [p.grad for p in wanted if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(wanted, max_norm, norm)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _check_warmup(warmup_steps: int) -> None:
    if warmup_steps < 1:
        raise ValueError(f"warmup_steps must be at least 1, not {warmup_steps}")


def paper_schedule(
    optimizer: Optimizer, d_model: int | None = None, warmup_steps: int = 4000
) -> LambdaLR:
    """``lr * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5)`` at step 1, 2, ...

    ``lr`` is the optimiser's rate: 1.0 gives the paper's rates.

    Args:
        d_model: size M of the model; None: ``lr`` is the highest rate, reached at warmup_steps.
        warmup_steps: steps of linear increase; then the rate falls with the square root of the step.

    Raises:
        ValueError: d_model or warmup_steps below 1.

    Source: "Attention Is All You Need", section 5.3.
    """
    _check_warmup(warmup_steps)
    if d_model is not None and d_model < 1:
        raise ValueError(f"d_model must be at least 1, or None, not {d_model}")
    scale = warmup_steps**0.5 if d_model is None else d_model**-0.5

    def factor(done: int) -> float:
        step = done + 1
        return scale * min(step**-0.5, step * warmup_steps**-1.5)

    return LambdaLR(optimizer, factor)


def linear_schedule(optimizer: Optimizer, total_steps: int, warmup_steps: int = 1) -> LambdaLR:
    """``lr * min(step / warmup_steps, (total_steps + 1 - step) / (total_steps + 1 - warmup_steps))``.

    For runs of known length: the highest rate is ``lr`` at warmup_steps; the rate ends near 0.

    Raises:
        ValueError: warmup_steps is below 1 or above total_steps.
    """
    _check_warmup(warmup_steps)
    if warmup_steps > total_steps:
        raise ValueError(
            f"warmup_steps must be at most total_steps, {total_steps}, not {warmup_steps}"
        )

    def factor(done: int) -> float:
        step = done + 1
        down = (total_steps + 1 - step) / (total_steps + 1 - warmup_steps)
        return max(0.0, min(step / warmup_steps, down))

    return LambdaLR(optimizer, factor)
