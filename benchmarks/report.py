"""``python -m benchmarks report``: tables and plots of the result files, as Markdown and SVG.

The report in the repository has the tables; `make docs` draws the plots into the site.
"""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, NullFormatter

from transformer_fast._console import output
from transformer_fast.cli import form
from transformer_fast.measure import machine
from transformer_fast.measure.benchmark_case import Row
from transformer_fast.measure.clock import Ratio, Summary

from . import findings
from .findings import FOLDER, Finding, Machine, by_case, is_scaling, losses

LEGEND = (
    "Every figure is the median of samples taken in rounds. In each round all candidates of a case "
    "run in shuffled order in one process, on fresh inputs, after their results were checked against "
    "fp64. Ratios carry the 95 % interval of a bootstrap over rounds. *on*: the backend that the "
    "dispatcher chooses. *roof*: share of the speed that the arithmetic peak and the bandwidth, "
    "measured beside the case, would allow for the unmasked work. On AMX an fp32 product can be made "
    "of six products of bfloat16 pieces on tiles, with fp32's precision: 100 % is then "
    "still the peak of fp32's multiply-adds, which may be exceeded; the figure in parentheses is the "
    "share of a sixth of the tiles' rate. *MiB*: peak memory of a call, less what was in use "
    "before. *error in refs*: largest error against fp64 in units of "
    "the reference's own."
)
#: Text below every table of sentence encoders.
RANDOM = (
    "Sentences a second; in parentheses the cosine of the worst sentence to fp64's. **The weights "
    "are random**: speeds are those of released models of these sizes, errors in 8 bits are not."
)
RELEASED = (
    "Sentences a second; in parentheses the cosine of the worst timed sentence to fp64's. The "
    "weights are those of all-MiniLM-L6-v2. *reciprocal rank*: mean over 600 questions of 1 / the "
    "rank of the right text among 600; *worst cosine*: to PyTorch's float32, of these 1,200 texts."
)
UNDER_REVIEW = (
    "CTranslate2's rows are under review: on virtual Intel CPUs it is slower than Hugging Face in "
    "float32, which its own figures contradict. Do not quote them."
)


# Tables.


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], words: int) -> str:
    """Formats a Markdown table; the first ``words`` columns are left-aligned, the others right."""
    marks = ["---"] * words + ["---:"] * (len(headings) - words)
    lines = [headings, marks, *rows]
    escaped = ((cell.replace("|", "\\|") for cell in line) for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)


def interval(ratio: Ratio | None) -> str:
    """Formats a ratio: '1.70x (1.66-1.75)'."""
    return f"{form.times(ratio.value)} ({form.interval(*ratio[1:])})" if ratio else ""


def seconds(row: Row | None) -> str:
    return form.seconds(row.time.median) if row is not None and row.time is not None else ""


def _rates(row: Row) -> str:
    """Formats Gflop/s: '412', or '206 (412)' if half is masked out, dense in parentheses."""
    if row.time is None or row.flops == 0.0:
        return ""
    useful, dense = (form.rate(n, row.time.median) for n in (row.useful_flops, row.flops))
    return useful if row.useful_flops == row.flops else f"{useful} ({dense})"


def _roof(row: Row) -> str:
    """Formats '57 %', or '113 % (44 %)' with the share of fp32's second roof in parentheses."""
    second = "" if row.split_share is None else f" ({form.percent(row.split_share)})"
    return form.percent(row.roof_share) + second


#: Column heading -> function that formats its cells; the first four are words.
COLUMNS: dict[str, Callable[[Finding], str]] = {
    "suite": lambda found: found.suite,
    "op": lambda found: found.chosen.op,
    "case": lambda found: found.chosen.case,
    "on": lambda found: found.chosen.candidate,
    "time": lambda found: seconds(found.chosen),
    "vs reference": lambda found: form.times(getattr(found.chosen.vs_reference, "value", None)),
    "vs torch's best (95 %)": lambda found: interval(found.chosen.vs_torch),
    "fastest other": lambda found: "" if found.rival is None else found.rival.candidate,
    "its time": lambda found: seconds(found.rival),
    "vs it (95 %)": lambda found: interval(found.against),
    "Gflop/s (dense)": lambda found: _rates(found.chosen),
    "roof": lambda found: _roof(found.chosen),
    "MiB": lambda found: form.three_digits(n / 2**20) if (n := found.chosen.peak_bytes) else "",
    "error in refs": lambda found: form.times(found.chosen.error_ratio),
}


