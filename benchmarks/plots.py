"""Pictures of results, as SVG text."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, NullFormatter

from transformer_fast.measure.benchmark_case import Row
from transformer_fast.measure.summary import Ratio, Summary

from .findings import Finding, by_case

#: A candidate keeps its colour through all pictures (Okabe and Ito's, told apart by all eyes).
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


def _colour(candidate: str) -> str:
    """Modules may be on several backends, as 'cpu+torch'."""
    return _COLOURS.get(candidate) or _COLOURS.get(candidate.partition("+")[0], "#666666")


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
    # No date in the file: the same results give the same picture.
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


def speed_ups(found: Sequence[Finding], title: str) -> str:
    """How many times as fast as PyTorch's best, case by case, with 95 % intervals."""
    shown = [finding.chosen for finding in found if finding.chosen.vs_torch is not None]
    if not shown:
        return ""
    with pyplot.rc_context(_STYLE):
        figure, axes = pyplot.subplots(figsize=(8, 0.8 + 0.26 * len(shown)))
        for place, row in enumerate(reversed(shown)):
            ratio = row.vs_torch
            assert ratio is not None
            colour = "#0072B2" if ratio.value >= 1.0 else "#D55E00"
            axes.plot([ratio.low, ratio.high], [place, place], color=colour, linewidth=2.5)
            axes.plot(ratio.value, place, "o", color=colour, markersize=5)
        axes.axvline(1.0, color="#999999", linewidth=1)
        axes.set_yticks(range(len(shown)), [f"{r.op}  {r.case}" for r in reversed(shown)])
        axes.set_ylim(-0.6, len(shown) - 0.4)
        _ratio_axis(axes)
        axes.set_xlabel("times as fast as PyTorch's best, with 95 % interval")
        axes.set_title(title, loc="left")
        return _svg(figure)


def _ratio_axis(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    first, last = math.floor(math.log2(min(low, 0.9))), math.ceil(math.log2(max(high, 1.1)))
    step = 1 + (last - first) // 10
    ticks = [2.0**i for i in range(first, last + 1) if i % step == 0]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


#: Lower values of a logarithmic axis than this share of the least time are not shown.
_BELOW = 1 / 30


class _Line(NamedTuple):
    """A candidate's way through the sizes."""

    sizes: list[float]
    times: list[Summary]
    #: Against PyTorch's best.
    ratios: list[Ratio | None]


def _lines(groups: Sequence[Sequence[Row]]) -> dict[str, _Line]:
    found: dict[str, _Line] = {}
    for group in groups:
        for row in group:
            if row.time is not None:
                line = found.setdefault(row.candidate, _Line([], [], []))
                line.sizes.append(float(row.case))
                line.times.append(row.time)
                line.ratios.append(row.vs_torch)
    return found


def _roofs(groups: Sequence[Sequence[Row]]) -> dict[str, list[tuple[float, float]]]:
    """(size, seconds) of the roof and, where it is another one, of the roof of bf16 pieces."""
    first, second = [], []
    for group in groups:
        row = next((row for row in group if row.time is not None and row.roof_share), None)
        if row is not None and row.time is not None and row.roof_share:
            size, time = float(row.case), row.time.median
            first.append((size, time * row.roof_share))
            second.append((size, time * (row.split_share or row.roof_share)))
    return {"roof": first} | ({"roof of bf16 pieces": second} if second != first else {})


def scaling(rows: Sequence[Row], title: str) -> str:
    """Time against size, one line for each candidate, and the roof; below, against PyTorch."""
    groups = list(by_case(rows).values())
    lines, roofs = _lines(groups), _roofs(groups)
    if not lines:
        return ""
    relative = any(any(line.ratios) for line in lines.values())
    work, _, size_name = title.removeprefix("scaling: ").rpartition(", ")
    with pyplot.rc_context(_STYLE):
        figure = pyplot.figure(figsize=(7.5, 3.6 + 1.7 * relative))
        grid = figure.add_gridspec(1 + relative, height_ratios=[3.6, 1.7][: 1 + relative])
        top = bottom = figure.add_subplot(grid[0])
        _draw_times(top, lines, roofs)
        top.set_title(f"{work}: time by {size_name}", loc="left")
        top.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        if relative:
            top.tick_params(labelbottom=False)
            bottom = figure.add_subplot(grid[1], sharex=top)
            _draw_ratios(bottom, lines)
        sizes = sorted({size for line in lines.values() for size in line.sizes})
        bottom.set_xscale("log", base=2)
        bottom.set_xticks(sizes, [f"{size:g}" for size in sizes], rotation=45)
        bottom.minorticks_off()
        bottom.set_xlabel(size_name)
        for axes in (top, bottom):
            axes.grid(color="#e5e5e5", linewidth=0.6)
            axes.set_axisbelow(True)
        return _svg(figure)


def _draw_times(
    axes: Axes, lines: Mapping[str, _Line], roofs: Mapping[str, list[tuple[float, float]]]
) -> None:
    for name, line in lines.items():
        colour = _colour(name)
        medians, lows, highs, _ = zip(*line.times, strict=True)
        axes.plot(line.sizes, medians, "o-", color=colour, label=name, markersize=4)
        axes.fill_between(line.sizes, lows, highs, color=colour, alpha=0.2, linewidth=0)
    for (name, points), dashes in zip(roofs.items(), ("--", ":"), strict=False):
        if points:
            axes.plot(*zip(*points, strict=True), dashes, color="#555555", label=name, linewidth=1)
    axes.set_yscale("log")
    least = min(time.median for line in lines.values() for time in line.times)
    axes.set_ylim(bottom=max(axes.get_ylim()[0], least * _BELOW))
    axes.yaxis.set_major_formatter(EngFormatter("s"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_ratios(axes: Axes, lines: Mapping[str, _Line]) -> None:
    axes.axhline(1.0, color="#999999", linewidth=1)
    for name, line in lines.items():
        points = [(s, r) for s, r in zip(line.sizes, line.ratios, strict=True) if r is not None]
        if points:
            colour = _colour(name)
            sizes, ratios = zip(*points, strict=True)
            axes.plot(sizes, [r.value for r in ratios], "o-", color=colour, markersize=3)
            bounds = [r.low for r in ratios], [r.high for r in ratios]
            axes.fill_between(sizes, *bounds, color=colour, alpha=0.2, linewidth=0)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}x"))
    axes.set_ylabel("times as fast\nas PyTorch")
