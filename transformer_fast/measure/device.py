"""Checks and times kernels that need validation, for `prove` and `benchmarks.gpu`.

They run in subprocesses, which isolate crashes and hangs.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from .. import _native, dispatch
from ..dispatch import Kernel
from ..proof import Verdict, shape_class
from ..specs import OPS
from ..specs.spec import Case
from ..testing import Parity, call_of, nan_memory, require_grad
from .accuracy import BothWays, OpChecker, leaves
from .benchmark_case import problem_of
from .clock import Call, Clock, Times, in_turn, medians

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_no_gpu(command: str) -> str | None:
    """Returns the reason why ``command`` cannot measure a GPU here, or None."""
    if torch.cuda.is_available():
        return None
    has = "no GPU" if torch.version.cuda else f"torch {torch.__version__} without CUDA"
    return f"{command} needs an NVIDIA GPU and a PyTorch with CUDA, and this machine has {has}"


def unproven() -> list[torch.device]:
    """Returns the devices of this machine on which kernels of ours need validation."""
    cpu = [] if _native.why_unproven() is None else [torch.device("cpu")]
    gpu = torch.cuda.is_available()
    return [*cpu, *([torch.device("cuda", torch.cuda.current_device())] if gpu else [])]


def copies_for(size: float, device: torch.device) -> int:
    """Returns how many inputs of ``size`` bytes to cycle through; on a GPU each is out of its L2."""
    if device.type != "cuda":
        return 2
    cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
    return max(2, min(32, -int(-2.5 * cache // max(1.0, size))))


#: GPU memory of a process in bytes: for the CUDA context alone, and for checking results.
CONTEXT_BYTES, CHECK_BYTES = 1 << 30, 16 << 30


def most_processes(memory: int) -> int:
    """Returns the maximum number of concurrent processes, by CPUs and free GPU memory."""
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(os.cpu_count() or 1, free // memory))


class Trial:
    """A case in one dtype, forward or with gradients: inputs, calls to time, accuracy checks."""

    def __init__(
        self, case: Case, dtype: torch.dtype, gradients: bool, device: torch.device
    ) -> None:
        self.op, self.gradients = case.op, gradients
        generator = torch.Generator(device).manual_seed(1)
        self.inputs: list[tuple[Any, ...]] = []
        copies = 1
        while len(self.inputs) < copies:
            drawn = case.build(dtype, device, generator)
            copies = copies_for(OPS[self.op].bytes(drawn), device)
            self.inputs.append(require_grad(self.op, drawn) if gradients else drawn)
        with torch.set_grad_enabled(gradients):
            self.call = call_of(self.op, self.inputs[0])
        self.checker = OpChecker(self.op, list(leaves(self.op, self.inputs[0])))

    def work(self, run: Callable[..., Any]) -> Call:
        """Returns the call to time, for a function with the reference's signature."""
        run = BothWays(self.op, run) if self.gradients else run
        return lambda i: run(*self.inputs[i])

    @torch.no_grad()
    def parity(self, work: Call, number: int = 0) -> Parity:
        """Checks the results or gradients on input ``number``."""
        with nan_memory():
            got = work(number)
        return self.checker(got, self.inputs[number])

    def check(self, work: Call, number: int = 0) -> tuple[Parity | None, str | None]:
        """Returns the parity (None if ``work`` raises), and the problem or None."""
        try:
            parity = self.parity(work, number)
        except torch.OutOfMemoryError:  # may be caused by the reference, not by the kernel
            raise
        except Exception as error:
            return None, problem_of(error)
        return parity, None if parity.ok else str(parity)

    def torchs(self) -> dict[str, Callable[..., Any]]:
        """Returns PyTorch's candidates: the backend `torch`, and the code that a user would write."""
        found = {
            kernel.backend: kernel.run
            for kernel in dispatch.kernels(self.op)
            if kernel.backend == "torch" and not dispatch.why_not(kernel, self.call)
        }
        return {**found, "by hand": OPS[self.op].pytorch}


