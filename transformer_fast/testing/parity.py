"""The error budget: errors of a kernel's results and gradients, relative to the reference's errors.

All errors are measured against the fp64 oracle. A result passes if it is finite where the oracle is
(except for overflow within the limit) and its largest error is at most

    factor * max(error of the same-dtype reference, eps / 2 * max|oracle|) + eps * max|oracle|

where eps is that of the result's dtype. ``eps / 2 * max|oracle|`` is the rounding error of the result
itself, which the reference may avoid by luck. For the same reason the reference's error on a small
call is the largest of several equivalent calls (`scaled`), relative to max|oracle|. A result beyond
the limit is compared again, with more of those. There are no other tolerances.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..specs import OPS
from .oracle import (
    MORE_FACTORS,
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
    "GRADIENT_FACTOR", "OUTPUT_FACTOR", "Parity", "Truth", "check", "check_gradients", "gradients",
    "measure", "measure_gradients", "truth_of", "truth_of_gradients", "upstream",
]  # fmt: skip

#: Largest error allowed for results and for gradients, as a multiple of the reference's error.
OUTPUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0

#: Number of calls that sample the reference's error if a result is beyond its limit, in calls with a
#: result of at most `SMALL` elements and no argument of more than `LARGE`.
MOST_TRIES = len(MORE_FACTORS) + 1
SMALL, LARGE = 1 << 10, 1 << 16


@dataclass(frozen=True)
class Parity:
    """The error of a result; of several results, the error of the one closest to its limit."""

    #: Largest absolute error against the fp64 oracle, of the result and of the reference.
    error: float
    reference_error: float
    #: `error` divided by the reference's, which counts as at least eps / 2 * max|oracle|.
    ratio: float
    #: Largest error that is within the budget.
    limit: float
    ok: bool
    #: Name of the result, index of its worst element, and the values there.
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
    """Returns |got - true|, flattened, 0 where one is not finite; and max|true|."""
    finite = true.isfinite() & got.isfinite()
    size = torch.where(true.isfinite(), true.abs(), 0.0).max().item()
    return torch.where(finite, (got.detach().double() - true).abs(), 0.0).flatten(), size


def relative_error(expected: Tensor | None, true: Tensor | None, least: float = 0.0) -> float:
    """Returns the largest error, or ``least`` if that is larger, relative to max|true|."""
    if expected is None or true is None or true.numel() == 0:
        return 0.0
    errors, size = _errors(expected, true)
    return max(errors.max().item(), least) / size if size else 0.0


def compare(
    name: str, got: Tensor | None, expected: Tensor | None, true: Tensor | None, factor: float,
    unit: float = 0.0, least_size: float = 0.0,
) -> Parity:  # fmt: skip
    """Compares one result with the reference's in the same dtype and with the oracle's.

    Where the oracle is not finite (overflow, NaN in unmasked inputs) the result must be identical.

    Args:
        unit: the reference's `relative_error` in similar calls; used if it is larger than in this.
        least_size: lower bound for max|oracle|, for results that vanish by cancellation.
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
    # An error within the limit may make a result overflow its dtype.
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
    """Returns the one closest to its limit, or farthest beyond it if any fails."""
    return max(found, key=lambda p: (not p.ok, p.error / p.limit if p.limit else 0.0))


#: Name -> result or gradient.
Named = Mapping[str, "Tensor | None"]


def named(op: str, result: Any) -> Named:
    """Returns an op's results by name."""
    return dict(zip(OPS[op].results, as_results(result), strict=True))


@dataclass(frozen=True)
class Truth:
    """Expected results or gradients of a call, by name, which do not depend on the kernel."""

    #: Those of the reference in the call's dtype, and those of the fp64 oracle.
    expected: Named
    true: Named
    #: The reference's largest `relative_error` in several equivalent calls.
    units: Mapping[str, float]
    #: Returns this truth with `units` from `MOST_TRIES` calls; None: the call is not small.
    resampled: Callable[[], Truth] | None = None

    def parity(
        self, got: Named, factor: float, what: str = "", least: Mapping[str, float] | None = None
    ) -> Parity:
        """Returns the result closest to its limit. ``least``: `least_size` by name."""
        found = worst_of([
            compare(
                what + name, value, self.expected[name], self.true[name], factor, self.units[name],
                (least or {}).get(name, 0.0),
            )
            for name, value in got.items()
        ])  # fmt: skip
        if found.ok or self.resampled is None or math.isinf(found.error):
            return found
        return self.resampled().parity(got, factor, what, least)


