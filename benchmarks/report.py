"""``python -m benchmarks report``: writes a Markdown report with plots from the result files."""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
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

from .findings import (
    FOLDER,
    LOST,
    SUMMARY,
    TEXT,
    Finding,
    ResultsError,
    by_case,
    commits_behind,
    files,
    findings,
    losses,
    read,
    table,
    taken,
    text_rows,
)

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


@dataclass(frozen=True)
class Machine:
    """The suites of one machine, from one or several files."""

    slug: str
    line: str
    suites: dict[str, Any]

    @property
    def about(self) -> dict[str, Any]:
        return _newest(self.suites)

    @cached_property
    def taken(self) -> tuple[str, str]:
        """When its first and its last suite were taken: dates and commits, as in `machine.taken`."""
        found = sorted({when for suite in self.suites.values() for when in taken(suite)})
        return found[0], found[-1]

    @property
    def title(self) -> str:
        """Such as 'AMD EPYC (Zen 5), avx512_bf16, 2 threads'."""
        isa = self.about["isa"] or "no native module"
        return f"{machine.cpu(self.about)}, {isa}, {form.count(self.about['threads'], 'thread')}"

    @cached_property
    def ordinary(self) -> list[tuple[str, dict[str, Any], list[Finding]]]:
        """(name, suite, findings) of suites shown as tables; cached: the bootstrap is slow."""
        return [
            (name, suite, findings(suite["rows"], name))
            for name, suite in self.suites.items()
            if not is_scaling(name)
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of JSON files")
    parser.add_argument(
        "--out", type=Path, help="folder of report.md and its plots (default: --results)"
    )


def _newest(suites: dict[str, Any]) -> dict[str, Any]:
    """Returns the description of the machine when the last suite was taken."""
    return max((suite["machine"] for suite in suites.values()), key=lambda about: about["date"])  # type: ignore[no-any-return]


def machines(folder: Path) -> list[Machine]:
    """Returns the machines of a folder; a machine's scaling file is merged with its other file."""
    found: dict[str, Machine] = {}
    for path in files(folder):
        slug = path.stem.removesuffix("-scaling")
        suites = read(path)
        if not suites:
            continue
        line = machine.line(_newest(suites))
        known = found.get(slug)
        joined = suites if known is None else known.suites | suites
        found[slug] = Machine(slug, line if known is None else known.line, joined)
    return list(found.values())


def is_scaling(suite: str) -> bool:
    """True if the suite is shown as a plot instead of a table."""
    return suite.startswith("scaling: ")


def all_findings(one: Machine) -> list[Finding]:
    """Returns the findings of all suites except overhead and scaling."""
    return [finding for name, _, found in one.ordinary if name != "overhead" for finding in found]


def is_of_int8(finding: Finding) -> bool:
    """True for ops of 8 bits, which PyTorch does not have: its row is our formula in its operators."""
    return finding.chosen.op.startswith("int8_")


def speedups_over_torch(one: Machine) -> list[float]:
    """Returns the speed-ups over PyTorch's best in all cases of the machine that it has, too."""
    found = (f for f in all_findings(one) if not is_of_int8(f))
    return [f.chosen.vs_torch.value for f in found if f.chosen.vs_torch is not None]


def mean_vs_torch(one: Machine) -> float | None:
    """Returns the geometric mean of `speedups_over_torch`."""
    ratios = speedups_over_torch(one)
    return geometric_mean(ratios) if ratios else None


def headline(one: Machine) -> str:
    """Returns two sentences that summarise the machine's cases."""
    found = all_findings(one)
    if not found:
        return "Only how time grows with size was measured."
    text, mean = f"{form.count(len(found), 'case')} timed", mean_vs_torch(one)
    if mean is not None:
        text += f": on average {form.times(mean)} the speed of PyTorch's best (geometric mean)"
    return f"{text}. In {len(losses(found))} of them something else was faster."


#: Peers with thread pools of their own, and calls of milliseconds.
_OTHER_THREADS = ("OpenVINO", "ONNX Runtime")


def hurried(one: Machine) -> str:
    """Returns a warning if figures predate `Plan.rest`, the wait for the previous one's threads."""
    suites = [
        name
        for name, suite in one.suites.items()
        if "rest" not in suite.get("plan", {})
        and any(row.candidate in _OTHER_THREADS and row.time for row in suite["rows"])
    ]
    if not suites:
        return ""
    return (
        f"Taken before candidates waited for one another's threads ({', '.join(suites)}): "
        f"{' and '.join(_OTHER_THREADS)} look up to 10 ms a call slower there than they are."
    )


def _beside(one: Machine) -> str:
    """Returns the text below the headline: peaks, versions of all peers, a warning."""
    versions: dict[str, str] = {}
    for suite in one.suites.values():
        versions |= suite["machine"].get("peers") or {}
    parts = [f"{name} {version}" for name, version in sorted(versions.items())]
    peers = f"Peers: {', '.join(parts)}." if parts else ""
    return " ".join(text for text in (machine.peaks_line(one.about), peers, hurried(one)) if text)


def _age(suite: dict[str, Any]) -> str:
    """Returns a sentence: when the suite's cases were taken, and what has changed since."""
    parts = []
    for when, cases in taken(suite).items():
        behind = commits_behind(when)
        since = (
            "its commit is not in this history"
            if behind is None
            else f"csrc: {behind} commits since"
        )
        parts.append(f"{when} ({form.count(cases, 'case')}; {since})")
    return f"Taken {', '.join(parts)}."


def _replaced_by(one: Machine, others: Iterable[Machine]) -> str:
    """Returns a sentence if newer results of such a machine are in another file."""
    newest = max(
        (other for other in others if other.title == one.title), key=lambda x: str(x.about["date"])
    )
    if newest.about["date"] == one.about["date"]:
        return ""
    return f"History: newer results of such a machine are those of {newest.line}."


# Plots, as SVG text.

#: Candidate -> colour, the same in all plots (Okabe and Ito's palette, safe for colour blindness).
_COLOURS = {
    "cpu": "#0072B2",
    "triton": "#0072B2",
    "cuda": "#56B4E9",
    "reference": "#999999",
    "torch": "#D55E00",
    "torch eager": "#D55E00",
    "torch fast path": "#E69F00",
    "torch.compile": "#CC79A7",
    "inductor tuned": "#882255",
    "zentorch": "#44AA99",
    "oneDNN prepacked": "#009E73",
    "ONNX Runtime": "#C9B800",
    "OpenVINO": "#56B4E9",
    "Hugging Face": "#000000",
    "CTranslate2": "#8A5A2B",
    "rewritten": "#0072B2",
    "transformer_fast.nn": "#6A3D9A",
}

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "transformer_fast",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    # No date in the file, so that the same results give the same plot.
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


def speed_ups(found: Sequence[Finding], title: str) -> str:
    """Plots the speed-ups over PyTorch's best, case by case, with 95 % intervals; returns SVG."""
    shown = [(one.chosen, one.chosen.vs_torch) for one in reversed(found) if one.chosen.vs_torch]
    if not shown:
        return ""
    with pyplot.rc_context(_STYLE):
        figure, axes = pyplot.subplots(figsize=(8, 0.8 + 0.26 * len(shown)))
        for place, (_, ratio) in enumerate(shown):
            colour = "#0072B2" if ratio.value >= 1.0 else "#D55E00"
            axes.plot([ratio.low, ratio.high], [place, place], color=colour, linewidth=2.5)
            axes.plot(ratio.value, place, "o", color=colour, markersize=5)
        axes.axvline(1.0, color="#999999", linewidth=1)
        axes.set_yticks(range(len(shown)), [f"{row.op}  {row.case}" for row, _ in shown])
        axes.set_ylim(-0.6, len(shown) - 0.4)
        axes.set_xscale("log", base=2)
        low, high = axes.get_xlim()
        first, last = math.floor(math.log2(min(low, 0.9))), math.ceil(math.log2(max(high, 1.1)))
        step = 1 + (last - first) // 10
        ticks = [2.0**i for i in range(first, last + 1) if i % step == 0]
        axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
        axes.minorticks_off()
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel("times the speed of PyTorch's best, with 95 % interval")
        axes.set_title(title, loc="left")
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
        colour = _COLOURS.get(name) or _COLOURS.get(name.partition("+")[0], "#666666")
        sizes, middles, lows, highs = zip(*found, strict=True)
        axes.plot(sizes, middles, "o-", color=colour, label=name, markersize=size)
        axes.fill_between(sizes, lows, highs, color=colour, alpha=0.2, linewidth=0)


def _draw_roofs(axes: Axes, groups: Iterable[Sequence[Row]]) -> None:
    """Draws the roofline's time by size, and that of fp32's second roof if it has one."""
    first, second = [], []
    for group in groups:
        row = next((row for row in group if row.time is not None and row.roof_share), None)
        if row is not None and row.time is not None and row.roof_share:
            size, time = float(row.case), row.time.median
            first.append((size, time * row.roof_share))
            second.append((size, time * (row.split_share or row.roof_share)))
    for name, points, dashes in (("roof", first, "--"), ("roof of bf16 pieces", second, ":")):
        if points and (points is first or second != first):
            axes.plot(*zip(*points, strict=True), dashes, color="#555555", label=name, linewidth=1)


def scaling(rows: Sequence[Row], title: str) -> str:
    """Plots time by size for each candidate and the roofline; below, the speed relative to PyTorch."""
    timed = [row for row in rows if row.time is not None]
    if not timed:
        return ""
    relative = any(row.vs_torch for row in timed)
    work, _, size_name = title.removeprefix("scaling: ").rpartition(", ")
    with pyplot.rc_context(_STYLE):
        figure = pyplot.figure(figsize=(7.5, 3.6 + 1.7 * relative))
        grid = figure.add_gridspec(1 + relative, height_ratios=[3.6, 1.7][: 1 + relative])
        top = bottom = figure.add_subplot(grid[0])
        _draw_lines(top, timed, lambda row: row.time, 4)
        _draw_roofs(top, by_case(rows).values())
        top.set_yscale("log")
        least = min(row.time.median for row in timed if row.time)
        top.set_ylim(bottom=max(top.get_ylim()[0], least * _BELOW))
        top.yaxis.set_major_formatter(EngFormatter("s"))
        top.yaxis.set_minor_formatter(NullFormatter())
        top.set_title(f"{work}: time by {size_name}", loc="left")
        top.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        if relative:
            top.tick_params(labelbottom=False)
            bottom = figure.add_subplot(grid[1], sharex=top)
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
        for axes in (top, bottom):
            axes.grid(color="#e5e5e5", linewidth=0.6)
            axes.set_axisbelow(True)
        return _svg(figure)


# The report.


def _picture(svg: str, name: str, file: Path) -> str:
    """Writes the SVG to the file and returns a Markdown link; '' if there is no plot."""
    if not svg:
        return ""
    file.write_text(svg, encoding="utf-8")
    return f"![{name}]({file.parent.name}/{file.name})"


def _parts(found: list[Machine], pictures: Path) -> Iterator[str]:
    """Yields the paragraphs of the report; '' is skipped."""
    yield "# Benchmarks"
    yield LEGEND
    for one in found:
        yield f"## {one.line}"
        yield _replaced_by(one, found)
        yield f"{headline(one)} {_beside(one)}".strip()
        failed = {name: form.failures(suite["rows"]) for name, suite in one.suites.items()}
        if wrong := [f"- {name}: {line}" for name, lines in failed.items() for line in lines]:
            yield "### Wrong results"
            yield "\n".join(wrong)
        yield "### Losses: cases in which another is faster"
        lost = losses(all_findings(one))
        yield table(lost, LOST) if lost else "None."

        def file(name: str, slug: str = one.slug) -> Path:
            plain = "".join(c if c.isalnum() else "-" for c in name.lower())
            return pictures / f"{slug}-{plain}.svg"

        for name, suite, cases in one.ordinary:
            yield f"### {name}"
            yield _age(suite)
            svg = speed_ups(cases, f"{name}: {one.title}")
            yield _picture(svg, "speed-ups", file(name))
            yield text_rows(suite["rows"]) if name == TEXT else ""
            yield table(cases, SUMMARY)
        for name, suite in one.suites.items():
            if is_scaling(name) and (svg := scaling(suite["rows"], name)):
                yield f"### {name}"
                yield _picture(svg, name, file(name))


def markdown(found: list[Machine], pictures: Path) -> str:
    """Returns the whole report as Markdown; writes the plots to ``pictures``."""
    return "\n\n".join(filter(None, _parts(found, pictures))) + "\n"


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Writes the report and returns 0; exits with 2 if there are no results."""
    console = output()
    try:
        found = machines(options.results)
    except (OSError, ResultsError) as error:
        parser.error(str(error))
    if not found:
        parser.error(f"there are no result files in {options.results}; run `make bench` first")
    out = options.out or options.results
    pictures = out / "plots"
    pictures.mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text(markdown(found, pictures), encoding="utf-8")
    for one in found:
        console.print(f"{one.line}\n  {headline(one)}")
    console.print(f"written: {out / 'report.md'}")
    return 0
