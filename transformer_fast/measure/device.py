"""Time on a GPU and on its host, apart, and what `prove` and `compare` make of it."""

from __future__ import annotations

import os
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import dispatch
from ..dispatch import Kernel
from ..proof import Verdict, shape_class
from ..specs import OPS
from ..specs.gpu import COMMON, GPU_CASES, GpuCase
from ..testing import (
    GRADIENT_FACTOR,
    OUTPUT_FACTOR,
    Parity,
    call_of,
    nan_memory,
    promote,
    require_grad,
    upstream,
)
from ..testing.oracle import FACTORS, as_results, scaled, tries_for
from ..testing.parity import compare, relative_error, worst_of
from . import torch_ops
from .gradients import BothWays
from .judge import Results, scores_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: ``call(i)`` does the work on the i-th of several equal inputs.
Call = Callable[[int], object]


class Times(NamedTuple):
    """Seconds of one call."""

    device: float
    #: What the host takes to launch it, while the device is busy with something else.
    host: float


class Clock(Protocol):
    """Takes the time of calls in a row."""

    def __call__(self, call: Call, inputs: int, repeats: int, host: float = ...) -> Times:
        """Of one call, on average, each on the next input; ``host``: about what its host takes."""


class DeviceClock:
    """Events on the stream; the device sleeps while the host prepares, so that it never waits for it."""

    #: Cycles of sleep for each second that the host is expected to take: more than any GPU has.
    CYCLES = 4e9
    #: How often the device sleeps longer if the host came too late.
    TRIES = 8

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, call: Call, inputs: int, repeats: int, host: float = 2e-4) -> Times:
        for _ in range(self.TRIES):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.device(self.device):
                torch.cuda._sleep(int(self.CYCLES * host * repeats))  # type: ignore[no-untyped-call]
                start.record()
                begun = time.perf_counter()
                for i in range(repeats):
                    call(i % inputs)
                taken = time.perf_counter() - begun
                end.record()
                late = start.query()
                end.synchronize()
            times = Times(float(start.elapsed_time(end)) / repeats / 1e3, taken / repeats)
            if not late:
                break
            # It took longer than expected, or its launches filled the queue of some thousand that
            # a stream has, so that it had to wait for the device.
            host, repeats = 4 * host, max(1, repeats // 2)
        return times  # too late each time: the call itself waits for the device


def why_no_gpu(command: str) -> str | None:
    """Why a command cannot measure a GPU here, in a sentence, or None."""
    if torch.cuda.is_available():
        return None
    has = "no GPU" if torch.version.cuda else f"torch {torch.__version__} without CUDA"
    return f"{command} needs an NVIDIA GPU and a PyTorch with CUDA, and this machine has {has}"


def cache_bytes(device: torch.device) -> int:
    """The last cache: of a GPU its L2; elsewhere a guess."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return 32 << 20


def copies_for(size: float, device: torch.device) -> int:
    """How many inputs of so many bytes are used in turn, so that none is found in the cache."""
    return max(2, min(32, -int(-2.5 * cache_bytes(device) // max(1.0, size))))


#: Memory of a GPU that a process takes: to be there at all, and to check results.
CONTEXT_BYTES, CHECK_BYTES = 1 << 30, 16 << 30


def most_processes(memory: int) -> int:
    """How many may run at once, by the processors and by the memory that the GPU has free."""
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(os.cpu_count() or 1, free // memory))


def in_turn(
    calls: Mapping[str, Call], inputs: int, clock: Clock, rounds: int = 7, sample: float = 2e-3
) -> dict[str, list[Times]]:
    """The times of each call, a pair a round; the order is shuffled anew in each round."""
    plans = {}
    for name, call in calls.items():
        clock(call, inputs, 2)
        once = clock(call, inputs, 2)
        plans[name] = max(2, min(200, round(sample / max(1e-7, *once)))), once.host
    samples: dict[str, list[Times]] = {name: [] for name in calls}
    order, shuffle = list(calls), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            samples[name].append(clock(calls[name], inputs, *plans[name]))
    return samples


def medians(samples: Sequence[Times]) -> Times:
    return Times(*map(median, zip(*samples, strict=True)))


def problem_of(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    where = traceback.extract_tb(error.__traceback__)[-1].name
    return f"{type(error).__name__} in {where}: {lines[0] if lines else 'no message'}"


#: Scores of attention of which the reference holds several copies in fp64 at once.
MOST_SCORES = 1 << 26


def _truth(op: str, arguments: tuple[Any, ...], gradients: bool) -> tuple[Results, Results]:
    """The results of a call, or its gradients, by the reference in their dtype and in fp64."""
    reference = OPS[op].reference

    def both(arguments: tuple[Any, ...], starts: list[Tensor] | None) -> tuple[Results, Results]:
        if not gradients:
            return as_results(reference(*arguments)), as_results(reference(*promote(arguments)))
        run = BothWays(op, reference, starts)
        expected = run(*require_grad(op, arguments))
        exact = BothWays(op, reference, [start.double() for start in run.starts or ()])
        return expected, exact(*require_grad(op, promote(arguments)))

    # What is dropped depends on the head's number.
    if op != "attention" or arguments[7] or scores_of(arguments) <= MOST_SCORES:
        return both(arguments, None)
    query, value = arguments[0], arguments[2]
    start = upstream(query.new_empty(*query.shape[:-1], value.shape[-1]), 0)

    def of_heads(x: Any, heads: slice) -> Any:
        return x[:, heads] if isinstance(x, Tensor) and x.dim() == 4 and x.shape[1] > 1 else x

    step = max(1, query.shape[1] * MOST_SCORES // scores_of(arguments))
    parts = [
        both(tuple(of_heads(x, heads) for x in arguments), [start[:, heads]])
        for heads in (slice(h, h + step) for h in range(0, query.shape[1], step))
    ]
    return tuple(  # type: ignore[return-value]
        tuple(None if x[0] is None else torch.cat(x, 1) for x in zip(*found, strict=True))
        for found in zip(*parts, strict=True)
    )


class Trial:
    """A case in a dtype, with gradients or without: what is timed, and what is right of exactly that."""

    def __init__(
        self, case: GpuCase, dtype: torch.dtype, gradients: bool, device: torch.device
    ) -> None:
        self.op, self.gradients = case.op, gradients
        generator = torch.Generator(device).manual_seed(1)
        self.inputs: list[tuple[Any, ...]] = []
        copies = 1
        while len(self.inputs) < copies:
            drawn = case.case.build(dtype, device, generator)
            copies = copies_for(OPS[self.op].bytes(drawn), device)
            self.inputs.append(require_grad(self.op, drawn) if gradients else drawn)
        with torch.set_grad_enabled(gradients):
            self.call = call_of(self.op, self.inputs[0])
        self._known: dict[int, tuple[Results, Results, list[float]]] = {}

    def work(self, run: Callable[..., Any]) -> Call:
        """What is timed of something with the reference's signature."""
        run = BothWays(self.op, run) if self.gradients else run
        return lambda i: run(*self.inputs[i])

    @torch.no_grad()
    def parity(self, work: Call, number: int = 0) -> Parity:
        """How far the results of `work` on an input, or its gradients, are off."""
        with nan_memory():
            got = as_results(work(number))
        names: Sequence[str] = OPS[self.op].results
        if self.gradients:
            named = OPS[self.op].named(self.inputs[number])
            names = [n for n, x in named.items() if isinstance(x, Tensor) and x.requires_grad]
        factor = GRADIENT_FACTOR if self.gradients else OUTPUT_FACTOR
        rows = zip(names, got, *self._truth_of(number), strict=True)
        return worst_of([compare(name, x, a, b, factor, unit) for name, x, a, b, unit in rows])

    def _truth_of(self, number: int) -> tuple[Results, Results, list[float]]:
        if number not in self._known:
            arguments = self.inputs[number]
            truth = _truth(self.op, arguments, self.gradients)
            units = list(map(relative_error, *truth))
            least = min(x.numel() for x in truth[1] if x is not None)
            for factor in FACTORS[: tries_for(least) - 1]:
                other = _truth(self.op, scaled(self.op, arguments, factor), self.gradients)
                units = list(map(max, units, map(relative_error, *other)))
            self._known[number] = *truth, units
        return self._known[number]

    def check(self, work: Call, number: int = 0) -> tuple[Parity | None, str | None]:
        """`parity`, unless `work` raises, and what is wrong with its results, if anything."""
        try:
            parity = self.parity(work, number)
        except torch.OutOfMemoryError:  # which the reference may have needed
            raise
        except Exception as error:
            return None, problem_of(error)
        return parity, None if parity.ok else str(parity)

    def wrong(self, work: Call, number: int = 0) -> str | None:
        """What is wrong with the results of `work` on an input, or None."""
        return self.check(work, number)[1]

    def torchs(self) -> dict[str, Callable[..., Any]]:
        """PyTorch's ways to do the work: the backend of that name, and what a user would write."""
        found = {
            kernel.backend: kernel.run
            for kernel in dispatch.kernels(self.op)
            if kernel.backend == "torch" and not dispatch.why_not(kernel, self.call)
        }
        return {**found, "by hand": torch_ops.OPS[self.op]}


class Finding(NamedTuple):
    """A verdict, and what it is made of."""

    verdict: Verdict
    #: Largest error against fp64 on the input checked last, and in units of the reference's; None
    #: where the kernel raised.
    error: float | None
    error_ratio: float | None
    #: Seconds of one call in each round, on the device or on the host, whichever took longer; the
    #: same of PyTorch's best. Empty where nothing was timed.
    samples: list[float]
    torch_samples: list[float]


def judge(
    case: GpuCase,
    dtype: torch.dtype,
    gradients: bool,
    device: torch.device,
    clock: Clock,
    kernels: Sequence[Kernel] | None = None,
) -> list[Finding]:
    """What is to be said of those kernels (None: of all that need a proof) which take such calls.

    They are checked before they are timed, and once more afterwards, on another input.
    """
    if kernels is None:
        kernels = [one for one in dispatch.kernels(case.op) if one.proven is not None]
    trial = Trial(case, dtype, gradients, device)
    with torch.set_grad_enabled(gradients):
        ours = {
            k.backend: trial.work(k.run) for k in kernels if not dispatch.why_not(k, trial.call)
        }
    checks = {name: trial.check(work) for name, work in ours.items()}
    right = {name: work for name, work in ours.items() if checks[name][1] is None}
    rivals: dict[str, Call] = {}
    samples: dict[str, list[Times]] = {}
    if right:
        with torch.no_grad():
            for name, run in trial.torchs().items():
                work = trial.work(run)
                with suppress(Exception):  # PyTorch has no way to do this work
                    work(0)
                    rivals[name] = work
            samples = in_turn({**right, **rivals}, len(trial.inputs), clock)
        checks |= {name: trial.check(work, len(trial.inputs) - 1) for name, work in right.items()}
    none = None, None
    times = {name: medians(taken) for name, taken in samples.items()}
    fastest = min(rivals, key=lambda name: max(times[name]), default="")
    best = times.get(fastest, none)
    about = str(dtype)[6:], shape_class(trial.call), gradients
    lonely = "PyTorch has nothing to compare it with" if best is none else None
    found = []
    for name, (parity, problem) in checks.items():
        measured = *times.get(name, none), *best
        verdict = Verdict._make(
            (case.op, name, *about, problem is None, *measured, problem or lonely, False)
        )
        errors = (parity.error, parity.ratio) if parity else none
        taken = ([max(one) for one in samples.get(each, ())] for each in (name, fastest))
        found.append(Finding(verdict, *errors, *taken))
    return found


def class_of(case: GpuCase) -> str:
    return shape_class(call_of(case.op, case.case.build(torch.float32, "meta", None)))


def cases_of(op: str, short: bool = False) -> list[GpuCase]:
    """Of an op; ``short``: only those of the classes in `COMMON`, class by class."""
    cases = [case for case in GPU_CASES if case.op == op]
    if not short:
        return cases
    common = [case for case in cases if class_of(case) in COMMON[op]]
    return sorted(common, key=lambda case: COMMON[op].index(class_of(case)))


def trials(op: str, short: bool = False) -> Iterator[tuple[GpuCase, torch.dtype, bool]]:
    """What is judged, one after the other."""
    for case in cases_of(op, short):
        for dtype in DTYPES:
            for gradients in (False, True) if case.gradients else (False,):
                yield case, dtype, gradients


def worst(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """Of each class the verdict that speaks most against the kernel: all of its cases have to be right
    and faster."""
    found: dict[tuple[Any, ...], Verdict] = {}
    for verdict in verdicts:
        key = verdict[:5]
        if key not in found or (verdict.right, verdict.gain) < (found[key].right, found[key].gain):
            found[key] = verdict
    return tuple(found.values())
