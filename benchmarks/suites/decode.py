"""Greedy decoding with the base Transformer: tokens one after the other."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from transformer_fast import models
from transformer_fast.measure.benchmark_case import Arguments, BenchmarkCase, Candidate
from transformer_fast.measure.calls import forced, record
from transformer_fast.measure.modules import fast_path, parameter_bytes, twins
from transformer_fast.measure.transformers import (
    Seq2Seq,
    Size,
    decoder_layer_flops,
    encoder_layer_flops,
)
from transformer_fast.testing import OUTPUT_FACTOR, Parity

from .. import peers
from ..scope import Maker, Scope

START, END = 1, 2
#: (B, S, new tokens, vocabulary, layers)
_CASES = ((1, 32, 64, 32000, 6), (16, 32, 64, 32000, 6), (64, 64, 64, 32000, 6))
_QUICK = ((2, 8, 6, 1000, 2),)


class Translator(nn.Module):
    """The paper's model, post-norm and without norms after the stacks, from torch's or our ``nn``.

    It never prefers the end token, so that all who decode with it make equally many tokens.
    """

    positions: Tensor

    def __init__(self, nn: Any, size: Size, longest: int) -> None:
        super().__init__()
        whole = Seq2Seq(nn, size, 0.0, longest)
        self.embedding, self.output = whole.embedding, whole.output
        self.encoder, self.decoder = whole.transformer.encoder, whole.transformer.decoder
        self.encoder.norm = self.decoder.norm = None
        # Sines, then cosines, as Marian has them.
        sines, cosines = whole.positions[:, ::2], whole.positions[:, 1::2]
        self.register_buffer("positions", torch.cat((sines, cosines), -1))
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    torch.nn.init.xavier_uniform_(parameter)
            self.output.bias[END] = -1e4

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        return self.embedding(tokens) + self.positions[start : start + tokens.shape[1]]

    def logits(self, source: Tensor, target: Tensor) -> Tensor:
        """(B, T, V), under teacher forcing."""
        future = nn.Transformer.generate_square_subsequent_mask(
            target.shape[1], device=target.device, dtype=self.positions.dtype
        )
        memory = self.encoder(self.embed(source))
        hidden = self.decoder(self.embed(target), memory, tgt_mask=future, tgt_is_causal=True)
        return self.output(hidden)


def cached(model: Translator, new_tokens: int) -> Callable[[Tensor], Tensor]:
    """Our decoding, with its cache of keys and values."""

    def decode(source: Tensor) -> Tensor:
        memory = model.encoder(model.embed(source))
        return models.generate(
            model.decoder, memory, embed=model.embed, project=model.output,
            prefix=START, max_new_tokens=new_tokens, end_token=-1, use_cache=True,
        ).tokens  # fmt: skip

    return decode


def recomputing(model: Translator, new_tokens: int) -> Callable[[Tensor], Tensor]:
    """What there is without a cache: everything again for every token."""

    def decode(source: Tensor) -> Tensor:
        tokens = torch.full((source.shape[0], 1), START, device=source.device)
        with fast_path(False):
            memory = model.encoder(model.embed(source))
            for length in range(1, new_tokens + 1):
                future = nn.Transformer.generate_square_subsequent_mask(
                    length, device=source.device, dtype=memory.dtype
                )
                hidden = model.decoder(
                    model.embed(tokens), memory, tgt_mask=future, tgt_is_causal=True
                )
                best = model.output(hidden[:, -1]).argmax(-1, keepdim=True)
                tokens = torch.cat((tokens, best), dim=1)
        return tokens[:, 1:]

    return decode


class GreedyJudge:
    """Whether every token was a best one: the oracle's logits for it against the highest.

    Tokens are compared this way because near ties may fall either way in fp32, and after one that
    did all later tokens differ. The unit is the reference's largest error in a logit.
    """

    def __init__(self, oracle: Translator, reference: Callable[..., Tensor], new: int) -> None:
        self.oracle, self.reference, self.new = oracle, reference, new

    @torch.no_grad()
    def __call__(self, tokens: Tensor, arguments: Arguments) -> Parity:
        (source,) = arguments
        shape = (source.shape[0], self.new)
        if tuple(tokens.shape) != shape:
            wrong = f"tokens are {list(tokens.shape)} instead of {list(shape)}"
            return Parity(float("inf"), 0.0, float("inf"), 0.0, False, wrong)
        start = torch.full((shape[0], 1), START, device=source.device)
        forced_on = torch.cat((start, tokens[:, :-1]), dim=1)
        with fast_path(False):
            true = self.oracle.logits(source, forced_on)
        close = self.reference(source, forced_on)
        eps = torch.finfo(close.dtype).eps
        size = true.clamp(min=-1e3).abs().max().item()
        unit = max((close - true).abs().max().item(), eps / 2 * size)
        gaps = true.amax(-1) - true.gather(-1, tokens[..., None])[..., 0]
        error = gaps.max().item()
        # Both logits of a near tie may be off.
        limit = 2 * (OUTPUT_FACTOR * unit + eps * size)
        place = f"token {int(gaps.argmax())} is {error:.3g} below the best"
        return Parity(error, unit, error / unit, limit, error <= limit, place)


def _work(size: Size, model: nn.Module, batch: int, source: int, new: int) -> tuple[float, float]:
    """(flops, bytes): weights are read once for every token, and the encoder's once."""
    rows = float(batch * new)
    encoder = encoder_layer_flops(size, batch * source, batch * source**2)
    seen = batch * new * (new + 1) / 2
    decoder = decoder_layer_flops(size, rows, batch * source, seen, rows * source)
    flops = size.layers * (encoder + decoder) + 2.0 * rows * size.model * size.vocabulary
    parts = dict(model.named_children())
    each = parameter_bytes(parts["decoder"]) + parameter_bytes(parts["output"])
    return flops, parameter_bytes(parts["encoder"]) + new * each


