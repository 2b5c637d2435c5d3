"""What the autograd functions of all ops share: the backends' pairs, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad

from ..dispatch import OPS


class Pair(NamedTuple):
    forward: Callable[..., Any]
    backward: Callable[..., Any]


pairs: dict[str, dict[str, Pair]] = {op: {} for op in OPS}


def register(
    op: str, backend: str, forward: Callable[..., Any], backward: Callable[..., Any]
) -> None:
    """Add a backend's pair for an op; a second one replaces the first."""
    pairs[op][backend] = Pair(forward, backward)


def needs_function(*tensors: Tensor | None) -> bool:
    """Whether a call with these tensors has to go through an autograd function.

    Raises NotImplementedError if one has a tangent, which a bare operator would lose in silence.
    """
    if forward_ad._current_level >= 0:
        _refuse_tangents(tensors)
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _refuse_tangents(tensors: tuple[Tensor | None, ...]) -> None:
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                "the kernels have no forward-mode derivative; run the call under "
                "transformer_fast.use_backend('reference')"
            )


class Function(torch.autograd.Function):
    """Takes all its arguments by position."""

    generate_vmap_rule = True

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """What torch's does, but for inspecting forward's signature: longer than many an op."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)  # type: ignore[no-untyped-call]
        args = unwrap_dead_wrappers(args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class _NoSecondDerivative(Function):
    """The identity on gradients; going back through it raises."""

    @staticmethod
    def forward(op: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:  # type: ignore[override]
        raise RuntimeError(
            f"the kernels of {ctx.op} have no second derivative; run the call under "
            "transformer_fast.use_backend('reference') to differentiate twice"
        )


def once(op: str, found: Sequence[Tensor | None], *used: Tensor | None) -> tuple[Any, ...]:
    """The gradients, so marked that differentiating them raises if it would have to be non-zero."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return tuple(found)
    witnesses = [t for t in used if t is not None and t.requires_grad]
    if not witnesses:
        return tuple(found)
    present = [t for t in found if t is not None]
    marked = iter(_NoSecondDerivative.apply(op, len(present), *present, *witnesses))  # type: ignore[no-untyped-call]
    return tuple(None if t is None else next(marked) for t in found)


def only(wants: Sequence[bool], found: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [t if want else None for want, t in zip(wants, found, strict=True)]
