"""``python -m transformer_fast compare``: checks and times every kernel on this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from .. import _native
from .._console import bullets, output, progress
from ..dispatch import BACKENDS, OPS
from ..measure import device as on_device
from ..measure import machine
from ..measure.benchmark_case import Arguments, BenchmarkCase, Candidate, Row, run_case
from ..measure.cases import (
    PADDING,
    VOCABULARY,
    Batch,
    Size,
    batches,
    compiled,
    encoder_case,
    op_case,
    pairs,
    transformer_case,
)
from ..measure.clock import QUICK, Plan
from ..measure.roof import why_no_roof
from ..proof import COMMAND, DURATION
from ..specs import OPS as SPECS
from ..specs.spec import Text
from . import form

DTYPES = {n: getattr(torch, n) for n in ("float32", "bfloat16", "float16", "float64")}
MODELS = ("encoder_layer", "transformer")
_MODEL = Size(vocabulary=VOCABULARY)
#: Number of inputs with the same shapes and different data; calls alternate between them.
_INPUTS = 2

#: (op, name of the case, function that builds the calls).
CASES: tuple[tuple[str, str, Callable[[Text], list[Arguments]]], ...] = tuple(
    (op, name.format(vocabulary=VOCABULARY), build)
    for op, spec in SPECS.items()
    for name, build in spec.text_cases
)
COMPARED = (*OPS, *MODELS)

_PLAN = Plan(rounds=25, seconds=1.0, least=5, sample=0.003)
#: The text: batches, paragraphs per batch, and bytes at which a paragraph is cut.
_BATCHES, _SIZE, _LONGEST = 2, 8, 256
_MODEL_LONGEST = 160


class OneOrMore(argparse.Action):
    """Stores an option with one or more values; the value 'all' stands for every choice."""

    def __init__(self, *, choices: Sequence[str], **options: Any) -> None:
        super().__init__(
            nargs="+", choices=[*choices, "all"], metavar=options.pop("metavar"), type=str.lower,
            **options,
        )  # fmt: skip

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        every = [name for name in self.choices or () if name != "all"]
        setattr(namespace, self.dest, every if "all" in values else values)


def add_work(parser: argparse.ArgumentParser, ops: Sequence[str]) -> None:
    """Adds the options for ops, backend, device, dtype and threads."""
    parser.add_argument(
        "--op", action=OneOrMore, choices=ops, default=list(ops), metavar="OP",
        help=f"one or more of: {', '.join(ops)} (default: all of them)",
    )  # fmt: skip
    parser.add_argument(
        "--backend", action=OneOrMore, choices=BACKENDS, metavar="BACKEND",
        help=f"one or more of: {', '.join(BACKENDS)} (default: all that support the call)",
    )  # fmt: skip
    parser.add_argument(
        "--device", type=str.lower, default="cpu",
        help="a PyTorch device, such as cpu or cuda:0 (default: cpu)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", type=str.lower, choices=DTYPES, default="float32", metavar="DTYPE",
        help=f"one of: {', '.join(DTYPES)} (default: float32)",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's number)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_work(parser, COMPARED)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and less text")
    parser.add_argument(
        "--compile", action="store_true", help="also time torch.compile (takes minutes)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")


def require_folder(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exits with an error if the folder of ``--json`` does not exist."""
    if options.json is not None and not options.json.resolve().parent.is_dir():
        parser.error(f"argument --json: there is no folder {options.json.resolve().parent}")


def device_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> torch.device:
    """Returns the device of ``--device`` and sets ``--threads``; exits if one of them is invalid."""
    if options.threads is not None:
        if options.threads < 1:
            parser.error(f"argument --threads: must be at least 1, not {options.threads}")
        torch.set_num_threads(options.threads)
    try:
        device = torch.device(options.device)
        torch.empty(1, device=device).item()
    except Exception as error:
        # PyTorch has no common exception for missing devices; the first line names the problem.
        why = str(error).splitlines()[0]
        parser.error(f"argument --device: {options.device!r} cannot be used here: {why}")
    return device


