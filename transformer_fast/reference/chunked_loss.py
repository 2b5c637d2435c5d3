"""Losses of a linear map's results, of which so many rows at a time are in memory.

The gradients are worked out with the losses where it is known that all rows' losses count alike; else
the logits are made once more for gradients. In programs that are compiled one operator stands for
all parts. Where gradients are differentiated themselves, in forward mode and under the transforms of
`torch.func` it is a `Recomputed` function that does one part each, by the reference's formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..autograd import only, vjp, wants_grad

__all__ = ["chunked_gradients", "chunked_loss", "recomputed_losses", "register_losses"]

#: So many logits are in memory at a time; of a very large vocabulary those of `_LEAST_ROWS`.
MOST_LOGITS = 2**24
_LEAST_ROWS = 64

#: Of input, weight, bias, target, ignore_index and label_smoothing.
Losses = Callable[[Tensor, Tensor, "Tensor | None", Tensor, int, float], Tensor]


class _Backend(NamedTuple):
    losses: Losses
    #: Whether it has kernels for ``linear_cross_entropy_gradients``.
    has_gradients: bool


_backends: dict[str, _Backend] = {}


def register_losses(
    backend: str,
    linear: Callable[..., Tensor],
    cross_entropy: Callable[..., Tensor],
    has_gradients: bool = False,
) -> None:
    """A backend's functions that logits and their losses come from."""

    def losses(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        label_smoothing: float,
    ) -> Tensor:
        logits = linear(input, weight, bias, None, None)
        return cross_entropy(logits, target, ignore_index, label_smoothing)

    _backends[backend] = _Backend(losses, has_gradients)


