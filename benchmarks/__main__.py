"""``python -m benchmarks``: times suites (run, scaling), compares revisions, writes the report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from transformer_fast import _native
from transformer_fast._console import output, until_interrupted
from transformer_fast._version import __version__
from transformer_fast.cli import compare as shared
from transformer_fast.cli import form
from transformer_fast.dispatch import BACKENDS, OPS
from transformer_fast.measure import machine, roof
from transformer_fast.measure.benchmark_case import Row
from transformer_fast.measure.clock import ORDINARY, QUICK, THOROUGH, Plan

from . import compare, findings, peers, report
from .suites import Scope, Suite, generate, models, ops, text, third_party

#: Suites of the command ``run``, in the order of the report.
SUITES: dict[str, Suite] = {
    "ops": ops.table,
    "backward": partial(ops.table, gradients=True),
    "layers": models.layers,
    "layers, int8": models.int8_layers,
    "models": models.transformers,
    "training": models.training,
    "hand-written": third_party.hand_written,
    "third-party": third_party.third_party,
    "generate": generate.generate,
    "text encoders": text.text_encoders,
    "released text encoder": text.released,
    "half precision": text.half_precision,
    "decode": models.decoding,
    "overhead": ops.overhead,
}
#: Suites of the command ``scaling``, separate because they take long.
SCALING: dict[str, Suite] = {f"scaling: {name}": suite for name, suite in ops.SCALING.items()}


def add_arguments(
    parser: argparse.ArgumentParser,
    suites: Mapping[str, Suite] = SUITES,
    kind: str = "",
    plan: Plan = ORDINARY,
) -> None:
    """Adds the options of a run; ``kind``: suffix of the file name; ``plan``: the default plan."""
    parser.add_argument(
        "--suite", action=shared.OneOrMore, choices=[*suites], default=[*suites], metavar="SUITE",
        help=f"one or more of: {'; '.join(suites)} (default: all of them)",
    )  # fmt: skip
    shared.add_work(parser, OPS)
    parser.set_defaults(suites=suites, kind=kind, plan=plan, device="cpu", backend=list(BACKENDS))
    parser.add_argument(
        "--peer", nargs="*", default=None,
        help="names of peers in benchmarks/peers.py; without a name: no peers (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "-k", nargs="+", default=[], dest="words", metavar="TEXT",
        help="only cases whose names contain all of these; the file keeps its other cases",
    )  # fmt: skip
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help="small cases, few rounds; not saved")
    how.add_argument("--thorough", action="store_true", help="more rounds and longer samples")
    parser.add_argument(
        "--cpu-time", action="store_true",
        help="CPU time of the process, for one thread (OMP_NUM_THREADS=1) on a busy machine",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, metavar="FILE",
        help="result file (default: benchmarks/results/<machine>.json; none with --quick)",
    )  # fmt: skip


def scope_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Scope:
    try:
        quick = ("onednn_prepacked",) if options.quick else None
        found = peers.load(quick if options.peer is None else options.peer)
    except ValueError as error:
        parser.error(str(error))
    if options.cpu_time and torch.get_num_threads() > 1:
        parser.error(f"argument --cpu-time: requires 1 thread, not {torch.get_num_threads()}")
    plan = QUICK if options.quick else THOROUGH if options.thorough else options.plan
    return Scope(
        plan=replace(plan, cpu_time=options.cpu_time),
        dtype=shared.DTYPES[options.dtype],
        device=shared.device_of(parser, options),
        backends=tuple(options.backend),
        peers=found,
        ops=tuple(options.op),
        quick=options.quick,
    )


def _write(
    path: Path | None, name: str, suite: dict[str, Any], rows: list[Row], some: bool = True
) -> None:
    """Writes rows of a suite to the file, if any; ``some``: the suite's other rows stay in the file."""
    if path is not None:
        findings.write(path, {name: suite | {"rows": rows}}, partial=some)


def run_suites(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Returns 1 if a result of ours is outside its error budget, else 0."""
    shared.require_folder(parser, options)
    scope = scope_of(parser, options)
    console = output()
    about = machine.describe(scope.device)
    if scope.device.type == "cpu":
        about["peaks"] = roof.peaks()
    about["peers"] = peers.versions(scope.peers)
    console.print(f"{machine.line(about)}\n{machine.peaks_line(about)}")
    if _native.why_not is not None:
        console.print(f"no native kernels: {_native.why_not}", style="red")
    path = options.json
    if path is None and not options.quick:
        path = findings.FOLDER / f"{machine.slug(about)}{options.kind}.json"
    failed = 0
    suffix = "" if options.dtype == "float32" else f", {options.dtype}"
    cases = {
        name: [
            (label, make)
            for label, make in options.suites[name](scope)
            if all(word in label for word in options.words)
        ]
        for name in options.suite
    }
    if options.words and not any(cases.values()):
        parser.error(
            f"no case of {', '.join(cases)} contains {' and '.join(map(repr, options.words))}"
        )
    for name, work in cases.items():
        full = not scope.quick
        suite = {"machine": about, "plan": asdict(scope.plan), "dtype": options.dtype}
        suite |= {"quick": not full}
        keep = partial(_write, path, name + suffix, suite)
        # Cases are written one by one, so that an interrupted run keeps its results.
        rows, remarks = shared.run(work, scope.plan, keep, probe_before=full, memory=full)
        if not rows:
            continue
        console.rule(name)
        notes = {"Not run by a kernel of ours": remarks, "Not measured": form.absent(rows)}
        shared.show(console, rows, {"Failed": form.failures(rows), **notes})
        if (busy := form.busy(rows)) is not None:
            console.print(f"\n{busy}", style="yellow")
        failed += sum(row.failed for row in rows)
        keep(rows, some=bool(options.words) or len(scope.ops) < len(OPS))
    if path is not None:
        console.print(f"\nwritten to {path}")
    if failed:
        console.print(f"\n{failed} results are wrong", style="bold red")
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command (default: ``run``); returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--version", action="version", version=f"transformer_fast {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    scaling = partial(add_arguments, suites=SCALING, kind="-scaling", plan=ops.SCALING_PLAN)
    for name, summary, add, command in (
        ("run", "ops, layers, models, training (the default)", add_arguments, run_suites),
        ("scaling", "how time grows with each size; about 10 minutes", scaling, run_suites),
        ("compare", "this tree against a revision or a file", compare.add_arguments, compare.main),
        ("report", "Markdown of the result files", report.add_arguments, report.main),
    ):
        added = commands.add_parser(name, help=summary)
        add(added)
        added.set_defaults(run=command, parser=added)
    if not given or given[0] not in (*commands.choices, "-h", "--help", "--version"):
        given.insert(0, "run")
    options = parser.parse_args(given)
    return until_interrupted(options.run, options.parser, options)


if __name__ == "__main__":
    sys.exit(main())
