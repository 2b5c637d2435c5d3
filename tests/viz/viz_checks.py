"""What the tests of pictures look at: what is written in them, and where."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from torch import Tensor


def draw(figure: Figure) -> FigureCanvasAgg:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas


def maps(figure: Figure) -> list[Any]:
    """Axes with an image, colour bars left out."""
    return [axes for axes in figure.axes if axes.images and axes.get_label() != "<colorbar>"]


def shown(axes: Any) -> tuple[Tensor, Tensor]:
    """The numbers in an image, and where they are hidden."""
    array = axes.images[0].get_array()
    data = torch.from_numpy(numpy.ma.getdata(array).astype(numpy.float64))
    return data, torch.from_numpy(numpy.ma.getmaskarray(array).copy())


def labels(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for one in figure.legends for text in one.get_texts()]


def within(box: Any, outer: Any) -> bool:
    across = outer.x0 <= box.x0 and box.x1 <= outer.x1
    return across and outer.y0 <= box.y0 and box.y1 <= outer.y1


def assert_legible(figure: Figure) -> None:
    """All words lie within the figure, and none on another."""
    canvas = draw(figure)
    renderer = canvas.get_renderer()
    words = [
        text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()
    ]
    # Ticks beyond the ends of an axis exist, and are not drawn.
    unseen = {
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for label, place in zip(axis.get_ticklabels(), axis.get_ticklocs(), strict=False)
        if not min(axis.get_view_interval()) <= place <= max(axis.get_view_interval())
    }
    boxes = []
    for text in words:
        if text in unseen or (text.axes is not None and not text.axes.get_visible()):
            continue
        box = text.get_window_extent(renderer)
        name = text.get_text()
        assert within(box, figure.bbox), f"{name!r} leaves the figure"
        boxes.append((name, box))
    for (one, a), (other, b) in combinations(boxes, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        up = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 1 or up <= 1, f"{one!r} and {other!r} overlap"
