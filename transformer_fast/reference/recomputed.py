"""Functions whose intermediate results are not kept: each derivative works them out again.

That holds for derivatives of any order, in reverse and in forward mode, and under the transforms of
`torch.func`. So what is done in parts needs the memory of one part at a time, whoever looks on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd import vjp

_Run = Callable[..., tuple[Tensor, ...]]


class Recomputed(NamedTuple):
    """Called with tensors, does what ``run`` does, which is plain PyTorch and gives a tuple."""

    run: _Run
    #: How many times `torch.vmap` may do it at once.
    at_once: int

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _Recomputed.apply(self, *tensors)  # type: ignore[no-any-return, no-untyped-call]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(function: Recomputed, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return function.run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.function, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        wants = ctx.needs_input_grad[1:]
        function = ctx.function._replace(run=_backward(ctx.function.run, wants))
        found = iter(function(*ctx.saved_tensors, *grads))
        return (None, *(next(found) if want else None for want in wants))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:  # type: ignore[override]
        moves = [tangent is not None for tangent in tangents]
        function = ctx.function._replace(run=_forward(ctx.function.run, moves))
        return function(*ctx.saved_tensors, *(t for t in tangents if t is not None))  # type: ignore[no-any-return]

    @staticmethod
    def vmap(  # type: ignore[override]
        info: Any, in_dims: tuple[int | None, ...], function: Recomputed, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        number = min(max(1, function.at_once), info.batch_size)
        run = torch.vmap(function.run, in_dims[1:], chunk_size=number)
        results = Recomputed(run, function.at_once // number)(*tensors)
        return results, (0,) * len(results)


def _pull(
    run: _Run, primals: Sequence[Tensor], wants: Sequence[bool], grads: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Gradients of the wanted primals."""
    if not torch._C._are_functorch_transforms_active():  # which saved tensors' hooks forbid
        found = vjp(run, primals, wants, grads)
        return tuple(
            torch.zeros_like(primal) if gradient is None else gradient
            for gradient, primal, want in zip(found, primals, wants, strict=True)
            if want
        )

    def of_wanted(*wanted: Tensor) -> tuple[Tensor, ...]:
        rest = iter(wanted)
        return run(*(next(rest) if want else p for p, want in zip(primals, wants, strict=True)))

    wanted = [primal for primal, want in zip(primals, wants, strict=True) if want]
    _, pull = torch.func.vjp(of_wanted, *wanted)  # type: ignore[misc]
    return pull(tuple(grads))  # type: ignore[no-any-return]


def _backward(run: _Run, wants: Sequence[bool]) -> _Run:
    def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(wants)
        return _pull(run, tensors[:count], wants, tensors[count:])

    return gradients


def _forward(run: _Run, moves: Sequence[bool]) -> _Run:
    """By the gradient of the gradient, which is linear in what it is given: forward mode itself cannot
    be nested where it is on."""

    def tangents(*tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(moves)
        primals, given = tensors[:count], tensors[count:]
        zeros = [torch.zeros_like(result) for result in run(*primals)]
        gradients = _backward(run, moves)
        return _pull(lambda *grads: gradients(*primals, *grads), zeros, (True,) * len(zeros), given)

    return tangents
