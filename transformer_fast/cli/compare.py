"""``python -m transformer_fast compare``: checks and times every kernel on this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .. import _native, proof
from ..dispatch import BACKENDS, OPS
from ..measure import machine
from ..measure.benchmark_case import BenchmarkCase, Row, run_case
from ..measure.clock import QUICK, Plan
from ..measure.roof import why_no_roof
from ..measure.text import batches, pairs
from ..proof import SHORT_DURATION
from . import form, gpu, notes, prove, table, text_cases
from .console import bullets, output, progress

DTYPES = {n: getattr(torch, n) for n in ("float32", "bfloat16", "float16", "float64")}
CASES = (*OPS, *text_cases.MODELS)

_PLAN = Plan(rounds=25, seconds=1.0, least=5, sample=0.003)
#: The text: paragraphs per batch, and where a paragraph is cut.
_BATCHES, _SIZE, _LONGEST = 2, 8, 256
_MODEL_LONGEST = 160


def add_work(parser: argparse.ArgumentParser, ops: Sequence[str], more: str = "") -> None:
    """What is run, and on what; ``more``: to be said of no device."""
    parser.add_argument(
        "--op", nargs="+", type=str.lower, choices=ops, default=list(ops), metavar="OP",
        help=f"of: {', '.join(ops)} (all)",
    )  # fmt: skip
    parser.add_argument(
        "--backend", nargs="+", type=str.lower, choices=BACKENDS, metavar="BACKEND",
        help=f"backends that get a row, of: {', '.join(BACKENDS)} (all that take the call)",
    )  # fmt: skip
    told = f"a torch device, like cpu or cuda:0 (cpu{more})"
    parser.add_argument("--device", type=str.lower, help=told)
    parser.add_argument(
        "--dtype", type=str.lower, choices=DTYPES, default="float32", metavar="DTYPE",
        help=f"one of: {', '.join(DTYPES)} (float32)",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, help="CPU threads (torch's default)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    gpu = ", and then the kernels of a GPU, if there is one, on calls of their own"
    add_work(parser, CASES, gpu)
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds and less text, no GPU kernels"
    )
    parser.add_argument(
        "--compile", action="store_true", help="also time torch.compile (takes minutes)"
    )
    parser.add_argument(
        "--no-proof", action="store_true",
        help="only show what was found about GPU kernels (measured, in "
        f"{SHORT_DURATION}, unless --device, --backend or --quick is given); otherwise those that "
        "are right and faster run from then on",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")


def device_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> torch.device:
    """``--device``, and sets ``--threads``; a wrong one ends the program."""
    if options.threads is not None:
        if options.threads < 1:
            parser.error(f"argument --threads: must be at least 1, not {options.threads}")
        torch.set_num_threads(options.threads)
    try:
        device = torch.device(options.device)
        torch.empty(1, device=device).item()
    except Exception as error:
        # torch has no common class for "no such device here"; the first line says which it is.
        why = str(error).splitlines()[0]
        parser.error(f"argument --device: {options.device!r} cannot be used here: {why}")
    return device


def run(makers: Sequence[Callable[[], BenchmarkCase]], plan: Plan) -> tuple[list[Row], list[str]]:
    """All benchmark_cases: their rows, and notes on what ran inside modules."""
    rows: list[Row] = []
    remarks: list[str] = []
    with progress() as bar:
        task = bar.add_task("", total=len(makers))
        for make in makers:
            bar.update(task, description="preparing")
            benchmark_case = make()
            bar.update(task, description=f"{benchmark_case.op} {benchmark_case.case}")
            # One measurement of the roof for each case: they take as long as the timing.
            rows += run_case(benchmark_case, plan, probe_before=False)
            remarks += notes.inside(benchmark_case.op, benchmark_case.inside)
            bar.advance(task)
    return rows, remarks


def show(
    console: Console, rows: list[Row], sections: dict[str, list[str]], legend: Sequence[str] = ()
) -> None:
    """The table, its legend, and the sections that are not empty."""
    console.print(table.build(rows, console.width))
    for line in legend:
        console.print(line, style="dim")
    for title, lines in sections.items():
        if lines:
            style = "bold red" if title == "Failed" else "bold"
            console.print(f"\n{title}", style=style)
            bullets(console, lines)


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Returns 1 if a result exceeds its error budget, or was asked for and not checked, or if a GPU
    kernel crashed; else 0."""
    on_gpu = gpu.ops(options)
    options.device = options.device or "cpu"
    if options.json is not None and not options.json.resolve().parent.is_dir():
        parser.error(f"argument --json: there is no folder {options.json.resolve().parent}")
    device = device_of(parser, options)
    text = batches(1 if options.quick else _BATCHES, _SIZE, _LONGEST)
    pair = pairs(1, _SIZE // 2, _MODEL_LONGEST)
    makers = text_cases.benchmark_cases(
        options.op, options.backend or BACKENDS, options.backend or [None], text, pair,
        DTYPES[options.dtype], device, options.compile,
    )  # fmt: skip
    rows, remarks = run(list(makers), QUICK if options.quick else _PLAN)
    measured = prove.measure(on_gpu, short=True) if on_gpu else prove.Measured()
    kept = None if options.no_proof else prove.keep(measured, short=True)
    about = machine.describe(device)
    real = sum(int(b.lengths.sum()) for b in text)
    places = sum(b.tokens.numel() for b in text)
    head = [
        machine.line(about),
        f"{options.dtype} on {device} · English text, {form.count(len(text), 'batch', 'batches')} "
        f"of {_SIZE} paragraphs, {real:,} bytes in {places:,} places",
    ]
    if on_gpu:
        known, _ = proof.known(torch.cuda.current_device())
        rows = sorted(
            [*rows, *gpu.rows(measured.findings, known)], key=lambda row: CASES.index(row.op)
        )
        head.append(
            f"GPU: {torch.cuda.get_device_name()}, one call of each common case, without gradients "
            "and with them; the longer of the device's and the host's time"
        )
    sections = {
        "Failed": notes.failures(rows),
        "Not finished": measured.problem_lines(),
        "GPU kernels": gpu.remarks(measured, kept) if on_gpu else [],
        "Not run by a kernel of ours": [*notes.fallbacks(rows), *remarks],
        "Not measured": notes.absent(rows),
    }
    if (reason := why_no_roof(device)) is not None:
        sections["No roofline"] = [reason]
    if _native.why_not is not None:
        sections["No native kernels"] = [_native.why_not]
    console = output()
    for line in head:
        console.print(line, style="dim", soft_wrap=False)
    console.print()
    show(console, rows, sections, ["", *table.LEGEND])
    if options.json is not None:
        _write(options, about, rows, sections)
    if measured.interrupted:
        raise KeyboardInterrupt
    wrong = _verdict(rows, options)
    if wrong is None and measured.crashed:
        wrong = f"GPU kernels crashed: {', '.join(measured.crashed)}"
    if wrong is None:
        checked = sum(row.ok is not None and row.ours for row in rows)
        console.print(f"\nall {checked} results are within the error budget", style="bold green")
        return 0
    console.print(f"\n{wrong}", style="bold red")
    return 1


def _verdict(rows: Sequence[Row], options: argparse.Namespace) -> str | None:
    """Returns what is wrong in one line, or None if everything asked for was checked and is right."""
    checked = [row for row in rows if row.ok is not None]
    ours = [row for row in checked if row.ours]
    if failed := sum(row.failed for row in rows):
        return f"{failed} of {len(ours)} results are wrong"
    missing = [op for op in options.op if all(row.op != op for row in ours)]
    if missing:
        return f"no result was checked for {', '.join(missing)}"
    named = options.backend or ()
    absent = [name for name in named if all(row.candidate != name for row in checked)]
    if absent:
        return f"no result was checked for {', '.join(absent)}, which was named: see above for the reason"
    return None


def _write(
    options: argparse.Namespace,
    about: dict[str, Any],
    rows: list[Row],
    sections: dict[str, list[str]],
) -> None:
    result = {
        "machine": about,
        "options": {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(options).items()
            if key not in ("run", "parser", "json")
        },
        "notes": sections,
        "rows": [asdict(row) | _named(row) for row in rows],
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _named(row: Row) -> dict[str, Any]:
    """Named tuples as objects; json would make lists of them."""
    fields = {"time": row.time, "vs_reference": row.vs_reference, "vs_torch": row.vs_torch}
    return {key: value and value._asdict() for key, value in fields.items()}