def checker(
    case: Case, dtype: torch.dtype, gradients: bool, device: torch.device, clock: Clock,
    kernels: Sequence[Kernel] | None = None,
) -> list[Verdict]:  # fmt: skip
    """Checks and times the kernels that support the case; one verdict for each.

    Results are checked before the timing, and once more afterwards on another input. ``kernels``:
    None stands for all that need validation.
    """
    if kernels is None:
        kernels = [one for one in dispatch.kernels(case.op) if one.proven is not None]
    trial = Trial(case, dtype, gradients, device)
    with torch.set_grad_enabled(gradients):
        ours = {
            k.backend: trial.work(k.run) for k in kernels if not dispatch.why_not(k, trial.call)
        }
    problems = {name: trial.check(work)[1] for name, work in ours.items()}
    right = {name: work for name, work in ours.items() if problems[name] is None}
    rivals: dict[str, Call] = {}
    samples: dict[str, list[Times]] = {}
    if right:
        with torch.no_grad():
            for name, run in trial.torchs().items():
                work = trial.work(run)
                with suppress(Exception):  # PyTorch does not support this call
                    work(0)
                    rivals[name] = work
            samples = in_turn({**right, **rivals}, len(trial.inputs), clock)
        last = len(trial.inputs) - 1
        problems |= {name: trial.check(work, last)[1] for name, work in right.items()}
    times = {name: max(medians(taken)) for name, taken in samples.items()}
    fastest = min(rivals, key=times.__getitem__, default="")
    about = str(dtype)[6:], shape_class(trial.call), gradients
    lonely = None if rivals else "PyTorch has no equivalent to compare it with"
    return [
        Verdict(
            case.op, name, *about, problem is None, times.get(name), times.get(fastest),
            problem or lonely,
        )
        for name, problem in problems.items()
    ]  # fmt: skip


def class_of(case: Case) -> str:
    return shape_class(call_of(case.op, case.build(torch.float32, "meta", None)))


#: Largest FLOPs of a case on a CPU.
_CPU_FLOPS = 2e10


def trials(op: str, kind: str = "cuda") -> Iterator[tuple[Case, torch.dtype, bool]]:
    """Yields what to check on a type of device: (case, dtype, with gradients).

    On CPUs the cases are the benchmark's.
    """
    spec = OPS[op]
    cases: Sequence[Case] = spec.gpu_cases
    if kind == "cpu":
        sizes = ((c, spec.flops(c.build(torch.float32, "meta", None))) for c in spec.bench_cases)
        cases = [case for case, flops in sizes if flops <= _CPU_FLOPS]
    for case in cases:
        for dtype in DTYPES:
            for gradients in (False, True) if case.gradients and spec.gradients_of else (False,):
                yield case, dtype, gradients


def worst(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """Returns the worst verdict of each class: a kernel has to be right and faster in all its cases."""
    found: dict[tuple[Any, ...], Verdict] = {}
    for verdict in verdicts:
        key = verdict[:5]
        if key not in found or (verdict.right, verdict.gain) < (found[key].right, found[key].gain):
            found[key] = verdict
    return tuple(found.values())


#: Returned by `lines_of` for a command that was still running at ``until``.
OUT_OF_TIME = "the time limit was reached"


def lines_of(
    command: Sequence[str], take: Callable[[Any], None], patience: float, until: float = math.inf
) -> str | None:
    """Runs a command and passes each line of JSON it prints to ``take``; returns an error or None.

    The command is killed after ``patience`` seconds without output, and at ``until``
    (`time.monotonic`).
    """
    problem: str | None = None
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):

        def give_up(why: str) -> None:
            nonlocal problem
            problem = why
            process.kill()

        def timer() -> threading.Timer:
            left = max(0.0, until - time.monotonic())
            silent = f"no output for {patience:.0f} seconds"
            why = silent if patience < left else OUT_OF_TIME
            started = threading.Timer(min(patience, left), give_up, [why])
            started.start()
            return started

        waiting = timer()
        try:
            for line in process.stdout or ():
                waiting.cancel()
                take(json.loads(line))
                waiting = timer()
        except json.JSONDecodeError:
            give_up("its output is not JSON")
        except BaseException:
            process.kill()
            raise
        finally:
            waiting.cancel()
        status = process.wait()
        errors.seek(0)
        last = errors.read().strip().rpartition("\n")[2] or "no error message"
    if problem is None and status != 0:
        problem = f"signal {-status}" if status < 0 else f"status {status}: {last}"
    return problem
