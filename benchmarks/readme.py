"""``python -m benchmarks.readme --write | --check``: generates README's figures and its plot.

The text between ``<!-- generated: NAME -->`` and ``<!-- end -->`` comes from the result files: no
number is typed. In a row of the table PyTorch computes in the precision of ours, and the last row is
the worst of all cases of the machine.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

from transformer_fast.cli import form
from transformer_fast.cli.info import kernel_row
from transformer_fast.dispatch import BACKENDS, Kernel, kernels
from transformer_fast.measure import machine
from transformer_fast.measure.benchmark_case import Row
from transformer_fast.measure.clock import speed_up
from transformer_fast.specs import OPS

from . import report
from .findings import FOLDER, Finding, Machine, by_case, losses, machines
from .report import COLOURS, markdown

README = Path(__file__).resolve().parents[1] / "README.md"
PLOT = FOLDER / "sentences.svg"
_MARKED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

TEXT, RELEASED, HALF = "text encoders", "released text encoder", "half precision"
OURS = "accelerated"
#: PyTorch's rows by precision: what a user runs without us and without tuning.
_PLAIN = ("torch", "torch eager", "torch fast path", "torch.compile")
_TORCH = {"int8": ("quantize_dynamic", "torchao")}
#: Rows in another precision than the case's: alternatives, but not what ours is divided by.
_NAMES = {
    "inductor tuned": "torch.compile, tuned",
    "torch eager, float32": "PyTorch in float32",
    "quantize_dynamic": "PyTorch",
}


class Line(NamedTuple):
    """A row of README's table."""

    text: str
    suite: str
    case: str

    @property
    def precision(self) -> str:
        return precision_of(f"{self.suite}, {self.case}")


def precision_of(name: str) -> str:
    return next((one for one in ("int8", "bfloat16", "float16") if one in name), "float32")


_SORTED = "{}, sorted, {}, 2 threads"
LINES = (
    *(
        Line(f"MiniLM-size encoder, {one}", TEXT, _SORTED.format("MiniLM", one))
        for one in ("float32", "bfloat16", "int8")
    ),
    *(
        Line(f"BERT-base-size encoder, {one}", TEXT, _SORTED.format("BERT-base", one))
        for one in ("float32", "int8")
    ),
    Line("training step, 6+6 layers, float32", "training", "6+6, (8,128), V = 32000"),
)
_HALF = Line(
    "3 BERT-base-size layers, bfloat16, AVX2 only ¹", HALF,
    "BERT-base, 3 layers, unsorted, bfloat16, 1 thread",
)  # fmt: skip
#: Cases whose names README spells out.
_SPELLED = {
    "hand-written transformer 2+2, (1,20), V = 100, d = 64": (
        "tutorial model, 2+2 layers, d_model 64, 20 tokens"
    ),
    "encoder_layer (1,32), int8": "one encoder layer, 32 tokens, int8",
    "encoder 6 layers, (1,32), int8": "six encoder layers, 32 tokens, int8",
    "encoder_layer (8,128), 65% real, bfloat16": (
        "one encoder layer, 8 x 128 tokens with padding, bfloat16"
    ),
    "layer_norm 32x512 with gradients, bfloat16": (
        "LayerNorm of 32 rows, forward and backward, bfloat16"
    ),
}


def spelled(one: Finding) -> str:
    kind, _, dtype = one.suite.partition(", ")
    name = f"{one.chosen.op} {one.chosen.case}{' with gradients' if kind == 'backward' else ''}"
    name += f", {dtype}" if dtype and not name.endswith(dtype) else ""
    return _SPELLED.get(name, name)


def named(row: Row) -> str:
    return _NAMES.get(row.candidate, row.candidate)


def shown_machine(found: Sequence[Machine]) -> Machine:
    """Returns the machine of README's table: the newest with sentence encoders and all suites."""
    able = [one for one in found if {line.suite for line in LINES} <= {*one.suites}]
    return max(able, key=lambda one: str(one.about["date"]))


def _is_foreign(row: Row) -> bool:
    return row.time is not None and not row.ours and row.ok is not False


