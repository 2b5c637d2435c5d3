"""``python -m benchmarks.readme --write | --check``: fills in README's figures and draws its plot.

What stands between ``<!--= NAME -->`` and ``<!--/-->`` in README is `figures()[NAME]`, from the result
files: no number is typed. In a row of the table PyTorch computes in the precision of ours, and the
last row is the worst of all cases of the machine.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

from transformer_fast.measure import machine
from transformer_fast.measure.benchmark_case import Row
from transformer_fast.measure.clock import Ratio, speed_up

from . import report
from .findings import FOLDER, Machine, by_case, is_scaling, machines
from .report import COLOURS, markdown

README = Path(__file__).resolve().parents[1] / "README.md"
PLOT = FOLDER / "sentences.svg"
_MARKED = re.compile(r"(<!--= (\w+) -->)(\s?).*?\3(<!--/-->)", re.DOTALL)

TEXT, RELEASED, HALF = "text encoders", "released text encoder", "half precision"
OURS = "accelerated"
#: PyTorch's rows by precision: what a user runs without us and without tuning.
_PLAIN = ("torch", "torch eager", "torch fast path", "torch.compile")
_TORCH = {"int8": ("quantize_dynamic", "torchao")}
#: Rows in another precision than the case's: alternatives, but not what ours is divided by.
_NAMES = {
    "torch": "PyTorch",
    "inductor tuned": "torch.compile, tuned",
    "torch eager, float32": "PyTorch in float32",
    "quantize_dynamic": "PyTorch",
}


class Line(NamedTuple):
    """A row of README's table."""

    text: str
    suite: str
    case: str


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
    "feed_forward call": "one call of `feed_forward`, one row of 16 features",
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


def named(row: Row) -> str:
    return _NAMES.get(row.candidate, row.candidate)


def shown_machine(found: Sequence[Machine]) -> Machine:
    """Returns the machine of README's table: the newest with sentence encoders and all suites."""
    able = [one for one in found if {line.suite for line in LINES} <= {*one.suites}]
    return max(able, key=lambda one: str(one.about["date"]))


def _sides(rows: Sequence[Row]) -> tuple[Row | None, list[Row]]:
    """Returns the dispatcher's choice, and the other software that computed the same, fastest first."""
    ours = next((row for row in rows if row.chosen and row.time), None)
    # Where the dispatcher has PyTorch's op, that op alone is ours, too.
    others = [
        row
        for row in rows
        if row.time and row.ok and not row.chosen and (not row.ours or row.candidate in _PLAIN)
    ]
    return ours, sorted(others, key=lambda row: row.time.median)  # type: ignore[union-attr]


def cells(rows: Sequence[Row], precision: str) -> tuple[str, str, str, str]:
    """Returns the cells PyTorch, ours, speed-up, fastest alternative of a case.

    PyTorch's row is in the same precision; StopIteration if there is none.
    """
    ours, others = _sides(rows)
    assert ours is not None
    torch = next(row for row in others if row.candidate in _TORCH.get(precision, _PLAIN))
    other = next((row for row in others if row is not torch), None)

    def speed(row: Row) -> str:
        assert row.time is not None
        per_second = "" if row.items is None else f"{_three(row.items / row.time.median)} /s"
        return per_second or report.seconds(row)

    ratio = speed_up(torch.samples, ours.samples).value
    beside = "-" if other is None else f"{named(other)} {speed(other)}"
    return speed(torch), speed(ours), f"{ratio:.2g}x", beside


def _three(value: float) -> str:
    """Formats a rate with three digits: '1,200', '50.5'."""
    return f"{float(f'{value:.3g}'):,}".removesuffix(".0")


def _medians(one: Machine, case: str) -> dict[str, float]:
    """Returns candidate -> its median time in a case of sentence encoders."""
    return {row.candidate: row.time.median for row in _rows(one, TEXT, case) if row.time}


def _rows(one: Machine, suite: str, case: str) -> list[Row]:
    return next(
        rows for (_, name), rows in by_case(one.suites[suite]["rows"]).items() if name == case
    )


