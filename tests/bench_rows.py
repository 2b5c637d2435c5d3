"""Rows of benchmark results, made up."""

from __future__ import annotations

from typing import Any

from transformer_fast.measure import machine
from transformer_fast.measure.contest import Row
from transformer_fast.measure.summary import speed_up, summarise


def row(contender: str, *times: float, case: str = "x", **values: Any) -> Row:
    """A row with these samples, in milliseconds."""
    ours = contender in ("cpu", "reference")
    made = Row("linear", case, contender, ours, contender == "cpu", ok=True, **values)
    if times:
        made.samples = [time / 1e3 for time in times]
        made.time = summarise(made.samples)
        made.error, made.error_ratio = 1e-6, 0.5
    return made


def suites(*rows: Row, name: str = "ops", **about: Any) -> dict[str, Any]:
    """As a result file has them; every row measured against the torch row of its case."""
    timed = [one for one in rows if one.samples]
    for one in timed:
        torch_row = next((r for r in timed if (r.case, r.contender) == (one.case, "torch")), None)
        if torch_row is not None:
            one.vs_torch = speed_up(torch_row.samples, one.samples)
            one.best_torch = "torch"
    return {name: {"machine": machine.describe() | about, "rows": list(rows)}}


NOISE = (1.0, 1.02, 0.99, 1.01, 0.98, 1.0, 1.01)


def noisy(time: float) -> list[float]:
    return [time * factor for factor in NOISE]