def table(found: Iterable[Finding], start: int = 0) -> str:
    """Formats a Markdown table with a line per case, without the first ``start`` columns."""
    headings = list(COLUMNS)[start:]
    return markdown(headings, ([COLUMNS[one](f) for one in headings] for f in found), 4 - start)


def _of_text(row: Row | None) -> str:
    """Formats sentences a second and their lowest cosine to fp64: '231 (0.99993)'."""
    if row is None or row.time is None or row.items is None or row.error is None:
        return ""
    # The error is the distance of unit vectors.
    return f"{form.three_digits(row.items / row.time.median)} ({1 - row.error**2 / 2:.5f})"


def texts(rows: Sequence[Row]) -> str:
    """Formats tables of sentence encoders: all candidates, and what they score; '' if there are none."""
    if rows[0].op != "text_encoder":
        return ""
    names = list(dict.fromkeys(row.candidate for row in rows if row.time is not None))
    lines = []
    for (_, case), group in by_case(rows).items():
        known = {row.candidate: row for row in group}
        lines.append([case, *(_of_text(known.get(name)) for name in names)])
    shown = markdown(("sentences a second (cosine)", *names), lines, 1)
    scored = [row for row in rows if row.scores]
    if not scored:
        return f"{shown}\n\n{RANDOM}"
    heads = tuple(scored[0].scores)
    lines = [
        [row.case, row.candidate, *(f"{row.scores[one]:.4f}" for one in heads)] for row in scored
    ]
    return f"{shown}\n\n{markdown(('case', 'on', *heads), lines, 2)}\n\n{RELEASED}"


def headline(one: Machine) -> str:
    """Returns two sentences that summarise the machine's cases."""
    if not one.all:
        return "Only how time grows with size was measured."
    text, ratios = f"{form.count(len(one.all), 'case')} timed", one.over_torch()
    if ratios:
        mean = form.times(geometric_mean(ratios))
        text += f": on average {mean} the speed of PyTorch's best (geometric mean)"
    return f"{text}. In {len(losses(one.all))} of them something else was faster."


def _notes(one: Machine, others: Iterable[Machine]) -> str:
    """Returns what a reader of the machine's figures needs: peaks, versions, warnings."""
    peers: dict[str, str] = {}
    timed: set[str] = set()
    hurried = []
    for name, suite in one.suites.items():
        peers |= suite["machine"].get("peers") or {}
        names = {row.candidate for row in suite["rows"] if row.time}
        timed |= names
        # Without `Plan.rest`, which older runs did not have.
        if names & {"OpenVINO", "ONNX Runtime"} and "rest" not in suite.get("plan", {}):
            hurried.append(name)
    newest = max((x for x in others if x.title == one.title), key=lambda x: str(x.about["date"]))
    parts = [
        machine.peaks_line(one.about),
        f"Peers: {', '.join(map(' '.join, sorted(peers.items())))}." if peers else "",
        f"Taken before candidates waited for one another's threads ({', '.join(hurried)}): OpenVINO "
        "and ONNX Runtime look up to 10 ms a call slower there than they are." if hurried else "",
        UNDER_REVIEW if "Intel" in one.about["cpu"] and "CTranslate2" in timed else "",
        "" if newest is one else
        f"History: newer results of such a machine are those of {machine.line(newest.about)}.",
    ]  # fmt: skip
    return " ".join(filter(None, parts))


def _taken(suite: dict[str, Any]) -> str:
    parts = (
        f"{when} ({form.count(cases, 'case')})" for when, cases in findings.taken(suite).items()
    )
    clock = " Times are CPU time of one thread." if suite.get("plan", {}).get("cpu_time") else ""
    return f"Taken {', '.join(parts)}.{clock}"


# Plots, as SVG text.

