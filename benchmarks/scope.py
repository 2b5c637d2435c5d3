"""How much of the suite runs, and on what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from transformer_fast.dispatch import BACKENDS
from transformer_fast.measure.benchmark_case import Arguments, BenchmarkCase, Candidate, Checker
from transformer_fast.measure.clock import ORDINARY, Plan
from transformer_fast.specs import OPS, Case

#: Makes a benchmark case when it is its turn, so that only one case's inputs are in memory.
Maker = Callable[[], BenchmarkCase]

#: Arguments that stay the same from input to input, as weights do in use.
_KEPT = frozenset({"weight", "bias", "weight1", "bias1", "weight2", "bias2"})


def _parameter(value: Any) -> Any:
    """Weights as modules have them; what is kept of a parameter is not kept of other tensors."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.nn.Parameter(value, requires_grad=False)


@dataclass(frozen=True)
class Scope:
    plan: Plan = ORDINARY
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backends: tuple[str, ...] = BACKENDS
    peers: Sequence[ModuleType] = ()
    ops: tuple[str, ...] = tuple(OPS)
    #: Small cases only.
    quick: bool = False

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    def case(
        self,
        op: str,
        case: object,
        inputs: list[list[Arguments]],
        candidates: Sequence[Candidate],
        checker: Checker,
        work: Sequence[float],
        chosen: str,
        torch: tuple[str, ...],
        times: float = 1.0,
    ) -> BenchmarkCase:
        """A case whose inputs cost ``times`` (flops, useful flops, bytes) of ``work`` each."""
        flops, useful, moved = (times * part for part in work)
        return BenchmarkCase(
            op, str(case), inputs, candidates, checker, flops, moved, useful, self.dtype,
            self.device, chosen, torch=torch,
        )  # fmt: skip

    def draw(self, op: str, case: Case, inputs: int = 2) -> list[list[Arguments]]:
        """Inputs of a case: the same weights, as parameters; everything else anew."""
        drawn = [case.build(self.dtype, self.device, self.generator(i)) for i in range(inputs)]
        names = OPS[op].arguments
        weights = [_parameter(value) for value in drawn[0]]
        return [
            [
                tuple(
                    weight if name in _KEPT else mine
                    for name, weight, mine in zip(names, weights, arguments, strict=False)
                )
            ]
            for arguments in drawn
        ]
