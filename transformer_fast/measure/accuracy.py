"""Checks many candidates against one cached oracle, by the error budget of `testing`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..specs import OPS
from ..specs.attention import restricted
from ..testing import GRADIENT_FACTOR, OUTPUT_FACTOR, Parity, oracle, promote, require_grad
from ..testing.oracle import FACTORS, as_results
from ..testing.parity import Named, Truth, find_truth, upstream
from .benchmark_case import Arguments

Results = tuple["Tensor | None", ...]


def leaves(op: str, arguments: Arguments) -> dict[str, Tensor]:
    """Returns the arguments that require gradients, by name."""
    named = OPS[op].named(arguments)
    return {n: x for n, x in named.items() if isinstance(x, Tensor) and x.requires_grad}


class BothWays:
    """Runs the op forward, then backward from fixed upstream gradients; returns the gradients."""

    def __init__(
        self, op: str, run: Callable[..., Any], starts: Sequence[Tensor] | None = None
    ) -> None:
        self.op, self.run, self.starts = op, run, starts

    @torch.enable_grad()
    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        results = [
            (number, result)
            for number, result in enumerate(as_results(self.run(*arguments)))
            if result is not None and result.requires_grad
        ]
        if self.starts is None:
            self.starts = [upstream(result, number) for number, result in results]
        wanted = list(leaves(self.op, arguments).values())
        found = torch.autograd.grad([r for _, r in results], wanted, self.starts, allow_unused=True)
        return tuple(
            torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)
        )


def unchecked(dropout_p: float) -> str | None:
    """Returns the reason why PyTorch's result cannot be checked, or None."""
    if dropout_p != 0.0:
        return "PyTorch drops other elements for the same seed, so its result cannot be checked"
    return None


def scores_of(arguments: Arguments) -> int:
    """Returns the number of elements of the (B, H, T, S) scores of an attention call."""
    return math.prod(arguments[0].shape[:-1]) * int(arguments[1].shape[-2])


#: Most attention scores that the reference computes at once; it holds several copies of them.
SCORES_AT_ONCE = 1 << 26


