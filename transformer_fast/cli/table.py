"""The table of `compare`: as wide as the terminal allows, nothing cut off at 100 columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ..measure.benchmark_case import Row
from ..measure.summary import Ratio
from . import form

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
    return Text(form.seconds(row.time.median))


def _speed(ratio: Ratio | None) -> Text:
    if ratio is None:
        return Text("")
    colour = "green" if ratio.value > 1.0 else "red"
    return Text(form.times(ratio.value), colour if ratio.significant else "")


def _interval(ratio: Ratio | None) -> str:
    return "" if ratio is None else form.interval(ratio.low, ratio.high)


def _rate(row: Row, amount: float) -> str:
    return form.rate(amount, row.time.median) if row.time and amount else ""


_RIGHT: dict[str, Any] = {"justify": "right", "no_wrap": True}
_DIM = {**_RIGHT, "style": "dim"}
#: Of a column: its heading, whether only a wide table has it, how it is set, what is in it.
_COLUMNS: tuple[tuple[str, bool, dict[str, Any], Callable[[Row], Text | str]], ...] = (
    ("on", False, {"min_width": 9}, _name),
    ("error", False, _RIGHT, lambda row: _parity(row, form.error(row.error))),
    ("in refs", False, _RIGHT, lambda row: _parity(row, form.times(row.error_ratio))),
    ("time", False, _RIGHT, _time),
    ("quartiles", False, _RIGHT, lambda row: form.spread(row.time) if row.time else ""),
    ("rounds", True, _RIGHT, lambda row: str(row.time.rounds) if row.time else ""),
    ("vs ref", False, _RIGHT, lambda row: _speed(row.vs_reference)),
    ("95 %", True, _DIM, lambda row: _interval(row.vs_reference)),
    ("vs torch", False, _RIGHT, lambda row: _speed(row.vs_torch)),
    ("95 %", True, _DIM, lambda row: _interval(row.vs_torch)),
    ("Gflop/s", True, _RIGHT, lambda row: _rate(row, row.useful_flops)),
    ("GB/s", True, _RIGHT, lambda row: _rate(row, row.bytes)),
    ("roof", False, _RIGHT, lambda row: form.percent(row.roof_share)),
    ("bound by", True, {"no_wrap": True}, lambda row: row.bound or ""),
)


def build(rows: Sequence[Row], width: int) -> Table:
    """One line for each candidate that has figures, or whose result is wrong."""
    columns = [column for column in _COLUMNS if width >= WIDE or not column[1]]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, show_edge=False)
    table.add_column("case", min_width=14)
    for heading, _, options, _ in columns:
        table.add_column(heading, **options)
    op = case = None
    for row in rows:
        if row.time is None and not row.failed:
            continue
        if row.op != op:
            if op is not None:
                table.add_section()
            table.add_row(Text(row.op, "bold cyan"))
            op, case = row.op, None
        cells = [cell(row) for *_, cell in columns]
        table.add_row("  " + row.case if row.case != case else "", *cells)
        case = row.case
    return table


LEGEND = (
    "error: largest absolute error against fp64; in refs: in units of the reference's own error",
    "time: median of all batches; vs ref, vs torch: speed-up over the reference, PyTorch's fastest",
    "roof: share of the roofline, from the measured arithmetic peak and bandwidth",
    "*: selected by the dispatcher",
)