def cells(rows: Sequence[Row], precision: str) -> tuple[str, str, str, str]:
    """Returns the cells PyTorch, ours, speed-up, fastest alternative of a case."""
    ours = next(row for row in rows if row.chosen and row.time)
    foreign = sorted(filter(_is_foreign, rows), key=lambda row: row.time.median)  # type: ignore[union-attr]
    torch = next(row for row in foreign if row.candidate in _TORCH.get(precision, _PLAIN))
    other = next((row for row in foreign if row is not torch), None)

    def speed(row: Row) -> str:
        assert row.time is not None
        if row.items is None:
            return report.seconds(row)
        return f"{_two(row.items / row.time.median)} /s"

    ratio = speed_up(torch.samples, ours.samples).value
    beside = "-" if other is None else f"{named(other)} {speed(other)}"
    return speed(torch), speed(ours), f"{ratio:.2g}x", beside


def _two(value: float) -> str:
    """Formats a rate with three digits at most: '1,200', '50.5'."""
    return f"{float(f'{value:.3g}'):,.4g}" if value < 1e4 else f"{value:,.0f}"


def _rows(one: Machine, suite: str, case: str) -> list[Row]:
    return next(rows for (_, name), rows in by_case(one.suites[suite]["rows"]).items() if name == case)


def worst(one: Machine) -> list[Finding]:
    """Returns the losses against other software, worst first."""
    return [found for found in losses(one.all) if found.rival and not found.rival.ours]


def _half(found: Sequence[Machine]) -> Machine | None:
    return next((one for one in found if HALF in one.suites), None)


def table(found: Sequence[Machine]) -> str:
    """Returns README's table: the same precision in a row, the worst case of all in the last."""
    one, half = shown_machine(found), _half(found)
    lines = [(line.text, *cells(_rows(one, line.suite, line.case), line.precision)) for line in LINES]
    if half:
        lines.append((_HALF.text, *cells(_rows(half, HALF, _HALF.case), _HALF.precision)))
    last = worst(one)[0]
    rows = _rows(one, last.suite, last.chosen.case)
    lines.append((f"*worst:* {spelled(last)}", *cells(rows, precision_of(spelled(last)))))
    return markdown(("workload", "PyTorch", "ours", "speed-up", "fastest alternative"), lines, 1)


def caption(found: Sequence[Machine]) -> str:
    one, half = shown_machine(found), _half(found)
    dates = sorted({one.suites[line.suite]["machine"]["date"][:10] for line in LINES})
    about = one.about
    text = (
        f"*{machine.cpu(about)}, {about['threads']} threads, PyTorch {about['torch'].split('+')[0]}, "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}. Encoders: English sentences of up to "
        "128 tokens, sorted by length as `encode` does, in batches of 32 (BERT-base: 8). **Their "
        "weights are random.** Training: 8 x 128 tokens, 32,000 words. PyTorch: eager or "
        "`torch.compile`, the faster; int8: `quantize_dynamic` or torchao.*"
    )
    if half:
        about = half.suites[HALF]["machine"]
        text += (
            f"\n*¹ {machine.cpu(about)}, which has no instructions for half precision; one thread, "
            f"2 x 128 tokens, CPU time, {about['date'][:10]}, random weights.*"
        )
    return text


def _medians(one: Machine, case: str, suite: str = TEXT) -> dict[str, float]:
    """Returns candidate -> its median time in a case."""
    return {row.candidate: row.time.median for row in _rows(one, suite, case) if row.time}


def _range(values: Sequence[float]) -> str:
    """Formats '1.5 to 3.2'; one number if both are equal."""
    return " to ".join(dict.fromkeys(f"{value:.2g}" for value in (min(values), max(values))))


