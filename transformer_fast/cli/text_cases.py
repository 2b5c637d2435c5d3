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
from ..measure.transformers import Size, encoder_case, transformer_case
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

    def drawn(seed: int) -> Text:
        batches = [batch.to(device) for batch in text]
        generator = torch.Generator().manual_seed(seed)
        return Text(dtype, device, generator, batches, PADDING, _SIZE)

    def of_op(op: str, name: str, build: Callable[[Text], list[Arguments]]) -> BenchmarkCase:
        return op_case(op, name, [build(drawn(seed)) for seed in range(_INPUTS)], ops_on)

    def peers(module: nn.Module, arguments: Arguments) -> Sequence[Candidate]:
        return [Candidate("torch.compile", compiled(module), ours=False)] if compile else []

    def encoder_layer() -> BenchmarkCase:
        inputs: list[list[Arguments]] = []
        for data in map(drawn, range(_INPUTS)):
            paired = zip(data.embedded, data.batches, strict=True)
            inputs.append([(x, None, ~batch.real) for x, batch in paired])
        return encoder_case(_SIZE.label, inputs, _SIZE, models_on, peers)

    def transformer() -> BenchmarkCase:
        # Two inputs that cost the same and differ: the pairs, and the pairs with each batch reversed.
        there = [tuple(batch.to(device) for batch in both) for both in pair]
        back = [tuple(Batch(b.tokens.flip(0), b.lengths.flip(0)) for b in both) for both in there]
        case = f"base, {_SIZE.layers}+{_SIZE.layers} layers"
        return transformer_case(case, [there, back], _SIZE, dtype, device, models_on, peers)

    yield from (partial(of_op, *case) for case in CASES if case[0] in names)
    yield from (make for make in (encoder_layer, transformer) if make.__name__ in names)
