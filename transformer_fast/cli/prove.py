"""``python -m transformer_fast prove``: which GPU kernels are right and faster on this machine's GPU."""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .. import proof
from ..dispatch import OPS
from ..measure import device as on_device
from ..measure.apart import lines_of
from ..proof import Proof, Verdict
from .console import bullets, output, progress

#: Seconds without a word after which an op's process is given up.
_PATIENCE = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", nargs="+", choices=OPS, default=list(OPS), help="only these ops")
    parser.add_argument(
        "--forget", action="store_true", help="remove the results of earlier runs and exit"
    )
    # What the command starts itself with: one op, a line of JSON for each trial.
    parser.add_argument("--alone", choices=OPS, help=argparse.SUPPRESS)


def _forget(console: Console) -> int:
    removed = proof.forget()
    if not removed:
        console.print(f"No results to remove in {proof.folder()}.")
    bullets(console, [f"removed {path}" for path in removed])
    return 0


def _alone(op: str) -> int:
    device = torch.device("cuda", torch.cuda.current_device())
    clock = on_device.DeviceClock(device)
    for trial in on_device.trials(op):
        try:
            verdicts = on_device.judge(*trial, device, clock)
        except torch.OutOfMemoryError:
            verdicts = []
        print(json.dumps(verdicts), flush=True)
    return 0


def _command(op: str) -> list[str]:
    return [sys.executable, "-m", "transformer_fast", "prove", "--alone", op]


def _verdicts_of(op: str, tick: Callable[[], None]) -> tuple[list[Verdict], str | None]:
    """What a process of its own found about an op, and what went wrong with it, if so."""
    found: list[Verdict] = []

    def take(content: Any) -> None:
        found.extend(Verdict(*one) for one in content)
        tick()

    return found, lines_of(_command(op), take, _PATIENCE)


def _summary(console: Console, found: Proof) -> None:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for heading in ("op", "backend", "cases", "right", "faster", "speed-up of those, median"):
        table.add_column(heading, justify="left" if heading in ("op", "backend") else "right")
    for op in OPS:
        for backend in dict.fromkeys(v.backend for v in found.verdicts if v.op == op):
            mine = [v for v in found.verdicts if (v.op, v.backend) == (op, backend)]
            gains = sorted(v.gain for v in mine if v.chosen)
            table.add_row(
                op, backend, str(len(mine)), str(sum(v.right for v in mine)), str(len(gains)),
                f"{gains[len(gains) // 2]:.2f}x" if gains else "-",
            )  # fmt: skip
    console.print(table, highlight=False)
    wrong = [v for v in found.verdicts if not v.right]
    if wrong:
        console.print("\n[bold]Wrong on this GPU, so never selected[/]")
        bullets(console, [f"{v.op}, {v.backend}, {v.dtype}, {v.shape}: {v.problem}" for v in wrong])


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """0 if all was right; 1 if a kernel was wrong or an op's process ended; 2 without a GPU."""
    console = output()
    if options.forget:
        return _forget(console)
    if (why := on_device.why_no_gpu("prove")) is not None:
        print(why, file=sys.stderr)
        return 2
    if options.alone:
        return _alone(options.alone)
    machine = proof.machine_of()
    before, _ = proof.read(machine)
    verdicts: list[Verdict] = []
    problems: list[str] = []
    start = time.perf_counter()
    with progress() as bar:
        for op in options.op:
            task = bar.add_task(op, total=len(list(on_device.trials(op))))
            found, problem = _verdicts_of(op, functools.partial(bar.advance, task))
            verdicts += on_device.worst(found)
            if problem is not None:
                problems.append(f"{op}: its process ended before it was done ({problem})")
    # Of ops that were not asked for now, what is known stays.
    kept = [v for v in (before.verdicts if before else ()) if v.op not in options.op]
    taken = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    seconds = time.perf_counter() - start
    result = Proof(machine, taken, round(seconds, 1), (*kept, *verdicts))
    path = proof.write(result)
    _summary(console, result)
    if problems:
        console.print("\n[bold]Not finished[/]")
        bullets(console, problems)
    console.print(
        f"\n{len(verdicts)} verdicts in {seconds:.0f} seconds, in {path}", highlight=False
    )
    return 1 if problems or not all(v.right for v in verdicts) else 0
