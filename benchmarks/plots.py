"""Pictures of results, as SVG text."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from transformer_fast.measure.contest import Row

from .findings import Finding, by_case

#: A contender keeps its colour through all pictures (Okabe and Ito's, told apart by all eyes).
_COLOURS = {
    "cpu": "#0072B2",
    "triton": "#0072B2",
    "cuda": "#56B4E9",
    "reference": "#999999",
    "torch": "#D55E00",
    "torch eager": "#D55E00",
    "torch fast path": "#E69F00",
    "torch.compile": "#CC79A7",
    "oneDNN prepacked": "#009E73",
    "ONNX Runtime": "#F0E442",
    "OpenVINO": "#56B4E9",
    "Hugging Face": "#000000",
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


def scaling(rows: Sequence[Row], title: str) -> str:
    """Time against size, one line for each contender, and the roof; both axes logarithmic."""
    series: dict[str, list[tuple[float, float, float, float]]] = {}
    roofs: dict[str, list[tuple[float, float]]] = {"roof": [], "roof of bf16 pieces": []}
    for group in by_case(rows):
        size = float(group[0].case)
        for row in group:
            if row.time is not None:
                series.setdefault(row.contender, []).append((size, *row.time[:3]))
        for row in group:
            if row.time is not None and row.roof_share:
                shares = row.roof_share, row.split_share or row.roof_share
                for roof, share in zip(roofs.values(), shares, strict=True):
                    roof.append((size, row.time.median * share))
                break
    if not series:
        return ""
    with pyplot.rc_context(_STYLE):
        figure, axes = pyplot.subplots(figsize=(7, 4.2))
        for name, points in series.items():
            sizes, medians, lows, highs = zip(*points, strict=True)
            colour = _COLOURS.get(name, "#666666")
            axes.plot(sizes, medians, "o-", color=colour, label=name, markersize=4)
            axes.fill_between(sizes, lows, highs, color=colour, alpha=0.2, linewidth=0)
        if roofs["roof of bf16 pieces"] == roofs["roof"]:
            del roofs["roof of bf16 pieces"]
        for (name, roof), dashes in zip(roofs.items(), ("--", ":"), strict=False):
            if roof:
                axes.plot(
                    *zip(*roof, strict=True), dashes, color="#555555", label=name, linewidth=1
                )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted({size for points in series.values() for size, *_ in points})
        axes.set_xticks(ticks, [f"{size:g}" for size in ticks], rotation=45)
        axes.minorticks_off()
        work, _, size_name = title.removeprefix("scaling: ").rpartition(", ")
        axes.set_xlabel(size_name)
        axes.set_ylabel("seconds")
        axes.set_title(work, loc="left")
        axes.grid(color="#e5e5e5", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend()
        return _svg(figure)


def contenders(rows: Sequence[Row], title: str) -> str:
    """Speed of every contender, in work per second relative to the roof or to the fastest."""
    groups = [g for g in by_case(rows) if any(row.time for row in g)]
    names = list(dict.fromkeys(row.contender for group in groups for row in group if row.time))
    if not groups:
        return ""
    height = 0.16 * sum(sum(row.time is not None for row in group) + 1 for group in groups)
    with pyplot.rc_context(_STYLE):
        figure, axes = pyplot.subplots(figsize=(8, 1.0 + height))
        place, labels = 0.0, []
        for group in reversed(groups):
            timed = [row for row in group if row.time is not None]
            best = min(row.time.median for row in timed if row.time is not None)
            first = place
            for row in sorted(timed, key=lambda r: names.index(r.contender), reverse=True):
                assert row.time is not None
                share = row.roof_share or best / row.time.median
                axes.barh(place, 100 * share, color=_COLOURS.get(row.contender, "#666666"))
                place += 1
            labels.append(((first + place - 1) / 2, f"{group[0].op}  {group[0].case}"))
            place += 1
        axes.set_yticks([at for at, _ in labels], [label for _, label in labels])
        axes.set_ylim(-1, place - 1)
        axes.axvline(100, color="#555555", linewidth=1, linestyle="--")
        axes.set_xlabel("per cent of the measured roof")
        axes.set_title(title, loc="left")
        marks = [
            pyplot.Rectangle((0, 0), 1, 1, color=_COLOURS.get(name, "#666666")) for name in names
        ]
        axes.legend(marks, names, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        return _svg(figure)
