"""The base Transformer under teacher forcing: one forward."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from transformer_fast.measure.contest import Arguments, Contest
from transformer_fast.measure.text import PADDING, Batch
from transformer_fast.measure.transformers import Size, transformer_contest

from .. import peers
from ..scope import Maker, Scope
from .layers import lengths

#: (B, S = T, vocabulary, layers, share of real places)
_CASES = ((8, 128, 32000, 6, 1.0), (8, 128, 32000, 6, 0.65))
_QUICK = ((4, 32, 1000, 2, 1.0),)


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


def _contest(
    scope: Scope, batch: int, length: int, vocabulary: int, layers: int, share: float
) -> Contest:
    size = Size(layers=layers, vocabulary=vocabulary)
    case = f"{layers}+{layers}, ({batch},{length}), V = {vocabulary}"
    case += f", {share:.0%} real" if share < 1.0 else ""
    inputs: list[list[Arguments]] = [
        [batches(scope, batch, length, vocabulary, share, seed)] for seed in range(2)
    ]
    return transformer_contest(
        case, inputs, size, scope.dtype, scope.device,
        peers=lambda model, arguments: peers.contenders(
            scope.peers, "transformer", model, arguments
        ),
    )  # fmt: skip


def suite(scope: Scope) -> Iterator[tuple[str, Maker]]:
    for case in _QUICK if scope.quick else _CASES:
        batch, length, _, layers, _ = case
        label = f"transformer {layers}+{layers} ({batch},{length}), {case[-1]:.0%} real"
        yield label, functools.partial(_contest, scope, *case)
