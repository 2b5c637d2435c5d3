"""Results as people read them: figures, `compare`'s table, and why some work has no row in it or did not
run on a kernel of ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ..measure.benchmark_case import Row
from ..measure.clock import Ratio, Summary

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def _unit(value: float) -> tuple[float, str]:
    return next((unit for unit in _UNITS if value >= unit[0]), _UNITS[-1])


def seconds(value: float) -> str:
    """Three digits and a unit: '12.3 ms'."""
    size, unit = _unit(value)
    return f"{three_digits(value / size)} {unit}"


def interval(low: float, high: float) -> str:
    """'12.1-12.9'."""
    return f"{three_digits(low)}-{three_digits(high)}"


def spread(time: Summary) -> str:
    """The quartiles in the median's unit."""
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
    """'2.14x'."""
    return "" if value is None else f"{three_digits(value)}x"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def rate(amount: float, time: float) -> str:
    """Billions per second."""
    return three_digits(amount / time / 1e9)


def count(amount: int, noun: str, several: str | None = None) -> str:
    return f"{amount:,} {noun if amount == 1 else several or noun + 's'}"


# The table: as wide as the terminal allows, nothing cut off at 100 columns.

#: From this width on there is room for intervals and rates.
WIDE = 140


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


_RIGHT: dict[str, Any] = {"justify": "right", "no_wrap": True}
_DIM = {**_RIGHT, "style": "dim"}
#: Of a column: its heading, whether only a wide table has it, how it is set, what is in it.
_COLUMNS: tuple[tuple[str, bool, dict[str, Any], Callable[[Row], Text | str | None]], ...] = (
    ("on", False, {"min_width": 9}, _name),
    ("error", False, _RIGHT, lambda row: _parity(row, error(row.error))),
    ("in refs", False, _RIGHT, lambda row: _parity(row, times(row.error_ratio))),
    ("time", False, _RIGHT, _time),
    ("quartiles", False, _RIGHT, lambda row: spread(row.time) if row.time else ""),
    ("rounds", True, _RIGHT, lambda row: str(row.time.rounds) if row.time else ""),
    ("vs ref", False, _RIGHT, lambda row: _speed(row.vs_reference)),
    ("95 %", True, _DIM, lambda row: row.vs_reference and interval(*row.vs_reference[1:])),
    ("vs torch", False, _RIGHT, lambda row: _speed(row.vs_torch)),
    ("95 %", True, _DIM, lambda row: row.vs_torch and interval(*row.vs_torch[1:])),
    ("Gflop/s", True, _RIGHT, lambda row: _rate(row, row.useful_flops)),
    ("GB/s", True, _RIGHT, lambda row: _rate(row, row.bytes)),
    ("roof", False, _RIGHT, lambda row: percent(row.roof_share)),
    ("bound by", True, {"no_wrap": True}, lambda row: row.bound or ""),
)


def table(rows: Sequence[Row], width: int) -> Table:
    """One line for each candidate that has figures, or whose result is wrong."""
    columns = [column for column in _COLUMNS if width >= WIDE or not column[1]]
    found = Table(box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, show_edge=False)
    found.add_column("case", min_width=14)
    for heading, _, options, _ in columns:
        found.add_column(heading, **options)
    op = case = None
    for row in rows:
        if row.time is None and not row.failed:
            continue
        if row.op != op:
            if op is not None:
                found.add_section()
            found.add_row(Text(row.op, "bold cyan"))
            op, case = row.op, None
        cells = [cell(row) for *_, cell in columns]
        found.add_row("  " + row.case if row.case != case else "", *cells)
        case = row.case
    return found


LEGEND = (
    "error: largest absolute error against fp64; in refs: in units of the reference's own error",
    "time: median of all batches; vs ref, vs torch: speed-up over the reference, PyTorch's fastest",
    "roof: share of the roofline, from the measured arithmetic peak and bandwidth",
    "*: selected by the dispatcher",
)


# Notes.

#: Kernels of ours, as opposed to what they are measured against.
_FALLBACKS = ("reference", "torch")


def absent(rows: Iterable[Row]) -> list[str]:
    """Candidates that were not measured, by reason: 'triton: it runs on ... (all 9 cases)'."""
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


def fallbacks(rows: Sequence[Row]) -> list[str]:
    """Cases that run on the reference or on PyTorch's ops, with the reasons."""
    lines = []
    for row in rows:
        if row.chosen and row.candidate in _FALLBACKS:
            others = [
                f"{other.candidate}: {other.reason}"
                for other in rows
                if (other.op, other.case) == (row.op, row.case)
                and other.candidate not in _FALLBACKS
                and other.reason
            ]
            because = f", because {'; '.join(others)}" if others else ""
            lines.append(f"{row.op} {row.case} runs on '{row.candidate}'{because}")
    return lines


def inside(
    module: str, reasons: Mapping[tuple[str, str], Mapping[str, Sequence[str]]]
) -> list[str]:
    """The same for ops inside a module (what `calls.record` found), alike ones together."""
    found: dict[tuple[str, str], list[str]] = {}
    for (op, backend), against in reasons.items():
        if backend in _FALLBACKS:
            told = "; ".join(
                f"{name}: {', '.join(why)}"
                for name, why in against.items()
                if why and name not in _FALLBACKS
            )
            found.setdefault((backend, told), []).append(op)
    return [
        f"{', '.join(ops)} in {module} run on '{backend}'" + (f", because {told}" if told else "")
        for (backend, told), ops in found.items()
    ]
