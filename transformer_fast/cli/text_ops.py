"""Contests of single ops on embedded text, in the sizes of the base Transformer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn

from ..measure.contest import Arguments, Contest
from ..measure.ops import op_contest
from ..measure.text import PADDING, VOCABULARY, Batch

MODEL, HEADS, HIDDEN = 512, 8, 2048
#: Equal pieces of work with other numbers in them: fresh inputs, call by call.
_INPUTS = 2


class _Data:
    """The text's batches under one random embedding."""

    def __init__(
        self, batches: list[Batch], dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.device = dtype, device
        embedding = nn.Embedding(VOCABULARY, MODEL, _weight=self.normal(VOCABULARY, MODEL))
        self.batches = [batch.to(device) for batch in batches]
        self.embedded = [embedding(batch.tokens).detach() for batch in self.batches]

    def normal(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator) * scale + shift
        return drawn.to(self.device, self.dtype)

    def weight(self, rows: int, columns: int) -> Tensor:
        return self.normal(rows, columns, scale=1.0 / math.sqrt(columns))

    def heads(self, x: Tensor) -> Tensor:
        """A projection of x, split into heads: (B, H, T, D), strided as in a real model."""
        projected = x @ self.weight(MODEL, MODEL).t()
        return projected.unflatten(-1, (HEADS, MODEL // HEADS)).transpose(1, 2)


#: From the data to the arguments of ``reference.<op>``, one tuple for each batch.
Build = Callable[[_Data], list[Arguments]]


def _layer_norm(data: _Data) -> list[Arguments]:
    weight, bias = data.normal(MODEL, scale=0.1, shift=1.0), data.normal(MODEL, scale=0.1)
    return [(x, (MODEL,), weight, bias, 1e-5) for x in data.embedded]


def _add_layer_norm(data: _Data) -> list[Arguments]:
    sublayer = data.weight(MODEL, MODEL)
    return [(x @ sublayer, *rest) for x, rest in _residual(data)]


def _residual(data: _Data) -> Iterator[tuple[Tensor, Arguments]]:
    for x, *rest in _layer_norm(data):
        yield x, (x, *rest, 0.0, None)


def _rms_norm(data: _Data) -> list[Arguments]:
    return [(x, shape, weight, eps) for x, shape, weight, _, eps in _layer_norm(data)]


def _add_rms_norm(data: _Data) -> list[Arguments]:
    return [(x, r, shape, w, *rest) for x, r, shape, w, _, *rest in _add_layer_norm(data)]


def _attention(masked: str) -> Build:
    def build(data: _Data) -> list[Arguments]:
        calls: list[Arguments] = []
        for batch, x in zip(data.batches, data.embedded, strict=True):
            query, key, value = (data.heads(x) for _ in range(3))
            mask = batch.real[:, None, None, :] if "mask" in masked else None
            lengths = batch.lengths if "lengths" in masked else None
            rest = (None, 0.0, None, False, "weights" in masked)
            calls.append((query, key, value, mask, lengths, "causal" in masked, *rest))
        return calls

    return build


def _linear(widened: bool, activation: str | None, residual: bool) -> Build:
    def build(data: _Data) -> list[Arguments]:
        rows = HIDDEN if widened else MODEL
        weight, bias = data.weight(rows, MODEL), data.normal(rows, scale=0.1)
        return [
            (x, weight, bias, activation, x.flip(0) if residual else None) for x in data.embedded
        ]

    return build


def _feed_forward(activation: str) -> Build:
    def build(data: _Data) -> list[Arguments]:
        weight1, bias1 = data.weight(HIDDEN, MODEL), data.normal(HIDDEN, scale=0.1)
        weight2, bias2 = data.weight(MODEL, HIDDEN), data.normal(MODEL, scale=0.1)
        return [(x, weight1, bias1, weight2, bias2, activation, 0.0, None) for x in data.embedded]

    return build


_SMOOTHING = 0.1


def _expected(batch: Batch) -> Tensor:
    """Of each place the token after it; nothing is expected behind the text."""
    following = torch.nn.functional.pad(batch.tokens[:, 1:], (0, 1), value=PADDING)
    return following.flatten()


def _cross_entropy(data: _Data) -> list[Arguments]:
    return [
        (x @ weight.t() + bias, *rest) for x, weight, bias, *rest in _linear_cross_entropy(data)
    ]


def _linear_cross_entropy(data: _Data) -> list[Arguments]:
    weight, bias = data.weight(VOCABULARY, MODEL), data.normal(VOCABULARY, scale=0.1)
    return [
        (x.flatten(0, 1), weight, bias, _expected(batch), PADDING, _SMOOTHING)
        for batch, x in zip(data.batches, data.embedded, strict=True)
    ]


CASES: tuple[tuple[str, str, Build], ...] = (
    ("layer_norm", "512", _layer_norm),
    ("add_layer_norm", "512", _add_layer_norm),
    ("rms_norm", "512", _rms_norm),
    ("add_rms_norm", "512", _add_rms_norm),
    ("attention", "padding mask", _attention("mask")),
    ("attention", "key lengths", _attention("lengths")),
    ("attention", "causal", _attention("causal")),
    ("attention", "with weights", _attention("lengths weights")),
    ("linear", "512 → 512", _linear(False, None, True)),
    ("linear", "512 → 2048, gelu", _linear(True, "gelu", False)),
    ("feed_forward", "512 → 2048, relu", _feed_forward("relu")),
    ("cross_entropy", f"{VOCABULARY} tokens", _cross_entropy),
    ("linear_cross_entropy", f"512 → {VOCABULARY} tokens", _linear_cross_entropy),
)


def contests(
    ops: Collection[str],
    backends: Collection[str],
    batches: list[Batch],
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Callable[[], Contest]]:
    """A maker for the contest of each case of these ops: inputs are made when it is their turn."""
    for op, name, build in CASES:
        if op in ops:
            yield _maker(op, name, build, backends, batches, dtype, device)


def _maker(
    op: str,
    name: str,
    build: Build,
    backends: Collection[str],
    batches: list[Batch],
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[], Contest]:
    def make() -> Contest:
        inputs = [build(_Data(batches, dtype, device, seed)) for seed in range(_INPUTS)]
        return op_contest(op, name, inputs, backends)

    return make
