"""Statistics of samples: median, quartiles, and speed-ups with confidence intervals."""

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
    """A speed-up with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    @property
    def significant(self) -> bool:
        """Whether the interval excludes 1."""
        return self.low > 1.0 or self.high < 1.0


def summarise(samples: Sequence[float]) -> Summary:
    """Median and quartiles of at least one sample."""
    if not samples:
        raise ValueError("samples must not be empty")
    points = torch.tensor([0.5, 0.25, 0.75], dtype=torch.float64)
    median, low, high = torch.quantile(torch.tensor(samples, dtype=torch.float64), points).tolist()
    return Summary(median, low, high, len(samples))


def medians(series: Sequence[Sequence[float]], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The median of each series, and (series, 2000) medians of draws of whole rounds (bootstrap)."""
    paired = torch.tensor([list(one) for one in series], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    rounds = torch.randint(paired.shape[1], (_RESAMPLES, paired.shape[1]), generator=generator)
    return torch.quantile(paired, 0.5, dim=-1), torch.quantile(paired[:, rounds], 0.5, dim=-1)


def interval(draws: torch.Tensor) -> tuple[float, float]:
    """Percentiles 2.5 and 97.5."""
    low, high = torch.quantile(draws, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def speed_up(base: Sequence[float], ours: Sequence[float]) -> Ratio:
    """``median(base) / median(ours)``: above 1, ours is the faster.

    The samples are pairs, taken in the same rounds. The interval is the bootstrap's over whole
    rounds, so drift that hits both candidates cancels.
    """
    if len(base) != len(ours) or not base:
        raise ValueError(
            f"base and ours must be pairs from the same rounds, not {len(base)} and {len(ours)}"
        )
    middle, draws = medians([base, ours])
    return Ratio((middle[0] / middle[1]).item(), *interval(draws[0] / draws[1]))
