"""Less memory for more time: activations are computed again in the backward pass."""

from __future__ import annotations

import functools

import torch
from torch.utils.checkpoint import checkpoint

from .processes import transformer_layers


def checkpoint_activations(model: torch.nn.Module, every: int = 1) -> int:
    """Keep only the inputs of the encoder and decoder layers until backward; how many layers.

    Changes the model in place: names, parameters and state_dict stay, and so do the numbers, since
    dropout's seeds are drawn again from the same state. Do it before `parallelise`.

    Args:
        every: 1: all layers; n: one of n.

    Raises:
        ValueError: every is below 1, or the model has no Transformer layers.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1, not {every}")
    layers = transformer_layers(model)
    if not layers:
        raise ValueError("model has no Transformer encoder or decoder layers")
    chosen = [layer for layer in layers[::every] if "forward" not in layer.__dict__]
    for layer in chosen:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]
    return len(chosen)
