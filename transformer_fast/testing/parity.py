"""The error budget: a kernel's error, and its gradients', against fp64, in units of the reference's.

A result is right if it is finite where the oracle is (but for overflow within the limit), and its
largest error is at most

    factor * max(error of the same-dtype reference, eps / 2 * max|oracle|) + eps * max|oracle|

eps being that of the result's dtype. The inner maximum is the rounding of the result itself, which
a reference may escape by luck. For the same reason the reference's error on a small call is the
worst of several equivalent ones (`scaled`), relative to max|oracle|. There are no other tolerances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..specs import OPS
from .oracle import (
    FACTORS,
    as_results,
    is_floating,
    promote,
    remembered,
    require_grad,
    scaled,
    tries_for,
)
from .oracle import oracle as reference_in_fp64

__all__ = [
    "GRADIENT_FACTOR",
    "OUTPUT_FACTOR",
    "Parity",
    "Truth",
    "check",
    "check_gradients",
    "gradients",
    "measure",
    "measure_gradients",
    "truth_of",
    "truth_of_gradients",
    "upstream",
]

#: How many times the reference's error a kernel's results, and its gradients, may have.
OUTPUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0


@dataclass(frozen=True)
class Parity:
    """How far a result is from the truth. For several results: the one nearest its limit."""

    #: Largest absolute error against the fp64 oracle, of the result and of the reference.
    error: float
    reference_error: float
    #: `error` in units of the reference's, which counts as at least half a unit of rounding.
    ratio: float
    #: The largest error that passes.
    limit: float
    ok: bool
    #: Which result, where in it, and what stands there.
    where: str

    def __str__(self) -> str:
        return (
            f"{self.where}: error {self.error:.3g}, {self.ratio:.2f} times the reference's, "
            f"limit {self.limit:.3g}"
        )


def _place(name: str, flat: int, got: Tensor, true: Tensor) -> str:
    index = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(flat), true.shape))
    place = f"{name}[{index}]" if index else name
    return f"{place} is {got.flatten()[flat].item():.9g}, not {true.flatten()[flat].item():.9g}"


def _form_problem(name: str, got: Tensor | None, expected: Tensor | None) -> str | None:
    if got is None or expected is None:
        same = got is expected
        return None if same else f"{name} is {_form(got)} instead of {_form(expected)}"
    if (got.shape, got.dtype, got.device) != (expected.shape, expected.dtype, expected.device):
        return f"{name} is {_form(got)} instead of {_form(expected)}"
    return None


def _form(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    return f"{str(tensor.dtype)[6:]} {list(tensor.shape)} on {tensor.device}"


def _errors(got: Tensor, true: Tensor) -> tuple[Tensor, float]:
    """|got - true| where both are finite, flat, and max|true|."""
    known = true.isfinite() & got.isfinite()
    size = torch.where(true.isfinite(), true.abs(), 0.0).max().item()
    return torch.where(known, (got.detach().double() - true).abs(), 0.0).flatten(), size


def relative_error(expected: Tensor | None, true: Tensor | None) -> float:
    """The largest error in units of max|true|."""
    if expected is None or true is None or true.numel() == 0:
        return 0.0
    errors, size = _errors(expected, true)
    return errors.max().item() / size if size else 0.0


def compare(
    name: str,
    got: Tensor | None,
    expected: Tensor | None,
    true: Tensor | None,
    factor: float,
    unit: float = 0.0,
    least_size: float = 0.0,
) -> Parity:
    """One result against the reference's in the same dtype and the oracle's.

    ``unit``: the reference's `relative_error` as other calls show it; counts if it is larger here.
    ``least_size``: max|oracle| counts as at least this, for results that vanish by cancellation.
    Where the oracle is not finite (overflow, NaN at visible places) the result must be the same.
    """
    problem = _form_problem(name, got, expected)
    if problem is not None:
        return Parity(math.inf, 0.0, math.inf, 0.0, False, problem)
    if got is None or expected is None or true is None:
        return Parity(0.0, 0.0, 0.0, 0.0, True, f"{name} is None")
    if true.numel() == 0:
        return Parity(0.0, 0.0, 0.0, 0.0, True, f"{name} is empty")
    eps, largest = torch.finfo(got.dtype).eps, torch.finfo(got.dtype).max
    errors, size = _errors(got, true)
    size = max(size, least_size)
    worst = int(errors.argmax())
    error = errors[worst].item()
    reference_error = _errors(expected, true)[0].max().item()
    unit = max(reference_error, unit * size, eps / 2 * size)
    limit = factor * unit + eps * size
    exact = got.detach().double()
    # An error within the limit may take a result to where the dtype overflows.
    overflown = exact.isinf() & (exact * true > 0.0) & (true.abs() + limit > largest)
    alike = torch.where(
        true.isfinite(),
        exact.isfinite() | overflown,
        (exact == true) | (exact.isnan() & true.isnan()),
    )
    if not bool(alike.all()):
        wrong = int((~alike).flatten().nonzero()[0])
        place = _place(name, wrong, got, true)
        return Parity(math.inf, 0.0, math.inf, 0.0, False, place)
    ratio = error / unit if unit else math.inf if error else 0.0
    return Parity(
        error, reference_error, ratio, limit, error <= limit, _place(name, worst, got, true)
    )


def worst_of(found: list[Parity]) -> Parity:
    """The one nearest its limit, those beyond it first."""
    return max(found, key=lambda p: (not p.ok, p.error / p.limit if p.limit else 0.0))


#: Results, or gradients, by name.
Named = Mapping[str, "Tensor | None"]


def named(op: str, result: Any) -> Named:
    """What an op returned, by the names of its results."""
    return dict(zip(OPS[op].results, as_results(result), strict=True))


@dataclass(frozen=True)
class Truth:
    """What is known about a call's results, or gradients, before any kernel ran it, by name."""

    #: The reference's in the call's dtype, and the oracle's.
    expected: Named
    true: Named
    #: The reference's `relative_error` in the worst of several such calls.
    units: Mapping[str, float]

    def parity(
        self, got: Named, factor: float, what: str = "", least: Mapping[str, float] | None = None
    ) -> Parity:
        """`compare` of the one nearest its limit; ``least``: of some, their ``least_size``."""
        return worst_of([
            compare(
                what + name, found, self.expected[name], self.true[name], factor, self.units[name],
                (least or {}).get(name, 0.0),
            )
            for name, found in got.items()
        ])  # fmt: skip


