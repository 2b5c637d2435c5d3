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
from operator import attrgetter
from pathlib import Path
from statistics import geometric_mean

from transformer_fast.measure import machine
from transformer_fast.measure.benchmark_case import Row
from transformer_fast.measure.clock import speed_up

from . import findings, report
from .findings import FOLDER, Finding, Machine, by_case, is_scaling, losses, machines
from .report import COLOURS, markdown

README = Path(__file__).resolve().parents[1] / "README.md"
PLOT = FOLDER / "sentences.svg"
_MARKED = re.compile(r"(<!--= (\w+) -->)(\s?).*?\3(<!--/-->)", re.DOTALL)

TEXT, RELEASED, HALF = "text encoders", "released text encoder", "half precision"
OURS = "accelerated"
#: Precision -> names of PyTorch's rows, for precisions without a row in `PYTORCH`.
_TORCH = {"int8": ("quantize_dynamic", "torchao")}
_NAMES = {
    "torch": "PyTorch",
    "inductor tuned": "torch.compile, tuned",
    "torch eager, float32": "PyTorch in float32",
    "quantize_dynamic": "PyTorch",
}


def precision_of(name: str) -> str:
    return next((one for one in ("int8", "bfloat16", "float16") if one in name), "float32")


_SORTED = "{}, sorted, {}, 2 threads"
_SIZES = {"MiniLM": ("float32", "bfloat16", "int8"), "BERT-base": ("float32", "int8")}
#: Rows of README's table: (workload, suite, case).
LINES = (
    *(
        (f"{size}-size encoder, {precision}", TEXT, _SORTED.format(size, precision))
        for size, precisions in _SIZES.items()
        for precision in precisions
    ),
    ("training step, 6+6 layers, float32", "training", "6+6, (8,128), V = 32000"),
)
_HALF = "BERT-base, 3 layers, unsorted, bfloat16, 1 thread"
#: Cases whose names README spells out.
_SPELLED = {
    "feed_forward call": "one call of `feed_forward`, one row of 8 features",
    "hand-written transformer 2+2, (1,1), V = 100, d = 64": (
        "hand-written model, 2+2 layers, d_model 64, one token, compiled"
    ),
    "encoder_layer (1,32), int8": "one encoder layer, 32 tokens, int8",
    "layer_norm 32x512 with gradients, bfloat16": (
        "LayerNorm of 32 rows, forward and backward, bfloat16"
    ),
}


def spelled(one: Finding) -> str:
    """Returns the case's name: 'attention (4,8,1024,64) with gradients, bfloat16'."""
    kind, _, dtype = one.suite.partition(", ")
    name = f"{one.chosen.op} {one.chosen.case}" + " with gradients" * (kind == "backward")
    name += f", {dtype}" if dtype and not name.endswith(dtype) else ""
    return _SPELLED.get(name, name)


def named(row: Row) -> str:
    return _NAMES.get(row.candidate, row.candidate)


def shown_machine(found: Sequence[Machine]) -> Machine:
    """Returns the machine of README's table: the newest with sentence encoders and all suites."""
    able = [one for one in found if {suite for _, suite, _ in LINES} <= {*one.suites}]
    return max(able, key=lambda one: str(one.about["date"]))


def speed(row: Row) -> str:
    """Formats sentences a second, or the time if the case has no sentences."""
    if row.items is None or row.time is None:
        return report.seconds(row)
    rate = float(f"{row.items / row.time.median:.3g}")
    return f"{rate:,}".removesuffix(".0") + " /s"


def cells(rows: Sequence[Row], precision: str) -> tuple[str, str, str, str]:
    """Returns a case's cells: PyTorch, ours, speed-up, fastest alternative.

    PyTorch's row has the same precision; raises StopIteration if there is none.
    """
    ours = next(row for row in rows if row.chosen)
    others = findings.alternatives(rows, foreign=True)
    names = _TORCH.get(precision, findings.PYTORCH)
    torch = next(row for row in others if row.candidate in names)
    other = next((row for row in others if row is not torch), None)
    ratio = speed_up(torch.samples, ours.samples).value
    beside = "-" if other is None else f"{named(other)} {speed(other)}"
    return speed(torch), speed(ours), f"{ratio:.2g}x", beside


def _medians(one: Machine, case: str) -> dict[str, float]:
    """Returns candidate -> its median time in a case of sentence encoders."""
    return {row.candidate: row.time.median for row in _rows(one, TEXT, case) if row.time}


def _rows(one: Machine, suite: str, case: str) -> list[Row]:
    cases = by_case(one.suites[suite]["rows"])
    return next(rows for (_, name), rows in cases.items() if name == case)


