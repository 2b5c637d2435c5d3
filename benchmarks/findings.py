"""What results say: for each case, what the dispatcher chose and the fastest of the others; tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from transformer_fast.cli import form
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


class Grid(NamedTuple):
    """A table: headings, rows of text, and the columns that are words and not figures."""

    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    words: int = 1

    def markdown(self) -> str:
        marks = ["---"] * self.words + ["---:"] * (len(self.headings) - self.words)
        lines = [self.headings, tuple(marks), *self.rows]
        return "\n".join("| " + " | ".join(_escape(cell) for cell in line) + " |" for line in lines)


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|")


def interval(ratio: Ratio | None) -> str:
    """'1.70x (1.66-1.75)'."""
    if ratio is None:
        return ""
    low, high = form.three_digits(ratio.low), form.three_digits(ratio.high)
    return f"{form.times(ratio.value)} ({low}-{high})"


def roof(row: Row) -> str:
    """'57 %', or '113 % (44 %)' with the share of fp32's second roof in parentheses."""
    second = "" if row.split_share is None else f" ({form.percent(row.split_share)})"
    return form.percent(row.roof_share) + second


def mebibytes(amount: int | None) -> str:
    return "" if amount is None else form.three_digits(amount / 2**20)


def rates(row: Row) -> str:
    """Gflop/s: '412', or '206 (412)' where masks hide half, dense in parentheses."""
    if row.time is None or row.flops == 0.0:
        return ""
    useful = form.rate(row.useful_flops, row.time.median)
    if row.useful_flops == row.flops:
        return useful
    return f"{useful} ({form.rate(row.flops, row.time.median)})"


def summary_table(found: Sequence[Finding]) -> Grid:
    """One line for each case: what the dispatcher chose."""
    rows = []
    for chosen, rival, against, _ in found:
        assert chosen.time is not None
        rows.append(
            (
                chosen.op,
                chosen.case,
                chosen.candidate,
                form.seconds(chosen.time.median),
                form.times(chosen.vs_reference.value) if chosen.vs_reference else "",
                interval(chosen.vs_torch),
                "" if rival is None else rival.candidate,
                interval(against),
                rates(chosen),
                roof(chosen),
                mebibytes(chosen.peak_bytes),
                form.times(chosen.error_ratio),
            )
        )
    headings = (
        *("op", "case", "on", "time", "vs reference", "vs torch's best (95 %)"),
        *("fastest other", "vs it (95 %)", "Gflop/s (dense)", "roof", "MiB", "error in refs"),
    )
    return Grid(headings, rows, words=3)


def lost_table(found: Sequence[Finding]) -> Grid:
    """Cases in which another is faster."""
    rows = [
        (
            suite,
            chosen.op,
            chosen.case,
            chosen.candidate,
            "" if rival is None else rival.candidate,
            form.seconds(chosen.time.median) if chosen.time else "",
            form.seconds(rival.time.median) if rival and rival.time else "",
            interval(against),
        )
        for chosen, rival, against, suite in found
    ]
    headings = ("suite", "op", "case", "on", "faster", "our time", "its time", "vs it (95 %)")
    return Grid(headings, rows, words=5)
