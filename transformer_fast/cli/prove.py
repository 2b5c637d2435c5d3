"""``python -m transformer_fast prove``: finds the kernels that are right and faster on this machine.

For GPUs, and for CPUs on whose instruction set the kernels were never timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from .. import proof
from .._console import bullets, columns, output, progress
from ..dispatch import OPS
from ..measure import device as on_device
from ..measure.device import OUT_OF_TIME, Finding, lines_of
from ..proof import Proof, Verdict

#: Seconds without output after which the process of an op is killed: in full and in short runs.
_PATIENCE, _SHORT_PATIENCE = 300.0, 120.0
#: Time limit of a short run in seconds, for all ops together.
_SHORT_SECONDS = 300.0
_INTERRUPTED = "interrupted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--op", nargs="+", choices=OPS, default=list(OPS), metavar="OP",
        help=f"one or more of: {', '.join(OPS)} (default: all of them)",
    )  # fmt: skip
    parser.add_argument(
        "--forget", action="store_true", help="remove the results of earlier runs and exit"
    )
    # Internal options of the subprocesses of `measure`: one op, a line of JSON per trial.
    parser.add_argument("--alone", nargs=2, metavar=("OP", "DEVICE"), help=argparse.SUPPRESS)
    parser.add_argument("--short", action="store_true", help=argparse.SUPPRESS)


def _alone(op: str, device: torch.device, short: bool) -> int:
    clock = on_device.clock_of(device)
    for trial in on_device.trials(op, short, device.type):
        try:
            findings = on_device.checker(*trial, device, clock)
        except torch.OutOfMemoryError:
            findings = []
        print(json.dumps(findings), flush=True)
    return 0


def _command(op: str, device: torch.device, short: bool) -> list[str]:
    alone = [sys.executable, "-m", "transformer_fast", "prove", "--alone", op, str(device)]
    return [*alone, "--short"] if short else alone


@dataclass
class Measured:
    """Findings of the processes of several ops on a device, and the processes that ended early."""

    device: torch.device
    findings: list[Finding] = field(default_factory=list)
    #: Op -> why its process did not finish.
    problems: dict[str, str] = field(default_factory=dict)
    #: Ops whose process crashed, i.e. was neither interrupted nor out of time.
    crashed: list[str] = field(default_factory=list)
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return on_device.worst([one.verdict for one in self.findings])

    def problem_lines(self) -> list[str]:
        return [
            f"{op}: its process ended before it was done ({problem})"
            for op, problem in self.problems.items()
        ]

    def keep(self) -> tuple[Proof, Path] | None:
        """Writes the device's record and returns it with its path; None if nothing was measured."""
        if not self.findings and not self.crashed:
            return None
        machine = proof.machine_of(self.device)
        before, _ = proof.read(machine)
        taken = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        found = Proof(machine, taken, round(self.seconds, 1), self.verdicts)
        result = proof.merged(before, found, self.crashed)
        return result, proof.write(result)


def _measure_op(op: str, short: bool, until: float, bar: Progress, measured: Measured) -> None:
    planned = list(on_device.trials(op, short, measured.device.type))
    if not planned:
        return
    task = bar.add_task(op, total=len(planned))
    done: list[list[Finding]] = []

    def take(content: Any) -> None:
        done.append([Finding(Verdict(*one), *rest) for one, *rest in content])
        bar.advance(task)

    problem: str | None = _INTERRUPTED
    try:
        patience = _SHORT_PATIENCE if short else _PATIENCE
        problem = lines_of(_command(op, measured.device, short), take, patience, until)
    finally:
        unfinished = set()
        if problem is not None:
            measured.problems[op] = problem
            unfinished = {
                (str(dtype)[6:], on_device.class_of(case), gradients)
                for case, dtype, gradients in planned[len(done) :]
            }
            if problem not in (_INTERRUPTED, OUT_OF_TIME):
                measured.crashed.append(op)
        # A class is right and faster only if all of its cases are; classes with unfinished cases
        # count only if a finished case is wrong.
        measured.findings += [
            one
            for findings in done
            for one in findings
            if not one.verdict.right or one.verdict[2:5] not in unfinished
        ]


def measure(ops: Sequence[str], device: torch.device, short: bool = False) -> Measured:
    """Checks and times the kernels of ``ops``, each op in a subprocess; Ctrl-C ends it early.

    ``short``: only common or small cases (`measure.device.cases_of`), in `_SHORT_SECONDS` at most.
    """
    measured = Measured(device)
    start = time.monotonic()
    try:
        with progress() as bar:
            for op in ops:
                until = start + _SHORT_SECONDS if short else math.inf
                _measure_op(op, short, until, bar, measured)
    except KeyboardInterrupt:
        measured.interrupted = True
    measured.seconds = time.monotonic() - start
    return measured


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
        return _alone(op, torch.device(device), options.short)
    devices = on_device.unproven()
    if not devices:
        print(f"{on_device.why_no_gpu('prove')}; its CPU kernels need none", file=sys.stderr)
        return 2
    right = True
    for device in devices:
        measured = measure(options.op, device)
        kept = measured.keep()
        if kept is not None:
            _summary(console, kept[0])
        if measured.problems:
            console.print("\n[bold]Not finished[/]")
            bullets(console, measured.problem_lines())
        if kept is not None:
            console.print(
                f"\n{len(measured.verdicts)} verdicts in {measured.seconds:.0f} seconds, in {kept[1]}"
            )
        if measured.interrupted:
            raise KeyboardInterrupt
        right = right and all(one.verdict.right for one in measured.findings)
        right = right and not measured.problems
    return 0 if right else 1
