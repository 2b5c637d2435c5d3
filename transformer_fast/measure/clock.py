"""Times several contenders against one another: alternating rounds, one process.

On a machine that others use too, speed drifts by tens of per cent within seconds. Two figures
taken one after the other then differ for no reason of theirs; figures taken in turn, sample by
sample, drift together, and their ratio holds.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Plan:
    """How long a case is timed."""

    #: A case stops after this many rounds ...
    rounds: int = 40
    #: ... or when this much time is gone, but not before `least` rounds.
    seconds: float = 3.0
    least: int = 5
    #: Seconds a single sample takes at least; a shorter call is repeated within the sample.
    sample: float = 0.004
    #: Seconds of calls before each sample that are not counted: the data of the contender before
    #: is still in the caches, and this one's threads sleep. Long calls need none.
    settle: float = 0.010
    #: Seconds to wait at most, before that, for the threads of the contender before: OpenMP's spin
    #: for some 10 ms after each call, and whoever has threads of his own would get half a core.
    rest: float = 0.1

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.rounds:
            raise ValueError(f"least must be between 1 and rounds, {self.rounds}, not {self.least}")
        if self.seconds <= 0 or self.sample <= 0:
            raise ValueError("seconds and sample must be positive")
        if self.settle < 0 or self.rest < 0:
            raise ValueError(
                f"settle and rest must not be negative, like {self.settle}, {self.rest}"
            )


#: For a look, for continuous integration, and for figures that are published.
QUICK = Plan(rounds=7, seconds=0.6, least=3, sample=0.001, settle=0.0005, rest=0.02)
ORDINARY = Plan()
THOROUGH = Plan(rounds=60, seconds=10.0, least=11, sample=0.010)

#: ``call(i)`` runs the contender on the i-th of several equal inputs.
Call = Callable[[int], object]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _wait_for_threads(most: float) -> None:
    """Sleep until no thread of this process is busy."""
    step = 0.001
    until = time.perf_counter() + most
    while time.perf_counter() < until:
        busy = time.process_time()
        time.sleep(step)
        if time.process_time() - busy < step / 4:
            return


def _sample(call: Call, inputs: int, first: int, repeats: int, device: torch.device) -> float:
    """Seconds per call, each call on the next input."""
    _synchronize(device)
    start = time.perf_counter_ns()
    for i in range(repeats):
        call((first + i) % inputs)
    _synchronize(device)
    return (time.perf_counter_ns() - start) / repeats / 1e9


def alternate(
    calls: Mapping[str, Call],
    inputs: int,
    plan: Plan = ORDINARY,
    device: torch.device | str = "cpu",
    tick: Callable[[], None] | None = None,
) -> dict[str, list[float]]:
    """Seconds per call of each contender, one sample per round; sample i of all is from round i.

    Within a round the order is shuffled anew, and all contenders get the same inputs, which change
    from call to call. Each waits until the threads of the one before have come to rest. ``tick`` is
    called after each round. Contenders must have run before (they have: parity comes first).
    """
    device = torch.device(device)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    if not calls:
        return samples
    repeats, settling = {}, {}
    for name, call in calls.items():
        once = max(1e-7, min(_sample(call, inputs, i, 1, device) for i in range(2)))
        repeats[name] = max(1, round(plan.sample / once))
        settling[name] = math.ceil(plan.settle / once) if once < 4 * plan.settle else 0
    order = list(calls)
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
                _wait_for_threads(plan.rest)
                if settling[name]:
                    _sample(calls[name], inputs, done, settling[name], device)
                samples[name].append(_sample(calls[name], inputs, done, repeats[name], device))
            if tick is not None:
                tick()
    finally:
        if collecting:
            gc.enable()
    return samples
