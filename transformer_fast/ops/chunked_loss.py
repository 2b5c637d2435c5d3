"""Cross entropy of a linear layer's output that holds the logits of one chunk of rows at a time.

If all losses will have the same gradient, the forward pass computes the gradients along with the
losses; otherwise the backward pass recomputes the logits. Compiled programs call one operator for
all chunks. Double backward, forward mode and the transforms of `torch.func` use a `Recomputed`
function for each chunk, with the reference's formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._context import (
    autograd_below_modes,
    has_transforms,
    in_torch_func,
    is_legacy_batched,
    vmap_size,
)
from .arguments import CrossEntropyArguments, LinearArguments, LinearCrossEntropyArguments
from .autograd import differentiates_again, gradients_of, mask_unwanted, vjp, wants_grad

__all__ = [
    "chunked_gradients", "chunked_loss", "keeps_logits", "recomputed_losses", "register_losses"
]  # fmt: skip

#: Most logits (elements) in a chunk. A chunk has at least `_LEAST_ROWS` rows, however large the
#: vocabulary is.
MOST_LOGITS = 2**24
_LEAST_ROWS = 64

#: Returns losses (N,).
Losses = Callable[[LinearCrossEntropyArguments], Tensor]


class _Backend(NamedTuple):
    losses: Losses
    #: True if the backend has kernels for ``linear_cross_entropy_gradients``.
    has_gradients: bool


_backends: dict[str, _Backend] = {}


def register_losses(
    backend: str,
    linear: Callable[[LinearArguments], Tensor],
    cross_entropy: Callable[[CrossEntropyArguments], Tensor],
    has_gradients: bool = False,
) -> None:
    """Registers the functions by which a backend computes the logits and their losses."""

    def losses(arguments: LinearCrossEntropyArguments) -> Tensor:
        logits = linear(LinearArguments(*arguments[:3]))
        return cross_entropy(CrossEntropyArguments(logits, *arguments[3:6]))

    _backends[backend] = _Backend(losses, has_gradients)


def _part_rows(weight: Tensor) -> int:
    return max(_LEAST_ROWS, MOST_LOGITS // max(1, weight.shape[0]))


def chunked_loss(backend: str, arguments: LinearCrossEntropyArguments) -> Tensor:
    """Returns the backend's losses (N,), in chunks of `_part_rows` rows; in some traces at once."""
    losses, has_gradients = _backends[backend]
    compiling = torch.compiler.is_compiling()
    if has_transforms():
        return losses(arguments) if compiling else recomputed_losses(arguments)
    # Tracers other than Dynamo (make_fx, export) should record PyTorch's operators.
    if compiling and not has_gradients and not torch.compiler.is_dynamo_compiling():
        return losses(arguments)
    rows = _part_rows(arguments.weight)
    if _are_few(arguments.input, rows):
        return losses(arguments)
    if not wants_grad(*arguments.tensors()):
        return _work(backend, None, arguments, rows, (False,) * 3)[0]
    # A gradient of stride 0 shows that all losses count alike. While tracing its strides are not
    # known, so gradients computed along with the losses would be wasted.
    summed = arguments.summed and not compiling
    return _InParts.apply(backend, rows, summed, *arguments[:6])  # type: ignore[no-any-return, no-untyped-call]


def keeps_logits(arguments: LinearCrossEntropyArguments) -> bool:
    """True if the forward should keep the logits for the backward: in eager calls, 16 MiB in fp32.

    They are one chunk then. Computing them again is one of four products of a training step.
    """
    logits = arguments.input.shape[0] * arguments.weight.shape[0]
    eager = not (torch.compiler.is_compiling() or has_transforms())
    return eager and logits <= MOST_LOGITS // 4 and wants_grad(*arguments.tensors())


def _are_few(input: Tensor, rows: int) -> bool:
    if not torch.compiler.is_compiling():
        return input.shape[0] <= rows
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(input.shape[0] <= rows)  # false if the number of rows is data-dependent


