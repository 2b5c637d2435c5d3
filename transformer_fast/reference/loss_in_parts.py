"""Losses of a linear map's results, of which so many rows at a time are in memory.

The gradients are worked out with the losses where it is known that all rows' losses count alike; else
the logits are made once more for gradients. In programs that are compiled one operator stands for
all parts. Where gradients are differentiated themselves, in forward mode and under the transforms of
`torch.func` it is `recomputed`'s functions that do one part each, by the reference's formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..autograd.function import only, vjp
from .recomputed import Recomputed

#: So many logits are in memory at a time; of a very large vocabulary those of `_LEAST_ROWS`.
MOST_LOGITS = 2**24
_LEAST_ROWS = 64

#: Of input, weight, bias, target, ignore_index and label_smoothing.
Losses = Callable[[Tensor, Tensor, "Tensor | None", Tensor, int, float], Tensor]


class Gradients(Protocol):
    """Losses, and gradients of input, weight and bias (those of the latter two in fp32 at least),
    worked out for so many rows at a time; without ``grad`` those of the losses' sum."""

    def __call__(
        self,
        grad: Tensor | None,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        rows: int,
        ignore_index: int,
        label_smoothing: float,
        wants: Sequence[bool],
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]: ...


class _Backend(NamedTuple):
    losses: Losses
    gradients: Gradients | None


_backends: dict[str, _Backend] = {}


def register_losses(backend: str, losses: Losses, gradients: Gradients | None = None) -> None:
    """A backend may have ``gradients`` of its own, an operator; else they are those of ``losses``."""
    _backends[backend] = _Backend(losses, gradients)


def _part_rows(weight: Tensor) -> int:
    return max(_LEAST_ROWS, MOST_LOGITS // max(1, weight.shape[0]))


def in_parts(
    backend: str,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    summed: bool,
) -> Tensor:
    """The backend's losses, for as many rows at a time as `MOST_LOGITS` allow.

    ``summed``: the caller will add the losses up, so all have the same gradient (a hint).
    """
    losses, gradients = _backends[backend]
    arguments = (input, weight, bias, target, ignore_index, label_smoothing)
    compiling = torch.compiler.is_compiling()
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return losses(*arguments) if compiling else recomputed_losses(*arguments)
    # What is traced otherwise is to be made of PyTorch's operators.
    if compiling and gradients is None and not torch.compiler.is_dynamo_compiling():
        return losses(*arguments)
    rows = _part_rows(weight)
    if _are_few(input, rows):
        return losses(*arguments)
    if not (torch.is_grad_enabled() and any_requires_grad(input, weight, bias)):
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
    """The backend's `Gradients`."""
    losses, gradients = _backends[backend]
    if gradients is not None:
        return gradients(
            grad, input, weight, bias, target, rows, ignore_index, label_smoothing, wants
        )
    if not torch.compiler.is_compiling():
        return _gradients(
            losses, grad, input, weight, bias, target, rows, ignore_index, label_smoothing, wants
        )
    result, *found = torch.ops.transformer_fast.linear_cross_entropy_gradients(
        backend, grad, input, weight, bias, target, rows, ignore_index, label_smoothing, *wants
    )
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
    """`Gradients` of any losses. Sums are in fp32 at least."""
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


def _operator(backend: str, *arguments: Any) -> tuple[Tensor, ...]:
    """`_gradients`, whose wants stand one by one here."""
    given: tuple[Any, ...] = (*arguments[:-3], arguments[-3:])
    # Behind autograd, as operators are called under modes, `_gradients` needs it nevertheless.
    autograd = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(autograd, False):
        results = _gradients(_backends[backend].losses, *given)
    input = given[1]
    return tuple(input.new_empty((0,)) if r is None else r for r in results)


def fake_gradients(
    grad: Tensor | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    part_rows: int,
    ignore_index: int,
    label_smoothing: float,
    want_input: bool,
    want_weight: bool,
    want_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, inputs = input.shape
    classes = weight.shape[0]
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (
        input.new_empty((rows,), dtype=wide),
        input.new_empty((rows, inputs) if want_input else (0,)),
        weight.new_empty((classes, inputs) if want_weight else (0,), dtype=wide),
        weight.new_empty((classes if want_bias else 0,), dtype=wide),
    )


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


def any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _define() -> None:
    name = "linear_cross_entropy_gradients"
    _library.define(
        f"{name}(str backend, Tensor? grad, Tensor input, Tensor weight, Tensor? bias, Tensor target,"
        " SymInt part_rows, int ignore_index, float label_smoothing, bool want_input,"
        " bool want_weight, bool want_bias) -> (Tensor, Tensor, Tensor, Tensor)"
    )
    _library.impl(name, _operator, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"transformer_fast::{name}",
        lambda backend, *arguments: fake_gradients(*arguments),
        lib=_library,
    )


_library = torch.library.Library("transformer_fast", "FRAGMENT")
_define()
