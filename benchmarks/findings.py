"""What results say: for each case, what the dispatcher chose and the fastest of the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from transformer_fast.measure.benchmark_case import Row
from transformer_fast.measure.summary import Ratio, speed_up


class Finding(NamedTuple):
    """One case: the row that the dispatcher chose, and how it stands."""

    chosen: Row
    #: The fastest of all other candidates, our own included; None if there is none.
    rival: Row | None
    #: How many times as fast as the rival.
    against: Ratio | None
    #: What it is a case of: forward and backward have the same ones.
    suite: str = ""

    @property
    def lost(self) -> bool:
        """Whether the rival is faster, beyond doubt."""
        return self.against is not None and self.against.high < 1.0


def by_case(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows of one case after the other, in their order."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.case), []).append(row)
    yield from groups.values()


def findings(rows: Sequence[Row], suite: str = "") -> list[Finding]:
    """For every case in which the chosen candidate was timed."""
    found = []
    for group in by_case(rows):
        chosen = next((row for row in group if row.chosen and row.time is not None), None)
        if chosen is None:
            continue
        others = [row for row in group if row is not chosen and row.time is not None and row.ok]
        rival = min(others, key=_median, default=None)
        against = None if rival is None else speed_up(rival.samples, chosen.samples)
        found.append(Finding(chosen, rival, against, suite))
    return found


def _median(row: Row) -> float:
    return math.inf if row.time is None else row.time.median


def losses(found: Sequence[Finding]) -> list[Finding]:
    """The cases in which another is faster, the worst first."""
    lost = [finding for finding in found if finding.lost]
    return sorted(lost, key=lambda finding: finding.against.value if finding.against else 1.0)


def mean_speed_up(ratios: Sequence[Ratio]) -> float | None:
    """The geometric mean."""
    if not ratios:
        return None
    return math.exp(sum(math.log(ratio.value) for ratio in ratios) / len(ratios))
