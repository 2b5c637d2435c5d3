"""What samples say: median, quartiles, and the ratio of two contenders with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

_RESAMPLES = 2000


class Summary(NamedTuple):
    """Seconds per call."""

    median: float
    #: Quartiles: half of the samples lie between them.
    low: float
    high: float
    rounds: int


class Ratio(NamedTuple):
    """How many times as fast, with the bounds of its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def significant(self) -> bool:
        """Whether the interval leaves 1 out."""
        return self.low > 1.0 or self.high < 1.0


def summarise(samples: Sequence[float]) -> Summary:
    """Median and quartiles of at least one sample."""
    if not samples:
        raise ValueError("samples must not be empty")
    points = torch.tensor([0.5, 0.25, 0.75], dtype=torch.float64)
    median, low, high = torch.quantile(torch.tensor(samples, dtype=torch.float64), points).tolist()
    return Summary(median, low, high, len(samples))


def speed_up(base: Sequence[float], ours: Sequence[float]) -> Ratio:
    """``median(base) / median(ours)``: above 1, ours is the faster.

    The samples are pairs, taken in the same rounds. The interval is the bootstrap's (2000 draws of
    whole rounds, percentiles 2.5 and 97.5), so drift that hits both contenders cancels.
    """
    if len(base) != len(ours) or not base:
        raise ValueError(
            f"base and ours must be pairs from the same rounds, not {len(base)} and {len(ours)}"
        )
    pairs = torch.tensor([list(base), list(ours)], dtype=torch.float64)
    middle = torch.quantile(pairs, 0.5, dim=-1)
    generator = torch.Generator().manual_seed(0)
    rounds = torch.randint(len(base), (_RESAMPLES, len(base)), generator=generator)
    medians = torch.quantile(pairs[:, rounds], 0.5, dim=-1)
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.quantile(medians[0] / medians[1], ends).tolist()
    return Ratio((middle[0] / middle[1]).item(), low, high)
