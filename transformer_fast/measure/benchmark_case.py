"""Runs one benchmark case with several candidates: parity check, timing, comparison with the roof."""

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

#: Error allowed for peers, in units of the reference's error. Our own kernels have to meet the error
#: budget. This limit only has to reject other computations or low precision, whose errors are
#: thousands of times as large.
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
    #: Ours has to meet the error budget, and a wrong result fails the run. Peers: see PEER_FACTOR.
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
    #: Names of the candidates that are the baselines of the speed-ups.
    reference: str = "reference"
    torch: tuple[str, ...] = ("torch",)
    #: Sentences or tokens in one input; None: not counted.
    items: int | None = None
    #: ``score(name, run)`` scores a candidate on other inputs than the timed ones: name of a measure
    #: -> its value.
    score: Callable[[str, Callable[..., Any]], dict[str, float]] | None = None
    #: The kind of products, see `roof.probe`.
    product: str | None = None
    #: (op, backend) that the dispatcher chose -> why not the other backends. Modules: one per op.
    inside: Mapping[tuple[str, str], dict[str, list[str]]] = field(default_factory=dict)


@dataclass
class Row:
    """The result of one candidate in one case; all figures are for one input."""

    op: str
    case: str
    candidate: str
    ours: bool
    chosen: bool
    #: Why it was not run or not timed.
    reason: str | None = None
    ok: bool | None = None
    error: float | None = None
    error_ratio: float | None = None
    time: Summary | None = None
    samples: list[float] = field(default_factory=list)
    vs_reference: Ratio | None = None
    vs_torch: Ratio | None = None
    #: The fastest of PyTorch's candidates.
    best_torch: str | None = None
    #: Time at the roof / measured time.
    roof_share: float | None = None
    #: The same for fp32's second roof (see `roof`), if it has one.
    split_share: float | None = None
    bound: str | None = None
    flops: float = 0.0
    useful_flops: float = 0.0
    bytes: float = 0.0
    #: Sentences or tokens in one input.
    items: int | None = None
    #: Peak memory of one input.
    peak_bytes: int | None = None
    #: Name of a measure -> its value, see `BenchmarkCase.score`.
    scores: dict[str, float] = field(default_factory=dict)
    #: Date and commit, if the row was kept from another run than its suite's last one.
    taken: str | None = None

    @property
    def failed(self) -> bool:
        """True if the candidate is ours and its result is wrong."""
        return self.ours and self.ok is False


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (tuple, list)):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


def problem_of(error: Exception) -> str:
    """Returns the first line of an error, with the function that raised it."""
    lines = str(error).strip().splitlines()
    where = traceback.extract_tb(error.__traceback__)[-1].name
    return f"{type(error).__name__} in {where}: {lines[0] if lines else 'no message'}"


class Trial:
    """One candidate of a case: its row, and the calls to time.

    The constructor checks parity. ``able``: True if it may be timed; else the row has the reason.
    """

    def __init__(self, case: BenchmarkCase, candidate: Candidate) -> None:
        self.case = case
        self.run: Any = candidate.run
        self.row = Row(
            case.op, case.case, candidate.name, candidate.ours, candidate.name == case.chosen,
            candidate.reason, flops=case.flops, useful_flops=case.useful_flops, bytes=case.bytes,
            items=case.items,
        )  # fmt: skip
        #: Bytes of the results of one input.
        self.written = 0.0
        self.able = self.run is not None and self._is_right(self.run)

    def __call__(self, index: int) -> None:
        """Runs the candidate on one input."""
        for arguments in self.case.inputs[index]:
            self.run(*arguments)

    def _is_right(self, run: Callable[..., Any]) -> bool:
        row = self.row
        for arguments in self.case.inputs[0]:
            before = [x.detach().clone() for x in _tensors(arguments)]
            try:
                result = run(*arguments)
                parity = self.case.checker(result, arguments)
            except Exception as error:
                # An exception of a peer is reported; one of our kernels fails the run.
                row.ok, row.reason = (False if row.ours else None), problem_of(error)
                return False
            for tensor, copy in zip(_tensors(arguments), before, strict=True):
                if not torch.equal(tensor.nan_to_num(), copy.nan_to_num()):
                    row.ok, row.reason = False, "it changed its input"
                    return False
            row.ok = _passes(row, parity) and row.ok is not False
            row.error = worse(row.error, parity.error)
            row.error_ratio = worse(row.error_ratio, parity.ratio)
            self.written += sum(x.numel() * x.element_size() for x in _tensors(result))
        if not row.ok:
            row.reason = "its result is outside the error budget, so no speed is given"
        return bool(row.ok)

    def probe(self) -> roof.Roof | None:
        """Measures the roof of the case now; None if the case has no cost or nothing can be probed."""
        case = self.case
        if case.flops <= 0.0 and case.bytes <= 0.0:
            return None
        work = case.useful_flops, case.bytes, self.written, case.dtype, case.device
        return roof.probe(*work, case.product)

    def finish(self, samples: Sequence[float], top: roof.Roof | None) -> None:
        """Fills in the row's time and its share of the roof, if the result is still right.

        The result is checked once more, on an input that the first parity check did not use.
        """
        row, arguments = self.row, self.case.inputs[-1][-1]
        try:
            good = _passes(row, self.case.checker(self.run(*arguments), arguments))
        except Exception:
            good = False
        if not good:
            row.ok, row.reason = (
                False,
                "its result was right before the timing and is wrong after it",
            )
            return
        row.samples, row.time = list(samples), summarise(samples)
        if top is not None:
            row.roof_share, row.bound = top.seconds / row.time.median, top.bound
            split = top.split_seconds
            if split is not None and split < top.seconds:
                row.split_share = split / row.time.median


def _passes(row: Row, parity: Parity) -> bool:
    return parity.ok or (not row.ours and parity.ratio <= PEER_FACTOR)


def worse(one: float | None, other: float) -> float:
    if one is None or other != other:
        return other
    return one if one != one else max(one, other)


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
    """Checks, times and compares the candidates of one case; returns one row for each, in order.

    Autograd is off, unless a candidate enables it. ``probe_before=False`` saves one of the two
    measurements of the roof; ``memory=True`` adds the peak memory.
    """
    trials = [Trial(case, candidate) for candidate in case.candidates]
    able = {trial.row.candidate: trial for trial in trials if trial.able}
    first = next(iter(able.values()), None)
    before = first.probe() if first is not None and probe_before else None
    samples = alternate(able, len(case.inputs), plan, case.device)
    after = first.probe() if first is not None else None
    top = after.better(before) if after is not None else None
    for name, trial in able.items():
        trial.finish(samples[name], top)
        if case.score is not None and trial.row.ok:
            trial.row.scores = case.score(name, trial.run)
        if memory and trial.row.ok:
            trial.row.peak_bytes = peak(functools.partial(trial, 0), case.device)
    rows = [trial.row for trial in trials]
    _compare(case, rows)
    return rows