def headline(found: Sequence[Machine]) -> str:
    """Returns the two figures of sentence encoders: of float32, and of int8 beyond that."""
    able = [one for one in found if TEXT in one.suites]
    floats, ints = [], []
    for one in able:
        for (_, case), _rows_of in by_case(one.suites[TEXT]["rows"]).items():
            if "float32" in case and ", sorted," in case:
                plain, eight = _medians(one, case), _medians(one, case.replace("float32", "int8"))
                floats.append(plain["torch eager"] / plain[OURS])
                ints.append(plain[OURS] / eight[OURS])
    return (
        f"One call makes sentence encoders **{_range(floats)} times as fast** as PyTorch in float32 on\n"
        f"{len(able)} CPUs, and int8 makes them another **{_range(ints)} times** as fast. Weights and code "
        "stay the\nsame; results agree within rounding."
    )


def plot(found: Sequence[Machine]) -> tuple[str, str]:
    """Returns README's plot as SVG, and its Markdown: sentences a second in three precisions."""
    one = shown_machine(found)
    labels = {
        "PyTorch": (COLOURS["torch"], ("torch eager", "quantize_dynamic")),
        "ONNX Runtime": (COLOURS["ONNX Runtime"], ("ONNX Runtime",)),
        "OpenVINO": (COLOURS["OpenVINO"], ("OpenVINO",)),
        "torch.compile, tuned (int8: torchao)": (COLOURS["torch.compile"], ("inductor tuned", "torchao")),
        "transformer_fast": (COLOURS["cpu"], (OURS,)),
    }
    groups: dict[str, dict[str, tuple[float, str]]] = {}
    for precision in ("float32", "bfloat16", "int8"):
        rows = {r.candidate: r for r in _rows(one, TEXT, _SORTED.format("MiniLM", precision)) if r.time}
        for label, (colour, names) in labels.items():
            for name in names:
                if name in rows:
                    row = rows[name]
                    value = (row.items or 0) / row.time.median  # type: ignore[union-attr]
                    groups.setdefault(precision, {})[label] = value, colour
    told = "; ".join(
        f"{name}: {', '.join(f'{label} {value:.0f}' for label, (value, _) in group.items())}"
        for name, group in groups.items()
    )
    title = "Sentences a second, MiniLM-size encoder"
    picture = report.bars(groups, f"{title} ({machine.cpu(one.about)}, {one.about['threads']} threads)")
    return picture, f"![{title}. {told}.](benchmarks/results/{PLOT.name})"


def quality(found: Sequence[Machine]) -> str:
    """Returns a sentence on what int8 does to the ranking of a released model's vectors."""
    one = next((one for one in found if RELEASED in one.suites), None)
    if one is None:
        return ""
    scores = {
        (precision_of(row.case), row.candidate): row.scores
        for row in one.suites[RELEASED]["rows"]
        if row.scores
    }
    rank = {key: f"{value['reciprocal rank']:.3f}" for key, value in scores.items()}
    cosine = scores["int8", OURS]["worst cosine"]
    parts = [
        f"{rank['float32', 'torch eager']} in float32",
        f"{rank['bfloat16', OURS]} in our bfloat16",
        f"{rank['int8', OURS]} in our int8 (cosine of the worst vector {cosine:.4f})",
    ]
    for name, text in (("OpenVINO", "in OpenVINO's int8"), ("quantize_dynamic", "with `quantize_dynamic`")):
        if ("int8", name) in rank:
            parts.append(f"{rank['int8', name]} {text}")
    return (
        "**What int8 costs, on real weights:** all-MiniLM-L6-v2 ranks the right text among 600 for 600 "
        f"questions;\nmean reciprocal rank {', '.join(parts)}."
    )


def speed(folder: Path = FOLDER) -> str:
    found = machines(folder)
    return "\n\n".join(filter(None, (table(found), caption(found), quality(found), plot(found)[1])))


