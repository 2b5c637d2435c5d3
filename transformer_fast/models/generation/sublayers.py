"""The three sub-layers of a decoding step, each one function from the layer's stream to itself.

x is (R * T, M): R sequences, T new tokens each. A step gives ``norm(x + sublayer(x))``, or
``x + sublayer(norm(x))`` in a pre-norm stack. ``bind`` chooses kernels and comes before the first
step of each shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...nn import masks
from ...nn.fusion import Sublayer
from .cuda_graph import Place
from .kernels import (
    Linear,
    bind_attention,
    bind_enter,
    bind_feed_forward,
    bind_join,
    bind_linear,
    empty_cache,
)


class _Attention:
    """What both attentions have: projections, and what stands around them."""

    def __init__(self, weights: Sublayer, norm_first: bool) -> None:
        self.weights, self.norm_first = weights, norm_first
        self.heads = weights.heads
        self.width = weights.weight1.shape[1]
        self.size = self.width // self.heads
        self.scale = self.size**-0.5

    def _bind(self, sample: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        w, rows = self.weights, sample.shape[0]
        self.project_in = bind_linear(rows, weight, bias)
        self.project_out = bind_linear(rows, w.weight2, w.bias2)
        self.enter = bind_enter(sample, w.norm, self.norm_first)
        self.join = bind_join(sample, w.norm, self.norm_first)


class SelfAttention(_Attention):
    """Attention of the new tokens to themselves and to all before them."""

    def bind(self, sample: Tensor, keys: Tensor, rows: int, length: int) -> None:
        """For (R * T, M) like ``sample``, and keys like (R, H, places, D)."""
        self._bind(sample, self.weights.weight1, self.weights.bias1)
        # Tokens that come together are the first ones, so the causal mask begins where they do.
        self.causal = length > 1
        query = keys.new_empty((rows, self.heads, length, self.size))
        self.attention = bind_attention(query, keys, None, None, self.causal)
        lengths = torch.empty(rows, dtype=torch.int64, device=keys.device)
        self.attention_at = bind_attention(query, keys, None, lengths, False)
        self.shape = (rows, length, 3, self.heads, self.size)

    def step(self, x: Tensor, cache: Tensor, start: int, place: Place | None = None) -> Tensor:
        """``cache`` (2, R, H, places, D) has the keys and values of ``start`` tokens so far.

        ``place``: of one token, with nothing in the step that changes from one to the next.
        """
        qkv = self.project_in(x if self.enter is None else self.enter(x))
        qkv = qkv.view(self.shape).permute(2, 0, 3, 1, 4)
        attention, lengths, causal = self.attention, None, self.causal
        if place is None:
            length = self.shape[1]
            cache.narrow(3, start, length).copy_(qkv.narrow(0, 1, 2))
            keys, values = cache.narrow(3, 0, start + length).unbind(0)
        else:
            attention, lengths, causal = self.attention_at, place.lengths, False
            cache.index_copy_(3, place.position, qkv.narrow(0, 1, 2).to(cache.dtype))
            keys, values = cache.narrow(3, 0, place.places).unbind(0)
        y = attention(
            qkv.select(0, 0), keys, values, None, lengths, causal, self.scale, 0.0, None, False,
            False,
        )[0]  # fmt: skip
        y = self.project_out(y.transpose(1, 2).reshape(-1, self.width))
        return self.join(y, x)


@dataclass
class MemoryPlaces:
    """Which places of the memory are real, in the cheapest form that says it."""

    #: int64 (B,): the real ones come first. None: see mask.
    lengths: Tensor | None
    #: bool (B, 1, 1, S), True = may attend. None: all, or see lengths.
    mask: Tensor | None

    @staticmethod
    def of(padding: Tensor | None) -> MemoryPlaces:
        """From a mask (B, S), True at padding."""
        lengths, mask = (None, None) if padding is None else masks.of_real(padding)
        return MemoryPlaces(lengths, mask)

    def keep(self, sources: Tensor) -> MemoryPlaces:
        lengths, mask = (
            None if t is None else t.index_select(0, sources) for t in (self.lengths, self.mask)
        )
        return MemoryPlaces(lengths, mask)


class CrossAttention(_Attention):
    """Attention to the memory, whose keys and values are computed once.

    The beams of a source are further queries to that source's keys, so nothing is copied for them.
    """

    def __init__(self, weights: Sublayer, norm_first: bool, memory: Tensor) -> None:
        super().__init__(weights, norm_first)
        width = self.width
        w, b = weights.weight1, weights.bias1
        sources, places, _ = memory.shape
        project = bind_linear(sources * places, w[width:], None if b is None else b[width:])
        both = project(memory.reshape(sources * places, width))
        both = both.view(sources, places, 2, self.heads, self.size)
        # (2, B, H, S, D): each head's keys lie together, since every step reads them all.
        both = both.permute(2, 0, 3, 1, 4)
        self.memory = empty_cache(both, tuple(both.shape), both.dtype).copy_(both)

    def keep(self, sources: Tensor) -> None:
        self.memory = self.memory.index_select(1, sources)

    def bind(self, sample: Tensor, places: MemoryPlaces) -> None:
        rows = sample.shape[0]
        self.keys, self.values = self.memory.unbind(0)
        sources = self.keys.shape[0]
        self.mask, self.lengths = places.mask, places.lengths
        self.shape = (sources, rows // max(sources, 1), self.heads, self.size)
        self._bind(sample, *self.weights.of_query())
        query = self.keys.new_empty(self.shape).transpose(1, 2)
        self.attention = bind_attention(query, self.keys, self.mask, self.lengths, False)

    def step(self, x: Tensor) -> Tensor:
        query = self.project_in(x if self.enter is None else self.enter(x))
        query = query.view(self.shape).transpose(1, 2)
        y = self.attention(
            query, self.keys, self.values, self.mask, self.lengths, False, self.scale, 0.0, None,
            False, False,
        )[0]  # fmt: skip
        y = self.project_out(y.transpose(1, 2).reshape(-1, self.width))
        return self.join(y, x)


class FeedForward:
    """The position-wise feed-forward network."""

    def __init__(self, weights: Sublayer, activation: Any, norm_first: bool) -> None:
        self.weights, self.activation, self.norm_first = weights, activation, norm_first

    def bind(self, sample: Tensor) -> None:
        """For (R * T, M) like ``sample``; ``step`` is then x -> x."""
        norm, norm_first = self.weights.norm, self.norm_first
        enter, join = bind_enter(sample, norm, norm_first), bind_join(sample, norm, norm_first)
        network = bind_feed_forward(sample.shape[0], self.weights, self.activation)
        if enter is None:
            self.step: Linear = lambda x: join(network(x), x)
        else:
            self.step = lambda x: join(network(enter(x)), x)
