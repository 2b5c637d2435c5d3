"""torch.compile of what a user of PyTorch would write."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch

from transformer_fast.measure import torch_ops
from transformer_fast.measure.modules import compiled
from transformer_fast.specs import OPS

from . import Offer

NAME = "torch.compile"


def available() -> str | None:
    if shutil.which("g++") is None and shutil.which("c++") is None:
        return "torch.compile needs a C++ compiler and there is none"
    return None


def op(op: str, arguments: tuple[Any, ...]) -> Offer:
    reason = torch_ops.why_not(OPS[op].named(arguments).get("dropout_p", 0.0))
    if reason is not None:
        return reason
    torch._dynamo.reset()
    return torch.compile(torch_ops.OPS[op], dynamic=False)


def encoder_layer(layer: torch.nn.Module, arguments: tuple[Any, ...]) -> Offer:
    return compiled(layer)


def transformer(model: torch.nn.Module, arguments: tuple[Any, ...]) -> Offer:
    return compiled(model)


def encoder(model: torch.nn.Module, arguments: tuple[Any, ...]) -> Offer:
    return compiled(model)


def hand_written(model: torch.nn.Module, adapt: Callable[..., Any]) -> Offer:
    torch._dynamo.reset()
    return adapt(torch.compile(model, dynamic=False))
