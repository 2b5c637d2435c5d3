"""What results say: for each case, what the dispatcher chose and the fastest of the others; tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
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


def by_case(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """The rows of each (op, case), in their order."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.case), []).append(row)
    return groups


def findings(rows: Sequence[Row], suite: str = "") -> list[Finding]:
    """For every case in which the chosen candidate was timed."""
    found = []
    for group in by_case(rows).values():
        chosen = next((row for row in group if row.chosen and row.time is not None), None)
        if chosen is None:
            continue
        others = [row for row in group if row is not chosen and row.time is not None and row.ok]
        rival = min(others, key=attrgetter("time.median"), default=None)
        against = None if rival is None else speed_up(rival.samples, chosen.samples)
        found.append(Finding(chosen, rival, against, suite))
    return found


def losses(found: Sequence[Finding]) -> list[Finding]:
    """The cases in which another is faster, the worst first."""
    lost = [finding for finding in found if finding.lost]
    return sorted(lost, key=lambda finding: finding.against.value if finding.against else 1.0)


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], words: int) -> str:
    """A table; its first ``words`` columns are words, the others figures."""
    marks = ["---"] * words + ["---:"] * (len(headings) - words)
    lines = [headings, marks, *rows]
    escaped = ((cell.replace("|", "\\|") for cell in line) for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)


def interval(ratio: Ratio | None) -> str:
    """'1.70x (1.66-1.75)'."""
    if ratio is None:
        return ""
    return f"{form.times(ratio.value)} ({form.interval(ratio.low, ratio.high)})"


def roof(row: Row) -> str:
    """'57 %', or '113 % (44 %)' with the share of fp32's second roof in parentheses."""
    second = "" if row.split_share is None else f" ({form.percent(row.split_share)})"
    return form.percent(row.roof_share) + second


def seconds(row: Row | None) -> str:
    return form.seconds(row.time.median) if row is not None and row.time is not None else ""


def rates(row: Row) -> str:
    """Gflop/s: '412', or '206 (412)' where masks hide half, dense in parentheses."""
    if row.time is None or row.flops == 0.0:
        return ""
    useful = form.rate(row.useful_flops, row.time.median)
    if row.useful_flops == row.flops:
        return useful
    return f"{useful} ({form.rate(row.flops, row.time.median)})"


def work(finding: Finding) -> str:
    """'attention (4,8,1024,64), and its gradients, bfloat16'."""
    kind, _, dtype = finding.suite.partition(", ")
    parts = [f"{finding.chosen.op} {finding.chosen.case}"]
    parts += ["and its gradients"] if kind == "backward" else []
    return ", ".join([*parts, dtype] if dtype else parts)


def _rival(finding: Finding) -> str:
    return "" if finding.rival is None else finding.rival.candidate


def _mebibytes(finding: Finding) -> str:
    amount = finding.chosen.peak_bytes
    return "" if amount is None else form.three_digits(amount / 2**20)


#: What stands in a table's column, by its heading; columns of words come first.
CELLS: dict[str, Callable[[Finding], str]] = {
    "work": work,
    "suite": lambda found: found.suite,
    "op": lambda found: found.chosen.op,
    "case": lambda found: found.chosen.case,
    "on": lambda found: found.chosen.candidate,
    "faster": _rival,
    "time": lambda found: seconds(found.chosen),
    "our time": lambda found: seconds(found.chosen),
    "its time": lambda found: seconds(found.rival),
    "vs reference": lambda found: form.times(getattr(found.chosen.vs_reference, "value", None)),
    "vs torch's best (95 %)": lambda found: interval(found.chosen.vs_torch),
    "fastest other": _rival,
    "vs it (95 %)": lambda found: interval(found.against),
    "vs the fastest other (95 %)": lambda found: (
        _rival(found) and f"{_rival(found)}: {interval(found.against)}"
    ),
    "Gflop/s (dense)": lambda found: rates(found.chosen),
    "roof": lambda found: roof(found.chosen),
    "MiB": _mebibytes,
    "error in refs": lambda found: form.times(found.chosen.error_ratio),
}
SUMMARY = (
    *("op", "case", "on", "time", "vs reference", "vs torch's best (95 %)"),
    *("fastest other", "vs it (95 %)", "Gflop/s (dense)", "roof", "MiB", "error in refs"),
)
FIGURES = ("work", "time", "vs torch's best (95 %)", "roof", "vs the fastest other (95 %)")
LOST = ("suite", "op", "case", "on", "faster", "our time", "its time", "vs it (95 %)")


def table(found: Iterable[Finding], headings: Sequence[str]) -> str:
    """A line for each case, of these columns of `CELLS`."""
    words = sum(heading in ("work", "suite", "op", "case", "on", "faster") for heading in headings)
    rows = [[CELLS[heading](one) for heading in headings] for one in found]
    return markdown(headings, rows, words)
