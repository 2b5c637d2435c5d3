"""The base Transformer under teacher forcing: one forward."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from transformer_fast.measure.benchmark_case import Arguments, BenchmarkCase
from transformer_fast.measure.text import PADDING, Batch
from transformer_fast.measure.transformers import Size, transformer_case

from .. import peers
from ..scope import Maker, Scope
from .layers import lengths


def batches(
    scope: Scope, batch: int, length: int, vocabulary: int, share: float, seed: int
) -> tuple[Batch, Batch]:
    """Random (source, target) tokens, padded behind `lengths`."""
    generator = scope.generator(seed)
    real = lengths(batch, length, share)
    pair = []
    for _ in range(2):
        tokens = torch.randint(vocabulary - 1, (batch, length), generator=generator)
        tokens += tokens >= PADDING  # no token but padding is that
        tokens[torch.arange(length) >= real[:, None]] = PADDING
        pair.append(Batch(tokens, real).to(scope.device))
    return pair[0], pair[1]


class Case(NamedTuple):
    """A batch of pairs of sentences, and the model that is given it."""

    batch: int
    length: int
    vocabulary: int
    layers: int
    share: float = 1.0

    def __str__(self) -> str:
        real = f", {self.share:.0%} real" if self.share < 1.0 else ""
        shape = f"({self.batch},{self.length})"
        return f"{self.layers}+{self.layers}, {shape}, V = {self.vocabulary}{real}"

    @property
    def size(self) -> Size:
        return Size(layers=self.layers, vocabulary=self.vocabulary)

    def inputs(self, scope: Scope) -> list[list[Arguments]]:
        batch, length, vocabulary, _, share = self
        return [[batches(scope, batch, length, vocabulary, share, seed)] for seed in range(2)]


def _contest(scope: Scope, case: Case) -> BenchmarkCase:
    return transformer_case(
        str(case), case.inputs(scope), case.size, scope.dtype, scope.device,
        peers=lambda model, arguments: peers.candidates(
            scope.peers, "transformer", model, arguments
        ),
    )  # fmt: skip


_CASES = (Case(8, 128, 32000, 6), Case(8, 128, 32000, 6, 0.65))
_QUICK = (Case(4, 32, 1000, 2),)


def suite(scope: Scope) -> Iterator[tuple[str, Maker]]:
    for case in _QUICK if scope.quick else _CASES:
        yield f"transformer {case}", functools.partial(_contest, scope, case)
