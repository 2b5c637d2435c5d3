"""The error budget: a kernel's error against fp64, in units of the reference's own error there.

A result is right if it is finite where the oracle is, and its largest error is at most

    factor * max(error of the same-dtype reference, eps / 2 * max|oracle|) + eps * max|oracle|

eps being that of the result's dtype. The inner maximum is the rounding of the result itself, which
a reference may escape by luck. There are no other tolerances.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..specs import OPS
from .oracle import as_results, oracle

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


def compare(
    name: str, got: Tensor | None, expected: Tensor | None, true: Tensor | None, factor: float
) -> Parity:
    """One result against the reference's in the same dtype and the oracle's.

    Where the oracle is not finite (overflow, NaN at visible places) the result must be the same.
    """
    problem = _form_problem(name, got, expected)
    if problem is not None:
        return Parity(float("inf"), 0.0, float("inf"), 0.0, False, problem)
    if got is None or expected is None or true is None:
        return Parity(0.0, 0.0, 0.0, 0.0, True, f"{name} is None")
    if true.numel() == 0:
        return Parity(0.0, 0.0, 0.0, 0.0, True, f"{name} is empty")
    eps = torch.finfo(got.dtype).eps
    got, expected = got.detach().double(), expected.detach().double()
    finite = true.isfinite()
    alike = torch.where(finite, got.isfinite(), (got == true) | (got.isnan() & true.isnan()))
    if not bool(alike.all()):
        wrong = int((~alike).flatten().nonzero()[0])
        place = _place(name, wrong, got, true)
        return Parity(float("inf"), 0.0, float("inf"), 0.0, False, place)
    errors = torch.where(finite, (got - true).abs(), 0.0).flatten()
    worst = int(errors.argmax())
    error = errors[worst].item()
    size = torch.where(finite, true.abs(), 0.0).max().item()
    known = finite & expected.isfinite()
    reference_error = torch.where(known, (expected - true).abs(), 0.0).max().item()
    unit = max(reference_error, eps / 2 * size)
    limit = factor * unit + eps * size
    ratio = error / unit if error else 0.0
    return Parity(
        error, reference_error, ratio, limit, error <= limit, _place(name, worst, got, true)
    )


def worst_of(found: list[Parity]) -> Parity:
    """The one nearest its limit, those beyond it first."""
    return max(found, key=lambda p: (not p.ok, p.error / p.limit if p.limit else p.error))


@torch.no_grad()
def measure(
    op: str,
    result: Any,
    arguments: tuple[Any, ...],
    *,
    factor: float = OUTPUT_FACTOR,
    expected: Any = None,
) -> Parity:
    """How far ``result`` is from the truth for these arguments of ``reference.<op>``.

    ``expected``: the reference's result in the same dtype, where the caller has it already.
    """
    spec = OPS[op]
    if expected is None:
        expected = spec.reference(*arguments)
    compared = zip(
        spec.results, as_results(result), as_results(expected), oracle(op, arguments), strict=True
    )
    return worst_of([compare(name, a, b, true, factor) for name, a, b, true in compared])


def check(op: str, result: Any, arguments: tuple[Any, ...], **options: Any) -> Parity:
    """`measure`, raising AssertionError with the place where the result is beyond its limit."""
    parity = measure(op, result, arguments, **options)
    if not parity.ok:
        raise AssertionError(f"{op}: {parity}")
    return parity
