"""Time and memory of calls: interleaved timing, statistics of the samples, peak memory.

Several candidates are timed in one process, by the host's clock or by CUDA events.

On a shared machine speed drifts by tens of per cent within seconds. Samples of different candidates
are therefore interleaved: drift affects all of them alike and cancels in their ratio.
"""

from __future__ import annotations

import ctypes
import gc
import math
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

import torch

from .. import memory

_T = TypeVar("_T")


@dataclass(frozen=True)
class Plan:
    """Limits on the time that the timing of a case takes."""

    #: Timing stops after this many rounds, or after `seconds` but not before `least` rounds.
    rounds: int = 40
    seconds: float = 3.0
    least: int = 5
    #: Minimum duration of a sample in seconds; shorter calls are repeated within the sample.
    sample: float = 0.004
    #: Seconds of warm-up calls before each sample: caches hold the previous candidate's data, and
    #: this one's threads sleep. Long calls need no warm-up.
    settle: float = 0.010
    #: Maximum wait in seconds for the previous candidate's threads. OpenMP threads spin for some
    #: 10 ms after each call, which would slow down candidates with thread pools of their own.
    rest: float = 0.1
    #: Samples are CPU time of the process, not time of the wall clock. On a busy machine this is
    #: the steadier of the two, and it is meaningful for candidates with one thread only.
    cpu_time: bool = False


#: Plans for continuous integration, for ordinary runs, and for published figures.
QUICK = Plan(rounds=7, seconds=0.6, least=3, sample=0.001, settle=0.0005, rest=0.02)
ORDINARY = Plan()
THOROUGH = Plan(rounds=60, seconds=10.0, least=11, sample=0.010)

#: ``call(i)`` runs the candidate on the i-th of several equal inputs.
Call = Callable[[int], object]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _wait_for_threads(most: float) -> None:
    """Sleeps until all threads of this process are idle, at most ``most`` seconds."""
    step = 0.001
    until = time.perf_counter() + most
    while time.perf_counter() < until:
        busy = time.process_time()
        time.sleep(step)
        if time.process_time() - busy < step / 4:
            return


def _sample(
    call: Call,
    inputs: int,
    first: int,
    repeats: int,
    device: torch.device,
    now: Callable[[], int],
) -> float:
    """Returns the seconds per call by the clock ``now``; each call uses the next input."""
    _synchronize(device)
    start = now()
    for i in range(repeats):
        call((first + i) % inputs)
    _synchronize(device)
    return (now() - start) / repeats / 1e9


def in_rounds(
    names: Iterable[str], plan: Plan, sample: Callable[[str, int], _T]
) -> dict[str, list[_T]]:
    """Calls ``sample(name, round)`` for each name in each round, shuffled, with the GC disabled."""
    order = list(names)
    samples: dict[str, list[_T]] = {name: [] for name in order}
    shuffle = random.Random(0).shuffle
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        for done in range(plan.rounds):
            if done >= plan.least and time.perf_counter() - start > plan.seconds:
                break
            shuffle(order)
            for name in order:
                samples[name].append(sample(name, done))
    finally:
        if collecting:
            gc.enable()
    return samples


def alternate(
    calls: Mapping[str, Call],
    inputs: int,
    plan: Plan = ORDINARY,
    device: torch.device | str = "cpu",
) -> dict[str, list[float]]:
    """Returns seconds per call of each candidate, one sample per round.

    All candidates get the same inputs in a round; inputs change from call to call. Candidates must
    have run before (the parity check does that).
    """
    device = torch.device(device)
    now = time.process_time_ns if plan.cpu_time else time.perf_counter_ns
    repeats, settling = {}, {}
    for name, call in calls.items():
        once = max(1e-7, min(_sample(call, inputs, i, 1, device, now) for i in range(2)))
        repeats[name] = max(1, round(plan.sample / once))
        settling[name] = math.ceil(plan.settle / once) if once < 4 * plan.settle else 0

    def sample(name: str, done: int) -> float:
        _wait_for_threads(plan.rest)
        if settling[name]:
            _sample(calls[name], inputs, done, settling[name], device, now)
        return _sample(calls[name], inputs, done, repeats[name], device, now)

    return in_rounds(calls, plan, sample)


class Times(NamedTuple):
    """Seconds of one call."""

    device: float
    #: Time in which the host launches it.
    host: float


#: ``clock(call, inputs, repeats, host)`` returns the mean times of a call, over ``repeats``
#: consecutive ones; ``host``: an estimate of the host's time in seconds.
Clock = Callable[..., Times]


