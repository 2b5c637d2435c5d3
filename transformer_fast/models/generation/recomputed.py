"""A decoder that computes all tokens again at every step: for any stack, and to check the cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ...functional import causal_mask
from .cached import Embed, Project


@contextmanager
def evaluating(*modules: object) -> Iterator[None]:
    """Within the block, dropout and the like are off; then every module is as it was."""
    trained = [
        part
        for module in modules
        if isinstance(module, torch.nn.Module)
        for part in module.modules()
        if part.training
    ]
    try:
        for part in trained:
            part.training = False
        yield
    finally:
        for part in trained:
            part.training = True


class RecomputedDecoder:
    """`CachedDecoder`'s methods for a stack whose layers can only be called.

    Args:
        stack: called as torch.nn.TransformerDecoder is where there is a memory, else as
            torch.nn.TransformerEncoder is.
        batch_first: whether the stack takes (R, T, M); else it takes (T, R, M).
        embed, project, memory, memory_padding: as in `CachedDecoder`.
    """

    def __init__(
        self,
        stack: torch.nn.Module,
        batch_first: bool,
        embed: Embed,
        project: Project,
        memory: Tensor | None,
        memory_padding: Tensor | None,
    ) -> None:
        self.stack, self.batch_first = stack, batch_first
        self.embed, self.project = embed, project
        self.memory, self.memory_padding = memory, memory_padding
        self.beams = 1
        self.tokens = torch.empty(0)

    def start(self, tokens: Tensor) -> Tensor:
        self.tokens = tokens
        return self._run()

    def step(self, tokens: Tensor) -> Tensor:
        self.tokens = torch.cat((self.tokens, tokens[:, None]), dim=1)
        return self._run()

    def _run(self) -> Tensor:
        with evaluating(self.stack, self.embed, self.project):
            x = self._swap(self.embed(self.tokens, 0))
            mask = causal_mask(self.tokens.shape[1], true_means="hidden", device=x.device)
            if self.memory is None:
                y = self.stack(x, mask=mask, is_causal=True)
            else:
                y = self.stack(
                    x,
                    self._swap(self.memory),
                    tgt_mask=mask,
                    tgt_is_causal=True,
                    memory_key_padding_mask=self.memory_padding,
                )
            return self.project(self._swap(y)[:, -1:]).squeeze(1)

    def _swap(self, x: Tensor) -> Tensor:
        return x if self.batch_first else x.transpose(0, 1)

    def spread(self, beams: int) -> None:
        self.beams *= beams
        rows = torch.arange(self.tokens.shape[0], device=self.tokens.device)
        self._select(rows.repeat_interleave(beams))

    def reorder(self, rows: Tensor) -> None:
        self.tokens = self.tokens.index_select(0, rows)

    def keep(self, sources: Tensor) -> None:
        beam = torch.arange(self.beams, device=sources.device)
        self._select((sources[:, None] * self.beams + beam).flatten())

    def _select(self, rows: Tensor) -> None:
        self.tokens = self.tokens.index_select(0, rows)
        if self.memory is not None:
            self.memory = self.memory.index_select(0, rows)
        if self.memory_padding is not None:
            self.memory_padding = self.memory_padding.index_select(0, rows)
