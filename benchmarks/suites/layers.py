"""Encoder layers of the paper's size, 512/8/2048, and stacks of six; cases are (B,T)."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from transformer_fast.measure.benchmark_case import Arguments, BenchmarkCase
from transformer_fast.measure.transformers import Size, encoder_case

from .. import peers
from ..scope import Maker, Scope

_SIZE = Size()
#: (B, T), and the share of places that hold text.
_CASES = (
    (8, 128, 1.0),
    (32, 128, 1.0),
    (2, 1024, 1.0),
    (1, 32, 1.0),
    (8, 128, 0.65),
    (32, 128, 0.65),
)
_QUICK = ((8, 128, 1.0), (1, 32, 1.0), (8, 128, 0.65))
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


def _contest(
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


def suite(scope: Scope) -> Iterator[tuple[str, Maker]]:
    for batch, length, share in _QUICK if scope.quick else _CASES:
        label = f"encoder_layer ({batch},{length}), {share:.0%} real"
        yield label, functools.partial(_contest, scope, batch, length, share)
    for batch, length, share in _QUICK_STACKS if scope.quick else _STACKS:
        label = f"encoder of {_SIZE.layers} layers ({batch},{length}), {share:.0%} real"
        yield label, functools.partial(_contest, scope, batch, length, share, _SIZE.layers)
