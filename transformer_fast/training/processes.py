"""Processes and memory: one process or several, as ``torchrun`` started them, where the same script
runs either way; and less memory for more time, activations being computed again in the backward."""

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
    """Whether there is a process group."""
    return bool(dist.is_available() and dist.is_initialized())


def rank() -> int:
    """This process's number; 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """The number of processes; 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


@contextmanager
def process_group(device: torch.device | str | None = None) -> Iterator[torch.device]:
    """Within the block, the process group of ``torchrun``, if it started this; gives the device.

    A group that exists already is left as it is.

    Args:
        device: "cpu" or "cuda"; None: cuda where there is one. Process n of a machine gets its
            n-th GPU; "nccl" connects GPUs, "gloo" CPUs.
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
            # Gloo's threads need the interpreter to let go of tensors. Those that still wait for it
            # when it ends take the process down with them (PyTorch 2.13).
            time.sleep(0.1)


def parallelise(model: torch.nn.Module, strategy: str = "ddp") -> torch.nn.Module:
    """The model for all processes of the group; without a group, the model as it is.

    Make the optimiser from the result. Every process must bring the same weights for "fsdp"; for
    "ddp" those of the first one count.

    Args:
        strategy: "ddp": each process has the whole model, gradients are averaged
            (DistributedDataParallel). "fsdp": parameters, gradients and the optimiser's state are
            sharded (FSDP2's fully_shard), each Transformer layer by itself.

    Raises:
        ValueError: unknown strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, not {strategy!r}")
    if not is_distributed():
        return model
    device = next(model.parameters()).device
    if strategy == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        # Buffers here are tables that never change.
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
    """All encoder and decoder layers, ours and torch's."""
    kinds = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)
    return [module for module in model.modules() if isinstance(module, kinds)]


def without_sync(model: torch.nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Within the block, gradients are exchanged between processes only if it is the ``last``."""
    inner: Any = getattr(model, "_orig_mod", model)
    if hasattr(inner, "set_requires_gradient_sync"):
        inner.set_requires_gradient_sync(last)
    elif not last and isinstance(inner, torch.nn.parallel.DistributedDataParallel):
        return inner.no_sync()
    return nullcontext()


def total(values: Tensor) -> Tensor:
    """The sum over all processes."""
    if is_distributed():
        dist.all_reduce(values)
    return values


def gathered(value: Any) -> list[Any]:
    """Each process's value, in the order of their ranks, on every process."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


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
