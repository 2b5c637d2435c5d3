"""The paper's size, 512/8/2048: encoder layers, stacks of six, and the base Transformer; one forward."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from transformer_fast.measure.benchmark_case import Arguments, BenchmarkCase
from transformer_fast.measure.text import PADDING, Batch
from transformer_fast.measure.transformers import Size, encoder_case, transformer_case

from .. import peers
from ..scope import Maker, Scope

_SIZE = Size()
#: (B, T), and the share of places that hold text.
_LAYERS = (
    (8, 128, 1.0),
    (32, 128, 1.0),
    (2, 1024, 1.0),
    (1, 32, 1.0),
    (8, 128, 0.65),
    (32, 128, 0.65),
)
_QUICK_LAYERS = ((8, 128, 1.0), (1, 32, 1.0), (8, 128, 0.65))
_STACKS = ((8, 128, 0.65), (32, 128, 0.65))
_QUICK_STACKS = ((2, 64, 0.65),)


def lengths(batch: int, length: int, share: float) -> torch.Tensor:
    """Lengths, ``share`` of ``length`` on average, spread evenly and as far as that goes."""
    lowest, highest = max(0.0, 2 * share - 1), min(1.0, 2 * share)
    spread = torch.linspace(lowest, highest, batch) if batch > 1 else torch.tensor([share])
    return (spread * length).round().clamp(min=1).long()


def calls(scope: Scope, batch: int, length: int, share: float) -> list[list[Arguments]]:
    padding = None
    if share < 1.0:
        padding = torch.arange(length) >= lengths(batch, length, share)[:, None]
        padding = padding.to(scope.device)
    shape = batch, length, _SIZE.model
    drawn = [torch.randn(shape, generator=scope.generator(i)) for i in range(2)]
    return [[(x.to(scope.device, scope.dtype), None, padding)] for x in drawn]


def _layer(
    scope: Scope, batch: int, length: int, share: float, layers: int | None = None
) -> BenchmarkCase:
    case = f"({batch},{length})" + (f", {share:.0%} real" if share < 1.0 else "")
    kind = "encoder_layer"
    if layers is not None:
        kind, case = "encoder", f"{layers} layers, {case}"
    return encoder_case(
        case,
        calls(scope, batch, length, share),
        _SIZE,
        peers=lambda module, arguments: peers.candidates(scope.peers, kind, module, arguments),
        layers=layers,
    )


def layers(scope: Scope) -> Iterator[tuple[str, Maker]]:
    for batch, length, share in _QUICK_LAYERS if scope.quick else _LAYERS:
        label = f"encoder_layer ({batch},{length}), {share:.0%} real"
        yield label, functools.partial(_layer, scope, batch, length, share)
    for batch, length, share in _QUICK_STACKS if scope.quick else _STACKS:
        label = f"encoder of {_SIZE.layers} layers ({batch},{length}), {share:.0%} real"
        yield label, functools.partial(_layer, scope, batch, length, share, _SIZE.layers)


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
    #: The model's, with heads of 64 in the paper's 512 and of 16 in smaller ones.
    width: int = 512

    def __str__(self) -> str:
        real = f", {self.share:.0%} real" if self.share < 1.0 else ""
        width = f", d = {self.width}" if self.width != 512 else ""
        shape = f"({self.batch},{self.length})"
        return f"{self.layers}+{self.layers}, {shape}, V = {self.vocabulary}{real}{width}"

    @property
    def size(self) -> Size:
        width, head = self.width, 64 if self.width == 512 else 16
        return Size(width, width // head, 4 * width, self.layers, self.vocabulary)

    def inputs(self, scope: Scope) -> list[list[Arguments]]:
        batch, length, vocabulary, _, share, _ = self
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
