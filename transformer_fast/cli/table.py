"""The table of `compare`: as wide as the terminal allows, nothing cut off at 100 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ..measure.benchmark_case import Row
from ..measure.summary import Ratio
from . import form

#: From this width on there is room for intervals and rates.
WIDE = 140


def _speed(ratio: Ratio | None) -> Text:
    if ratio is None:
        return Text("")
    style = ""
    if ratio.significant:
        style = "green" if ratio.value > 1.0 else "red"
    return Text(form.times(ratio.value), style)


def _interval(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    return f"{form.three_digits(ratio.low)}-{form.three_digits(ratio.high)}"


def _name(row: Row) -> Text:
    style = "bold" if row.chosen else "" if row.ours else "dim"
    return Text(row.candidate + (" *" if row.chosen else ""), style)


def _parity(row: Row) -> list[Text | str]:
    if row.ok is None or row.error is None:
        return ["", ""]
    style = "" if row.ok else "bold red"
    ratio = "" if row.error_ratio is None else form.times(row.error_ratio)
    return [Text(form.error(row.error), style), Text(ratio, style)]


def _cells(row: Row, wide: bool) -> list[Text | str]:
    cells: list[Text | str] = [_name(row), *_parity(row)]
    if row.time is None:
        mark = "[red]failed" if row.failed else "-"
        return [*cells, Text.from_markup(mark)]
    median, low, high, rounds = row.time
    cells += [form.seconds(median), form.spread(low, high, median)]
    if wide:
        cells.append(str(rounds))
    cells.append(_speed(row.vs_reference))
    if wide:
        cells.append(_interval(row.vs_reference))
    cells.append(_speed(row.vs_torch))
    if wide:
        cells += [
            _interval(row.vs_torch),
            *(form.rate(x, median) if x else "" for x in (row.useful_flops, row.bytes)),
        ]
    cells.append(form.percent(row.roof_share))
    if wide:
        cells.append(row.bound or "")
    return cells


def build(rows: Sequence[Row], width: int) -> Table:
    """One line for each candidate that has figures, or whose result is wrong."""
    wide = width >= WIDE
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, show_edge=False)
    table.add_column("case", min_width=14)
    table.add_column("on", min_width=9)
    for heading in ("error", "in refs"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("quartiles", justify="right", no_wrap=True)
    if wide:
        table.add_column("rounds", justify="right")
    for heading in ("vs ref", "vs torch"):
        table.add_column(heading, justify="right", no_wrap=True)
        if wide:
            table.add_column("95 %", justify="right", no_wrap=True, style="dim")
    if wide:
        table.add_column("Gflop/s", justify="right", no_wrap=True)
        table.add_column("GB/s", justify="right", no_wrap=True)
    table.add_column("roof", justify="right", no_wrap=True)
    if wide:
        table.add_column("bound by", no_wrap=True)
    op = case = None
    for row in rows:
        if row.time is None and not row.failed:
            continue
        if row.op != op:
            if op is not None:
                table.add_section()
            table.add_row(Text(row.op, "bold cyan"))
            op, case = row.op, None
        table.add_row("  " + row.case if row.case != case else "", *_cells(row, wide))
        case = row.case
    return table


LEGEND = (
    "error: largest absolute error against fp64; in refs: in units of the reference's own error",
    "time: median of all batches; vs ref, vs torch: speed-up over the reference, PyTorch's fastest",
    "roof: share of the roofline, from the measured arithmetic peak and bandwidth",
    "*: selected by the dispatcher",
)