def worst(one: Machine) -> list[Finding]:
    """Returns the significant losses against other software, worst first."""
    found: list[Finding] = []
    for name, suite in one.suites.items():
        for rows in () if is_scaling(name) else by_case(suite["rows"]).values():
            # The other rows of "overhead" time parts of calls, such as the host's part of a launch.
            if name == "overhead" and rows[0].case != "call":
                continue
            timed = sorted(filter(attrgetter("time"), rows), key=attrgetter("time.median"))
            if timed and not timed[0].chosen:  # else no loss: skip the slow bootstrap
                found += findings.findings(rows, name, foreign=True)
    return losses(found)


def table(one: Machine, half: Machine | None) -> str:
    """Returns README's table: one precision per row; the last row is the worst case of all."""
    lines = [(text, *cells(_rows(one, *case), precision_of(text))) for text, *case in LINES]
    if half:
        text = "3 BERT-base-size layers, bfloat16, AVX2 only ¹"
        lines.append((text, *cells(_rows(half, HALF, _HALF), "bfloat16")))
    last = worst(one)[0]
    rows = _rows(one, last.suite, last.chosen.case)
    lines.append((f"*our worst:* {spelled(last)}", *cells(rows, precision_of(spelled(last)))))
    return markdown(("workload", "PyTorch", "ours", "speed-up", "fastest alternative"), lines, 1)


def listed(found: Sequence[Finding]) -> str:
    """Returns a list of the worst case of each of the four worst suites."""
    first = {loss.suite: loss for loss in reversed(found)}
    return "\n".join(
        f"- {spelled(loss)}: {report.seconds(loss.chosen)}, {named(loss.rival)} "
        f"{report.seconds(loss.rival)} ({loss.against.value:.2g}x)"
        for loss in losses([*first.values()])[:4]
        if loss.rival and loss.against
    )


def _range(values: Sequence[float]) -> str:
    """Formats '1.5 to 3.2'; one number if both are equal, '' if there are none."""
    ends = (min(values), max(values)) if values else ()
    return " to ".join(dict.fromkeys(f"{value:.2g}" for value in ends))


def encoders(found: Sequence[Machine]) -> dict[str, str]:
    """Returns README's speed-ups of sentence encoders: float32 over PyTorch, int8 over float32."""
    floats, ints = [], []
    for one in found:
        for _, case in by_case(one.suites[TEXT]["rows"]):
            if ", sorted, float32" in case:
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


def quality(found: Sequence[Machine]) -> str:
    """Returns a sentence on how each precision changes a released model's search results."""
    rows = [row for one in found for row in one.suites.get(RELEASED, {"rows": ()})["rows"]]
    every = {(precision_of(row.case), row.candidate): row.scores for row in rows if row.scores}
    words = {
        ("float32", "torch eager"): "in float32",
        ("bfloat16", OURS): "in bfloat16",
        ("int8", OURS): "in int8",
        ("int8", "OpenVINO"): "in OpenVINO's int8",
        ("int8", "quantize_dynamic"): "with `quantize_dynamic`",
    }
    parts = [f"{every[k]['reciprocal rank']:.3f} {v}" for k, v in words.items() if k in every]
    if not parts:
        return "not measured yet; `make peers` and `make bench` measure it."
    return f"all-MiniLM-L6-v2's mean reciprocal rank among 600 texts is {', '.join(parts)}."


def figures(folder: Path = FOLDER) -> dict[str, str]:
    """Returns name -> text for README."""
    found = machines(folder)
    one = shown_machine(found)
    half = next((x for x in found if HALF in x.suites), one)
    held = [x for x in found if machine.forced_isa(x.about) == "avx2"]
    narrow = [geometric_mean(ratios) for x in held if (ratios := x.over_torch("ops"))]
    layers = [ratio for x in found if x not in held for ratio in x.over_torch("layers")]
    steps = [r for r in one.suites["training"]["rows"] if r.chosen and "V = 100," in r.case]
    dates = sorted({one.suites[suite]["machine"]["date"][:10] for _, suite, _ in LINES})
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
        "layers": _range(layers),
        "avx2": _range(narrow),
        "small": _range([row.vs_torch.value for row in steps if row.vs_torch]),
        "worst": f"{lost[0].against.value:.2g} times the speed of {named(lost[0].rival)}",  # type: ignore[union-attr, arg-type]
        "losses": listed(lost),
        "count": str(len(lost)),
        "quality": quality([one] if RELEASED in one.suites else found),
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
    """Returns 1 if ``--check`` finds that README is out of date, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true")
    what.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    before = README.read_text(encoding="utf-8")
    after = generated(before, figures())
    if options.write:
        README.write_text(after, encoding="utf-8")
        PLOT.write_text(plot(shown_machine(machines()))[0], encoding="utf-8")
        return 0
    changes = [*difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)]
    if changes:
        print(*changes, "README.md is out of date: `python -m benchmarks.readme --write`", sep="\n")
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main())
