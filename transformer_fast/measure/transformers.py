"""BenchmarkCases of encoder layers and of whole Transformers, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..models import SinusoidalPositions
from .benchmark_case import Arguments, BenchmarkCase, Candidate
from .modules import module_case, parameter_bytes, twins
from .text import Batch

#: Makes peers for the module of torch.nn that they are to equal, and the arguments of a call.
Peers = Callable[[nn.Module, Arguments], Sequence[Candidate]]


class Size(NamedTuple):
    """The paper's base model, unless told otherwise (table 3)."""

    model: int = 512
    heads: int = 8
    hidden: int = 2048
    layers: int = 6
    vocabulary: int = 32000

    @property
    def label(self) -> str:
        return f"{self.model}/{self.heads}/{self.hidden}"


def no_peers(module: nn.Module, arguments: Arguments) -> Sequence[Candidate]:
    return ()


# Arithmetic, 2 for each multiply-add. ``pairs``: how many (query, key) pairs there are.


def encoder_layer_flops(size: Size, rows: float, pairs: float) -> float:
    return rows * (8.0 * size.model**2 + 4.0 * size.model * size.hidden) + 4.0 * pairs * size.model


def decoder_layer_flops(
    size: Size, rows: float, keys: float, pairs: float, cross_pairs: float
) -> float:
    cross = 4.0 * (rows + keys) * size.model**2 + 4.0 * cross_pairs * size.model
    return encoder_layer_flops(size, rows, pairs) + cross


def real_places(x: Tensor, mask: None, padding: Tensor | None) -> Tensor:
    """(B, T) bool: where an encoder's results count."""
    if padding is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return ~padding


def encoder_work(size: Size, weights: float, layers: int = 1) -> Callable[..., Any]:
    """What a call of that many encoder layers costs, with ``weights`` bytes of parameters."""

    def work(x: Tensor, mask: None, padding: Tensor | None) -> tuple[float, float, float]:
        batch, length, _ = x.shape
        lengths = real_places(x, mask, padding).sum(1).double()
        dense = encoder_layer_flops(size, batch * length, batch * length**2)
        useful = encoder_layer_flops(size, lengths.sum().item(), lengths.square().sum().item())
        moved = 2.0 * x.numel() * x.element_size() + weights
        return layers * dense, layers * useful, moved

    return work


def encoder_case(
    case: str,
    inputs: Sequence[Sequence[Arguments]],
    size: Size,
    backends: Sequence[str | None] = (None,),
    peers: Peers = no_peers,
    layers: int | None = None,
) -> BenchmarkCase:
    """One layer, or a `TransformerEncoder` of ``layers``.

    Calls are (x, None, padding): x (B, T, M), padding (B, T) bool, True = hidden, or None.
    """
    x, _, _ = inputs[0][0]

    def make(nn: Any) -> nn.Module:
        layer = nn.TransformerEncoderLayer(size.model, size.heads, size.hidden, batch_first=True)
        return layer if layers is None else nn.TransformerEncoder(layer, layers)

    ours, theirs = twins(make, x.dtype, x.device)
    work = encoder_work(size, parameter_bytes(theirs), layers or 1)
    offered = peers(theirs, inputs[0][0])
    op = "encoder_layer" if layers is None else "encoder"
    return module_case(op, case, ours, theirs, inputs, real_places, work, backends, offered)


class Seq2Seq(nn.Module):
    """The paper's model on tokens, from the classes of ``nn``: torch's namespace or ours."""

    positions: Tensor

    def __init__(self, nn: Any, size: Size, dropout: float = 0.1, longest: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.model)
        table = SinusoidalPositions(longest, size.model).table
        self.register_buffer("positions", table, persistent=False)
        self.transformer = nn.Transformer(
            size.model, size.heads, size.layers, size.layers, size.hidden, dropout, batch_first=True
        )
        self.output = nn.Linear(size.model, size.vocabulary)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) + self.positions[: tokens.shape[1]]

    def forward(self, source: Batch, target: Batch) -> Tensor:
        """Logits (B, T, vocabulary) for the token after each of the target's (teacher forcing)."""
        return self.output(self.decoded(source, target))

    def decoded(self, source: Batch, target: Batch) -> Tensor:
        """(B, T, M), what `output` is applied to."""
        length = target.tokens.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=target.tokens.device).triu(1)
        hidden = None if source.full else ~source.real
        return self.transformer(
            self._embed(source.tokens),
            self._embed(target.tokens),
            tgt_mask=future,
            src_key_padding_mask=hidden,
            tgt_key_padding_mask=None if target.full else ~target.real,
            memory_key_padding_mask=hidden,
            tgt_is_causal=True,
        )


def transformer_work(size: Size, weights: float, item: int) -> Callable[..., Any]:
    """What a call of `Seq2Seq` costs."""

    def flops(rows: float, keys: float, own: float, past: float, cross: float) -> float:
        encoder = encoder_layer_flops(size, keys, own)
        decoder = decoder_layer_flops(size, rows, keys, past, cross)
        return size.layers * (encoder + decoder) + 2.0 * rows * size.model * size.vocabulary

    def work(source: Batch, target: Batch) -> tuple[float, float, float]:
        batch, keys = source.tokens.shape
        length = target.tokens.shape[1]
        s, t = source.lengths.double(), target.lengths.double()
        sums = (t.sum(), s.sum(), (s * s).sum(), (t * (t + 1) / 2).sum(), (s * t).sum())
        dense = flops(
            batch * length, batch * keys, batch * keys**2, batch * length**2, batch * length * keys
        )
        return (
            dense,
            flops(*(x.item() for x in sums)),
            float(batch * length * size.vocabulary * item) + weights,
        )

    return work


def transformer_case(
    case: str,
    inputs: Sequence[Sequence[Arguments]],
    size: Size,
    dtype: torch.dtype,
    device: torch.device | str,
    backends: Sequence[str | None] = (None,),
    peers: Peers = no_peers,
) -> BenchmarkCase:
    """Calls are (source, target), both `Batch`."""
    ours, theirs = twins(lambda nn: Seq2Seq(nn, size), dtype, device)
    work = transformer_work(size, parameter_bytes(theirs), dtype.itemsize)
    offered = peers(theirs, inputs[0][0])
    return module_case(
        "transformer", case, ours, theirs, inputs, lambda source, target: target.real, work,
        backends, offered,
    )  # fmt: skip
