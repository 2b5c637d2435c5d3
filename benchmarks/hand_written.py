"""Transformers as one writes them by hand, with nothing of ours, for the suites.

The paper's model: four Linears for each attention, masks that are 0 where hidden and fill with
-1e9, norms behind each sub-layer. What most tutorials have in common.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from transformer_fast.measure.text import PADDING
from transformer_fast.measure.transformers import Size

State = dict[str, Tensor]


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(size.model, size.model) for _ in range(4)
        )
        self.dropout = nn.Dropout(0.0)

    def split(self, x: Tensor) -> Tensor:
        batch, length, model = x.shape
        return x.view(batch, length, self.heads, model // self.heads).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        query = self.split(self.query(x))
        key, value = self.split(self.key(memory)), self.split(self.value(memory))
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        weights = self.dropout(torch.softmax(scores, dim=-1))
        joined = torch.matmul(weights, value).transpose(1, 2).contiguous().view(x.shape)
        return self.out(joined)


class Layer(nn.Module):
    """Of the encoder; ``crossed``: of the decoder."""

    def __init__(self, size: Size, crossed: bool = False) -> None:
        super().__init__()
        self.self_attn = Attention(size)
        self.norm1, self.norm2 = nn.LayerNorm(size.model), nn.LayerNorm(size.model)
        if crossed:
            self.multihead_attn, self.norm3 = Attention(size), nn.LayerNorm(size.model)
        self.linear1 = nn.Linear(size.model, size.hidden)
        self.linear2 = nn.Linear(size.hidden, size.model)
        self.dropout = nn.Dropout(0.0)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        last = self.norm2
        x = self.norm1(x + self.dropout(self.self_attn(x, x, mask)))
        if memory is not None:
            x = self.norm2(x + self.dropout(self.multihead_attn(x, memory, memory_mask)))
            last = self.norm3
        hidden = self.dropout(torch.relu(self.linear1(x)))
        return last(x + self.dropout(self.linear2(hidden)))


class Stack(nn.Module):
    """Layers, and a norm after them."""

    def __init__(self, size: Size, crossed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(size, crossed) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.model)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, *rest)
        return self.norm(x)


class Transformer(nn.Module):
    """`measure.transformers.Seq2Seq`, on two tensors of tokens."""

    positions: Tensor

    def __init__(self, size: Size, positions: Tensor) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.model)
        self.register_buffer("positions", positions, persistent=False)
        self.encoder, self.decoder = Stack(size), Stack(size, crossed=True)
        self.output = nn.Linear(size.model, size.vocabulary)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) + self.positions[: tokens.shape[1]]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        source_mask = (source != PADDING)[:, None, None, :]
        length = target.shape[1]
        past = torch.ones(length, length, dtype=torch.bool, device=target.device).tril()
        target_mask = (target != PADDING)[:, None, None, :] & past
        memory = self.encoder(self.embed(source), source_mask)
        return self.output(self.decoder(self.embed(target), target_mask, memory, source_mask))


_PARTS = ("query", "key", "value")


def renamed(theirs: State) -> State:
    """The weights of modules of ``torch.nn`` under the names that they have here."""
    found: State = {}
    for name, value in theirs.items():
        name = name.removeprefix("transformer.")
        head, is_packed, kind = name.partition("in_proj_")
        if is_packed:
            for part, chunk in zip(_PARTS, value.chunk(3), strict=True):
                found[f"{head}{part}.{kind}"] = chunk
        else:
            found[name.replace("out_proj.", "out.")] = value
    return found


def packed(ours: State) -> State:
    """The other way, without the prefix "transformer."."""
    found: State = {}
    for name, value in ours.items():
        head, is_first, kind = name.partition(f"{_PARTS[0]}.")
        if is_first:
            parts = [ours[f"{head}{part}.{kind}"] for part in _PARTS]
            found[f"{head}in_proj_{kind}"] = torch.cat(parts)
        elif not any(f".{part}." in f".{name}" for part in _PARTS[1:]):
            found[name.replace("attn.out.", "attn.out_proj.")] = value
    return found
