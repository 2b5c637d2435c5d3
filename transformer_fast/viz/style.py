"""What all pictures have in common: colours, tokens on axes, checks of arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

# Okabe and Ito's colours, told apart by all eyes; never the only thing that tells lines apart.
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
VISIBLE, HIDDEN, BLIND = "#56B4E9", "#D9D9D9", "#D55E00"
_HIDDEN: Any = {"facecolor": HIDDEN, "edgecolor": "#B8B8B8", "hatch": "////", "linewidth": 0.0}
#: From nothing to much, in even steps of lightness; and around zero.
SEQUENTIAL, DIVERGING = "viridis", "PuOr_r"

TITLE_SIZE, LABEL_SIZE, TICK_SIZE = 11, 9, 8
#: Inches that a tick's label takes across its axis.
_TICK_SPACE = TICK_SIZE * 1.35 / 72
_LONGEST_TOKEN = 16


def new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(w_pad=0.07, h_pad=0.07)  # type: ignore[call-arg]
    return figure


def legend_entry(label: str, colour: str | None = None) -> Patch:
    """For a colour, or for what is hidden."""
    return Patch(label=label, **({"facecolor": colour} if colour else _HIDDEN))


class Map(NamedTuple):
    """A query's values for each key, as a picture."""

    title: str
    #: (T, S), shown where not `hidden`.
    values: Tensor
    hidden: Tensor
    #: Ends of the scale of colours; None: there is one colour, `VISIBLE`.
    limits: tuple[float, float] | None = None


def draw_maps(
    rows: Sequence[Sequence[Map]],
    queries: Sequence[str],
    keys: Sequence[str],
    most: float,
    narrowest: float,
    scale: str,
    legend: list[Patch],
    title: str | None,
) -> tuple[Figure, Any]:
    """Rows of maps, with their tokens at the left and below; the figure, and its axes as an array.

    A map has at most ``most`` inches, unless it could not be seen then, and is at least ``narrowest``
    wide. ``scale``: what the colours of maps with limits stand for.
    """
    across, longest = max(map(len, rows)), max(len(queries), len(keys))
    cell = max(min(0.26, most / longest), 1.3 / longest)
    height, width = max(cell * len(queries), 0.6), max(cell * len(keys), narrowest)
    scaled = any(one.limits for row in rows for one in row)
    figure = new_figure(
        max(across * (width + 0.2) + token_inches(queries) + (1.7 if scaled else 0.8), 3.4),
        len(rows) * (height + 0.25) + token_inches(keys) + (1.15 if legend else 0.8),
    )
    panels = figure.subplots(len(rows), across, squeeze=False)
    bar = None
    for i, row in enumerate(rows):
        for panel, one in zip(panels[i], row, strict=False):
            # Behind the image: grey, and hatched, so that no pale colour is like it.
            panel.patch.set(**_HIDDEN)
            values = numpy.ma.array(one.values.numpy(), mask=one.hidden.numpy())
            colours: Colormap = ListedColormap([VISIBLE])
            if one.limits:
                colours = colormaps[DIVERGING if one.limits[0] < 0 else SEQUENTIAL]
            drawn = image(panel, values, colours.with_extremes(bad="none"), *one.limits or (0, 1))
            bar = drawn if one.limits else bar
            panel.set_title(one.title, fontsize=LABEL_SIZE)
            label_tokens(panel.xaxis, keys, width)
            label_tokens(panel.yaxis, queries, height)
            panel.tick_params(labelleft=panel is panels[i, 0], labelbottom=i == len(rows) - 1)
            if i == len(rows) - 1:
                panel.set_xlabel("key", fontsize=LABEL_SIZE)
        for panel in panels[i, len(row) :]:
            panel.set_visible(False)
    if bar is not None:
        colour_bar(figure, bar, panels, scale, fraction=0.05, aspect=25)
    head(figure, title)
    if legend:
        legend_below(figure, legend)
    return figure, panels


def shown(token: str) -> str:
    """A token as one short line: white space is made visible, the end of a long one cut off."""
    signs = (s if s.isprintable() else s.encode("unicode_escape").decode() for s in token)
    token = "".join(signs).replace(" ", "\N{OPEN BOX}")
    if len(token) <= _LONGEST_TOKEN:
        return token
    return token[: _LONGEST_TOKEN - 1] + "\N{HORIZONTAL ELLIPSIS}"


