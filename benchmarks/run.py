"""``python -m benchmarks run`` and ``scaling``: time suites, print them, write them down."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from transformer_fast import _native
from transformer_fast.cli import notes
from transformer_fast.cli.compare import DTYPES, add_work, device_of, show
from transformer_fast.cli.console import output, progress
from transformer_fast.dispatch import BACKENDS, OPS
from transformer_fast.measure import machine, roof
from transformer_fast.measure.benchmark_case import Row, run_case
from transformer_fast.measure.clock import ORDINARY, QUICK, THOROUGH, Plan

from . import peers, store
from .scope import Scope
from .suites import Suite

_QUICK_PEERS = ("onednn_prepacked",)


def add_arguments(
    parser: argparse.ArgumentParser,
    suites: Mapping[str, Suite],
    kind: str = "",
    plan: Plan = ORDINARY,
) -> None:
    """``kind``: the end of the file's name; ``plan``: that of a run that names none."""
    names = list(suites)
    parser.add_argument(
        "--suite", nargs="+", type=str.lower, choices=names, default=names, metavar="SUITE",
        help=f"of: {'; '.join(names)} (all)",
    )  # fmt: skip
    add_work(parser, OPS)
    parser.set_defaults(suites=suites, kind=kind, plan=plan, device="cpu", backend=list(BACKENDS))
    parser.add_argument(
        "--peer", nargs="*", default=None,
        help="peers by file name in benchmarks/peers; none: --peer without a name (all)",
    )  # fmt: skip
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help="small cases, few rounds; not kept")
    how.add_argument("--thorough", action="store_true", help="more rounds and longer samples")
    parser.add_argument(
        "--json", type=Path, metavar="FILE",
        help="where results go (benchmarks/results/<machine>.json; nowhere if --quick)",
    )  # fmt: skip


def scope_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Scope:
    device, names = device_of(parser, options), options.peer
    if names is None and options.quick:
        names = _QUICK_PEERS
    try:
        found = peers.load(names)
    except ValueError as error:
        parser.error(str(error))
    return Scope(
        plan=QUICK if options.quick else THOROUGH if options.thorough else options.plan,
        dtype=DTYPES[options.dtype],
        device=device,
        backends=tuple(options.backend),
        peers=found,
        ops=tuple(options.op),
        quick=options.quick,
    )


def run_suite(name: str, suite: Suite, scope: Scope) -> list[Row]:
    """The rows of a suite."""
    work = list(suite(scope))
    rows: list[Row] = []
    threads = torch.get_num_threads()
    with progress() as bar:
        task = bar.add_task(name, total=len(work))
        for label, make in work:
            bar.update(task, description=f"{name}: {label}")
            benchmark_case = make()
            rows += run_case(
                benchmark_case, scope.plan, probe_before=not scope.quick, memory=not scope.quick
            )
            torch.set_num_threads(threads)
            bar.advance(task)
    return rows


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """1 if a result of ours is outside its error budget, else 0."""
    scope = scope_of(parser, options)
    console = output()
    about = machine.describe(scope.device)
    if scope.device.type == "cpu":
        about["peaks"] = roof.peaks()
    about["peers"] = peers.versions(scope.peers)
    for line in (machine.line(about), machine.peaks_line(about)):
        console.print(line)
    if _native.why_not is not None:
        console.print(f"no native kernels: {_native.why_not}", style="red")
    path = options.json
    if path is None and not options.quick:
        path = store.FOLDER / f"{machine.slug(about)}{options.kind}.json"
    failed = 0
    suffix = "" if options.dtype == "float32" else f", {options.dtype}"
    for name in options.suite:
        rows = run_suite(name, options.suites[name], scope)
        if not rows:
            continue
        console.rule(name)
        show(
            console,
            rows,
            {
                "Failed": notes.failures(rows),
                "Not run by a kernel of ours": notes.fallbacks(rows),
                "Not measured": notes.absent(rows),
            },
        )
        failed += sum(row.failed for row in rows)
        if path is not None:
            plan = {"plan": asdict(scope.plan), "dtype": options.dtype, "quick": options.quick}
            # Written suite by suite: a run that is ended early keeps what it has.
            store.write(path, {name + suffix: {"machine": about, **plan, "rows": rows}})
    if path is not None:
        console.print(f"\nwritten to {path}")
    if failed:
        console.print(f"\n{failed} results are wrong", style="bold red")
    return 1 if failed else 0
