"""Fusion of inner modules, where the result is the same as calling them.

A module that is hooked, replaced, parametrised, quantised or compiled on its own is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import _has_any_global_hook

from .. import functional
from .layer_norm import LayerNorm
from .linear import Linear

LINEAR = (Linear, torch.nn.Linear, NonDynamicallyQuantizableLinear)
LAYER_NORM = (LayerNorm, torch.nn.LayerNorm)
DROPOUT = (torch.nn.Dropout,)


def is_unhooked(module: Any, classes: tuple[type, ...]) -> bool:
    """Whether the module is unhooked and unmodified: calling it runs its class's ``forward`` only."""
    return type(module) in classes and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or module._compiled_call_impl is not None
        or _has_any_global_hook()
    )


def affine(
    module: torch.nn.Module, weight: str = "weight", bias: str = "bias"
) -> tuple[Tensor | None, Tensor | None]:
    """The parameters of these names, without Module.__getattr__, which takes ten times as long."""
    parameters = module._parameters
    if weight in parameters and bias in parameters:
        return parameters[weight], parameters[bias]
    return getattr(module, weight), getattr(module, bias)


def overridden(layer: torch.nn.Module, name: str, base: type) -> bool:
    """Whether a subclass, or the instance itself, replaces the method ``name`` of ``base``."""
    return getattr(type(layer), name) is not getattr(base, name) or name in layer.__dict__


def activation_name(activation: Any) -> str | None:
    """The kernels' name of an activation, or None if they do not have it."""
    if activation is torch.nn.functional.relu or activation is torch.relu:
        return "relu"
    if activation is torch.nn.functional.gelu:
        return "gelu"
    if activation is torch.nn.functional.silu:
        return "silu"
    if isinstance(activation, torch.nn.Module):
        if is_unhooked(activation, (torch.nn.ReLU,)):
            return "relu"
        if is_unhooked(activation, (torch.nn.SiLU,)):
            return "silu"
        if is_unhooked(activation, (torch.nn.GELU,)):
            return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    if (
        type(activation) is functools.partial
        and activation.func is torch.nn.functional.gelu
        and not activation.args
        and activation.keywords == {"approximate": "tanh"}
    ):
        return "gelu_tanh"
    return None


def linear(module: torch.nn.Module, input: Tensor) -> Tensor:
    """``module(input)``."""
    if is_unhooked(module, LINEAR):
        return functional.linear(input, *affine(module))  # type: ignore[arg-type]
    return module(input)


def feed_forward(
    input: Tensor,
    linear1: torch.nn.Module,
    activation: Callable[[Tensor], Tensor],
    dropout: torch.nn.Module,
    linear2: torch.nn.Module,
) -> Tensor:
    """``linear2(dropout(activation(linear1(input))))``."""
    name = activation_name(activation)
    if (
        name is not None
        and is_unhooked(linear1, LINEAR)
        and is_unhooked(dropout, DROPOUT)
        and is_unhooked(linear2, LINEAR)
    ):
        return functional.feed_forward(
            input,
            *affine(linear1),  # type: ignore[arg-type]
            *affine(linear2),  # type: ignore[arg-type]
            activation=name,
            dropout_p=dropout.p if dropout.training else 0.0,  # type: ignore[arg-type]
        )
    return linear(linear2, dropout(activation(linear(linear1, input))))


def add_norm(
    input: Tensor, dropout: torch.nn.Module | None, residual: Tensor, norm: torch.nn.Module
) -> tuple[Tensor, Tensor]:
    """``(norm(sum), sum)`` with ``sum = residual + dropout(input)``; no dropout if None."""
    if (
        is_unhooked(norm, LAYER_NORM)
        and (dropout is None or is_unhooked(dropout, DROPOUT))
        and input.shape == residual.shape
    ):
        return functional.add_layer_norm(
            input,
            residual,
            norm.normalized_shape,  # type: ignore[arg-type]
            *affine(norm),
            norm.eps,  # type: ignore[arg-type]
            dropout_p=dropout.p if dropout is not None and dropout.training else 0.0,  # type: ignore[arg-type]
        )
    total = residual + (input if dropout is None else dropout(input))
    return norm(total), total