class Loss(NamedTuple):
    """A case in which other software is faster than the dispatcher's choice."""

    suite: str
    ours: Row
    other: Row
    ratio: Ratio

    @property
    def text(self) -> str:
        kind, _, dtype = self.suite.partition(", ")
        name = f"{self.ours.op} {self.ours.case}" + " with gradients" * (kind == "backward")
        name += f", {dtype}" if dtype and not name.endswith(dtype) else ""
        return _SPELLED.get(name, name)


def worst(one: Machine) -> list[Loss]:
    """Returns the significant losses against other software, worst first."""
    found = []
    for name, suite in one.suites.items():
        for rows in () if is_scaling(name) else by_case(suite["rows"]).values():
            ours, others = _sides(rows)
            # Other rows of "overhead" are parts of calls, such as the host's part of a GPU launch.
            if ours is None or not others or (name == "overhead" and ours.case != "call"):
                continue
            ratio = speed_up(others[0].samples, ours.samples)
            if ratio.high < 1.0:
                found.append(Loss(name, ours, others[0], ratio))
    return sorted(found, key=lambda loss: loss.ratio.value)


def _half(found: Sequence[Machine]) -> Machine | None:
    return next((one for one in found if HALF in one.suites), None)


def table(one: Machine, half: Machine | None) -> str:
    """Returns README's table: the same precision in a row, the worst case of all in the last."""
    lines = [(n.text, *cells(_rows(one, n.suite, n.case), precision_of(n.case))) for n in LINES]
    if half:
        lines.append((_HALF.text, *cells(_rows(half, HALF, _HALF.case), precision_of(_HALF.case))))
    last = worst(one)[0]
    rows = _rows(one, last.suite, last.ours.case)
    lines.append((f"*our worst:* {last.text}", *cells(rows, precision_of(last.text))))
    return markdown(("workload", "PyTorch", "ours", "speed-up", "fastest alternative"), lines, 1)


def losses(found: Sequence[Loss]) -> str:
    """Returns a list of the worst case of each of the four worst suites."""
    first = {loss.suite: loss for loss in reversed(found)}
    return "\n".join(
        f"- {loss.text}: {report.seconds(loss.ours)}, {named(loss.other)} "
        f"{report.seconds(loss.other)} ({loss.ratio.value:.2g}x)"
        for loss in sorted(first.values(), key=lambda loss: loss.ratio.value)[:4]
    )


def _range(values: Sequence[float]) -> str:
    """Formats '1.5 to 3.2'; one number if both are equal, '' if there are none."""
    if not values:
        return ""
    return " to ".join(dict.fromkeys(f"{value:.2g}" for value in (min(values), max(values))))


def encoders(found: Sequence[Machine]) -> dict[str, str]:
    """Returns the speed-ups of sentence encoders, sorted: float32 over PyTorch, int8 over float32."""
    floats, ints = [], []
    for one in found:
        cases = [
            case for _, case in by_case(one.suites[TEXT]["rows"]) if ", sorted, float32" in case
        ]
        for case in cases:
            plain, eight = (_medians(one, x) for x in (case, case.replace("float32", "int8")))
            floats.append(plain["torch eager"] / plain[OURS])
            ints.append(plain[OURS] / eight[OURS])
    return {"encoders": _range(floats), "int8": _range(ints), "cpus": str(len(found))}


#: Bars of the plot: label -> (colour, candidates, of which the first that was timed is shown).
_BARS = {
    "PyTorch": (COLOURS["torch"], ("torch eager", "quantize_dynamic")),
    "ONNX Runtime": (COLOURS["ONNX Runtime"], ("ONNX Runtime",)),
    "OpenVINO": (COLOURS["OpenVINO"], ("OpenVINO",)),
    "torch.compile, tuned (int8: torchao)": (
        COLOURS["torch.compile"], ("inductor tuned", "torchao")
    ),
    "transformer_fast": (COLOURS["cpu"], (OURS,)),
}  # fmt: skip


