"""Checks that several ops share; torch's exception type and wording where torch has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..reference.linear import ACTIVATIONS


def require_tensor(function: str, name: str, position: int, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{function}(): argument '{name}' (position {position}) must be Tensor, "
            f"not {type(value).__name__}"
        )


def require_optional_tensor(function: str, name: str, position: int, value: Any) -> None:
    if value is not None:
        require_tensor(function, name, position, value)


def require_floating(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must have a floating-point dtype, not {tensor.dtype}")


def require_probability(name: str, p: Any) -> float:
    if not isinstance(p, (int, float)) or isinstance(p, bool):
        raise TypeError(f"{name} must be a float in [0, 1], not {type(p).__name__}")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, not {p}")
    return float(p)


def require_same_device(first_name: str, first: Tensor, **others: Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != first.device:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {first_name} is on "
                f"{first.device} and {name} is on {tensor.device}"
            )


def require_activation(activation: Any) -> None:
    if activation is None or callable(activation):
        return
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation must be one of {', '.join(ACTIVATIONS)}, or a callable, not {activation!r}"
        )


def named_activation(
    activation: str | Callable[[Tensor], Tensor] | None,
) -> str | Callable[[Tensor], Tensor] | None:
    """The name of a well-known callable, so that kernels can take it."""
    if callable(activation):
        return _KNOWN_CALLABLES.get(activation, activation)
    return activation


_KNOWN_CALLABLES: dict[Any, str] = {
    torch.nn.functional.relu: "relu",
    torch.relu: "relu",
    torch.nn.functional.gelu: "gelu",
    torch.nn.functional.silu: "silu",
}


def wants_grad(*tensors: Tensor | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:  # noqa: SIM110 - a generator costs more, on the hot path
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors in autocast's dtype for their device, where autocast is on."""
    first = tensors[0]
    assert first is not None
    kind = first.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    )