def recomputed_losses(arguments: LinearCrossEntropyArguments) -> Tensor:
    """Returns the reference's losses; they and all derivatives keep one chunk of logits in memory."""
    losses = _backends["reference"].losses
    input, weight, bias, target, *_ = arguments
    rows = _part_rows(weight)
    if input.shape[0] * vmap_size() <= rows:
        return losses(arguments)
    dtype = weight.dtype
    shared = [weight] if bias is None else [weight, bias]
    # Their gradients are sums over all chunks, so they are accumulated in at least fp32.
    wide = [p.to(torch.promote_types(p.dtype, torch.float32)) for p in shared]

    def part(x: Tensor, t: Tensor, *shared: Tensor) -> tuple[Tensor]:
        w, b = (*(p.to(dtype) for p in shared), None)[:2]
        return (losses(arguments._replace(input=x, weight=w, bias=b, target=t)),)  # type: ignore[arg-type]

    logits = min(rows, input.shape[0]) * weight.shape[0]
    function = Recomputed(part, MOST_LOGITS // max(1, logits))
    return torch.cat(
        [
            function(x, t, *wide)[0]
            for x, t in zip(input.split(rows), target.split(rows), strict=True)
        ]
    )


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, backend: str, rows: int, summed: bool, *given: Any
    ) -> Tensor:
        wants = ctx.needs_input_grad[3:6] if summed else (False,) * 3
        result, *primal_grads = _work(
            backend, None, LinearCrossEntropyArguments(*given), rows, wants
        )
        ctx.backend, ctx.rows, ctx.summed = backend, rows, summed
        *tensors, ctx.ignore_index, ctx.label_smoothing = given
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *primal_grads)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if grad is None:
            return gradients_of(ctx)
        input, weight, bias, target, *primal_grads = ctx.saved_tensors
        wants = ctx.needs_input_grad[3:6]
        primals = (input, weight, bias)
        rest = (target, ctx.ignore_index, ctx.label_smoothing)
        # is_grads_batched=True uses PyTorch's legacy vmap, with other wrappers.
        is_batched = not torch.compiler.is_compiling() and (
            in_torch_func() or is_legacy_batched(grad)
        )
        if is_batched or differentiates_again():
            primal_grads = vjp(
                lambda x, w, b: recomputed_losses(LinearCrossEntropyArguments(x, w, b, *rest)),
                primals,
                wants,
                (grad,),
            )
        elif ctx.summed and grad.stride(0) == 0:
            primal_grads = _times(grad[0], primal_grads, primals, target == ctx.ignore_index)
        else:
            arguments = LinearCrossEntropyArguments(*primals, *rest)
            _, *primal_grads = _work(ctx.backend, grad, arguments, ctx.rows, wants)
            primal_grads = [
                None if f is None or p is None else f.to(p.dtype)
                for f, p in zip(primal_grads, primals, strict=True)
            ]
        return gradients_of(ctx, None, None, None, *primal_grads)


