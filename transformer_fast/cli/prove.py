"""``python -m transformer_fast prove``: finds the kernels that are right and faster on this machine.

For GPUs, and for CPUs on whose instruction set the kernels were never timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from .. import proof
from .._console import bullets, columns, output, progress
from ..dispatch import OPS
from ..measure import device as on_device
from ..measure.clock import DeviceClock, host_clock
from ..measure.device import lines_of
from ..proof import Proof, Verdict

#: Seconds without output after which the process of an op is killed.
_PATIENCE = 300.0
_INTERRUPTED = "interrupted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--op", nargs="+", choices=OPS, default=list(OPS), metavar="OP",
        help=f"one or more of: {', '.join(OPS)} (default: all of them)",
    )  # fmt: skip
    parser.add_argument(
        "--forget", action="store_true", help="remove the results of earlier runs and exit"
    )
    # Internal option of the subprocesses: one op, a line of JSON per trial.
    parser.add_argument("--alone", nargs=2, metavar=("OP", "DEVICE"), help=argparse.SUPPRESS)


def _alone(op: str, device: torch.device) -> int:
    clock = DeviceClock(device) if device.type == "cuda" else host_clock
    for trial in on_device.trials(op, device.type):
        try:
            verdicts = on_device.checker(*trial, device, clock)
        except torch.OutOfMemoryError:
            verdicts = []
        print(json.dumps(verdicts), flush=True)
    return 0


def _command(op: str, device: torch.device) -> list[str]:
    return [sys.executable, "-m", "transformer_fast", "prove", "--alone", op, str(device)]


@dataclass
class Measured:
    """Verdicts of the processes of several ops on a device, and the processes that ended early."""

    device: torch.device
    verdicts: list[Verdict] = field(default_factory=list)
    #: Op -> why its process did not finish.
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def crashed(self) -> list[str]:
        """The ops whose process ended by itself."""
        return [op for op, problem in self.problems.items() if problem != _INTERRUPTED]


def _measure_op(op: str, bar: Progress, measured: Measured) -> None:
    planned = list(on_device.trials(op, measured.device.type))
    if not planned:
        return
    task = bar.add_task(op, total=len(planned))
    done: list[list[Verdict]] = []

    def take(content: Any) -> None:
        done.append([Verdict(*one) for one in content])
        bar.advance(task)

    problem: str | None = _INTERRUPTED
    try:
        problem = lines_of(_command(op, measured.device), take, _PATIENCE)
    finally:
        unfinished = set()
        if problem is not None:
            measured.problems[op] = problem
            unfinished = {
                (str(dtype)[6:], on_device.class_of(case), gradients)
                for case, dtype, gradients in planned[len(done) :]
            }
        # A class is right and faster only if all of its cases are; classes with unfinished cases
        # count only if a finished case is wrong.
        measured.verdicts += [
            one
            for verdicts in done
            for one in verdicts
            if not one.right or one[2:5] not in unfinished
        ]


def _keep(measured: Measured, seconds: float) -> tuple[Proof, str]:
    """Writes the device's record; returns it, and a line on what was written."""
    machine = proof.machine_of(measured.device)
    before, _ = proof.read(machine)
    taken = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    found = Proof(machine, taken, round(seconds, 1), on_device.worst(measured.verdicts))
    result = proof.merged(before, found, measured.crashed)
    path = proof.write(result)
    return result, f"{len(found.verdicts)} verdicts in {seconds:.0f} seconds, in {path}"


def _summary(console: Console, found: Proof) -> None:
    figures = ("cases", "right", "faster", "speed-up of those, median")
    table = columns(("op", "backend"), figures)
    for op, backend in dict.fromkeys(v[:2] for v in found.verdicts):
        mine = [v for v in found.verdicts if v[:2] == (op, backend)]
        gains = sorted(v.gain for v in mine if v.chosen)
        table.add_row(
            op, backend, str(len(mine)), str(sum(v.right for v in mine)), str(len(gains)),
            f"{gains[len(gains) // 2]:.2f}x" if gains else "-",
        )  # fmt: skip
    console.print(f"{found.machine.device}, {found.machine.target}")
    console.print(table)
    wrong = [v for v in found.verdicts if not v.right]
    if wrong:
        console.print("\n[bold]Wrong on this machine, so never selected[/]")
        bullets(console, [f"{v.op}, {v.backend}, {v.dtype}, {v.shape}: {v.problem}" for v in wrong])


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Returns 0 if all is right, 1 if a kernel is wrong or a process failed, 2 with nothing to do."""
    console = output()
    if options.forget:
        removed = proof.forget()
        if not removed:
            console.print(f"No results to remove in {proof.folder()}.")
        bullets(console, [f"removed {path}" for path in removed])
        return 0
    if options.alone:
        op, device = options.alone
        return _alone(op, torch.device(device))
    devices = on_device.unproven()
    if not devices:
        print(f"{on_device.why_no_gpu('prove')}; its CPU kernels need none", file=sys.stderr)
        return 2
    right = True
    for device in devices:
        start, measured, finished = time.monotonic(), Measured(device), True
        try:
            with progress() as bar:
                for op in options.op:  # each in a subprocess
                    _measure_op(op, bar, measured)
        except KeyboardInterrupt:
            finished = False
        line = "nothing was measured"
        if measured.verdicts or measured.crashed:
            found, line = _keep(measured, time.monotonic() - start)
            _summary(console, found)
        if measured.problems:
            console.print("\n[bold]Not finished[/]")
            ended = "its process ended before it was done"
            problems = measured.problems.items()
            bullets(console, [f"{op}: {ended} ({problem})" for op, problem in problems])
        console.print(f"\n{line}")
        if not finished:
            raise KeyboardInterrupt
        right = right and not measured.problems and all(one.right for one in measured.verdicts)
    return 0 if right else 1
