"""torch.compile of what a user of PyTorch would write."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from transformer_fast.measure.accuracy import unchecked
from transformer_fast.measure.modules import compiled, with_fast_path
from transformer_fast.specs import OPS

from . import Offer

NAME = "torch.compile"


def available() -> str | None:
    if shutil.which("g++") is None and shutil.which("c++") is None:
        return "torch.compile needs a C++ compiler and there is none"
    return None


def op(op: str, arguments: tuple[Any, ...]) -> Offer:
    reason = unchecked(OPS[op].named(arguments).get("dropout_p", 0.0))
    if reason is not None:
        return reason
    torch._dynamo.reset()
    return torch.compile(OPS[op].pytorch, dynamic=False)


def encoder_layer(layer: torch.nn.Module, arguments: tuple[Any, ...]) -> Offer:
    return compiled(layer)


encoder = transformer = encoder_layer


def hand_written(model: torch.nn.Module, adapt: Callable[..., Any]) -> Offer:
    torch._dynamo.reset()
    return adapt(torch.compile(model, dynamic=False))


training = hand_written


def generate(adapt: Callable[..., Any]) -> Offer:
    """The compiled step with a cache of fixed size, which transformers has on GPUs by default."""
    from transformers import CompileConfig

    torch._dynamo.reset()
    compiling = CompileConfig(mode="default")
    compiling._compile_all_devices = True  # type: ignore[assignment]
    return adapt(cache_implementation="static", compile_config=compiling)


#: For inference: weights become constants, which can be packed. Nothing is taken from the disk,
#: where the same graph may lie as another version of a plugin compiled it.
FROZEN = {"freezing": True, "fx_graph_cache": False}


def frozen(
    model: torch.nn.Module,
    settings: Mapping[str, Any],
    adapt: Callable[..., Any] | None = None,
    **options: Any,
) -> Offer:
    """``torch.compile(model, **options)`` under these settings of inductor, which no other sees.

    ``adapt`` as for `hand_written`; None: the model is of torch.nn.
    """
    if next(model.parameters()).device.type != "cpu":
        return "its settings are for the CPU"
    from torch._inductor import config

    torch._dynamo.reset()
    run = torch.compile(model, dynamic=False, **options)
    done = False

    def forward(*arguments: Any) -> Any:
        nonlocal done
        if done:
            return run(*arguments)
        # Dynamo itself asks whether weights are frozen, so options of torch.compile are not enough.
        with config.patch(settings), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch about itself
            done = True
            return run(*arguments)

    return adapt(forward) if adapt is not None else with_fast_path(forward, False)
