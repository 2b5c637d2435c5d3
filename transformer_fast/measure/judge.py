"""Parity of many contenders on the same inputs: `testing`'s budget, the oracle computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..specs import OPS
from ..testing import OUTPUT_FACTOR, Parity, oracle
from ..testing.oracle import as_results
from ..testing.parity import compare, worst_of
from .contest import Arguments

Results = tuple["Tensor | None", ...]


class _Judge:
    """Keeps the truth and the reference's result for the last few arguments."""

    names: Sequence[str]

    def __init__(self) -> None:
        # The arguments are kept too, so that their id stays theirs.
        self._known: dict[int, tuple[Arguments, Results, Results]] = {}

    def _truth(self, arguments: Arguments) -> tuple[Results, Results]:
        """(the reference's results in the arguments' dtype, the oracle's)."""
        raise NotImplementedError

    def _results(self, result: Any, arguments: Arguments) -> Results:
        return as_results(result)

    @torch.no_grad()
    def __call__(self, result: Any, arguments: Arguments) -> Parity:
        if id(arguments) not in self._known:
            self._known[id(arguments)] = (arguments, *self._truth(arguments))
        _, expected, true = self._known[id(arguments)]
        got = self._results(result, arguments)
        if len(got) != len(expected):
            message = f"{len(got)} results instead of {len(expected)}"
            return Parity(float("inf"), 0.0, float("inf"), 0.0, False, message)
        rows = zip(self.names, got, expected, true, strict=True)
        return worst_of([compare(name, a, b, c, OUTPUT_FACTOR) for name, a, b, c in rows])


class OpJudge(_Judge):
    """For ``judge(result, arguments)`` of one op, arguments being those of ``reference.<op>``."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op, self.names = op, OPS[op].results

    def _truth(self, arguments: Arguments) -> tuple[Results, Results]:
        return as_results(OPS[self.op].reference(*arguments)), oracle(self.op, arguments)


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