def _work(
    backend: str,
    grad: Tensor | None,
    arguments: LinearCrossEntropyArguments,
    rows: int,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Computes losses and the gradients of input, weight and bias, ``rows`` rows at a time.

    The gradients of weight and bias are in at least fp32. ``grad`` (N,): the gradient of the
    losses; None stands for ones, which gives the gradients of the losses' sum.
    """
    losses, has_gradients = _backends[backend]
    if not has_gradients and not torch.compiler.is_compiling():
        return _gradients(losses, grad, arguments, rows, wants)
    operator = getattr(torch.ops.transformer_fast.linear_cross_entropy_gradients, backend)
    result, *primal_grads = operator(grad, *arguments[:4], rows, *arguments[4:6], *wants)
    return (result, *mask_unwanted(wants, primal_grads))  # type: ignore[return-value]


def _leaves(
    tensors: Sequence[Tensor | None], wants: Sequence[bool]
) -> tuple[list[Any], list[Tensor]]:
    """Returns the tensors as autograd leaves, and the list of those that need a gradient."""
    own = [
        None if tensor is None else tensor.detach().requires_grad_(want)
        for tensor, want in zip(tensors, wants, strict=True)
    ]
    return own, [t for t, want in zip(own, wants, strict=True) if want and t is not None]


def _gradients(
    losses: Losses,
    grad: Tensor | None,
    arguments: LinearCrossEntropyArguments,
    rows: int,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Like `_work`, for any ``losses`` function: computes the gradients by autograd."""
    input, weight, bias, target, *_ = arguments
    (w, b), shared = _leaves((weight, bias), wants[1:])
    wide = torch.promote_types(weight.dtype, torch.float32)
    results: list[Tensor] = []
    inputs: list[Tensor] = []
    sums = [leaf.new_zeros(leaf.shape, dtype=wide) for leaf in shared]
    for begin in range(0, input.shape[0], rows):
        part = slice(begin, begin + rows)
        (x,), own = _leaves((input[part],), wants[:1])
        with torch.set_grad_enabled(any(wants)):
            result = losses(arguments._replace(input=x, weight=w, bias=b, target=target[part]))
        results.append(result.detach())
        if not any(wants):
            continue
        given = torch.ones_like(result) if grad is None else grad[part]
        primal_grads = torch.autograd.grad(result, own + shared, given)
        inputs += primal_grads[: len(own)]
        for total, one in zip(sums, primal_grads[len(own) :], strict=True):
            total.add_(one)
    rest = iter(sums)
    return (
        torch.cat(results),
        torch.cat(inputs) if wants[0] else None,
        next(rest) if wants[1] else None,
        next(rest) if wants[2] else None,
    )


def chunked_gradients(backend: str, grad: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
    """The operator ``linear_cross_entropy_gradients`` for backends that have no kernels for it."""
    *tensors, rows, ignore_index, label_smoothing = given[:-3]
    arguments = LinearCrossEntropyArguments._make((*tensors, ignore_index, label_smoothing, True))
    with autograd_below_modes():
        results = _gradients(_backends[backend].losses, grad, arguments, rows, given[-3:])
    return tuple(arguments.input.new_empty((0,)) if r is None else r for r in results)


def _times(
    factor: Tensor,
    primal_grads: Sequence[Tensor | None],
    primals: Sequence[Tensor | None],
    ignored: Tensor,
) -> list[Tensor | None]:
    """Returns the gradients of the losses' sum times ``factor``, in the dtypes of the primals.

    Gradients to which only ignored rows contribute stay 0 even if the factor is not finite. It is
    inf or NaN for the mean of no rows, for instance. Does not synchronise with the device.
    """
    factor = torch.where(ignored.all(), 0.0, factor)
    results: list[Tensor | None] = []
    for tensor, primal in zip(primal_grads, primals, strict=True):
        if tensor is None or primal is None:
            results.append(None)
            continue
        if tensor.dtype == primal.dtype or type(tensor) is not Tensor or not tensor.is_cpu:
            results.append((tensor * factor).to(primal.dtype))
            continue
        # In blocks that fit the cache, because PyTorch makes a converted copy of each operand.
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
    """A differentiable function; derivatives recompute ``run`` instead of saving its results.

    ``run`` is plain PyTorch code that takes tensors and returns a tuple of tensors. Recomputation
    holds for derivatives of any order, in reverse and in forward mode, and under the transforms of
    `torch.func`. So peak memory of a chunked computation is one chunk in each of them.
    """

    run: _Run
    #: How many calls `torch.vmap` may batch at once (its ``chunk_size``).
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
        primal_grads = iter(function(*ctx.saved_tensors, *grads))
        return (None, *(next(primal_grads) if want else None for want in wants))

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
    """Returns the vector-Jacobian products for the primals for which ``wants`` is True."""
    # torch.func raises under saved-tensor hooks; so it is used only inside its transforms.
    if not in_torch_func():
        primal_grads = vjp(run, primals, wants, grads)
        return tuple(
            torch.zeros_like(primal) if gradient is None else gradient
            for gradient, primal, want in zip(primal_grads, primals, wants, strict=True)
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
    """Returns a function that computes the tangents of ``run``.

    They are computed by double backward: the gradient is linear in the upstream gradient, so its
    own gradient is the tangent. Forward mode cannot be used because it does not nest.
    """

    def tangents(*tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(moves)
        primals, given = tensors[:count], tensors[count:]
        zeros = [torch.zeros_like(result) for result in run(*primals)]
        gradients = _backward(run, moves)
        return _pull(lambda *grads: gradients(*primals, *grads), zeros, (True,) * len(zeros), given)

    return tangents
