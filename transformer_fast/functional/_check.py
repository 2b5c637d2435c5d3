"""Checks that several ops share; torch's exception type and wording where torch has one."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import dispatch
from ..reference.linear import ACTIVATIONS


def same_error_as(torch_call: Callable[[], Any], otherwise: Exception) -> NoReturn:
    """Raise what torch raises for the same call, or ``otherwise`` if torch takes it."""
    with torch.no_grad():
        torch_call()
    raise otherwise


#: Tensors that are their memory and nothing else.
_PLAIN = (Tensor, torch.nn.Parameter)
#: Subclasses that know an operator by its schema, its fake or its sharding rules.
_KNOW_OPERATORS = frozenset(
    {
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.functional_tensor.FunctionalTensor",
        "torch.distributed.tensor.DTensor",
        "torch.distributed.tensor._api.DTensor",
        "torch.distributed._functional_collectives.AsyncCollectiveTensor",
    }
)


def is_torchs(*tensors: Tensor | None) -> bool:
    """Whether a call with these is PyTorch's own: its functions are what the tensors know.

    Subclasses that override them, or what they dispatch to; sparse, mkldnn and nested tensors; a
    first tensor on meta, whose others PyTorch lets be elsewhere or refuses.
    """
    if getattr(tensors[0], "is_meta", False):
        return True
    for tensor in tensors:
        if isinstance(tensor, Tensor) and (
            (type(tensor) not in _PLAIN and _overrides(type(tensor)))
            or tensor.layout is not torch.strided
            or tensor.is_nested
        ):
            return True
    return False


def _overrides(kind: type[Tensor]) -> bool:
    if kind.__torch_function__ is not torch._C._disabled_torch_function_impl:
        return True
    if kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl:  # type: ignore[comparison-overlap]
        return False
    return f"{kind.__module__}.{kind.__qualname__}" not in _KNOW_OPERATORS


def leaves_to_torch(op: str, backend: Any, *tensors: Tensor | None, also: bool = False) -> bool:
    """`is_torchs`, or ``also``; NotImplementedError if a backend with kernels is named.

    A call that is explained goes on to the dispatcher, which has the reasons.
    """
    if not (also or is_torchs(*tensors)) or backend is dispatch.Probe:
        return False
    backend = dispatch.named_backend() if backend is None else backend
    if backend not in (None, "torch", "reference"):
        dispatch.check_name(backend)
        raise NotImplementedError(
            f"backend {backend!r} does not support this call of {op}: a tensor is of a subclass "
            "that overrides PyTorch's functions, or sparse, nested, complex, or on meta."
        )
    return True


def wrong_type(
    function: str, name: str, position: int | None, wanted: str, value: Any
) -> TypeError:
    """``position``: None for keyword-only arguments."""
    place = "" if position is None else f" (position {position})"
    return TypeError(
        f"{function}(): argument '{name}'{place} must be {wanted}, not {type(value).__name__}"
    )


def require_tensor(
    function: str, name: str, position: int | None, value: Any, optional: bool = False
) -> None:
    if not (isinstance(value, Tensor) or (optional and value is None)):
        raise wrong_type(function, name, position, "Tensor", value)


def require_floating(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must have a floating-point dtype, not {tensor.dtype}")


def require_float(function: str, name: str, value: Any, position: int | None = None) -> Any:
    """The value as a number, wherever torch would take it for one; symbolic while tracing."""
    if isinstance(value, (float, int, torch.SymFloat, torch.SymInt)):
        return value
    if isinstance(value, numbers.Real) or (isinstance(value, Tensor) and value.dim() == 0):
        return float(value)
    raise wrong_type(function, name, position, "float", value)


def require_bool(function: str, name: str, value: Any) -> None:
    if not isinstance(value, (bool, torch.SymBool)):
        raise wrong_type(function, name, None, "bool", value)


def require_probability(function: str, name: str, p: Any) -> float:
    if type(p) is not float:
        p = float(require_float(function, name, p))
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, not {p}")
    return p


def require_same_device(first_name: str, first: Tensor, **others: Tensor | None) -> None:
    device = first.device
    for name, tensor in others.items():
        if tensor is not None and tensor.device != device:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {first_name} is on "
                f"{device} and {name} is on {tensor.device}"
            )


def require_activation(activation: Any) -> None:
    if activation is None or callable(activation):
        return
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
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


def casts_itself(op: str, first: Tensor, backend: str | None) -> bool:
    """Whether autocast is on and the call is for PyTorch's own ops in any case.

    They cast their arguments themselves, and a parameter once until autocast's region ends.
    """
    if backend is not None or not isinstance(first, Tensor) or torch.compiler.is_compiling():
        return False
    kind = "cpu" if first.is_cpu else first.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind) and dispatch.only_pytorchs(op, first)


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors in autocast's dtype for their device, where autocast is on."""
    first = tensors[0]
    assert first is not None
    kind = "cpu" if first.is_cpu else first.device.type  # the name of a device takes its time
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    )
