"""Formats results: numbers, the table of `compare`, and notes on work without a row or our kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from rich.text import Text

from .. import dispatch
from ..measure.benchmark_case import BenchmarkCase, Row
from ..measure.clock import Ratio, Summary

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def _unit(value: float) -> tuple[float, str]:
    return next((unit for unit in _UNITS if value >= unit[0]), _UNITS[-1])


def seconds(value: float) -> str:
    """Formats a time with three significant digits and a unit: '12.3 ms'."""
    size, unit = _unit(value)
    return f"{three_digits(value / size)} {unit}"


def interval(low: float, high: float) -> str:
    """Formats an interval: '12.1-12.9'."""
    return f"{three_digits(low)}-{three_digits(high)}"


def spread(time: Summary) -> str:
    """Formats the quartiles, in the unit of the median."""
    size, _ = _unit(time.median)
    return interval(time.low / size, time.high / size)


def three_digits(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if value == 0.0:
        return "0"
    before = math.floor(math.log10(abs(value))) + 1
    return f"{value:.{min(3, max(0, 3 - before))}f}"


def error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def times(value: float | None) -> str:
    """Formats a factor: '2.14x'."""
    return "" if value is None else f"{three_digits(value)}x"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def rate(amount: float, time: float) -> str:
    """Formats a rate in billions per second."""
    return three_digits(amount / time / 1e9)


def count(amount: int, noun: str, several: str | None = None) -> str:
    return f"{amount:,} {noun if amount == 1 else several or noun + 's'}"


# The table.


def _name(row: Row) -> Text:
    style = "bold" if row.chosen else "" if row.ours else "dim"
    return Text(row.candidate + (" *" if row.chosen else ""), style)


def _parity(row: Row, text: str) -> Text:
    return Text("" if row.ok is None else text, "" if row.ok else "bold red")


def _time(row: Row) -> Text:
    if row.time is None:
        return Text("failed", "red") if row.failed else Text("-")
    return Text(seconds(row.time.median))


def _speed(ratio: Ratio | None) -> Text:
    if ratio is None:
        return Text("")
    colour = "green" if ratio.value > 1.0 else "red"
    return Text(times(ratio.value), colour if ratio.significant else "")


def _rate(row: Row, amount: float) -> str:
    return rate(amount, row.time.median) if row.time and amount else ""


#: Columns: (heading, rank, function that formats a row's cell). If the table is wider than the
#: terminal, columns of the highest rank are omitted first; those of rank 0 are always shown.
_COLUMNS: tuple[tuple[str, int, Callable[[Row], Text | str | None]], ...] = (
    ("on", 0, _name),
    ("error", 2, lambda row: _parity(row, error(row.error))),
    ("in refs", 0, lambda row: _parity(row, times(row.error_ratio))),
    ("time", 0, _time),
    ("quartiles", 1, lambda row: spread(row.time) if row.time else ""),
    ("rounds", 3, lambda row: str(row.time.rounds) if row.time else ""),
    ("vs ref", 0, lambda row: _speed(row.vs_reference)),
    ("95 %", 3, lambda row: row.vs_reference and interval(*row.vs_reference[1:])),
    ("vs torch", 0, lambda row: _speed(row.vs_torch)),
    ("95 %", 3, lambda row: row.vs_torch and interval(*row.vs_torch[1:])),
    ("Gflop/s", 3, lambda row: _rate(row, row.useful_flops)),
    ("GB/s", 3, lambda row: _rate(row, row.bytes)),
    ("roof", 0, lambda row: percent(row.roof_share)),
    ("bound by", 3, lambda row: row.bound or ""),
)


def _cell(value: Text | str | None) -> Text:
    return value if isinstance(value, Text) else Text(value or "")


def _widths(grid: Sequence[Sequence[Text]]) -> list[int]:
    return [max(cell.cell_len for cell in column) for column in zip(*grid, strict=True)]


def _layout(grid: Sequence[Sequence[Text]], width: int) -> tuple[list[int], str]:
    """Returns the columns that fit into ``width``, and the gap between them: one space or two."""
    widths, kept = _widths(grid), list(range(len(_COLUMNS)))
    for highest in sorted({rank for _, rank, _ in _COLUMNS}, reverse=True):
        kept = [column for column in kept if _COLUMNS[column][1] <= highest]
        for gap in ("  ", " "):
            needed = len(_INDENT) + sum(widths[i] for i in kept) + len(gap) * (len(kept) - 1)
            if needed <= width:
                return kept, gap
    return kept, " "


_INDENT = "  "


def table(rows: Sequence[Row], width: int) -> Text:
    """Returns the table: below each case one line per candidate that was timed or is wrong."""
    shown = [row for row in rows if row.time is not None or row.failed]
    grid = [[Text(heading, "bold") for heading, *_ in _COLUMNS]]
    grid += [[_cell(content(row)) for *_, content in _COLUMNS] for row in shown]
    kept, gap = _layout(grid, width)
    widths = _widths(grid)

    def line(cells: Sequence[Text]) -> Text:
        found = Text(_INDENT)
        for column in kept:
            space = " " * (widths[column] - cells[column].cell_len)
            parts = (cells[column], space) if column == 0 else (gap, space, cells[column])
            found = Text.assemble(found, *parts)
        found.rstrip()
        return found

    lines, op, case = [line(grid[0])], None, None
    for row, cells in zip(shown, grid[1:], strict=True):
        if row.op != op:
            lines.append(Text())
        if (row.op, row.case) != (op, case):
            op, case = row.op, row.case
            lines.append(Text.assemble((op, "bold cyan"), " ", case))
        lines.append(line(cells))
    return Text("\n").join(lines)


LEGEND = (
    "error: largest absolute error against fp64; in refs: relative to the reference's",
    "time: median of all batches; quartiles: half of the samples lie between them",
    "vs ref, vs torch: speed relative to the reference and to PyTorch's fastest",
    "roof: share of the roofline, from the measured arithmetic peak and bandwidth",
    "*: selected by the dispatcher",
)

#: The machine counts as busy if the median row has a larger (interquartile range / time).
_QUIET_SPREAD = 0.15


def busy(rows: Iterable[Row]) -> str | None:
    """Returns a warning that times are uncertain if quartiles are far apart, else None."""
    spreads = [(row.time.high - row.time.low) / row.time.median for row in rows if row.time]
    if not spreads or (typical := median(spreads)) <= _QUIET_SPREAD:
        return None
    return (
        f"the machine is busy: the quartiles of a typical time are {percent(typical)} apart. "
        "The results are checked all the same; for reliable times, run this on an idle machine"
    )


def summary(rows: Sequence[Row]) -> str:
    """Returns a line such as 'right in all 30; 1.1 to 3.1 times PyTorch; worst: attention causal,
    1.10x'.

    It counts our results only, and the speeds of the candidates that the dispatcher selects.
    """
    checked = sum(row.ok is not None and row.ours for row in rows)
    right = f"right in all {checked}" if checked != 1 else "right"
    found = [(row.vs_torch.value, row) for row in rows if row.chosen and row.vs_torch]
    if not found:
        return right
    (low, worst), (high, _) = (pick(found, key=lambda pair: pair[0]) for pick in (min, max))
    if len(found) == 1:
        return f"{right}; {three_digits(low)} times PyTorch"
    return (
        f"{right}; {three_digits(low)} to {three_digits(high)} times PyTorch; "
        f"worst: {worst.op} {worst.case}, {times(low)}"
    )


# Notes.

#: Backends that are the baselines of our kernels.
_FALLBACKS = ("reference", "torch")


def absent(rows: Iterable[Row]) -> list[str]:
    """Lists candidates that were not measured, by reason: 'triton: it runs on ... (all 9 cases)'."""
    rows = list(rows)
    cases: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.time is None and not row.failed:
            place = f"{row.op} {row.case}"
            cases.setdefault((row.candidate, row.reason or "no reason given"), []).append(place)
    lines = []
    for (candidate, reason), places in cases.items():
        total = len({(row.op, row.case) for row in rows if row.candidate == candidate})
        if len(places) == total and total > 1:
            where = f"all {total} cases"
        elif len(places) <= 3:
            where = "; ".join(places)
        else:
            where = count(len(places), "case")
        lines.append(f"{candidate}: {reason} ({where})")
    return lines


def failures(rows: Iterable[Row]) -> list[str]:
    return [f"{row.op} {row.case} on {row.candidate}: {row.reason}" for row in rows if row.failed]


def fallbacks(case: BenchmarkCase) -> list[str]:
    """Lists the ops of a case that run on the reference or on PyTorch, grouped by reason.

    The reasons are those of the backends for the device of the case if there are any, else of all.
    """
    device = case.device.type
    found: dict[tuple[str, str], list[str]] = {}
    for (op, backend), against in case.inside.items():
        if backend in _FALLBACKS:
            able = {
                kernel.backend
                for kernel in dispatch.kernels(op)
                if not kernel.devices or device in kernel.devices
            }
            reasons = {name: why for name, why in against.items() if why and name not in _FALLBACKS}
            near = {name: why for name, why in reasons.items() if name in able}
            why_not = "; ".join(
                f"{name}: {', '.join(why)}" for name, why in (near or reasons).items()
            )
            found.setdefault((backend, why_not), []).append(op)
    lines = []
    for (backend, why_not), ops in found.items():
        own = ops == [case.op]
        place = f"{case.op} {case.case} runs" if own else f"{', '.join(ops)} in {case.op} run"
        lines.append(f"{place} on '{backend}'" + (f", because {why_not}" if why_not else ""))
    return lines