def label_tokens(axis: Axis, tokens: Sequence[str], inches: float) -> None:
    """Tokens at 0, 1, ...; as many of them, in even steps, as there is room for.

    Below a map they stand upright where they do not fit side by side.
    """
    names = [shown(token) for token in tokens]
    below = isinstance(axis, XAxis)
    rotated = below and token_inches(names) + 0.06 > inches / len(names)
    if rotated and all(name.isdigit() for name in names):
        # Places: some of them are enough.
        rotated, space = False, token_inches(names) + 0.06
    else:
        space = 0.0 if below and not rotated else _TICK_SPACE
    step = max(1, math.ceil(len(names) * space / inches))
    axis.set_ticks(list(range(0, len(names), step)))
    # What looks like mathematics ("$") is text too.
    axis.set_ticklabels(
        names[::step], fontsize=TICK_SIZE, rotation=90 if rotated else 0, parse_math=False
    )
    axis.set_tick_params(length=2)


def token_inches(tokens: Sequence[str]) -> float:
    """Roughly what the longest takes along its line."""
    return max(len(shown(token)) for token in tokens) * 0.075


def image(axes: Axes, values: Any, colours: Colormap | str, low: float, high: float) -> Any:
    """A heat map with a value for each cell."""
    return axes.imshow(
        values, cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="nearest"
    )


def colour_bar(figure: Figure, of: Any, beside: Any, label: str, **options: Any) -> None:
    bar = figure.colorbar(of, ax=beside, **options)
    bar.set_label(label, fontsize=LABEL_SIZE)
    bar.ax.tick_params(labelsize=TICK_SIZE)


def curve_axes(axes: Axes, x: str, y: str = "") -> None:
    """Axes of curves: labels, a pale grid, no frame above and on the right."""
    axes.set_xlabel(x, fontsize=LABEL_SIZE)
    axes.set_ylabel(y, fontsize=LABEL_SIZE)
    axes.tick_params(labelsize=TICK_SIZE)
    axes.grid(color="#E5E5E5", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def head(figure: Figure, title: str | None) -> None:
    if title:
        figure.suptitle(title, fontsize=TITLE_SIZE, parse_math=False)


def legend_below(figure: Figure, entries: list[Patch]) -> None:
    """As many columns as the figure has room for."""
    widest = max(len(str(entry.get_label())) for entry in entries) * 0.065 + 0.5
    figure.legend(
        handles=entries,
        loc="outside lower right",
        ncols=max(1, min(len(entries), int(figure.get_figwidth() / widest))),
        fontsize=TICK_SIZE,
        frameon=False,
    )


def cell_borders(axes: Axes, rows: int, columns: int) -> None:
    """Thin lines between the cells, where there are few enough to see."""
    if max(rows, columns) > 40:
        return
    axes.set_xticks([i - 0.5 for i in range(1, columns)], minor=True)
    axes.set_yticks([i - 0.5 for i in range(1, rows)], minor=True)
    axes.grid(which="minor", color="white", linewidth=0.6)
    axes.tick_params(which="minor", length=0)


def check_tensor(name: str, value: Any, what: str = "a Tensor") -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be {what}, not {type(value).__name__}")
    return value.detach().cpu()


def check_float(name: str, value: Any) -> Tensor:
    """As a tensor in CPU memory that numpy knows: fp32 or fp64."""
    tensor = check_tensor(name, value, "a Tensor of floating point")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be a Tensor of floating point, not {tensor.dtype}")
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def check_tokens(name: str, tokens: Sequence[Any] | None, length: int) -> list[str]:
    """The names of ``length`` tokens; their places where there are none."""
    if tokens is None:
        return [str(i) for i in range(length)]
    if isinstance(tokens, str):
        raise TypeError(f"{name} must be a sequence of tokens, not one str")
    if len(tokens) != length:
        raise ValueError(f"{name} must name {length} tokens, not {len(tokens)}")
    return [str(token) for token in tokens]


def check_padding(name: str, padding: Tensor | None, length: int) -> Tensor | None:
    if padding is None:
        return None
    found = check_tensor(name, padding, "a bool Tensor, True at padding")
    if found.dtype != torch.bool:
        raise TypeError(f"{name} must be a bool Tensor, True at padding, not {found.dtype}")
    if found.shape != (length,):
        raise ValueError(f"{name} must have shape [{length}], not {list(found.shape)}")
    return found


def check_index(name: str, index: int, size: int) -> int:
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"{name} must be an int, not {type(index).__name__}")
    if not 0 <= index < size:
        raise IndexError(f"{name} must be in [0, {size}), not {index}")
    return index
