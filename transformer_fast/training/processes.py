"""Training on several processes (``torchrun``), and activation checkpointing."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["checkpoint_activations", "parallelise", "process_group"]

STRATEGIES = ("ddp", "fsdp")


def is_distributed() -> bool:
    """True if there is a process group."""
    return bool(dist.is_available() and dist.is_initialized())


def rank() -> int:
    """Returns this process's rank; 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Returns the number of processes; 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


@contextmanager
def process_group(device: torch.device | str | None = None) -> Iterator[torch.device]:
    """Context manager with the process group of ``torchrun``, if it started this process; yields the
    device.

    An existing group is left unchanged.

    Args:
        device: "cpu" or "cuda"; None: cuda if available. Process n of a machine gets its n-th GPU;
            GPUs communicate by "nccl", CPUs by "gloo".
    """
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if "LOCAL_RANK" in os.environ and str(kind) == "cuda":
        kind = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(kind)
    ours = "RANK" in os.environ and not is_distributed()
    if ours:
        dist.init_process_group("nccl" if kind.type == "cuda" else "gloo")
    try:
        yield kind
    finally:
        if ours:
            dist.destroy_process_group()
            # Gloo's threads need the interpreter to release tensors. Threads that still wait for it
            # when it ends crash the process (PyTorch 2.13).
            time.sleep(0.1)


def parallelise(model: torch.nn.Module, strategy: str = "ddp") -> torch.nn.Module:
    """Returns the model wrapped for all processes of the group; without a group, the model itself.

    Create the optimiser from the result. For "fsdp" every process must pass the same weights; for "ddp"
    those of the first process are used.

    Args:
        strategy: "ddp": each process has the whole model, and gradients are averaged
            (DistributedDataParallel). "fsdp": parameters, gradients and the optimiser's state are
            sharded (FSDP2's fully_shard), one shard group for each Transformer layer.

    Raises:
        ValueError: the strategy is unknown.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, not {strategy!r}")
    if not is_distributed():
        return model
    device = next(model.parameters()).device
    if strategy == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        # The buffers are constant tables.
        return torch.nn.parallel.DistributedDataParallel(
            model, device_ids=ids, broadcast_buffers=False
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world_size(),))
    for layer in transformer_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def transformer_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns all encoder and decoder layers, of this package and of torch.nn."""
    kinds = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)
    return [module for module in model.modules() if isinstance(module, kinds)]


def without_sync(model: torch.nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Context manager in which processes exchange gradients only if ``last``."""
    inner: Any = getattr(model, "_orig_mod", model)
    if hasattr(inner, "set_requires_gradient_sync"):
        inner.set_requires_gradient_sync(last)
    elif not last and isinstance(inner, torch.nn.parallel.DistributedDataParallel):
        return inner.no_sync()
    return nullcontext()


def total(values: Tensor) -> Tensor:
    """Returns the sum over all processes."""
    if is_distributed():
        dist.all_reduce(values)
    return values


def gathered(value: Any) -> list[Any]:
    """Returns the values of all processes by rank, on every process."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def checkpoint_activations(model: torch.nn.Module, every: int = 1) -> int:
    """Save only the inputs of encoder and decoder layers for backward; returns the number of layers.

    Changes the model in place. Names, parameters and state_dict stay, and so do the results, because
    dropout seeds are drawn again from the same state. Call it before `parallelise`.

    Args:
        every: 1: all layers; n: every n-th layer.

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
