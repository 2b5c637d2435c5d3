"""Boxes, arrows and words in inches, for diagrams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path
from matplotlib.textpath import TextPath

Point = tuple[float, float]

FONT_SIZE = 9.0
LINE_HEIGHT = FONT_SIZE * 1.35 / 72
SUM_RADIUS = 0.12
_INK = "#222222"


def text_width(text: str, size: float = FONT_SIZE, weight: str = "normal") -> float:
    """Inches of the widest line."""
    font = FontProperties(size=size, weight=weight)
    widths = [
        TextPath((0.0, 0.0), line, prop=font).get_extents().width
        for line in text.split("\n")
        if line.strip()
    ]
    return max(widths, default=0.0) / 72


class Canvas:
    """A drawing that grows to what is put on it; `figure` makes it a picture."""

    def __init__(self) -> None:
        self._artists: list[Any] = []
        self._texts: list[tuple[float, float, str, dict[str, Any]]] = []
        #: Corners of what is on it.
        self.low, self.high = [0.0, 0.0], [0.0, 0.0]

    def _reach(self, x: float, y: float) -> None:
        self.low = [min(self.low[0], x), min(self.low[1], y)]
        self.high = [max(self.high[0], x), max(self.high[1], y)]

    def box(
        self,
        name: str,
        left: float,
        bottom: float,
        width: float,
        height: float,
        text: str,
        colour: str,
    ) -> None:
        """A box with its text in the middle; ``name`` is its artists' gid."""
        patch = FancyBboxPatch(
            (left, bottom), width, height, boxstyle="round,pad=0,rounding_size=0.07",
            facecolor=colour, edgecolor=_INK, linewidth=0.9, zorder=3, gid=name,
        )  # fmt: skip
        self._add(patch, left, bottom, width, height)
        self.text(left + width / 2, bottom + height / 2, text, gid=name)

    def frame(self, name: str, left: float, bottom: float, width: float, height: float) -> None:
        patch = FancyBboxPatch(
            (left, bottom), width, height, boxstyle="round,pad=0,rounding_size=0.12",
            facecolor="#F5F5F5", edgecolor="#888888", linewidth=0.9, zorder=1, gid=name,
        )  # fmt: skip
        self._add(patch, left, bottom, width, height)

    def _add(self, patch: Any, left: float, bottom: float, width: float, height: float) -> None:
        self._artists.append(patch)
        self._reach(left, bottom)
        self._reach(left + width, bottom + height)

    def sum(self, name: str, x: float, y: float) -> None:
        """A circle with a plus: what comes in is added."""
        circle = Circle(
            (x, y), SUM_RADIUS, facecolor="white", edgecolor=_INK, linewidth=0.9, zorder=3, gid=name
        )
        self._add(circle, x - SUM_RADIUS, y - SUM_RADIUS, 2 * SUM_RADIUS, 2 * SUM_RADIUS)
        self.text(x, y, "+", gid=name, fontsize=11)

    def line(
        self, name: str, points: Sequence[Point], *, arrow: bool = True, dashed: bool = False
    ) -> None:
        """Straight pieces through the points, with a head at the last one."""
        patch = FancyArrowPatch(
            path=Path(list(points)), arrowstyle="-|>" if arrow else "-", mutation_scale=9,
            color="#0072B2" if dashed else _INK, linewidth=1.1 if dashed else 0.9,
            linestyle=(0, (4, 2)) if dashed else "-", joinstyle="round", zorder=2, gid=name,
        )  # fmt: skip
        self._artists.append(patch)
        for point in points:
            self._reach(*point)

    def text(self, x: float, y: float, text: str, **options: Any) -> None:
        usual: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": FONT_SIZE, "zorder": 4}
        options = usual | options
        self._texts.append((x, y, text, options))
        width = text_width(text, options["fontsize"], options.get("fontweight", "normal"))
        height = (text.count("\n") + 1) * options["fontsize"] * 1.35 / 72
        if options.get("rotation"):
            width, height = height, width
        left = x - {"left": 0.0, "center": 0.5, "right": 1.0}[options["ha"]] * width
        bottom = y - {"bottom": 0.0, "center": 0.5, "top": 1.0}[options["va"]] * height
        self._reach(left, bottom)
        self._reach(left + width, bottom + height)

    def figure(self) -> Figure:
        """One inch of the drawing is one inch of the figure."""
        margin = 0.2
        left, bottom = self.low[0] - margin, self.low[1] - margin
        width = self.high[0] + margin - left
        height = self.high[1] + margin - bottom
        figure = Figure(figsize=(width, height))
        axes: Axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_xlim(left, left + width)
        axes.set_ylim(bottom, bottom + height)
        axes.set_axis_off()
        for artist in self._artists:
            axes.add_patch(artist)
        for x, y, text, options in self._texts:
            axes.text(x, y, text, parse_math=False, **options)
        return figure
