"""Beams that change places: their keys and values move, but not those that all beams share."""

from __future__ import annotations

import torch
from torch import Tensor


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
