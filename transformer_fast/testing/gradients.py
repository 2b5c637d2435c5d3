"""The same budget for gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..specs import OPS
from .oracle import as_results, is_floating, promote, remembered, require_grad
from .parity import GRADIENT_FACTOR, Named, Parity, Truth, find_truth, passed


def upstream(like: Tensor, seed: int) -> Tensor:
    """A gradient for a result: normal values, rounded to its dtype, the same in every call."""
    # Far from the seeds of cases: a gradient equal to the input would hide mistakes.
    generator = torch.Generator(like.device).manual_seed(0x5EED0000 + seed)
    return torch.randn(like.shape, generator=generator, device=like.device).to(like.dtype)


def gradients(
    op: str,
    run: Callable[..., Any],
    arguments: tuple[Any, ...],
    names: tuple[str, ...] | None = None,
    rounded_to: torch.dtype | None = None,
    twice: bool = False,
) -> dict[str, Tensor]:
    """Gradients, by argument, of a fixed linear function of all results.

    Args:
        run: has the signature of ``reference.<op>``.
        names: of which arguments; None means all that can have one.
        rounded_to: the upstream gradients are rounded to this dtype first, so that the oracle
            starts from the same ones as the kernel.
        twice: second derivatives: gradients of a fixed linear function of all gradients.
    """
    arguments = require_grad(op, arguments, names)
    leaves = {
        name: value
        for name, value in OPS[op].named(arguments).items()
        if is_floating(value) and value.requires_grad
    }
    with torch.enable_grad():
        results = as_results(run(*arguments))
    for order in (1, 2) if twice else (1,):
        differentiable, starts = [], []
        for number, result in enumerate(results):
            if result is not None and result.requires_grad:
                differentiable.append(result)
                start = upstream(result, 100 * (order - 1) + number)
                starts.append(start.to(rounded_to).to(result.dtype) if rounded_to else start)
        if not differentiable and order == 1:
            raise AssertionError(f"{op}: no result has a gradient")
        results = found = torch.autograd.grad(
            differentiable,
            list(leaves.values()),
            starts,
            create_graph=twice and order == 1,
            allow_unused=True,
        )
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }


@remembered
def truth_of_gradients(
    op: str,
    arguments: tuple[Any, ...],
    names: tuple[str, ...] | None = None,
    twice: bool = False,
    oracle: Callable[[str, tuple[Any, ...], tuple[str, ...] | None], dict[str, Tensor]]
    | None = None,
) -> Truth:
    """The truth about a call's gradients by argument, for `measure_gradients`.

    ``oracle``: gives the gradients in fp64 of these arguments; None: the reference in fp64 does.
    """
    reference = OPS[op].reference
    dtype = arguments[0].dtype

    def both(called: tuple[Any, ...]) -> tuple[Named, Named]:
        expected = gradients(op, reference, called, names, twice=twice)
        if oracle is not None:
            return expected, oracle(op, called, names)
        return expected, gradients(op, reference, promote(called), names, dtype, twice)

    return find_truth(op, arguments, both, min)


def measure_gradients(
    op: str,
    run: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    factor: float = GRADIENT_FACTOR,
    names: tuple[str, ...] | None = None,
    twice: bool = False,
    truth: Truth | None = None,
) -> Parity:
    """How far the gradients of ``run`` are from the truth: the argument nearest its limit.

    ``truth``: `truth_of_gradients` of the same arguments and names, where the caller has it.
    """
    got = gradients(op, run, arguments, names, twice=twice)
    truth = truth_of_gradients(op, arguments, names, twice) if truth is None else truth
    sizes = {name: _size(gradient) for name, gradient in truth.true.items()}
    largest, eps = max(sizes.values()), torch.finfo(arguments[0].dtype).eps
    # A gradient that vanishes (one key: the weights are 1 whatever the query) is a difference of
    # equal terms, whose rounding only the other gradients can tell.
    least = {name: largest for name, size in sizes.items() if size < eps * eps * largest}
    return truth.parity(got, factor, "grad of ", least)


def _size(x: Tensor | None) -> float:
    if x is None or not x.numel():
        return 0.0
    return torch.where(x.isfinite(), x.abs(), 0.0).max().item()


def check_gradients(
    op: str, run: Callable[..., Any], arguments: tuple[Any, ...], **options: Any
) -> Parity:
    """`measure_gradients`, raising AssertionError with the place beyond its limit."""
    return passed(op, measure_gradients(op, run, arguments, **options))
