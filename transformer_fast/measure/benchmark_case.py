"""One case, its candidates, and what comes of it: parity first, then time, then the roof."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..testing import Parity
from . import roof
from .clock import ORDINARY, Plan, Ratio, Summary, alternate, peak, speed_up, summarise

#: Error allowed for peers, in units of the reference's error. Our own kernels are held to the error
#: budget; this only has to reject other work or half precision, which errs thousands of times as much.
PEER_FACTOR = 256.0

#: Positional arguments of one call.
Arguments = tuple[Any, ...]
Checker = Callable[[Any, Arguments], Parity]


@dataclass(frozen=True)
class Candidate:
    """An implementation to check and time, or the reason why it cannot run the case."""

    name: str
    run: Callable[..., Any] | None
    reason: str | None = None
    #: Held to the error budget; a wrong result fails the run. Peers: see PEER_FACTOR.
    ours: bool = True


@dataclass(frozen=True)
class BenchmarkCase:
    """A benchmark case: its inputs, and the candidates that must compute the same result."""

    op: str
    case: str
    #: Several inputs of the same shapes with different data, each for one or more calls.
    inputs: Sequence[Sequence[Arguments]]
    candidates: Sequence[Candidate]
    checker: Checker
    #: Cost of one input; useful_flops excludes masked positions. Zero: no roofline.
    flops: float = 0.0
    bytes: float = 0.0
    useful_flops: float = 0.0
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    #: The candidate that the dispatcher would choose.
    chosen: str | None = None
    #: Names of the candidates that others are measured against.
    reference: str = "reference"
    torch: tuple[str, ...] = ("torch",)
    #: For modules: the (op, backend) that the dispatcher chose inside, and why not the others.
    inside: Mapping[tuple[str, str], dict[str, list[str]]] = field(default_factory=dict)


@dataclass
class Row:
    """Result of one candidate in one case; all figures are for one input."""

    op: str
    case: str
    candidate: str
    ours: bool
    chosen: bool
    #: Why it was not run, or not timed.
    reason: str | None = None
    ok: bool | None = None
    error: float | None = None
    error_ratio: float | None = None
    time: Summary | None = None
    samples: list[float] = field(default_factory=list)
    vs_reference: Ratio | None = None
    vs_torch: Ratio | None = None
    #: Which of torch's candidates was the fastest.
    best_torch: str | None = None
    #: Time at the roof / time taken.
    roof_share: float | None = None
    #: The same of fp32's second roof (see `roof`), where it is another one.
    split_share: float | None = None
    bound: str | None = None
    flops: float = 0.0
    useful_flops: float = 0.0
    bytes: float = 0.0
    #: Peak memory of one input.
    peak_bytes: int | None = None

    @property
    def failed(self) -> bool:
        """Whether it is ours and its result is wrong."""
        return self.ours and self.ok is False


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (tuple, list)):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


def problem_of(error: Exception) -> str:
    """The first line of an error, with the function that raised it."""
    lines = str(error).strip().splitlines()
    where = traceback.extract_tb(error.__traceback__)[-1].name
    return f"{type(error).__name__} in {where}: {lines[0] if lines else 'no message'}"


def _check(case: BenchmarkCase, run: Callable[..., Any], row: Row) -> float | None:
    """Fill in the row's parity; the bytes of its results, or None if it may not be timed."""
    written = 0.0
    for arguments in case.inputs[0]:
        before = [x.detach().clone() for x in _tensors(arguments)]
        try:
            result = run(*arguments)
            parity = case.checker(result, arguments)
        except Exception as error:
            # A peer that raises is reported; a kernel of ours that raises fails the run.
            row.ok, row.reason = (False if row.ours else None), problem_of(error)
            return None
        for tensor, copy in zip(_tensors(arguments), before, strict=True):
            if not torch.equal(tensor.nan_to_num(), copy.nan_to_num()):
                row.ok, row.reason = False, "it changed its input"
                return None
        row.ok = _passes(row, parity) and row.ok is not False
        row.error = worse(row.error, parity.error)
        row.error_ratio = worse(row.error_ratio, parity.ratio)
        written += sum(x.numel() * x.element_size() for x in _tensors(result))
    if not row.ok:
        row.reason = "its result is outside the error budget, so no speed is given"
        return None
    return written


def _passes(row: Row, parity: Parity) -> bool:
    return parity.ok or (not row.ours and parity.ratio <= PEER_FACTOR)


def worse(one: float | None, other: float) -> float:
    if one is None or other != other:
        return other
    return one if one != one else max(one, other)


def _recheck(case: BenchmarkCase, run: Callable[..., Any], row: Row) -> None:
    """After the timing, on data that parity has not seen yet."""
    arguments = case.inputs[-1][-1]
    try:
        good = _passes(row, case.checker(run(*arguments), arguments))
    except Exception:
        good = False
    if not good:
        row.ok, row.time, row.samples = False, None, []
        row.reason = "its result was right before the timing and is wrong after it"


def _compare(case: BenchmarkCase, rows: Iterable[Row]) -> None:
    timed = {row.candidate: row for row in rows if row.time is not None}
    reference = timed.get(case.reference)
    peers = [timed[name] for name in case.torch if name in timed]
    best = min(peers, key=lambda row: row.time.median if row.time else 0.0, default=None)
    for row in timed.values():
        if reference is not None:
            row.vs_reference = speed_up(reference.samples, row.samples)
        if best is not None:
            row.vs_torch = speed_up(best.samples, row.samples)
            row.best_torch = best.candidate


@torch.no_grad()
def run_case(
    case: BenchmarkCase, plan: Plan = ORDINARY, probe_before: bool = True, memory: bool = False
) -> list[Row]:
    """Check, time and compare the candidates of one case; a row for each, in their order.

    No gradients are recorded, unless a candidate turns them on. ``probe_before=False`` saves one
    of the two measurements of the roof; ``memory=True`` adds the peak memory.
    """
    cost: dict[str, Any] = {
        "flops": case.flops,
        "useful_flops": case.useful_flops,
        "bytes": case.bytes,
    }
    rows: dict[str, Row] = {}
    able: dict[str, Callable[..., Any]] = {}
    written = 0.0
    for one in case.candidates:
        about = case.op, case.case, one.name, one.ours, one.name == case.chosen, one.reason
        row = rows[one.name] = Row(*about, **cost)
        if one.run is not None and (size := _check(case, one.run, row)) is not None:
            able[one.name], written = one.run, size

    def call(run: Callable[..., Any], index: int) -> None:
        for arguments in case.inputs[index]:
            run(*arguments)

    calls = {name: functools.partial(call, run) for name, run in able.items()}
    has_roof = bool(able) and (case.flops > 0.0 or case.bytes > 0.0)
    work = case.useful_flops, case.bytes, written, case.dtype, case.device
    before = roof.probe(*work) if probe_before and has_roof else None
    samples = alternate(calls, len(case.inputs), plan, case.device)
    after = roof.probe(*work) if has_roof else None
    top = after.better(before) if after is not None else None
    for name, run in able.items():
        row = rows[name]
        row.samples, row.time = samples[name], summarise(samples[name])
        _recheck(case, run, row)
        if memory and row.ok:
            row.peak_bytes = peak(functools.partial(calls[name], 0), case.device)
        if row.time is not None and top is not None:
            row.roof_share, row.bound = top.seconds / row.time.median, top.bound
            split = top.split_seconds
            if split is not None and split < top.seconds:
                row.split_share = split / row.time.median
    _compare(case, rows.values())
    return list(rows.values())
