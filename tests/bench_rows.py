"""What the tests of tools make up: rows of results, cases, kernels and clocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from transformer_fast import reference
from transformer_fast.measure import device, machine
from transformer_fast.measure.benchmark_case import Row
from transformer_fast.measure.summary import speed_up, summarise
from transformer_fast.specs.gpu import GpuCase
from transformer_fast.specs.spec import case

CPU = torch.device("cpu")
#: A case of a GPU's that a CPU has time for.
SMALL = GpuCase(
    "linear",
    case("timed", lambda draw: (draw.normal(33, 8), draw.weight(6, 8), None, None, None)),
)


def row(candidate: str, *times: float, case: str = "x", **values: Any) -> Row:
    """A row with these samples, in milliseconds."""
    ours = candidate in ("cpu", "reference")
    made = Row("linear", case, candidate, ours, candidate == "cpu", ok=True, **values)
    if times:
        made.samples = [time / 1e3 for time in times]
        made.time = summarise(made.samples)
        made.error, made.error_ratio = 1e-6, 0.5
    return made


def suites(*rows: Row, name: str = "ops", **about: Any) -> dict[str, Any]:
    """As a result file has them; every row measured against the torch row of its case."""
    timed = [one for one in rows if one.samples]
    for one in timed:
        torch_row = next((r for r in timed if (r.case, r.candidate) == (one.case, "torch")), None)
        if torch_row is not None:
            one.vs_torch = speed_up(torch_row.samples, one.samples)
            one.best_torch = "torch"
    return {name: {"machine": machine.describe() | about, "rows": list(rows)}}


NOISE = (1.0, 1.02, 0.99, 1.01, 0.98, 1.0, 1.01)


def noisy(time: float) -> list[float]:
    return [time * factor for factor in NOISE]


def wrong_linear(*arguments: Any) -> torch.Tensor:
    return reference.linear(*arguments) + 1e-3


def fake_clock(times: tuple[device.Times, ...]) -> Callable[..., device.Times]:
    """Times by the order in which calls come: what kernels take, then PyTorch's ways."""
    known: dict[Any, int] = {}

    def clock(call: Any, inputs: int, repeats: int, host: float = 0.0) -> device.Times:
        for i in range(repeats):
            call(i % inputs)
        return times[known.setdefault(call, len(known))]

    return clock
