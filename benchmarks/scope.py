"""How much of the suite runs, and on what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch

from transformer_fast.dispatch import BACKENDS
from transformer_fast.measure.clock import ORDINARY, Plan
from transformer_fast.measure.contest import Arguments, Contest
from transformer_fast.specs import OPS, Case

#: Makes a contest when it is its turn, so that only one case's inputs are in memory.
Maker = Callable[[], Contest]

#: Arguments that stay the same from input to input, as weights do in use.
_KEPT = frozenset({"weight", "bias", "weight1", "bias1", "weight2", "bias2"})


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

    def draw(self, op: str, case: Case, inputs: int = 2) -> list[list[Arguments]]:
        """Inputs of a case: the same weights, everything else anew."""
        drawn = [case.build(self.dtype, self.device, self.generator(i)) for i in range(inputs)]
        names = OPS[op].arguments
        return [
            [
                tuple(
                    first if name in _KEPT else mine
                    for name, first, mine in zip(names, drawn[0], arguments, strict=True)
                )
            ]
            for arguments in drawn
        ]