#: Candidate -> colour, the same in all plots (Okabe and Ito's palette, safe for colour blindness).
COLOURS = {
    "cpu": "#0072B2",
    "triton": "#0072B2",
    "cuda": "#56B4E9",
    "reference": "#999999",
    "torch": "#D55E00",
    "torch.compile": "#CC79A7",
    "zentorch": "#44AA99",
    "oneDNN prepacked": "#009E73",
    "ONNX Runtime": "#C9B800",
    "OpenVINO": "#56B4E9",
}

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "transformer_fast",
    "font.size": 9,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e5e5e5",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    # No date in the file, so that the same results give the same plot.
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


@pyplot.rc_context(_STYLE)
def bars(groups: Mapping[str, Mapping[str, tuple[float, str]]], title: str) -> str:
    """Plots groups of bars, with their values above them; returns SVG.

    ``groups``: name -> (label of a bar -> (value, colour)); labels are those of the first group.
    """
    figure, axes = pyplot.subplots(figsize=(8, 3.4))
    labels = list(dict.fromkeys(label for group in groups.values() for label in group))
    width = 0.86 / len(labels)
    for place, label in enumerate(labels):
        shown = [(i, *group[label]) for i, group in enumerate(groups.values()) if label in group]
        at, values, colours = zip(*shown, strict=True)
        left = [i + width * place for i in at]
        drawn = axes.bar(left, values, 0.92 * width, color=colours, label=label)
        axes.bar_label(drawn, [f"{value:,.0f}" for value in values], padding=2, fontsize=9)
    middles = [i + width * (len(labels) - 1) / 2 for i in range(len(groups))]
    axes.set_xticks(middles, list(groups), fontsize=11)
    axes.grid(axis="x", visible=False)
    axes.tick_params(length=0)
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(loc="upper left", fontsize=10)
    return _svg(figure)


@pyplot.rc_context(_STYLE)
def speed_ups(found: Sequence[Finding], title: str) -> str:
    """Plots the speed-ups over PyTorch's best, case by case, with 95 % intervals; returns SVG."""
    shown = [(one.chosen, one.chosen.vs_torch) for one in reversed(found) if one.chosen.vs_torch]
    if not shown:
        return ""
    figure, axes = pyplot.subplots(figsize=(8, 0.8 + 0.26 * len(shown)))
    for place, (_, ratio) in enumerate(shown):
        colour = COLOURS["cpu"] if ratio.value >= 1.0 else COLOURS["torch"]
        axes.plot(ratio[1:], [place, place], color=colour, linewidth=2.5)
        axes.plot(ratio.value, place, "o", color=colour, markersize=5)
    axes.axvline(1.0, color="#999999", linewidth=1)
    axes.set_yticks(range(len(shown)), [f"{row.op}  {row.case}" for row, _ in shown])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.minorticks_off()
    axes.set_title(f"{title}: times the speed of PyTorch's best, 95 % interval", loc="left")
    return _svg(figure)


#: Lower limit of a logarithmic time axis, as a fraction of the shortest time.
_BELOW = 1 / 30


def _draw_lines(
    axes: Axes, rows: Iterable[Row], figure: Callable[[Row], Summary | Ratio | None], size: int
) -> None:
    """Draws a line with an error band for each candidate; x is the size, which is the case's name."""
    points: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in rows:
        if row.time is not None and (found := figure(row)) is not None:
            points.setdefault(row.candidate, []).append((float(row.case), *found[:3]))
    for name, found in points.items():
        # Modules may run on several backends, such as 'cpu+torch'.
        colour = COLOURS.get(name.partition("+")[0], "#666666")
        sizes, middles, lows, highs = zip(*found, strict=True)
        axes.plot(sizes, middles, "o-", color=colour, label=name, markersize=size)
        axes.fill_between(sizes, lows, highs, color=colour, alpha=0.2, linewidth=0)


def _draw_roofs(axes: Axes, rows: Sequence[Row]) -> None:
    """Draws the roofline's time by size, and that of fp32's second roof if it has one."""
    able = [g[0] for g in by_case([r for r in rows if r.roof_share]).values()]
    for name, dashes, label in (
        ("roof_share", "--", "roof"), ("split_share", ":", "roof of bf16 pieces")
    ):  # fmt: skip
        shares = [(row, share) for row in able if row.time and (share := getattr(row, name))]
        points = [(float(row.case), row.time.median * share) for row, share in shares if row.time]
        if points:
            axes.plot(*zip(*points, strict=True), dashes, color="#555555", label=label, linewidth=1)


