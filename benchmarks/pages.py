"""Tables of the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from transformer_fast.cli import form
from transformer_fast.measure.benchmark_case import Row
from transformer_fast.measure.summary import Ratio

from .findings import Finding


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


def summary(found: Sequence[Finding]) -> Grid:
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


def lost(found: Sequence[Finding]) -> Grid:
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
