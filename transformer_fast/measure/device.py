"""Time on a GPU itself, without what its host takes, and what `prove` makes of it."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Protocol

import torch

from .. import dispatch
from ..dispatch import Kernel
from ..proof import Verdict, shape_class
from ..specs import OPS
from ..specs.gpu import GPU_CASES, GpuCase
from ..testing import Parity, call_of, measure, measure_gradients, nan_memory, require_grad
from . import torch_ops
from .gradients import BothWays

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: ``call(i)`` does the work on the i-th of several equal inputs.
Call = Callable[[int], object]


class Clock(Protocol):
    """Takes the time of calls in a row."""

    def __call__(self, call: Call, inputs: int, repeats: int) -> float:
        """Seconds of one call, on average, each on the next input."""


class DeviceClock:
    """Events on the stream; the device sleeps while the host prepares, so that it never waits for it."""

    #: Cycles of sleep for each call that the host prepares: some 0.15 ms.
    CYCLES = 250_000

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, call: Call, inputs: int, repeats: int) -> float:
        with torch.cuda.device(self.device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(self.CYCLES * repeats)  # type: ignore[no-untyped-call]
            start.record()
            for i in range(repeats):
                call(i % inputs)
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / repeats / 1e3


class HostClock:
    """What a program waits for, launches included."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, call: Call, inputs: int, repeats: int) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        for i in range(repeats):
            call(i % inputs)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (time.perf_counter() - start) / repeats


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


def in_turn(
    calls: Mapping[str, Call], inputs: int, clock: Clock, rounds: int = 7, sample: float = 2e-3
) -> dict[str, list[float]]:
    """Seconds of each call, a figure a round; the order is shuffled anew in each round."""
    repeats = {}
    for name, call in calls.items():
        clock(call, inputs, 2)
        once = max(1e-7, clock(call, inputs, 2))
        repeats[name] = max(2, min(200, round(sample / once)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffle = list(calls), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            samples[name].append(clock(calls[name], inputs, repeats[name]))
    return samples


def problem_of(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    where = traceback.extract_tb(error.__traceback__)[-1].name
    return f"{type(error).__name__} in {where}: {lines[0] if lines else 'no message'}"


def on_each(inputs: Sequence[tuple[Any, ...]], run: Callable[..., Any]) -> Call:
    return lambda i: run(*inputs[i])


def parity_of(
    case: GpuCase,
    run: Callable[..., Any],
    dtype: torch.dtype,
    gradients: bool,
    device: torch.device,
) -> Parity:
    """How far the numbers, or the gradients, of something with the reference's signature are off."""
    arguments = case.checked.build(dtype, device, torch.Generator().manual_seed(0))
    with nan_memory():
        if gradients:
            return measure_gradients(case.op, run, arguments)
        return measure(case.op, run(*arguments), arguments)


def wrong(
    case: GpuCase, kernel: Kernel, dtype: torch.dtype, gradients: bool, device: torch.device
) -> str | None:
    """What is wrong with the kernel's numbers, or None."""
    try:
        parity = parity_of(case, kernel.run, dtype, gradients, device)
    except Exception as error:
        return problem_of(error)
    return None if parity.ok else str(parity)


def timed_inputs(
    case: GpuCase,
    dtype: torch.dtype,
    gradients: bool,
    device: torch.device,
    generator: torch.Generator,
) -> Iterator[tuple[Any, ...]]:
    """As many as `copies_for` asks for, each drawn when its turn comes."""
    drawn, copies = 0, 1
    while drawn < copies:
        arguments = case.timed.build(dtype, device, generator)
        copies = copies_for(OPS[case.op].bytes(arguments), device)
        yield require_grad(case.op, arguments) if gradients else arguments
        drawn += 1


def torchs(op: str, call: dispatch.Call) -> dict[str, Callable[..., Any]]:
    """PyTorch's ways to do the work: the backend of that name, and what a user would write."""
    found: dict[str, Callable[..., Any]] = {}
    for kernel in dispatch.kernels(op):
        if kernel.backend == "torch" and not dispatch.why_not(kernel, call):
            found["torch"] = kernel.run
    if not torch_ops.why_not(call.dropout_p):
        found["by hand"] = torch_ops.OPS[op]
    return found


def judge(
    case: GpuCase,
    kernel: Kernel,
    dtype: torch.dtype,
    gradients: bool,
    device: torch.device,
    clock: Clock,
) -> Verdict | None:
    """What is to be said of the kernel in a case; None if it does not take such calls."""
    op = case.op
    inputs = timed_inputs(case, dtype, gradients, device, torch.Generator().manual_seed(1))
    first = next(inputs)
    with torch.set_grad_enabled(gradients):
        call = call_of(op, first)
        if dispatch.why_not(kernel, call):
            return None
    known = op, kernel.backend, str(dtype)[6:], shape_class(call), gradients
    problem = wrong(case, kernel, dtype, gradients, device)
    if problem is not None:
        return Verdict(*known, right=False, problem=problem)
    others = [first, *inputs]
    calls: dict[str, Call] = {}
    for name, run in {"own": kernel.run, **torchs(op, call)}.items():
        work = on_each(others, BothWays(op, run) if gradients else run)
        try:
            with torch.no_grad():
                work(0)
        except Exception as error:
            if name == "own":
                return Verdict(*known, right=False, problem=problem_of(error))
            continue  # PyTorch has no way to do this work
        calls[name] = work
    with torch.no_grad():
        samples = in_turn(calls, len(others), clock)
    times = {name: median(taken) for name, taken in samples.items()}
    own = times.pop("own")
    if not times:
        return Verdict(
            *known, right=True, seconds=own, problem="PyTorch has nothing to compare it with"
        )
    return Verdict(*known, right=True, seconds=own, torch_seconds=min(times.values()))


def cases_of(op: str) -> list[GpuCase]:
    return [case for case in GPU_CASES if case.op == op]


def steps(op: str) -> int:
    """How many verdicts `prove_op` tries for."""
    kernels = sum(kernel.proven is not None for kernel in dispatch.kernels(op))
    return len(cases_of(op)) * kernels * len(DTYPES) * 2


def prove_op(op: str, device: torch.device, clock: Clock) -> Iterator[Verdict | None]:
    """One after the other; where two cases are of one class, both have to be right and faster."""
    for case in cases_of(op):
        for kernel in dispatch.kernels(op):
            if kernel.proven is None:
                continue
            for dtype in DTYPES:
                for gradients in (False, True):
                    yield judge(case, kernel, dtype, gradients, device, clock)


def worst(verdicts: list[Verdict]) -> tuple[Verdict, ...]:
    """Of each class the verdict that speaks most against the kernel."""
    found: dict[tuple[Any, ...], Verdict] = {}

    def rank(verdict: Verdict) -> tuple[bool, float]:
        if not verdict.seconds or not verdict.torch_seconds:
            return verdict.right, 0.0
        return verdict.right, verdict.torch_seconds / verdict.seconds

    for verdict in verdicts:
        key = verdict[:5]
        if key not in found or rank(verdict) < rank(found[key]):
            found[key] = verdict
    return tuple(found.values())
