"""Benchmark suites. A suite yields makers of benchmark cases, in the order in which they run.

This module has what the suites share, and `Scope`: dtype, device, backends, peers and size of a run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import transformer_fast
from transformer_fast.dispatch import BACKENDS
from transformer_fast.measure.benchmark_case import Arguments, BenchmarkCase, Candidate, Checker
from transformer_fast.measure.clock import ORDINARY, Plan
from transformer_fast.specs import OPS, Case
from transformer_fast.testing import OUTPUT_FACTOR, Parity

from ..peers import Peer, candidates

#: Builds a benchmark case just before it runs, so that only one case's inputs are in memory.
Maker = Callable[[], BenchmarkCase]

#: Arguments that are the same in all inputs of a case, as weights are in practice.
_KEPT = {name + number for name in ("weight", "scale", "bias") for number in ("", "1", "2")}


@dataclass(frozen=True)
class Scope:
    plan: Plan = ORDINARY
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backends: tuple[str, ...] = BACKENDS
    peers: Sequence[Peer] = ()
    ops: tuple[str, ...] = tuple(OPS)
    #: Small cases only.
    quick: bool = False

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    def offered(self, kind: str, *arguments: Any) -> list[Candidate]:
        """Returns the peers' candidates for that kind of work."""
        return candidates(self.peers, kind, *arguments)

    def case(
        self, op: str, case: object, inputs: list[list[Arguments]], candidates: Sequence[Candidate],
        checker: Checker, work: Sequence[float], chosen: str, times: float = 1.0,
        torch: tuple[str, ...] = ("torch eager", "torch.compile"), reference: str = "reference",
    ) -> BenchmarkCase:  # fmt: skip
        """Returns a case; one input costs ``times * work``, with work (FLOPs, useful FLOPs, bytes)."""
        flops, useful, moved = (times * part for part in work)
        return BenchmarkCase(
            op, str(case), inputs, candidates, checker, flops, moved, useful, self.dtype,
            self.device, chosen, reference, torch,
        )  # fmt: skip

    def draw(self, op: str, case: Case, inputs: int = 2) -> list[list[Arguments]]:
        """Draws inputs of a case: weights are shared parameters, other arguments differ."""
        drawn = [case.build(self.dtype, self.device, self.generator(i)) for i in range(inputs)]
        kept = {
            # Parameters, as in modules: for other tensors no packed weight is cached.
            i: nn.Parameter(value, requires_grad=False) if isinstance(value, Tensor) else value
            for i, (name, value) in enumerate(zip(OPS[op].arguments, drawn[0], strict=False))
            if name in _KEPT
        }
        return [[tuple(kept.get(i, x) for i, x in enumerate(arguments))] for arguments in drawn]

    def tokens(self, first: int, vocabulary: int, *shape: int) -> list[list[Arguments]]:
        """Draws two inputs, each a tensor of tokens in [first, vocabulary)."""
        draw = partial(torch.randint, first, vocabulary, shape)
        return [[(draw(generator=self.generator(i)).to(self.device),)] for i in range(2)]


Suite = Callable[[Scope], Iterator[tuple[str, Maker]]]


def suite_of(
    *parts: tuple[str, Callable[..., BenchmarkCase], Sequence[Any], Sequence[Any]],
) -> Suite:
    """Returns a suite of ``parts``: (name, ``make(scope, case)``, cases, cases of a quick run)."""

    def suite(scope: Scope) -> Iterator[tuple[str, Maker]]:
        for name, make, cases, quick in parts:
            for case in quick if scope.quick else cases:
                yield f"{name} {case}", partial(make, scope, case)

    return suite


def lengths(batch: int, length: int, share: float) -> torch.Tensor:
    """Returns lengths (batch,) with mean ``share * length``, evenly spaced over the widest range."""
    lowest, highest = max(0.0, 2 * share - 1), min(1.0, 2 * share)
    spread = torch.linspace(lowest, highest, batch) if batch > 1 else torch.tensor([share])
    return (spread * length).round().clamp(min=1).long()


def spread(bias: torch.Tensor) -> torch.Tensor:
    """Returns a bias of the same shape that alternates between +5 and -5.

    If a ReLU's argument is within rounding error of 0, its derivative is random; among millions of
    arguments around 0 some always are. With these biases they are five standard deviations away.
    """
    even = torch.arange(len(bias), device=bias.device) % 2 == 0
    return torch.full_like(bias, 5.0).where(even, -5.0)


def spread_biases(model: nn.Module) -> nn.Module:
    """Sets the biases before the model's ReLUs to `spread`; returns the model."""
    for name, parameter in model.named_parameters():
        if name.endswith("linear1.bias"):
            parameter.data = spread(parameter.data)
    return model


#: Names of candidates.
ACCELERATED, EAGER = "accelerated", "torch eager"
#: Smallest cosine to fp64's result that 8-bit products of ours may have.
COSINE_OF_INT8 = 0.999


class Directions:
    """Checks the directions of vectors, which users of embeddings compare; also in low precision.

    The error is the largest distance of two unit vectors, the result's and fp64's, which is
    ``sqrt(2 - 2 * cosine)``. Its unit is PyTorch's error in the same precision; for 8 bits, in which
    PyTorch has no module of its own, it is a unit of rounding of 8 bits.
    """

    def __init__(
        self, oracle: Callable[..., Tensor], reference: Callable[..., Tensor], precision: str,
        cosine: float = COSINE_OF_INT8,
    ) -> None:  # fmt: skip
        self.oracle, self.reference = oracle, reference
        self.precision, self.cosine = precision, cosine

    def _error(self, result: Tensor, true: Tensor) -> float:
        if result.shape != true.shape:
            return math.inf
        unit = nn.functional.normalize
        return (unit(result.double(), dim=-1) - unit(true, dim=-1)).norm(dim=-1).max().item()

    def __call__(self, result: Tensor, arguments: Arguments) -> Parity:
        true = self.oracle(*arguments)
        error = self._error(result, true)
        if self.precision == "int8":
            unit, limit = 2.0**-8, math.sqrt(2 - 2 * self.cosine)
        else:
            eps = torch.finfo(getattr(torch, self.precision)).eps
            unit = max(self._error(self.reference(*arguments), true), eps / 2)
            limit = OUTPUT_FACTOR * unit + eps
        cosine = f"the worst cosine is {1 - error**2 / 2:.6f}"
        return Parity(error, unit, error / unit, limit, error <= limit, cosine)


def accelerated(model: nn.Module, **options: Any) -> nn.Module:
    """Returns a copy of the model, converted by `accelerate` with these options."""
    model = copy.deepcopy(model)
    transformer_fast.accelerate(model, **options)
    return model
