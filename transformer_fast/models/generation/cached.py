"""A decoder that remembers keys and values, so that each new token costs one token's work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...nn import fusion
from ..embedding import OutputProjection
from . import cuda_graph
from .kernels import (
    Linear,
    bind_layer_norm,
    bind_linear,
    bind_stack,
    empty_cache,
    product_dtype,
)
from .layers import Stack
from .sublayers import CrossAttention, FeedForward, MemoryPlaces, SelfAttention

#: (tokens (R, T), position of the first) -> vectors (R, T, M)
Embed = Callable[[Tensor, int], Tensor]
#: (vectors (R, T, M)) -> logits (R, T, V)
Project = Callable[[Tensor], Tensor]


def bind_project(project: Any, rows: int) -> Linear:
    """``project`` for (R, M), on our kernels where it is a plain matrix."""
    if fusion.is_unhooked(project, fusion.LINEAR):
        return bind_linear(rows, project.weight, project.bias)
    if fusion.is_unhooked(project, (OutputProjection,)):
        last = bind_linear(rows, project.weight, project.bias)
        if project.projection is None:
            return last
        if fusion.is_unhooked(project.projection, fusion.LINEAR):
            first = bind_linear(rows, project.projection.weight, None)
            return lambda x: last(first(x))
    return lambda x: project(x[:, None]).squeeze(1)


def select_rows(cache: Tensor, rows: Tensor, start: int, end: int, out: Tensor) -> None:
    """Places start ... end of ``cache[:, :, rows]`` (layers, 2, R, H, places, D) into ``out``."""
    used, to = cache.narrow(4, start, end - start), out.narrow(4, start, end - start)
    torch.index_select(used, 2, rows, out=to)


class Reordering:
    """Moves rows of a cache between two buffers.

    The hypotheses of a source soon descend from one: up to it they have the same keys and values,
    and both buffers hold those after a move. So only the places behind it are copied. On the CPU
    a table of who wrote each place tells which these are; elsewhere that would cost a look at it.
    """

    def __init__(self, cache: Tensor | None = None, beams: int = 1) -> None:
        self.beams = beams
        self.spare: Tensor | None = None
        #: How many places all sequences of each source share, and how many did before the last
        #: move: those are the same in both buffers.
        self.shared = self.equal = 0
        #: (R, places): what tells the sequences of one source apart at each place.
        self.writers: Tensor | None = None
        if cache is not None and beams > 1 and cache.device.type == "cpu":
            self.rows = torch.arange(cache.shape[2])
            # A fresh cache's sequences may differ anywhere, which distinct writers say.
            self.writers = self.rows[:, None].repeat(1, cache.shape[4])

    def wrote(self, place: int) -> None:
        """Each sequence has a token of its own at ``place`` now."""
        if self.writers is not None:
            self.writers.select(1, place).copy_(self.rows)

    def apply(self, cache: Tensor, rows: Tensor, length: int) -> Tensor:
        """``cache[:, :, rows]`` up to ``length``; the buffer given becomes the spare one."""
        if self.spare is None:
            self.spare = torch.empty_like(cache)
        select_rows(cache, rows, self.equal, length, self.spare)
        cache, self.spare = self.spare, cache
        if self.writers is not None:
            self.writers = self.writers.index_select(0, rows)
            self.equal, self.shared = self.shared, self._shared(length)
        return cache

    def _shared(self, length: int) -> int:
        assert self.writers is not None
        writers = self.writers.narrow(1, 0, length).unflatten(0, (-1, self.beams))
        differ = (writers != writers[:, :1]).flatten(0, 1).any(dim=0)
        return int(differ.int().argmax()) if bool(differ.any()) else length


class CachedDecoder:
    """Logits of the next token, R sequences at a time, without computing the past again.

    ``start`` takes the first tokens, ``step`` one more of each sequence. B sources may have several
    sequences each (beams), all in one tensor of R = B * beams rows, a source's side by side.

    Args:
        stack: what `read_stack` found.
        embed, project: what stands before and behind the stack.
        memory: (B, S, M) what the decoder attends to; None if it has no such sub-layer.
        memory_padding: bool (B, S), True at places to ignore; None: none.
        capacity: most tokens of a sequence.
    """

    def __init__(
        self,
        stack: Stack,
        embed: Embed,
        project: Project,
        memory: Tensor | None,
        memory_padding: Tensor | None,
        capacity: int,
    ) -> None:
        self.stack, self.embed, self.project, self.capacity = stack, embed, project, capacity
        self.places = MemoryPlaces.of(memory_padding)
        self.length = 0  # tokens seen so far
        self.beams = 1
        self.layers: list[tuple[SelfAttention, CrossAttention | None, FeedForward]] = []
        norm_first = stack.norm_first
        for layer in stack.layers:
            own, *crossed, last = layer.sublayers
            cross = None
            if crossed:
                assert memory is not None
                cross = CrossAttention(crossed[0], norm_first, memory)
            network = FeedForward(last, layer.activation, norm_first)
            self.layers.append((SelfAttention(own, norm_first), cross, network))
        self._bound: tuple[int, int] | None = None
        # (layers, key and value, R, H, capacity, D).
        self.cache = torch.empty(0)
        self.reordering = Reordering()

    def start(self, tokens: Tensor) -> Tensor:
        """Logits (R, V) of the token after the first ones, (R, P)."""
        rows, length = tokens.shape
        x = self.embed(tokens, 0)
        size = self.stack.d_model // self.stack.heads
        shape = (len(self.layers), 2, rows, self.stack.heads, self.capacity, size)
        self.cache = empty_cache(x, shape, product_dtype(x))
        return self._run(x, rows, length)

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (R, V) of the token after these, (R,)."""
        logits = self._run(self.embed(tokens.unsqueeze(1), self.length), tokens.shape[0], 1)
        if self.beams > 1:
            self.reordering.wrote(self.length - 1)
        return logits

    def _run(self, x: Tensor, rows: int, length: int) -> Tensor:
        x = x.reshape(rows * length, -1)
        if self._bound != (rows, length):
            self._bind(x, rows, length)
        start, self.length = self.length, self.length + length
        if self.steps is not None:
            return self.steps.step(x, self.cache, start)
        if self.whole is not None:
            x = self.whole(x, self.cache, start)
        else:
            x = self._layer_by_layer(x, self.cache, start)
        if length > 1:
            x = x.view(rows, length, -1)[:, -1]
        return self._logits(x)

    def _logits(self, x: Tensor) -> Tensor:
        return self.logits(x if self.final_norm is None else self.final_norm(x))

    def _layer_by_layer(
        self, x: Tensor, caches: Tensor, start: int, place: cuda_graph.Place | None = None
    ) -> Tensor:
        for cache, (own, cross, feed_forward) in zip(caches, self.layers, strict=True):
            x = own.step(x, cache, start, place)
            if cross is not None:
                x = cross.step(x)
            x = feed_forward.step(x)
        return x

    def _bind(self, x: Tensor, rows: int, length: int) -> None:
        self._bound = (rows, length)
        keys = self.cache[0, 0]
        memories = [cross.memory for _, cross, _ in self.layers if cross is not None]
        self.whole = bind_stack(
            x, self.cache, self.stack, memories, self.places.mask, self.places.lengths
        )
        if self.whole is None:
            for own, cross, feed_forward in self.layers:
                own.bind(x, keys, rows, length)
                if cross is not None:
                    cross.bind(x, self.places)
                feed_forward.bind(x)
        final = self.stack.final_norm
        self.final_norm = None if final is None else bind_layer_norm(x[:rows], final)
        self.logits = bind_project(self.project, rows)
        self.steps: cuda_graph.Steps | None = None
        if length == 1 and self.whole is None and cuda_graph.wanted(x):
            self.steps = cuda_graph.Steps(
                x, self.capacity, lambda *step: self._logits(self._layer_by_layer(*step))
            )

    def spread(self, beams: int) -> None:
        """Make ``beams`` equal sequences of each."""
        self.beams *= beams
        rows = torch.arange(self.cache.shape[2], device=self.cache.device)
        self._rebuild(rows.repeat_interleave(beams))

    def reorder(self, rows: Tensor) -> None:
        """Sequence r continues as sequence ``rows[r]`` was, one of the same source."""
        self.cache = self.reordering.apply(self.cache, rows, self.length)

    def keep(self, sources: Tensor) -> None:
        """Go on with these sources only, and their sequences."""
        beam = torch.arange(self.beams, device=sources.device)
        self._rebuild((sources[:, None] * self.beams + beam).flatten())
        self.places = self.places.keep(sources)
        for _, cross, _ in self.layers:
            if cross is not None:
                cross.keep(sources)

    def _rebuild(self, rows: Tensor) -> None:
        """A cache of these rows; only what has been written so far is copied."""
        shape = list(self.cache.shape)
        shape[2] = rows.shape[0]
        new = empty_cache(self.cache, tuple(shape), self.cache.dtype)
        select_rows(self.cache, rows, 0, self.length, new)
        self.cache = new
        self.reordering = Reordering(new, self.beams)
        self._bound = None
