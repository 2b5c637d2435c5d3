"""Contests of an encoder layer and of the base Transformer on text."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import nn as our_nn
from ..measure.contest import Arguments, Contest
from ..measure.modules import decoder_layer_flops, encoder_layer_flops, module_contest
from ..measure.text import VOCABULARY, Batch
from .text_ops import HEADS, HIDDEN, MODEL

_LAYERS = 6
_INPUTS = 2


def _positions(length: int, model: int) -> Tensor:
    """Sinusoids ("Attention Is All You Need", section 3.5)."""
    rate = torch.exp(torch.arange(0, model, 2) * (-math.log(10000.0) / model))
    angle = torch.arange(length)[:, None] * rate
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)


class ByteTransformer(torch.nn.Module):
    """The paper's base model on bytes, from the classes of ``nn``: torch's namespace or ours."""

    positions: Tensor

    def __init__(self, nn: Any, layers: int = _LAYERS, longest: int = 512) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, MODEL)
        self.register_buffer("positions", _positions(longest, MODEL), persistent=False)
        self.transformer = nn.Transformer(MODEL, HEADS, layers, layers, HIDDEN, batch_first=True)
        self.output = torch.nn.Linear(MODEL, VOCABULARY)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) + self.positions[: tokens.shape[1]]

    def forward(self, source: Batch, target: Batch) -> Tensor:
        """Logits (B, T, VOCABULARY) of each target byte's successor, under teacher forcing."""
        length = target.tokens.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=target.tokens.device).triu(1)
        decoded = self.transformer(
            self._embed(source.tokens),
            self._embed(target.tokens),
            tgt_mask=future,
            src_key_padding_mask=~source.real,
            tgt_key_padding_mask=~target.real,
            memory_key_padding_mask=~source.real,
            tgt_is_causal=True,
        )
        return self.output(decoded)


def _twins(
    make: Callable[[Any], torch.nn.Module], dtype: torch.dtype, device: torch.device
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The module made from our classes and from torch's, with one state_dict."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = make(torch.nn)
        # What training would have moved: torch starts norms and biases at exactly 1 and 0.
        for name, parameter in theirs.named_parameters():
            if parameter.dim() == 1:
                with torch.no_grad():
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
            del name
    ours = make(our_nn)
    ours.load_state_dict(theirs.state_dict())
    return tuple(module.eval().to(device, dtype) for module in (ours, theirs))  # type: ignore[return-value]


def _parameter_bytes(module: torch.nn.Module) -> float:
    return float(sum(p.numel() * p.element_size() for p in module.parameters()))


def _encoder_layer(
    batches: list[Batch],
    dtype: torch.dtype,
    device: torch.device,
    backends: list[str | None],
    compile: bool,
) -> Contest:
    ours, theirs = _twins(
        lambda nn: nn.TransformerEncoderLayer(MODEL, HEADS, HIDDEN, batch_first=True), dtype, device
    )
    inputs: list[list[Arguments]] = []
    for seed in range(_INPUTS):
        table = torch.randn(VOCABULARY, MODEL, generator=torch.Generator().manual_seed(seed))
        placed = [batch.to(device) for batch in batches]
        table = table.to(device, dtype)
        inputs.append([(table[b.tokens], None, ~b.real) for b in placed])

    def work(x: Tensor, mask: None, padding: Tensor) -> tuple[float, float, float]:
        rows, length = x.shape[0] * x.shape[1], x.shape[1]
        lengths = (~padding).sum(1).double()
        dense = encoder_layer_flops(rows, rows * length, MODEL, HIDDEN)
        useful = encoder_layer_flops(
            lengths.sum().item(), (lengths * lengths).sum().item(), MODEL, HIDDEN
        )
        return dense, useful, 2.0 * x.numel() * x.element_size() + _parameter_bytes(theirs)

    return module_contest(
        "encoder_layer", "512/8/2048", ours, theirs, inputs,
        real=lambda x, mask, padding: ~padding, work=work, backends=backends, compile=compile,
    )  # fmt: skip


def _transformer(
    pairs: list[tuple[Batch, Batch]],
    dtype: torch.dtype,
    device: torch.device,
    backends: list[str | None],
    compile: bool,
) -> Contest:
    ours, theirs = _twins(ByteTransformer, dtype, device)
    # Two inputs that cost the same and differ: the same pairs, in reverse order of the batch.
    inputs: list[list[Arguments]] = []
    for turn in (False, True):
        inputs.append([
            tuple(
                Batch(b.tokens.flip(0), b.lengths.flip(0)).to(device) if turn else b.to(device)
                for b in pair
            )
            for pair in pairs
        ])  # fmt: skip

    def flops(rows: float, keys: float, own: float, past: float, cross: float) -> float:
        encoder = encoder_layer_flops(keys, own, MODEL, HIDDEN)
        decoder = decoder_layer_flops(rows, keys, past, cross, MODEL, HIDDEN)
        return _LAYERS * (encoder + decoder) + 2.0 * rows * MODEL * VOCABULARY

    def work(source: Batch, target: Batch) -> tuple[float, float, float]:
        batch, keys = source.tokens.shape
        length = target.tokens.shape[1]
        s, t = source.lengths.double(), target.lengths.double()
        sums = (t.sum(), s.sum(), (s * s).sum(), (t * (t + 1) / 2).sum(), (s * t).sum())
        dense = flops(
            batch * length, batch * keys, batch * keys * keys, batch * length * length,
            batch * length * keys,
        )  # fmt: skip
        moved = batch * length * VOCABULARY * next(theirs.parameters()).element_size()
        return dense, flops(*(x.item() for x in sums)), moved + _parameter_bytes(theirs)

    return module_contest(
        "transformer", "base, 6+6 layers", ours, theirs, inputs,
        real=lambda source, target: target.real, work=work, backends=backends, compile=compile,
    )  # fmt: skip


NAMES = ("encoder_layer", "transformer")


def contests(
    names: Collection[str],
    backends: list[str | None],
    batches: list[Batch],
    pairs: list[tuple[Batch, Batch]],
    dtype: torch.dtype,
    device: torch.device,
    compile: bool = False,
) -> Iterator[Callable[[], Contest]]:
    """A maker for the contest of each of these models."""
    if "encoder_layer" in names:
        yield lambda: _encoder_layer(batches, dtype, device, backends, compile)
    if "transformer" in names:
        yield lambda: _transformer(pairs, dtype, device, backends, compile)