@pyplot.rc_context(_STYLE)
def scaling(rows: Sequence[Row], title: str) -> str:
    """Plots time by size for each candidate and the roofline; below, the speed relative to PyTorch."""
    timed = [row for row in rows if row.time is not None]
    if not timed:
        return ""
    work, _, size_name = title.removeprefix("scaling: ").rpartition(", ")
    figure, (top, bottom) = pyplot.subplots(
        2, sharex=True, figsize=(7.5, 5.3), height_ratios=[3.6, 1.7]
    )
    _draw_lines(top, timed, lambda row: row.time, 4)
    _draw_roofs(top, timed)
    top.set_yscale("log")
    least = min(row.time.median for row in timed if row.time)
    top.set_ylim(bottom=max(top.get_ylim()[0], least * _BELOW))
    top.yaxis.set_major_formatter(EngFormatter("s"))
    top.yaxis.set_minor_formatter(NullFormatter())
    top.set_title(f"{work}: time by {size_name}", loc="left")
    top.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    bottom.axhline(1.0, color="#999999", linewidth=1)
    _draw_lines(bottom, timed, lambda row: row.vs_torch, 3)
    bottom.set_yscale("log", base=2)
    bottom.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}x"))
    bottom.set_ylabel("times the speed\nof PyTorch")
    sizes = sorted({float(row.case) for row in timed})
    bottom.set_xscale("log", base=2)
    bottom.set_xticks(sizes, [f"{size:g}" for size in sizes], rotation=45)
    bottom.minorticks_off()
    bottom.set_xlabel(size_name)
    return _svg(figure)


# The report.


def page(one: Machine, others: Iterable[Machine], pictures: Path | None = None) -> Iterator[str]:
    """Yields the paragraphs on a machine; some are ''. Writes plots to ``pictures`` if given."""

    def picture(name: str, draw: Callable[..., str], shown: Sequence[Any]) -> str:
        if pictures is None or not (svg := draw(shown, name)):
            return ""
        file = pictures / f"{one.slug}-{re.sub('[^a-z0-9]', '-', name.lower())}.svg"
        file.write_text(svg, encoding="utf-8")
        return f"![{name}]({pictures.name}/{file.name})"

    notes = _notes(one, others)
    yield f"{headline(one)} {notes}".strip()

    def shown(found: Iterable[Finding], start: int = 0) -> str:
        name = " CTranslate2 "
        marked = f"{name}(under review) " if UNDER_REVIEW in notes else name
        return table(found, start).replace(name, marked)

    failed = {name: form.failures(suite["rows"]) for name, suite in one.suites.items()}
    if wrong := [f"- {name}: {line}" for name, lines in failed.items() for line in lines]:
        yield "### Wrong results"
        yield "\n".join(wrong)
    yield "### Losses: cases in which another is faster"
    lost = losses(one.all)
    yield shown(lost) if lost else "None."
    for name, cases in one.ordinary.items():
        yield f"### {name}"
        yield _taken(one.suites[name])
        yield picture(name, speed_ups, cases)
        yield texts(one.suites[name]["rows"])
        yield shown(cases, 1)
    for name in filter(is_scaling, one.suites if pictures else ()):
        yield f"### {name}"
        yield picture(name, scaling, one.suites[name]["rows"])


def report(found: Sequence[Machine]) -> str:
    """Returns the whole report as Markdown, without plots."""
    parts = ["# Benchmarks", LEGEND]
    for one in found:
        parts += [f"## {machine.line(one.about)}", *page(one, found)]
    return "\n\n".join(filter(None, parts)) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of JSON files")


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Writes report.md beside the results and returns 0; exits with 2 if there are no results."""
    try:
        found = findings.machines(options.results)
    except (OSError, findings.ResultsError) as error:
        parser.error(str(error))
    if not found:
        parser.error(f"there are no result files in {options.results}; run `make bench` first")
    file = options.results / "report.md"
    file.write_text(report(found), encoding="utf-8")
    output().print(f"written: {file}")
    return 0