def _contest(
    scope: Scope, batch: int, source: int, new: int, vocabulary: int, layers: int
) -> BenchmarkCase:
    size = Size(layers=layers, vocabulary=vocabulary)
    ours: Any
    theirs: Any
    ours, theirs = twins(
        lambda nn: Translator(nn, size, source + new + 2), scope.dtype, scope.device
    )
    inputs: list[list[Arguments]] = []
    for seed in range(2):
        tokens = torch.randint(3, vocabulary, (batch, source), generator=scope.generator(seed))
        inputs.append([(tokens.to(scope.device),)])
    with torch.no_grad(), record() as found:
        cached(ours, 2)(*inputs[0][0])
    chosen = found.backends
    checker = GreedyJudge(copy.deepcopy(theirs).double(), forced(ours.logits, "reference"), new)
    eager, too_long = recomputing(theirs, new), None
    if batch > 1 and not scope.quick:
        too_long = "torch.nn has no cache; computing all anew for every token takes too long here"
    candidates = [
        Candidate(chosen, cached(ours, new)),
        Candidate("reference", forced(cached(ours, new), "reference")),
        Candidate("torch eager", None if too_long else eager, too_long, ours=False),
        *peers.candidates(scope.peers, "decode", theirs, inputs[0][0], new),
    ]
    flops, moved = _work(size, theirs, batch, source, new)
    case = f"{layers}+{layers}, ({batch},{source}), {new} new, V = {vocabulary}"
    work, torchs = (flops, flops, moved), ("torch eager",)
    return scope.case("greedy decoding", case, inputs, candidates, checker, work, chosen, torchs)


def suite(scope: Scope) -> Iterator[tuple[str, Maker]]:
    cases: Sequence[tuple[int, int, int, int, int]] = _QUICK if scope.quick else _CASES
    for case in cases:
        batch, source, new, _, _ = case
        label = f"greedy decoding ({batch},{source}), {new} new"
        yield label, functools.partial(_contest, scope, *case)
