"""Contests of an encoder layer and of the base Transformer on text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import nn

from ..measure.contest import Arguments, Contender, Contest
from ..measure.modules import compiled
from ..measure.text import VOCABULARY, Batch
from ..measure.transformers import Peers, Size, encoder_contest, transformer_contest

NAMES = ("encoder_layer", "transformer")
_SIZE = Size(vocabulary=VOCABULARY)
_INPUTS = 2


def _compile(module: nn.Module, arguments: Arguments) -> Sequence[Contender]:
    return [Contender("torch.compile", compiled(module), ours=False)]


def _nobody(module: nn.Module, arguments: Arguments) -> Sequence[Contender]:
    return ()


def _encoder_layer(
    batches: list[Batch],
    dtype: torch.dtype,
    device: torch.device,
    backends: list[str | None],
    peers: Peers,
) -> Contest:
    inputs: list[list[Arguments]] = []
    for seed in range(_INPUTS):
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(VOCABULARY, _SIZE.model, generator=generator).to(device, dtype)
        placed = [batch.to(device) for batch in batches]
        inputs.append([(table[batch.tokens], None, ~batch.real) for batch in placed])
    return encoder_contest(_SIZE.label, inputs, _SIZE, backends, peers)


def _transformer(
    pairs: list[tuple[Batch, Batch]],
    dtype: torch.dtype,
    device: torch.device,
    backends: list[str | None],
    peers: Peers,
) -> Contest:
    # Two inputs that cost the same and differ: the pairs, and the pairs with each batch reversed.
    inputs: list[list[Arguments]] = [
        [tuple(batch.to(device) for batch in pair) for pair in pairs],
        [
            tuple(Batch(b.tokens.flip(0), b.lengths.flip(0)).to(device) for b in pair)
            for pair in pairs
        ],
    ]
    case = f"base, {_SIZE.layers}+{_SIZE.layers} layers"
    return transformer_contest(case, inputs, _SIZE, dtype, device, backends, peers)


def contests(
    names: Collection[str],
    backends: list[str | None],
    batches: list[Batch],
    pairs: list[tuple[Batch, Batch]],
    dtype: torch.dtype,
    device: torch.device,
    compile: bool = False,
) -> Iterator[Callable[[], Contest]]:
    """A maker for the contest of each of these models; ``compile``: with torch.compile."""
    peers = _compile if compile else _nobody
    if "encoder_layer" in names:
        yield lambda: _encoder_layer(batches, dtype, device, backends, peers)
    if "transformer" in names:
        yield lambda: _transformer(pairs, dtype, device, backends, peers)
