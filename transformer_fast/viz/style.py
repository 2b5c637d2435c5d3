"""Shared by all pictures: colours, curves and heat maps, checks of arguments."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from torch import Tensor

# Okabe and Ito's colours, for colour-blind readers too; lines also differ in their dashes.
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
#: Colour maps: from 0 up, in even steps of lightness; and around 0.
SEQUENTIAL, DIVERGING = "viridis", "PuOr_r"

TITLE_SIZE, LABEL_SIZE, TICK_SIZE = 11, 9, 8


def new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(w_pad=0.07, h_pad=0.07)  # type: ignore[call-arg]
    return figure


def image(axes: Axes, values: Any, colours: Colormap | str, low: float, high: float) -> Any:
    """Draws a heat map with one cell for each value."""
    return axes.imshow(
        values, cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="nearest"
    )


def colour_bar(figure: Figure, of: Any, beside: Any, label: str, **options: Any) -> None:
    bar = figure.colorbar(of, ax=beside, **options)
    bar.set_label(label, fontsize=LABEL_SIZE)
    bar.ax.tick_params(labelsize=TICK_SIZE)


def curve_axes(axes: Axes, x: str, y: str = "") -> None:
    """Styles the axes of curves: labels, a pale grid, no frame above and on the right."""
    axes.set_xlabel(x, fontsize=LABEL_SIZE)
    axes.set_ylabel(y, fontsize=LABEL_SIZE)
    axes.tick_params(labelsize=TICK_SIZE)
    axes.grid(color="#E5E5E5", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def head(figure: Figure, title: str | None) -> None:
    if title:
        figure.suptitle(title, fontsize=TITLE_SIZE, parse_math=False)


def check_tensor(name: str, value: Any, what: str = "a Tensor") -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be {what}, not {type(value).__name__}")
    return value.detach().cpu()


def check_float(name: str, value: Any) -> Tensor:
    """Returns the value as a CPU tensor in a dtype that NumPy supports: fp32 or fp64."""
    tensor = check_tensor(name, value, "a Tensor of floating point")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be a Tensor of floating point, not {tensor.dtype}")
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def check_index(name: str, index: int, size: int) -> int:
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"{name} must be an int, not {type(index).__name__}")
    if not 0 <= index < size:
        raise IndexError(f"{name} must be in [0, {size}), not {index}")
    return index