def find_truth(
    op: str, arguments: tuple[Any, ...], both: Callable[[tuple[Any, ...]], tuple[Named, Named]],
    which: Callable[[Iterable[int]], int], tries: int | None = None,
) -> Truth:  # fmt: skip
    """Computes the truth of a call.

    Args:
        op: the op, whose arguments can be `scaled`; "": no op, and one call samples the error.
        both: returns the expected and the true results of arguments.
        which: min or max: whether the smallest or the largest result determines ``tries``.
        tries: number of calls that sample the reference's error; None: `tries_for` determines it.
    """
    expected, true = both(arguments)
    spec = OPS.get(op)
    step = spec.step(arguments) if spec is not None and spec.step is not None else 0.0
    units = {name: relative_error(expected[name], true[name], step) for name in true}
    if tries is None:
        tries = tries_for(which(0 if x is None else x.numel() for x in true.values()))
    for factor in MORE_FACTORS[: tries - 1]:
        again, exact = both(scaled(op, arguments, factor))
        for name in units:
            units[name] = max(units[name], relative_error(again[name], exact[name]))
    is_small = any(x is not None and x.numel() <= SMALL for x in true.values())
    is_small &= all(x.numel() <= LARGE for x in arguments if isinstance(x, Tensor))
    if not op or tries == MOST_TRIES or not is_small:
        return Truth(expected, true, units)
    resampled = functools.partial(find_truth, op, arguments, both, which, MOST_TRIES)
    return Truth(expected, true, units, resampled)


@remembered
@torch.no_grad()
def truth_of(
    op: str,
    arguments: tuple[Any, ...],
    oracle: Callable[[str, tuple[Any, ...]], tuple[Tensor | None, ...]] = reference_in_fp64,
) -> Truth:
    """Returns the `Truth` of a call, for `measure`. ``oracle`` computes the results in fp64."""

    def both(called: tuple[Any, ...]) -> tuple[Named, Named]:
        return named(op, OPS[op].reference(*called)), named(op, oracle(op, called))

    return find_truth(op, arguments, both, max)


@torch.no_grad()
def measure(
    op: str, result: Any, arguments: tuple[Any, ...], *, factor: float = OUTPUT_FACTOR,
    truth: Truth | None = None,
) -> Parity:  # fmt: skip
    """Returns the error of ``result`` for these arguments of ``reference.<op>``.

    ``truth``: `truth_of` the same arguments, if the caller has it already.
    """
    truth = truth_of(op, arguments) if truth is None else truth
    return truth.parity(named(op, result), factor)


def passed(op: str, parity: Parity) -> Parity:
    """Returns the parity; raises AssertionError with the worst element if it is beyond the limit."""
    if not parity.ok:
        raise AssertionError(f"{op}: {parity}")
    return parity


def check(op: str, result: Any, arguments: tuple[Any, ...], **options: Any) -> Parity:
    """Like `measure`; raises AssertionError with the worst element if it is beyond the limit."""
    return passed(op, measure(op, result, arguments, **options))


def upstream(like: Tensor, seed: int) -> Tensor:
    """Returns an upstream gradient: normal values rounded to the result's dtype, fixed by the seed."""
    # Seeds differ from those of cases: a gradient equal to the input would hide errors.
    generator = torch.Generator(like.device).manual_seed(0x5EED0000 + seed)
    return torch.randn(like.shape, generator=generator, device=like.device).to(like.dtype)


def gradients(
    op: str, run: Callable[..., Any], arguments: tuple[Any, ...],
    names: tuple[str, ...] | None = None, rounded_to: torch.dtype | None = None,
    twice: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Returns the gradients, by argument, of a fixed linear function of all results.

    Args:
        run: function with the signature of ``reference.<op>``.
        names: arguments to differentiate; None: all that are differentiable.
        rounded_to: dtype to which upstream gradients are rounded first, so that oracle and kernel
            start from the same ones.
        twice: return second derivatives: gradients of a fixed linear function of all gradients.
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
            differentiable, list(leaves.values()), starts, create_graph=twice and order == 1,
            allow_unused=True,
        )  # fmt: skip
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
    """Returns the truth of a call's gradients, by argument, for `measure_gradients`.

    ``oracle``: returns the gradients of the arguments in fp64; None: the reference in fp64.
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
    op: str, run: Callable[..., Any], arguments: tuple[Any, ...], *,
    factor: float = GRADIENT_FACTOR, names: tuple[str, ...] | None = None, twice: bool = False,
    truth: Truth | None = None,
) -> Parity:  # fmt: skip
    """Returns the error of the gradients of ``run``: of the argument closest to its limit.

    ``truth``: `truth_of_gradients` of the same arguments and names, if the caller has it already.
    """
    got = gradients(op, run, arguments, names, twice=twice)
    truth = truth_of_gradients(op, arguments, names, twice) if truth is None else truth
    sizes = {name: _size(gradient) for name, gradient in truth.true.items()}
    largest, eps = max(sizes.values()), torch.finfo(arguments[0].dtype).eps
    # A gradient that vanishes (with one key all weights are 1, whatever the query) is a difference
    # of equal terms. Their rounding error scales with the other gradients, not with this one.
    least = {name: largest for name, size in sizes.items() if size < eps * eps * largest}
    return truth.parity(got, factor, "grad of ", least)


def _size(x: Tensor | None) -> float:
    if x is None or not x.numel():
        return 0.0
    return torch.where(x.isfinite(), x.abs(), 0.0).max().item()


def check_gradients(
    op: str, run: Callable[..., Any], arguments: tuple[Any, ...], **options: Any
) -> Parity:
    """Like `measure_gradients`; raises AssertionError with the worst element beyond the limit."""
    return passed(op, measure_gradients(op, run, arguments, **options))
