"""Cases of `compare`: ops, an encoder layer and the base Transformer, on embedded text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from ..measure.benchmark_case import Arguments, BenchmarkCase, Candidate
from ..measure.modules import compiled
from ..measure.ops import op_case
from ..measure.text import PADDING, VOCABULARY, Batch
from ..measure.transformers import Peers, Size, encoder_case, no_peers, transformer_case
from ..specs import OPS
from ..specs.spec import Text

MODELS = ("encoder_layer", "transformer")
_SIZE = Size(vocabulary=VOCABULARY)
#: Inputs of the same shapes with different data; calls alternate between them.
_INPUTS = 2

#: Ops, the names of their cases, and what makes the calls.
CASES: tuple[tuple[str, str, Callable[[Text], list[Arguments]]], ...] = tuple(
    (op, name.format(vocabulary=VOCABULARY), build)
    for op, spec in OPS.items()
    for name, build in spec.text_cases
)


def _drawn(text: Sequence[Batch], dtype: torch.dtype, device: torch.device, seed: int) -> Text:
    batches = [batch.to(device) for batch in text]
    return Text(dtype, device, torch.Generator().manual_seed(seed), batches, PADDING, _SIZE)


def _op(
    op: str,
    name: str,
    build: Callable[[Text], list[Arguments]],
    backends: Collection[str],
    text: Sequence[Batch],
    dtype: torch.dtype,
    device: torch.device,
) -> BenchmarkCase:
    inputs = [build(_drawn(text, dtype, device, seed)) for seed in range(_INPUTS)]
    return op_case(op, name, inputs, backends)


def _encoder_layer(
    backends: Sequence[str | None],
    text: Sequence[Batch],
    dtype: torch.dtype,
    device: torch.device,
    peers: Peers,
) -> BenchmarkCase:
    inputs: list[list[Arguments]] = []
    for seed in range(_INPUTS):
        data = _drawn(text, dtype, device, seed)
        paired = zip(data.embedded, data.batches, strict=True)
        inputs.append([(x, None, ~batch.real) for x, batch in paired])
    return encoder_case(_SIZE.label, inputs, _SIZE, backends, peers)


def _transformer(
    backends: Sequence[str | None],
    pair: Sequence[tuple[Batch, Batch]],
    dtype: torch.dtype,
    device: torch.device,
    peers: Peers,
) -> BenchmarkCase:
    # Two inputs that cost the same and differ: the pairs, and the pairs with each batch reversed.
    there = [tuple(batch.to(device) for batch in pair) for pair in pair]
    back = [tuple(Batch(b.tokens.flip(0), b.lengths.flip(0)) for b in pair) for pair in there]
    case = f"base, {_SIZE.layers}+{_SIZE.layers} layers"
    return transformer_case(case, [there, back], _SIZE, dtype, device, backends, peers)


def _compiled(module: nn.Module, arguments: Arguments) -> Sequence[Candidate]:
    return [Candidate("torch.compile", compiled(module), ours=False)]


def benchmark_cases(
    names: Collection[str],
    ops_on: Collection[str],
    models_on: Sequence[str | None],
    text: Sequence[Batch],
    pair: Sequence[tuple[Batch, Batch]],
    dtype: torch.dtype,
    device: torch.device,
    compile: bool = False,
) -> Iterator[Callable[[], BenchmarkCase]]:
    """Makers of the cases of these ops and models; inputs are created when a maker is called.

    ``ops_on`` and ``models_on`` are backends; None in the latter is the dispatcher's choice.
    ``compile``: also time models under torch.compile.
    """
    for op, name, build in CASES:
        if op in names:
            yield partial(_op, op, name, build, ops_on, text, dtype, device)
    peers = _compiled if compile else no_peers
    if "encoder_layer" in names:
        yield partial(_encoder_layer, models_on, text, dtype, device, peers)
    if "transformer" in names:
        yield partial(_transformer, models_on, pair, dtype, device, peers)