def fit(folder: Path = FOLDER) -> str:
    """Returns for whom it is worth it: the figures by kind of CPU."""
    found = machines(folder)
    held = [one for one in found if machine.forced_isa(one.about) == "avx2"]
    narrow = [geometric_mean(report.speed_ups_over_torch(one)) for one in held]
    wide = [
        finding.chosen.vs_torch.value
        for one in found
        if one not in held
        for finding in one.ordinary.get("layers", ())
        if finding.chosen.vs_torch
    ]
    small = worst(shown_machine(found))[0]
    assert small.against is not None and small.rival is not None
    return (
        "- **Yes**: x86-64 Linux with AVX-512 or AMX, d_model of some 512 and more, text with padding. "
        f"An encoder layer\n  is {_range(wide)} times as fast as PyTorch's best in float32.\n"
        f"- **A little**: CPUs with AVX2 only ({_range(narrow)} times, average of single ops); except in "
        "bfloat16 and\n  float16, which PyTorch is slow at there.\n"
        f"- **No**: d_model 64 to 128 (the worst row: {small.against.value:.2g} times the speed of "
        f"{named(small.rival)}), macOS, Windows, ARM:\n  PyTorch's ops run there. GPU kernels have not "
        "run on a GPU yet."
    )


def lost(folder: Path = FOLDER) -> str:
    """Returns the worst cases, the worst of each suite, and how many there are."""
    one = shown_machine(machines(folder))
    first = {found.suite: found for found in reversed(worst(one))}
    bullets = [
        f"- {spelled(found)}: {report.seconds(found.chosen)}; {named(found.rival)} takes "  # type: ignore[arg-type]
        f"{report.seconds(found.rival)} ({found.against.value:.2g}x)"  # type: ignore[union-attr]
        for found in sorted(first.values(), key=lambda f: f.against.value)[:4]  # type: ignore[union-attr]
    ]
    tail = (
        f"In {len(losses(one.all))} of {len(one.all)} cases something else is faster on this machine:\n"
        "[all cases, losses first](benchmarks/results/report.md)."
    )
    return "\n".join([*bullets, "", tail])


def _cell(kernel: Kernel | None) -> str:
    if kernel is None:
        return "-"
    _, _, _, dtypes, gradients, dropout, _ = kernel_row(kernel)
    passes = {"no": "forward", "yes": "forward, backward"}
    dropped = {"": "", "no": ", no dropout", "yes": ", dropout"}[dropout]
    return f"{dtypes}, {passes.get(gradients, 'forward, backward (not of masks)')}{dropped}"


def ops_table() -> str:
    """Returns the table of ops and backends, with limits that do not depend on the machine."""
    every = {(k.op, k.backend): k for op in OPS for k in kernels(op)}
    shown = [name for name in reversed(BACKENDS) if any(backend == name for _, backend in every)]
    rows = [
        # 'section 3.2.1' of '"Attention Is All You Need", section 3.2.1'.
        (
            f"`{op}`",
            re.sub(r"^.*?(sections? )", r"\1", spec.paper),
            *(_cell(every.get((op, name))) for name in shown),
        )
        for op, spec in OPS.items()
    ]
    headings = ("op", "in the paper", *(f"`{name}`" for name in shown))
    return markdown(headings, rows, words=len(headings))


_PARTS: dict[str, Callable[[], str]] = {
    "headline": lambda: headline(machines()), "speed": speed, "fit": fit, "lost": lost,
}  # fmt: skip


def generated(text: str) -> str:
    """Returns README with its generated parts replaced; raises ValueError for unknown parts."""
    names = {found[2] for found in _MARKED.finditer(text)}
    if names != {*_PARTS}:
        raise ValueError(f"README must have the generated parts {', '.join(_PARTS)}, not {names}")
    return _MARKED.sub(lambda found: f"{found[1]}{_PARTS[found[2]]()}\n{found[3]}", text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if ``--check`` finds that README or its plot is out of date, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true")
    what.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    before = README.read_text(encoding="utf-8")
    after, picture = generated(before), plot(machines())[0]
    if options.write:
        README.write_text(after, encoding="utf-8")
        PLOT.write_text(picture, encoding="utf-8")
        return 0
    lines = (before.splitlines(), after.splitlines(), "README.md", "generated")
    changes = list(difflib.unified_diff(*lines, lineterm="", n=0))
    if changes:
        print("\n".join(changes))
        print("README.md is out of date; run `python -m benchmarks.readme --write`")
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main())