def find_truth(
    op: str,
    arguments: tuple[Any, ...],
    both: Callable[[tuple[Any, ...]], tuple[Named, Named]],
    which: Callable[[Iterable[int]], int],
    tries: int | None = None,
) -> Truth:
    """From what is expected and what is true of a call.

    ``tries``: see `tries_for`, which chooses if None by ``which`` of the numbers of elements.
    """
    expected, true = both(arguments)
    units = {name: relative_error(expected[name], true[name]) for name in true}
    if tries is None:
        tries = tries_for(which(0 if x is None else x.numel() for x in true.values()))
    for factor in FACTORS[: tries - 1]:
        again, exact = both(scaled(op, arguments, factor))
        for name in units:
            units[name] = max(units[name], relative_error(again[name], exact[name]))
    return Truth(expected, true, units)


@remembered
@torch.no_grad()
def truth_of(
    op: str,
    arguments: tuple[Any, ...],
    tries: int | None = None,
    oracle: Callable[[str, tuple[Any, ...]], tuple[Tensor | None, ...]] = reference_in_fp64,
) -> Truth:
    """The truth about a call's results, for `measure`.

    ``tries``: see `tries_for`, which chooses if None. ``oracle``: gives the results in fp64.
    """

    def both(called: tuple[Any, ...]) -> tuple[Named, Named]:
        return named(op, OPS[op].reference(*called)), named(op, oracle(op, called))

    return find_truth(op, arguments, both, max, tries)


@torch.no_grad()
def measure(
    op: str,
    result: Any,
    arguments: tuple[Any, ...],
    *,
    factor: float = OUTPUT_FACTOR,
    truth: Truth | None = None,
) -> Parity:
    """How far ``result`` is from the truth for these arguments of ``reference.<op>``.

    ``truth``: `truth_of` the same arguments, where the caller has it already.
    """
    truth = truth_of(op, arguments) if truth is None else truth
    return truth.parity(named(op, result), factor)


def passed(op: str, parity: Parity) -> Parity:
    """The parity; raises AssertionError with the place that is beyond its limit."""
    if not parity.ok:
        raise AssertionError(f"{op}: {parity}")
    return parity


def check(op: str, result: Any, arguments: tuple[Any, ...], **options: Any) -> Parity:
    """`measure`, raising AssertionError with the place where the result is beyond its limit."""
    return passed(op, measure(op, result, arguments, **options))


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