def _part_rows(weight: Tensor) -> int:
    return max(_LEAST_ROWS, MOST_LOGITS // max(1, weight.shape[0]))


def chunked_loss(
    backend: str,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    summed: bool = False,
) -> Tensor:
    """The backend's losses, for as many rows at a time as `MOST_LOGITS` allow.

    ``summed``: the caller will add the losses up, so all have the same gradient (a hint).
    """
    losses, has_gradients = _backends[backend]
    arguments = (input, weight, bias, target, ignore_index, label_smoothing)
    compiling = torch.compiler.is_compiling()
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return losses(*arguments) if compiling else recomputed_losses(*arguments)
    # What is traced otherwise is to be made of PyTorch's operators.
    if compiling and not has_gradients and not torch.compiler.is_dynamo_compiling():
        return losses(*arguments)
    rows = _part_rows(weight)
    if _are_few(input, rows):
        return losses(*arguments)
    if not wants_grad(input, weight, bias):
        return _work(backend, None, *arguments[:4], rows, *arguments[4:], (False,) * 3)[0]
    # How the losses' gradient lies in memory, by which it is known that they count alike, is not
    # known while a program is traced: gradients worked out with the losses would be so for nothing.
    return _InParts.apply(backend, rows, summed and not compiling, *arguments)  # type: ignore[no-any-return, no-untyped-call]


def _are_few(input: Tensor, rows: int) -> bool:
    if not torch.compiler.is_compiling():
        return input.shape[0] <= rows
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(input.shape[0] <= rows)  # of any number if that depends on data


def recomputed_losses(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """The reference's losses, of which any derivative has a part of the logits at a time."""
    losses = _backends["reference"].losses
    rows = _part_rows(weight)
    if input.shape[0] * _repeats() <= rows:
        return losses(input, weight, bias, target, ignore_index, label_smoothing)
    dtype = weight.dtype
    shared = [weight] if bias is None else [weight, bias]
    # Their gradients are sums over all parts.
    wide = [p.to(torch.promote_types(p.dtype, torch.float32)) for p in shared]

    def part(x: Tensor, t: Tensor, *shared: Tensor) -> tuple[Tensor]:
        w, b = (*(p.to(dtype) for p in shared), None)[:2]
        assert w is not None
        return (losses(x, w, b, t, ignore_index, label_smoothing),)

    logits = min(rows, input.shape[0]) * weight.shape[0]
    function = Recomputed(part, MOST_LOGITS // max(1, logits))
    return torch.cat(
        [
            function(x, t, *wide)[0]
            for x, t in zip(input.split(rows), target.split(rows), strict=True)
        ]
    )


def _repeats() -> int:
    """How many times the transforms of `torch.func` do at once what is called now."""
    functorch = torch._C._functorch
    return math.prod(
        functorch.CVmapInterpreterPtr(one).batchSize()
        for one in functorch.get_interpreter_stack() or ()
        if one.key() == functorch.TransformType.Vmap
    )


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        backend: str,
        rows: int,
        summed: bool,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        label_smoothing: float,
    ) -> Tensor:
        wants = ctx.needs_input_grad[3:6] if summed else (False,) * 3
        result, *found = _work(
            backend, None, input, weight, bias, target, rows, ignore_index, label_smoothing, wants
        )
        ctx.backend, ctx.rows, ctx.summed = backend, rows, summed
        ctx.ignore_index, ctx.label_smoothing = ignore_index, label_smoothing
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, weight, bias, target, *found)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 9
        input, weight, bias, target, *found = ctx.saved_tensors
        wants = ctx.needs_input_grad[3:6]
        primals = (input, weight, bias)
        options = (ctx.ignore_index, ctx.label_smoothing)
        if not torch.compiler.is_compiling() and (
            torch.is_grad_enabled()
            or torch._C._are_functorch_transforms_active()
            or torch._C._functorch.is_legacy_batchedtensor(grad)  # is_grads_batched=True
        ):
            found = vjp(
                lambda x, w, b: recomputed_losses(x, w, b, target, *options),
                primals,
                wants,
                (grad,),
            )
        elif ctx.summed and grad.stride(0) == 0:
            found = _times(grad[0], found, primals, target == ctx.ignore_index)
        else:
            _, *found = _work(ctx.backend, grad, *primals, target, ctx.rows, *options, wants)
            found = [
                None if f is None or p is None else f.to(p.dtype)
                for f, p in zip(found, primals, strict=True)
            ]
        return (None, None, None, *found, None, None, None)


def _work(
    backend: str,
    grad: Tensor | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    rows: int,
    ignore_index: int,
    label_smoothing: float,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Losses, and gradients of input, weight and bias (those of the latter two in fp32 at least),
    worked out for so many rows at a time; without ``grad`` those of the losses' sum."""
    losses, has_gradients = _backends[backend]
    arguments = (grad, input, weight, bias, target, rows, ignore_index, label_smoothing)
    if not has_gradients and not torch.compiler.is_compiling():
        return _gradients(losses, *arguments, wants)
    operator = getattr(torch.ops.transformer_fast.linear_cross_entropy_gradients, backend)
    result, *found = operator(*arguments, *wants)
    return (result, *only(wants, found))  # type: ignore[return-value]


def _leaves(
    tensors: Sequence[Tensor | None], wants: Sequence[bool]
) -> tuple[list[Tensor | None], list[Tensor]]:
    """The tensors without their history, and which of them gradients are wanted of."""
    own = [
        None if tensor is None else tensor.detach().requires_grad_(want)
        for tensor, want in zip(tensors, wants, strict=True)
    ]
    return own, [t for t, want in zip(own, wants, strict=True) if want and t is not None]


def _gradients(
    losses: Losses,
    grad: Tensor | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    rows: int,
    ignore_index: int,
    label_smoothing: float,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """`_work` of any losses."""
    (w, b), shared = _leaves((weight, bias), wants[1:])
    assert w is not None
    wide = torch.promote_types(weight.dtype, torch.float32)
    results: list[Tensor] = []
    inputs: list[Tensor] = []
    sums = [leaf.new_zeros(leaf.shape, dtype=wide) for leaf in shared]
    for begin in range(0, input.shape[0], rows):
        part = slice(begin, begin + rows)
        (x,), own = _leaves((input[part],), wants[:1])
        assert x is not None
        with torch.set_grad_enabled(any(wants)):
            result = losses(x, w, b, target[part], ignore_index, label_smoothing)
        results.append(result.detach())
        if not any(wants):
            continue
        given = torch.ones_like(result) if grad is None else grad[part]
        found = torch.autograd.grad(result, own + shared, given)
        inputs += found[: len(own)]
        for total, one in zip(sums, found[len(own) :], strict=True):
            total.add_(one)
    rest = iter(sums)
    return (
        torch.cat(results),
        torch.cat(inputs) if wants[0] else None,
        next(rest) if wants[1] else None,
        next(rest) if wants[2] else None,
    )


def chunked_gradients(backend: str, *arguments: Any) -> tuple[Tensor, ...]:
    """The operator ``linear_cross_entropy_gradients`` of a backend without kernels for it."""
    given: tuple[Any, ...] = (*arguments[:-3], arguments[-3:])
    # Behind autograd, as operators are called under modes, `_gradients` needs it nevertheless.
    autograd = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(autograd, False):
        results = _gradients(_backends[backend].losses, *given)
    input = given[1]
    return tuple(input.new_empty((0,)) if r is None else r for r in results)


def _times(
    factor: Tensor,
    found: Sequence[Tensor | None],
    primals: Sequence[Tensor | None],
    ignored: Tensor,
) -> list[Tensor | None]:
    """Gradients of the losses' sum as those of ``factor`` times it, in the dtypes of the primals.

    What is of ignored rows only stays 0 even if the factor, which may be one by their number, is not
    finite; no value is waited for.
    """
    factor = torch.where(ignored.all(), 0.0, factor)
    results: list[Tensor | None] = []
    for tensor, primal in zip(found, primals, strict=True):
        if tensor is None or primal is None:
            results.append(None)
            continue
        if tensor.dtype == primal.dtype or type(tensor) is not Tensor or not tensor.is_cpu:
            results.append((tensor * factor).to(primal.dtype))
            continue
        # Through the cache: PyTorch converts by way of copies.
        result = torch.empty_like(tensor, dtype=primal.dtype)
        parts = (t.view(-1).split(2**18) for t in (result, tensor))
        for to, of in zip(*parts, strict=True):
            torch.mul(of, factor, out=to)
        results.append(result)
    if results[0] is not None:
        results[0].masked_fill_(ignored[:, None], 0.0)
    return results


_Run = Callable[..., tuple[Tensor, ...]]


class Recomputed(NamedTuple):
    """Called with tensors, does what ``run`` does, which is plain PyTorch and gives a tuple.

    Intermediate results are not kept: each derivative works them out again. That holds for derivatives
    of any order, in reverse and in forward mode, and under the transforms of `torch.func`. So what is
    done in parts needs the memory of one part at a time, whoever looks on.
    """

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