def plot(one: Machine) -> tuple[str, str]:
    """Returns README's plot as SVG, and its Markdown: sentences a second in three precisions."""
    groups: dict[str, dict[str, tuple[float, str]]] = {}
    for precision in ("float32", "bfloat16", "int8"):
        case = _SORTED.format("MiniLM", precision)
        timed, rows = _medians(one, case), _rows(one, TEXT, case)
        for label, (colour, names) in _BARS.items():
            for name in [name for name in names if name in timed][:1]:
                value = (rows[0].items or 0) / timed[name]
                groups.setdefault(precision, {})[label] = value, colour
    told = "; ".join(
        f"{name}: {', '.join(f'{label} {value:.0f}' for label, (value, _) in group.items())}"
        for name, group in groups.items()
    )
    title = "Sentences a second, MiniLM-size encoder, random weights"
    return report.bars(groups, title), f"![{title}. {told}.](benchmarks/results/{PLOT.name})"


def ranks(one: Machine) -> dict[str, str]:
    """Returns the mean reciprocal ranks of a released model, and the worst cosine of our int8."""
    every = {(precision_of(r.case), r.candidate): r.scores for r in one.suites[RELEASED]["rows"]}
    candidates = {
        "rank_float32": ("float32", "torch eager"),
        "rank_bfloat16": ("bfloat16", OURS),
        "rank_int8": ("int8", OURS),
        "rank_openvino": ("int8", "OpenVINO"),
        "rank_dynamic": ("int8", "quantize_dynamic"),
    }
    found = {k: f"{every[v]['reciprocal rank']:.3f}" for k, v in candidates.items()}
    return found | {"cosine": f"{every['int8', OURS]['worst cosine']:.3f}"}


def figures(folder: Path = FOLDER) -> dict[str, str]:
    """Returns name -> text for README."""
    found = machines(folder)
    one = shown_machine(found)
    half = next((x for x in found if HALF in x.suites), one)
    held = [x for x in found if machine.forced_isa(x.about) == "avx2"]
    narrow = [geometric_mean(report.speed_ups_over_torch(x)) for x in held]
    layers = [
        f.chosen.vs_torch for x in found if x not in held for f in x.ordinary.get("layers", ())
    ]
    dates = sorted({one.suites[line.suite]["machine"]["date"][:10] for line in LINES})
    lost = worst(one)
    values = {
        **encoders([x for x in found if TEXT in x.suites]),
        "table": table(one, half if half is not one else None),
        "cpu": machine.cpu(one.about),
        "setup": f"{one.about['threads']} threads, PyTorch {one.about['torch'].partition('+')[0]}",
        "dates": " to ".join(dict.fromkeys((dates[0], dates[-1]))),
        "half_cpu": machine.cpu(half.about),
        "half_date": half.about["date"][:10],
        "plot": plot(one)[1],
        "layers": _range([ratio.value for ratio in layers if ratio]),
        "avx2": _range(narrow),
        "worst": f"{lost[0].ratio.value:.2g} times the speed of {named(lost[0].other)}",
        "losses": losses(lost),
        "count": str(len(lost)),
        **next((ranks(x) for x in found if RELEASED in x.suites), {}),
    }
    return {name: value for name, value in values.items() if value}


def generated(text: str, values: Mapping[str, str]) -> str:
    """Returns README with its figures replaced; raises ValueError if one is unknown or missing."""
    names = {found[2] for found in _MARKED.finditer(text)}
    if wrong := names ^ values.keys():
        raise ValueError(f"not both in README and in the results: {', '.join(sorted(wrong))}")
    return _MARKED.sub(
        lambda found: f"{found[1]}{found[3]}{values[found[2]]}{found[3]}{found[4]}", text
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if ``--check`` finds that README or its plot is out of date, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true")
    what.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    before = README.read_text(encoding="utf-8")
    after, picture = generated(before, figures()), plot(shown_machine(machines()))[0]
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
