"""The loss on data that is not trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from . import processes

#: ``objective(model, batch)``: the sum of the losses, and the number of tokens it is the sum over.
Objective = Callable[[torch.nn.Module, Any], tuple[Tensor, Tensor]]


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device: tensors, tuples, lists and dicts of them."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(on_device(part, device) for part in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(on_device(part, device) for part in batch)
    if isinstance(batch, dict):
        return {name: on_device(part, device) for name, part in batch.items()}
    return batch


def device_of(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


def in_dtype(model: torch.nn.Module, dtype: torch.dtype | None) -> Any:
    """autocast to ``dtype`` on the model's device; None: nothing."""
    return nullcontext() if dtype is None else torch.autocast(device_of(model).type, dtype)


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    objective: Objective,
    batches: Iterable[Any],
    *,
    autocast: torch.dtype | None = None,
) -> float:
    """The mean loss per token over all batches (of all processes), without dropout.

    The model's mode and the random numbers that follow stay as they were.

    Args:
        model, objective, autocast: as in `Trainer`.
        batches: what the objective takes, one batch after the other.

    Raises:
        ValueError: there is not one token.
    """
    was_training = model.training
    device = device_of(model)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    state = torch.get_rng_state()  # a DataLoader draws from it
    model.eval()
    try:
        for batch in batches:
            with in_dtype(model, autocast):
                loss, tokens = objective(model, on_device(batch, device))
            sums += torch.stack((loss.double(), tokens.double()))
    finally:
        model.train(was_training)
        torch.set_rng_state(state)
    loss_sum, tokens_sum = processes.total(sums).tolist()
    if tokens_sum == 0:
        raise ValueError("batches has no tokens to evaluate on")
    return loss_sum / tokens_sum