def text_cases(
    options: argparse.Namespace, device: torch.device, text: Sequence[Batch]
) -> Iterator[tuple[str, Callable[[], BenchmarkCase]]]:
    """Yields (name, builder) of the selected cases: ops, an encoder layer, the base Transformer."""
    dtype = DTYPES[options.dtype]
    backends = options.backend or [None]

    def drawn(seed: int) -> Text:
        batches = [batch.to(device) for batch in text]
        generator = torch.Generator().manual_seed(seed)
        return Text(dtype, device, generator, batches, PADDING, _MODEL)

    def of_op(op: str, name: str, build: Callable[[Text], list[Arguments]]) -> BenchmarkCase:
        inputs = [build(drawn(seed)) for seed in range(_INPUTS)]
        return op_case(op, name, inputs, options.backend or BACKENDS)

    def peers(module: nn.Module, arguments: Arguments) -> Sequence[Candidate]:
        if not options.compile:
            return []
        return [Candidate("torch.compile", compiled(module), ours=False)]

    def encoder_layer() -> BenchmarkCase:
        inputs: list[list[Arguments]] = []
        for data in map(drawn, range(_INPUTS)):
            paired = zip(data.embedded, data.batches, strict=True)
            inputs.append([(x, None, ~batch.real) for x, batch in paired])
        return encoder_case(_MODEL.label, inputs, _MODEL, backends, peers)

    def transformer() -> BenchmarkCase:
        # Two different inputs of equal cost: the pairs, and the pairs with each batch reversed.
        pair = pairs(1, _SIZE // 2, _MODEL_LONGEST)
        there = [tuple(batch.to(device) for batch in both) for both in pair]
        back = [tuple(Batch(b.tokens.flip(0), b.lengths.flip(0)) for b in both) for both in there]
        case = f"base, {_MODEL.layers}+{_MODEL.layers} layers"
        return transformer_case(case, [there, back], _MODEL, dtype, device, backends, peers)

    for case in CASES:
        if case[0] in options.op:
            yield f"{case[0]} {case[1]}", partial(of_op, *case)
    for make in (encoder_layer, transformer):
        if make.__name__ in options.op:
            yield make.__name__, make


def run(
    work: Sequence[tuple[str, Callable[[], BenchmarkCase]]], plan: Plan,
    keep: Callable[[list[Row]], None] | None = None, **options: bool,
) -> tuple[list[Row], list[str]]:  # fmt: skip
    """Builds and runs benchmark cases; returns their rows, and notes on ops without a kernel of ours.

    ``keep``: called with the rows of each case; ``options``: those of `run_case`. A case may set the
    number of threads; it is restored after it.
    """
    rows: list[Row] = []
    remarks: list[str] = []
    threads = torch.get_num_threads()
    with progress() as bar:
        task = bar.add_task("", total=len(work))
        for label, make in work:
            bar.update(task, description=label)
            case = make()
            found = run_case(case, plan, **options)
            rows += found
            if keep is not None and found:
                keep(found)
            remarks += form.fallbacks(case)
            torch.set_num_threads(threads)
            bar.advance(task)
    return rows, remarks


def show(
    console: Console, rows: list[Row], sections: dict[str, list[str]], legend: Sequence[str] = ()
) -> None:
    """Prints the table, its legend, and all sections with content."""
    console.print(form.table(rows, console.width))
    for line in legend:
        console.print(line, style="dim")
    for title, lines in sections.items():
        if lines:
            style = "bold red" if title == "Failed" else "bold"
            console.print(f"\n{title}", style=style)
            bullets(console, lines)


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Returns 0 if all selected results were checked and are right, else 1."""
    require_folder(parser, options)
    device = device_of(parser, options)
    text = batches(1 if options.quick else _BATCHES, _SIZE, _LONGEST)
    plan = QUICK if options.quick else _PLAN
    # The roof is measured once per case, not twice, because that takes as long as the timing.
    rows, remarks = run([*text_cases(options, device, text)], plan, probe_before=False)
    about = machine.describe(device)
    real = sum(int(b.lengths.sum()) for b in text)
    positions = sum(b.tokens.numel() for b in text)
    head = [
        machine.line(about),
        f"{options.dtype} on {device} · English text, {form.count(len(text), 'batch', 'batches')} "
        f"of {_SIZE} paragraphs, {real:,} bytes in {positions:,} positions",
    ]
    sections = {
        "Failed": form.failures(rows),
        "Not validated": [
            f"kernels for this {one.type.replace('cuda', 'gpu').upper()}: `{COMMAND}` checks and times "
            f"them, in {DURATION}"
            for one in on_device.unproven()
        ],
        "Not run by a kernel of ours": remarks,
        "Not measured": form.absent(rows),
    }
    if _native.why_not is not None:
        sections["No native kernels"] = [_native.why_not]
    if _native.why_not is not None and device.type == "cpu":
        del sections["Not run by a kernel of ours"]  # it would repeat this reason for each case
    elif (reason := why_no_roof(device)) is not None:
        sections["No roofline"] = [reason]
    console = output()
    for line in head:
        console.print(line, style="dim", soft_wrap=False)
    console.print()
    show(console, rows, sections, ["", *form.LEGEND])
    if options.json is not None:
        _write(options, about, rows, sections)
    if (busy := form.busy(rows)) is not None:
        console.print(f"\n{busy}", style="yellow")
    wrong = _verdict(rows, options)
    if wrong is None:
        console.print(f"\n{form.summary(rows)}", style="bold green")
        return 0
    console.print(f"\n{wrong}", style="bold red")
    return 1


# Exit status and JSON output.


def _verdict(rows: Sequence[Row], options: argparse.Namespace) -> str | None:
    """Returns the problem in one line, or None if all selected results were checked and are right."""
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
    """Converts named tuples to dicts, because json would write them as lists."""
    fields = {"time": row.time, "vs_reference": row.vs_reference, "vs_torch": row.vs_torch}
    return {key: value and value._asdict() for key, value in fields.items()}
