"""Parity of many contenders on the same inputs: `testing`'s budget, the oracle computed once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..specs import OPS
from ..testing import GRADIENT_FACTOR, OUTPUT_FACTOR, Parity, gradients, oracle, promote
from ..testing.oracle import FACTORS, as_results
from ..testing.parity import compare, truth_of, worst_of
from .contest import Arguments

Results = tuple["Tensor | None", ...]


class _Judge:
    """Keeps the truth and the reference's result for the last few arguments."""

    names: Sequence[str]
    factor = OUTPUT_FACTOR

    def __init__(self) -> None:
        # The arguments are kept too, so that their id stays theirs.
        self._known: dict[int, tuple[Arguments, Results, Results]] = {}

    def _truth(self, arguments: Arguments) -> tuple[Results, Results]:
        """(the reference's results in the arguments' dtype, the oracle's)."""
        raise NotImplementedError

    def _results(self, result: Any, arguments: Arguments) -> Results:
        return as_results(result)

    def _units(self, arguments: Arguments) -> Sequence[float] | None:
        """The reference's relative errors in the worst of several such calls; None: unknown."""
        return None

    @torch.no_grad()
    def __call__(self, result: Any, arguments: Arguments) -> Parity:
        if id(arguments) not in self._known:
            self._known[id(arguments)] = (arguments, *self._truth(arguments))
        _, expected, true = self._known[id(arguments)]
        got = self._results(result, arguments)
        if len(got) != len(expected):
            message = f"{len(got)} results instead of {len(expected)}"
            return Parity(float("inf"), 0.0, float("inf"), 0.0, False, message)

        def judged(units: Sequence[float]) -> Parity:
            rows = zip(self.names, got, expected, true, units, strict=True)
            return worst_of(
                [compare(name, a, b, c, self.factor, unit) for name, a, b, c, unit in rows]
            )

        parity = judged([0.0] * len(got))
        if not parity.ok and math.isfinite(parity.error):
            # Of half a million elements one may err more than all of the reference's by chance.
            units = self._units(arguments)
            if units is not None:
                parity = judged(units)
        return parity


class OpJudge(_Judge):
    """For ``judge(result, arguments)`` of one op, arguments being those of ``reference.<op>``."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op, self.names = op, OPS[op].results

    def _truth(self, arguments: Arguments) -> tuple[Results, Results]:
        return as_results(OPS[self.op].reference(*arguments)), oracle(self.op, arguments)

    def _units(self, arguments: Arguments) -> Sequence[float]:
        return truth_of(self.op, arguments, tries=len(FACTORS) + 1).units


#: More fp64 scores than this are not held in memory at once.
MOST_SCORES = 1 << 27


def scores_of(arguments: Arguments) -> int:
    """Elements of the (B, H, T, S) scores of an attention call."""
    return math.prod(arguments[0].shape[:-1]) * int(arguments[1].shape[-2])


class SampledAttentionJudge(_Judge):
    """For attention too long for an oracle of all scores: a random choice of queries.

    A query's result does not depend on other queries, so each one chosen is checked in full.
    """

    def __init__(self, queries: int = 64) -> None:
        super().__init__()
        self.names, self.queries = OPS["attention"].results, queries

    def _rows(self, arguments: Arguments) -> Tensor:
        query = arguments[0]
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(query.shape[-2], generator=generator)
        return order[: self.queries].sort().values.to(query.device)

    def _results(self, result: Any, arguments: Arguments) -> Results:
        rows = self._rows(arguments)
        return tuple(None if x is None else x[:, :, rows] for x in as_results(result))

    def _sampled(self, arguments: Arguments) -> Arguments:
        query, key, value, mask, lengths, is_causal, *rest = arguments
        rows = self._rows(arguments)
        if mask is not None and mask.shape[-2] != 1:
            mask = mask[:, :, rows]
        if is_causal:
            # The chosen queries are not the first ones, so causality becomes a mask.
            past = (torch.arange(key.shape[-2], device=key.device) <= rows[:, None])[None, None]
            if mask is None:
                mask = past
            elif mask.dtype == torch.bool:
                mask = mask & past
            else:
                mask = mask.masked_fill(~past, -math.inf)
        return (query[:, :, rows], key, value, mask, lengths, False, *rest)

    def _truth(self, arguments: Arguments) -> tuple[Results, Results]:
        sampled = self._sampled(arguments)
        expected = as_results(OPS["attention"].reference(*sampled))
        return expected, oracle("attention", sampled)


def judge_of(op: str, arguments: Arguments) -> _Judge:
    """The judge for calls of that size."""
    if op == "attention" and scores_of(arguments) > MOST_SCORES and arguments[7] == 0.0:
        return SampledAttentionJudge()
    return OpJudge(op)


class GradientJudge(_Judge):
    """For gradients of all differentiable arguments, as `testing.gradients` takes them."""

    factor = GRADIENT_FACTOR

    def __init__(self, op: str, arguments: Arguments) -> None:
        super().__init__()
        reference = OPS[op].reference
        self.op = op
        self.names = tuple(gradients(op, reference, arguments))

    def _truth(self, arguments: Arguments) -> tuple[Results, Results]:
        reference, dtype = OPS[self.op].reference, arguments[0].dtype
        expected = gradients(self.op, reference, arguments)
        true = gradients(self.op, reference, promote(arguments), rounded_to=dtype)
        return tuple(expected.values()), tuple(true.values())


class ModuleJudge(_Judge):
    """For modules that give one (B, T, ...) tensor, of which only real places count.

    Args:
        oracle: gives the truth from arguments whose floating-point tensors are fp64.
        reference: gives the result whose error is the unit.
        real: gives the bool (B, T) tensor of the places that count.
    """

    names = ("output",)

    def __init__(
        self,
        oracle: Callable[..., Tensor],
        reference: Callable[..., Tensor],
        real: Callable[..., Tensor],
    ) -> None:
        super().__init__()
        self.oracle, self.reference, self.real = oracle, reference, real

    def _results(self, result: Any, arguments: Arguments) -> Results:
        return (result[self.real(*arguments)],)

    def _truth(self, arguments: Arguments) -> tuple[Results, Results]:
        promoted = tuple(
            x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments
        )
        return tuple(
            self._results(run(*these), arguments)
            for run, these in ((self.reference, arguments), (self.oracle, promoted))
        )  # type: ignore[return-value]


class StepJudge(_Judge):
    """For a training step that returns its loss and its gradients, named in that order."""

    factor = GRADIENT_FACTOR

    def __init__(
        self,
        oracle: Callable[..., Results],
        reference: Callable[..., Results],
        names: Sequence[str],
    ) -> None:
        super().__init__()
        self.oracle, self.reference, self.names = oracle, reference, names

    def _truth(self, arguments: Arguments) -> tuple[Results, Results]:
        return self.reference(*arguments), self.oracle(*arguments)
