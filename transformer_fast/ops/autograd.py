"""Helpers shared by the autograd functions of all ops: double backward, saved tensors.

Kernels have first derivatives only. With ``create_graph=True`` a backward differentiates the
reference's formula instead, which can be differentiated again; tensors with tangents, and calls
inside torch.func's transforms, never get here (`dispatch.select`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._context import in_forward_mode, is_node_executed, unwrap_if_dead

_Function = TypeVar("_Function", bound="type[Any]")


def wants_grad(*tensors: Tensor | None) -> bool:
    """True if autograd records a call with these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


class Function(torch.autograd.Function):
    """Base class of the autograd functions: all arguments are positional, and torch.func's
    transforms are not supported (see `_context.is_transformed`).

    The autograd node takes much of a small call's time. So all arguments that are not tensors are one,
    ``options``; ``forward`` sets up the context itself, and saves results that only the backward uses
    without returning them.
    """

    @classmethod
    def recorded(cls, options: tuple[Any, ...], tensors: Sequence[Tensor | None]) -> Any:
        """Returns ``apply(options, *tensors)`` if autograd records the call, else None.

        PyTorch's ``apply`` is avoided: it inspects the signature of ``forward``, which takes longer
        than many ops.
        """
        if not torch.is_grad_enabled():
            return None
        for each in tensors:
            if each is not None and each.requires_grad:
                break
        else:
            return None
        if torch.compiler.is_compiling():
            return cls.apply(options, *tensors)  # type: ignore[no-untyped-call]
        own = []
        for each in tensors:  # a loop: until Python 3.12 a comprehension is a call
            own.append(None if each is None else unwrap_if_dead(each))
        return super(torch.autograd.Function, cls).apply(options, *own)  # type: ignore[misc]


def called_directly(function: _Function) -> _Function:
    """Binds the autograd node to ``backward``. PyTorch's node looks up the method in every call."""
    function._backward_cls.apply = function.backward
    return function


def gradients_of(ctx: Any, *found: Any) -> tuple[Any, ...]:
    """Returns ``found``, followed by None for each further argument of ``forward``."""
    return (*found, *[None] * (len(ctx.needs_input_grad) - len(found)))


#: From this many multiply-adds of one gradient on, a backward checks whether it is needed.
_WORTH_ASKING = 1 << 22


def wanted(ctx: Any, work: int) -> Sequence[bool]:
    """Returns, for each argument of ``forward``, True if a backward must compute its gradient.

    ``needs_input_grad`` of a function in Python is also true for inputs that a call of
    `torch.autograd.grad` leaves out, such as the weights when only the input's gradient is requested.

    Args:
        work: multiply-adds of the gradient of one matrix; the check takes too long for small calls.
    """
    needs: Sequence[bool] = ctx.needs_input_grad
    if work < _WORTH_ASKING or torch.compiler.is_compiling():
        return needs
    wants = list(needs)
    # Autograd edges of the tensor arguments; (None, 0) for an argument without gradient.
    edges, place = ctx.next_functions, 0
    for index, need in enumerate(needs):
        if need:
            while edges[place][0] is None:
                place += 1
            try:  # noqa: SIM105 - `suppress` is two further calls
                wants[index] = is_node_executed(edges[place][0])
            except RuntimeError:  # a leaf, and the call returns its gradient
                pass
            place += 1
    return wants


def gradients(backward: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a backend's backward without recording it."""
    if torch.is_grad_enabled():  # only while a program is traced
        with torch.no_grad():
            return backward(*arguments)
    return backward(*arguments)


def differentiates_again() -> bool:
    """True if a backward is differentiated itself: for double backward (``create_graph=True``), or in
    forward mode, whose tangents kernels would lose.

    Compiled programs have no second derivatives.
    """
    return (torch.is_grad_enabled() or in_forward_mode()) and not torch.compiler.is_compiling()


def vjp(
    formula: Callable[..., Any],
    primals: Sequence[Tensor | None],
    wants: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Returns the gradients of ``formula(*primals)``; differentiable if grad mode is on.

    Args:
        formula: plain PyTorch; gives a tensor or a tuple.
        wants: for each primal, True if its gradient is returned.
        grads: gradients of the results; None counts as zeros.
    """
    with torch.enable_grad():
        # The same tensor may occur several times, each time with a separate gradient.
        own = [
            primal if primal is None or not want
            else primal.view_as(primal) if primal.requires_grad
            else primal.detach().requires_grad_()
            for primal, want in zip(primals, wants, strict=True)
        ]  # fmt: skip
        results = formula(*own)
    if isinstance(results, Tensor):
        results = (results,)
    given = [
        (result, grad)
        for result, grad in zip(results, grads, strict=True)
        if grad is not None and result.requires_grad
    ]
    sought = [primal for primal, want in zip(own, wants, strict=True) if want]
    found = iter(
        torch.autograd.grad(
            [result for result, _ in given],
            sought,  # type: ignore[arg-type]
            [grad for _, grad in given],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        if given and sought
        else (None,) * len(sought)
    )
    return [next(found) if want else None for want in wants]


def placeholder(like: Tensor, *shape: int) -> Tensor:
    """Returns a stand-in of this shape for a tensor that was not saved; allocates one row only."""
    return like.new_empty(shape[-1:]).expand(shape)


def savable(tensor: Tensor) -> Tensor:
    """Returns the tensor, or a copy of an inference tensor, which autograd cannot save."""
    if torch.compiler.is_compiling() or not tensor.is_inference():
        return tensor
    return tensor if torch.is_inference_mode_enabled() else tensor.clone()


def mask_unwanted(wants: Sequence[bool], found: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    if False not in wants:
        return found
    return [t if want else None for want, t in zip(wants, found, strict=True)]
