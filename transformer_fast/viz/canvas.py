"""Boxes, arrows and words in inches, for diagrams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Patch
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Bbox

FONT_SIZE = 9.0
LINE_HEIGHT = FONT_SIZE * 1.35 / 72
SUM_RADIUS = 0.12
_INK = "#222222"


def text_width(text: str) -> float:
    """Inches of the widest line."""
    font = FontProperties(size=FONT_SIZE)
    lines = filter(str.strip, text.split("\n"))
    return max((TextPath((0, 0), s, prop=font).get_extents().width for s in lines), default=0) / 72


def text_height(text: str) -> float:
    return (text.count("\n") + 1) * LINE_HEIGHT


class Canvas:
    """A drawing of which a unit is an inch; names become the gid of the artists."""

    def __init__(self) -> None:
        self._figure = Figure(figsize=(1.0, 1.0))
        self._axes = self._figure.add_axes((0.0, 0.0, 1.0, 1.0))
        self._axes.set_axis_off()

    def box(
        self, name: str, left: float, bottom: float, width: float, height: float, text: str,
        colour: str,
    ) -> None:  # fmt: skip
        """A box with its text in the middle."""
        self._round(name, left, bottom, width, height, 0.07, facecolor=colour, edgecolor=_INK)
        self.text(name, left + width / 2, bottom + height / 2, text)

    def frame(self, name: str, left: float, bottom: float, width: float, height: float) -> None:
        colours = {"facecolor": "#F5F5F5", "edgecolor": "#888888"}
        self._round(name, left, bottom, width, height, 0.12, zorder=1, **colours)

    def _round(
        self, name: str, left: float, bottom: float, width: float, height: float, radius: float,
        **options: Any,
    ) -> None:  # fmt: skip
        style = f"round,pad=0,rounding_size={radius}"
        self._add(FancyBboxPatch((left, bottom), width, height, style), name, **options)

    def _add(self, patch: Patch, name: str, **options: Any) -> None:
        patch.set(**{"gid": name, "zorder": 3, "linewidth": 0.9, "clip_on": False} | options)
        self._axes.add_artist(patch)

    def sum(self, name: str, x: float, y: float) -> None:
        """A circle with a plus: what comes in is added."""
        self._add(Circle((x, y), SUM_RADIUS), name, facecolor="white", edgecolor=_INK)
        self.text(name, x, y, "+", fontsize=11)

    def line(
        self, name: str, *points: tuple[float, float], arrow: bool = True, dashed: bool = False
    ) -> None:
        """Straight pieces through the points, with a head at the last one."""
        patch = FancyArrowPatch(
            path=Path(points), arrowstyle="-|>" if arrow else "-", mutation_scale=9
        )
        colour, width, style = ("#0072B2", 1.1, (0, (4, 2))) if dashed else (_INK, 0.9, "-")
        self._add(patch, name, color=colour, linewidth=width, linestyle=style, zorder=2)

    def text(self, name: str, x: float, y: float, text: str, **options: Any) -> None:
        usual: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": FONT_SIZE, "zorder": 4}
        self._axes.text(x, y, text, gid=name, parse_math=False, **usual | options)

    def extent(self) -> Bbox:
        """Of all that is on it."""
        drawn: Sequence[Any] = (*self._axes.patches, *self._axes.texts)
        boxes = [artist.get_window_extent() for artist in drawn]
        return Bbox.union(boxes).transformed(self._axes.transData.inverted())

    def figure(self) -> Figure:
        """The drawing with a margin; one inch of it is one inch of the figure."""
        found = self.extent().padded(0.2)
        self._figure.set_size_inches(found.width, found.height)
        self._axes.set(xlim=found.intervalx, ylim=found.intervaly)
        return self._figure