class DeviceClock:
    """Times by CUDA events. The device sleeps until all launches are queued, so it never idles."""

    #: Cycles of sleep per second of host time; above any GPU's clock rate.
    CYCLES = 4e9
    #: Attempts with longer sleeps if the launches were not queued in time.
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
            # The estimate was too low, or the launches filled the stream's queue (about 1000) and
            # the host had to wait for the device.
            host, repeats = 4 * host, max(1, repeats // 2)
        return times  # every attempt was late, so the call itself synchronizes


def host_clock(call: Call, inputs: int, repeats: int, host: float = 0.0) -> Times:
    """Times calls on the CPU, where the launch is part of the call."""
    each = _sample(call, inputs, 0, repeats, torch.device("cpu"), time.perf_counter_ns)
    return Times(each, each)


#: Seven rounds, without a time limit.
_ON_DEVICE = Plan(rounds=7, seconds=math.inf, sample=2e-3)


def in_turn(calls: Mapping[str, Call], inputs: int, clock: Clock) -> dict[str, list[Times]]:
    """Like `alternate`, with a clock that measures the device's and the host's time separately."""
    plans = {}
    for name, call in calls.items():
        clock(call, inputs, 2)
        once = clock(call, inputs, 2)
        plans[name] = max(2, min(200, round(_ON_DEVICE.sample / max(1e-7, *once)))), once.host
    return in_rounds(calls, _ON_DEVICE, lambda name, _: clock(calls[name], inputs, *plans[name]))


def medians(samples: Sequence[Times]) -> Times:
    return Times(*map(median, zip(*samples, strict=True)))


# Statistics of samples.

_RESAMPLES = 2000


class Summary(NamedTuple):
    """Seconds per call."""

    median: float
    #: Quartiles: half of the samples lie between them.
    low: float
    high: float
    rounds: int


class Ratio(NamedTuple):
    """A speed-up with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    @property
    def significant(self) -> bool:
        """True if the interval excludes 1."""
        return self.low > 1.0 or self.high < 1.0


def summarise(samples: Sequence[float]) -> Summary:
    """Returns median and quartiles; requires at least one sample."""
    if not samples:
        raise ValueError("samples must not be empty")
    points = torch.tensor([0.5, 0.25, 0.75], dtype=torch.float64)
    median, low, high = torch.quantile(torch.tensor(samples, dtype=torch.float64), points).tolist()
    return Summary(median, low, high, len(samples))


def bootstrap(
    series: Sequence[Sequence[float]], seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each series' median, and the medians (series, 2000) of bootstrap samples of rounds."""
    paired = torch.tensor([list(one) for one in series], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    rounds = torch.randint(paired.shape[1], (_RESAMPLES, paired.shape[1]), generator=generator)
    return torch.quantile(paired, 0.5, dim=-1), torch.quantile(paired[:, rounds], 0.5, dim=-1)


def interval(draws: torch.Tensor) -> tuple[float, float]:
    """Returns the percentiles 2.5 and 97.5, the bounds of a 95 % confidence interval."""
    low, high = torch.quantile(draws, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def speed_up(base: Sequence[float], ours: Sequence[float]) -> Ratio:
    """Returns ``median(base) / median(ours)``; above 1, ours is the faster.

    The samples are pairs, taken in the same rounds. The bootstrap resamples whole rounds, so drift
    that affects both candidates cancels.
    """
    if len(base) != len(ours) or not base:
        raise ValueError(
            f"base and ours must be pairs from the same rounds, not {len(base)} and {len(ours)}"
        )
    middle, draws = bootstrap([base, ours])
    return Ratio((middle[0] / middle[1]).item(), *interval(draws[0] / draws[1]))


# Peak memory of a call, beyond what is allocated before it.

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def _resident(field: str) -> int:
    found = re.search(rf"^{field}:\s*(\d+) kB", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _trim() -> None:
    gc.collect()
    memory.release()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def peak(call: Callable[[], object], device: torch.device | str = "cpu") -> int | None:
    """Returns the peak bytes that ``call`` allocates, its result included; None if not measurable.

    On the CPU it is the peak resident set size (Linux), which includes memory outside PyTorch's
    allocator. Buffers that libraries keep between calls are not counted, but those of
    `transformer_fast.memory` are, because they are released before the call.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    try:
        _trim()
        _CLEAR.write_text("5", encoding="ascii")  # resets VmHWM, the peak resident set size
        before = _resident("VmRSS")
        call()
        return max(0, _resident("VmHWM") - before)
    except (OSError, AssertionError):
        return None
