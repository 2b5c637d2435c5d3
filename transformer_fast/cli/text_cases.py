"""Cases of `compare`: ops, an encoder layer and the base Transformer, on embedded text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from ..measure.benchmark_case import Arguments, BenchmarkCase, Candidate
from ..measure.modules import compiled
from ..measure.ops import op_case
from ..measure.text import PADDING, VOCABULARY, Batch
from ..measure.transformers import Peers, Size, encoder_case, no_peers, transformer_case
from ..specs.spec import Draw

MODELS = ("encoder_layer", "transformer")
_SIZE = Size(vocabulary=VOCABULARY)
#: Inputs of the same shapes with different data; calls alternate between them.
_INPUTS = 2
_SMOOTHING = 0.1


@dataclass(frozen=True)
class _Data(Draw):
    """The text's batches under one random embedding."""

    batches: Sequence[Batch]

    @cached_property
    def embedded(self) -> list[Tensor]:
        table = self.normal(VOCABULARY, _SIZE.model)
        return [table[batch.tokens] for batch in self.batches]

    def parameters(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Weight and bias of a linear map."""
        return self.weight(rows, columns), self.normal(rows, scale=0.1)

    def heads(self, x: Tensor) -> Tensor:
        """A projection of x, split into heads: (B, H, T, D), strided as in a real model."""
        projected = x @ self.weight(_SIZE.model, _SIZE.model).t()
        return projected.unflatten(-1, (_SIZE.heads, -1)).transpose(1, 2)


#: From the data to the arguments of ``reference.<op>``, one tuple for each batch.
Build = Callable[[_Data], list[Arguments]]


def _layer_norm(data: _Data) -> list[Arguments]:
    model = _SIZE.model
    weight, bias = data.normal(model, scale=0.1, shift=1.0), data.normal(model, scale=0.1)
    return [(x, (model,), weight, bias, 1e-5) for x in data.embedded]


def _add_layer_norm(data: _Data) -> list[Arguments]:
    sublayer = data.weight(_SIZE.model, _SIZE.model)
    return [(x @ sublayer, x, *rest, 0.0, None) for x, *rest in _layer_norm(data)]


def _rms_norm(data: _Data) -> list[Arguments]:
    return [(x, shape, weight, eps) for x, shape, weight, _, eps in _layer_norm(data)]


def _add_rms_norm(data: _Data) -> list[Arguments]:
    return [(x, r, shape, w, *rest) for x, r, shape, w, _, *rest in _add_layer_norm(data)]


def _attention(masked: str, data: _Data) -> list[Arguments]:
    calls: list[Arguments] = []
    for batch, x in zip(data.batches, data.embedded, strict=True):
        query, key, value = (data.heads(x) for _ in range(3))
        mask = batch.real[:, None, None, :] if "mask" in masked else None
        lengths = batch.lengths if "lengths" in masked else None
        rest = (None, 0.0, None, False, "weights" in masked)
        calls.append((query, key, value, mask, lengths, "causal" in masked, *rest))
    return calls


def _linear(data: _Data) -> list[Arguments]:
    parameters = data.parameters(_SIZE.model, _SIZE.model)
    return [(x, *parameters, None, x.flip(0)) for x in data.embedded]


def _widening_linear(data: _Data) -> list[Arguments]:
    parameters = data.parameters(_SIZE.hidden, _SIZE.model)
    return [(x, *parameters, "gelu", None) for x in data.embedded]


def _feed_forward(data: _Data) -> list[Arguments]:
    first = data.parameters(_SIZE.hidden, _SIZE.model)
    second = data.parameters(_SIZE.model, _SIZE.hidden)
    return [(x, *first, *second, "relu", 0.0, None) for x in data.embedded]


def _following(batch: Batch) -> Tensor:
    """For each position the next token; padding behind the text."""
    return nn.functional.pad(batch.tokens[:, 1:], (0, 1), value=PADDING).flatten()


def _linear_cross_entropy(data: _Data) -> list[Arguments]:
    parameters = data.parameters(VOCABULARY, _SIZE.model)
    return [
        (x.flatten(0, 1), *parameters, _following(batch), PADDING, _SMOOTHING)
        for batch, x in zip(data.batches, data.embedded, strict=True)
    ]


def _cross_entropy(data: _Data) -> list[Arguments]:
    return [(x @ weight.t() + bias, *r) for x, weight, bias, *r in _linear_cross_entropy(data)]


CASES: tuple[tuple[str, str, Build], ...] = (
    ("layer_norm", "512", _layer_norm),
    ("add_layer_norm", "512", _add_layer_norm),
    ("rms_norm", "512", _rms_norm),
    ("add_rms_norm", "512", _add_rms_norm),
    ("attention", "padding mask", partial(_attention, "mask")),
    ("attention", "key lengths", partial(_attention, "lengths")),
    ("attention", "causal", partial(_attention, "causal")),
    ("attention", "with weights", partial(_attention, "lengths weights")),
    ("linear", "512 → 512", _linear),
    ("linear", "512 → 2048, gelu", _widening_linear),
    ("feed_forward", "512 → 2048, relu", _feed_forward),
    ("cross_entropy", f"{VOCABULARY} tokens", _cross_entropy),
    ("linear_cross_entropy", f"512 → {VOCABULARY} tokens", _linear_cross_entropy),
)


def _drawn(text: Sequence[Batch], dtype: torch.dtype, device: torch.device, seed: int) -> _Data:
    return _Data(
        dtype, device, torch.Generator().manual_seed(seed), [batch.to(device) for batch in text]
    )


def _op(
    op: str,
    name: str,
    build: Build,
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