def truth(op: str, arguments: Arguments, gradients: bool) -> tuple[Results, Results]:
    """Returns the reference's results or gradients in the call's dtype, and those in fp64.

    Large attention is computed a few heads at a time.
    """
    reference = OPS[op].reference

    def both(arguments: Arguments, starts: list[Tensor] | None) -> tuple[Results, Results]:
        if not gradients:
            return as_results(reference(*arguments)), oracle(op, arguments)
        run = BothWays(op, reference, starts)
        expected = run(*require_grad(op, arguments))
        exact = BothWays(op, reference, [start.double() for start in run.starts or ()])
        return expected, exact(*require_grad(op, promote(arguments)))

    # Dropout depends on the index of the head, so heads cannot be computed separately.
    if op != "attention" or arguments[7] or scores_of(arguments) <= SCORES_AT_ONCE:
        return both(arguments, None)
    query, value = arguments[0], arguments[2]
    start = upstream(query.new_empty(*query.shape[:-1], value.shape[-1]), 0)

    def of_heads(x: Any, heads: slice) -> Any:
        return x[:, heads] if isinstance(x, Tensor) and x.dim() == 4 and x.shape[1] > 1 else x

    step = max(1, query.shape[1] * SCORES_AT_ONCE // scores_of(arguments))
    parts = [
        both(tuple(of_heads(x, heads) for x in arguments), [start[:, heads]])
        for heads in (slice(h, h + step) for h in range(0, query.shape[1], step))
    ]
    return tuple(  # type: ignore[return-value]
        tuple(None if x[0] is None else torch.cat(x, 1) for x in zip(*found, strict=True))
        for found in zip(*parts, strict=True)
    )


class _Checker:
    """Callable that checks results; caches the truth (oracle and reference) of each call's arguments.

    ``oracle`` is called with floating-point arguments in fp64. ``reference`` is called in the dtype
    of the call, and its error is the unit of the error budget.
    """

    factor = OUTPUT_FACTOR
    #: The op, by which the reference's error can be sampled in more calls; "": no op.
    op = ""

    def __init__(
        self, oracle: Callable[..., Any], reference: Callable[..., Any], names: Sequence[str]
    ) -> None:
        self.oracle, self.reference, self.names = oracle, reference, names
        # The arguments are kept alive so that their ids stay unique.
        self._truths: dict[tuple[int, int], tuple[Arguments, Truth]] = {}

    def _truth(self, arguments: Arguments) -> tuple[Results, Results]:
        """Returns (the reference's results in the arguments' dtype, the oracle's results)."""
        expected = self._results(self.reference(*arguments), arguments)
        return expected, self._results(self.oracle(*promote(arguments)), arguments)

    def _results(self, result: Any, arguments: Arguments) -> Results:
        return as_results(result)

    def _parity(self, got: Results, arguments: Arguments, tries: int) -> Parity:
        def named(results: Results) -> Named:
            return dict(zip(self.names, results, strict=True))

        def both(called: Arguments) -> tuple[Named, Named]:
            expected, true = self._truth(called)
            return named(expected), named(true)

        key = id(arguments), tries
        if key not in self._truths:
            self._truths[key] = arguments, find_truth(self.op, arguments, both, max, tries)
        return self._truths[key][1].parity(named(got), self.factor)

    @torch.no_grad()
    def __call__(self, result: Any, arguments: Arguments) -> Parity:
        got = self._results(result, arguments)
        if len(got) != len(self.names):
            message = f"{len(got)} results instead of {len(self.names)}"
            return Parity(float("inf"), 0.0, float("inf"), 0.0, False, message)
        parity = self._parity(got, arguments, 1)
        if self.op and not parity.ok and math.isfinite(parity.error):
            # One of half a million elements may by chance have a larger error than all elements of
            # the reference. So before failing, the reference's error is sampled in more calls.
            parity = self._parity(got, arguments, len(FACTORS) + 1)
        return parity


class OpChecker(_Checker):
    """Checks one op: ``checker(result, arguments)`` with the arguments of ``reference.<op>``.

    ``gradients_of``: the result is the gradients of these arguments, as `BothWays` returns them.
    """

    def __init__(self, op: str, gradients_of: Sequence[str] = ()) -> None:
        spec = OPS[op]
        super().__init__(spec.reference, spec.reference, gradients_of or spec.results)
        self.op, self.gradients = op, bool(gradients_of)
        self.factor = GRADIENT_FACTOR if gradients_of else OUTPUT_FACTOR

    def _truth(self, arguments: Arguments) -> tuple[Results, Results]:
        return truth(self.op, arguments, self.gradients)


#: If attention has more scores than this, only a random sample of the queries is checked.
MOST_SCORES = 1 << 27


class SampledAttentionChecker(OpChecker):
    """Checks a random sample of queries, for attention too long for an oracle of all scores.

    A query's result does not depend on other queries, so each sampled query is checked in full.
    """

    def __init__(self, queries: int = 64) -> None:
        super().__init__("attention")
        self.queries = queries
        #: id of a call's arguments -> these (so that the id stays valid), sampled rows, their call.
        self._samples: dict[int, tuple[Arguments, Tensor, Arguments]] = {}

    def _sample(self, arguments: Arguments) -> tuple[Arguments, Tensor, Arguments]:
        query, key, value, mask, lengths, is_causal, *rest = arguments
        order = torch.randperm(query.shape[-2], generator=torch.Generator().manual_seed(0))
        rows = order[: self.queries].sort().values.to(query.device)
        if mask is not None and mask.shape[-2] != 1:
            mask = mask[:, :, rows]
        if is_causal:
            # The sampled queries are not the first ones, so causality is converted to a mask.
            past = torch.arange(key.shape[-2], device=key.device) <= rows[:, None]
            mask = restricted(mask, past[None, None])
        return arguments, rows, (query[:, :, rows], key, value, mask, lengths, False, *rest)

    def __call__(self, result: Any, arguments: Arguments) -> Parity:
        if id(arguments) not in self._samples:
            self._samples[id(arguments)] = self._sample(arguments)
        _, rows, sampled = self._samples[id(arguments)]
        found = tuple(None if x is None else x[:, :, rows] for x in as_results(result))
        return super().__call__(found, sampled)


def checker_of(op: str, arguments: Arguments) -> _Checker:
    """Returns the checker for calls of that size."""
    if op == "attention" and scores_of(arguments) > MOST_SCORES and arguments[7] == 0.0:
        return SampledAttentionChecker()
    return OpChecker(op)


class ModuleChecker(_Checker):
    """Checks modules that return one (B, T, ...) tensor, at positions that are not padding.

    ``real``: returns a bool tensor (B, T), True where the result counts.
    """

    def __init__(
        self,
        oracle: Callable[..., Tensor],
        reference: Callable[..., Tensor],
        real: Callable[..., Tensor],
    ) -> None:
        super().__init__(oracle, reference, ("output",))
        self.real = real

    def _results(self, result: Any, arguments: Arguments) -> Results:
        return (result[self.real(*arguments)],)


class StepChecker(_Checker):
    """Checks a training step that returns its loss and its gradients; ``names`` has that order."""

    factor = GRADIENT_FACTOR
