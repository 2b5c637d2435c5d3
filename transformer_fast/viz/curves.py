"""Curves: positional encodings, and the training loss over steps and over time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor

from ..models.embedding import Positions, SinusoidalPositions
from ..training import History
from . import style


def positional_encoding(
    positions: torch.nn.Module | Tensor,
    length: int | None = None,
    *,
    dimensions: Sequence[int] | None = None,
    title: str | None = None,
) -> Figure:
    """Draws a table of position vectors as a heat map, and some of its columns as curves.

    Args:
        positions: `models.SinusoidalPositions`, `models.LearnedPositions`, a model or an embedding
            with one of them, or a table (L, M).
        length: number of positions to show; None: the first 100, or all if there are fewer.
        dimensions: columns to draw as curves, at most 6; None: four, spread over the table.
        title: title of the figure; None: the kind and size of the positions.

    Raises:
        TypeError: positions of another type.
        ValueError: a length beyond the table, or a table of another shape.
        IndexError: a dimension out of range.

    Source: "Attention Is All You Need", section 3.5.
    """
    table, kind = _table(positions)
    longest, size = table.shape
    if length is None:
        length = min(100, longest)
    if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= longest:
        raise ValueError(f"length must be an int in [1, {longest}], not {length!r}")
    table = table[:length]
    if dimensions is None:
        # Even dimensions of sinusoids are all sines, which differ only in their period.
        dimensions = sorted({size * i // 16 // 2 * 2 for i in (4, 6, 8, 10)})
    chosen = [style.check_index("dimensions", dimension, size) for dimension in dimensions]
    if not 1 <= len(chosen) <= len(style.LINES):
        raise ValueError(f"dimensions must name 1 to {len(style.LINES)}, not {len(chosen)}")

    figure = style.new_figure(11.0, 4.2)
    heat, curves = figure.subplots(1, 2, width_ratios=(1.15, 1.0))
    extreme = float(table.abs().max()) or 1.0
    image = style.image(heat, table.T.numpy(), style.DIVERGING, -extreme, extreme)
    heat.invert_yaxis()
    heat.set_title("each column is one position's vector", fontsize=style.LABEL_SIZE)
    heat.set_ylabel("dimension", fontsize=style.LABEL_SIZE)
    heat.set_xlabel("position", fontsize=style.LABEL_SIZE)
    heat.tick_params(labelsize=style.TICK_SIZE)
    style.colour_bar(figure, image, heat, "value")
    for number, dimension in enumerate(chosen):
        label = f"dimension {dimension}"
        if kind == "sinusoidal":
            wave = "cos" if dimension % 2 else "sin"
            period = 2 * torch.pi * 10000.0 ** (dimension // 2 * 2 / size)
            label += f": {wave}, period {period:,.4g}"
        curves.plot(
            range(length), table[:, dimension].numpy(), color=style.LINES[number],
            linestyle=style.DASHES[number], marker="o" if length == 1 else "", label=label,
        )  # fmt: skip
    curves.set_title("some dimensions over the positions", fontsize=style.LABEL_SIZE)
    style.curve_axes(curves, "position", "value")
    # Below the curves, so that it covers none of them.
    figure.legend(
        loc="outside lower right", ncols=2, fontsize=style.TICK_SIZE, frameon=False,
        handlelength=3.5,
    )  # fmt: skip
    name = {"sinusoidal": "Sinusoidal positions", "learned": "Learned positions"}.get(
        kind, "Positions"
    )
    usual = f"{name}: {length} of {longest:,}, d_model = {size}"
    style.head(figure, usual if title is None else title)
    return figure


def _table(positions: torch.nn.Module | Tensor) -> tuple[Tensor, str]:
    """Returns the table (L, M) and its kind: "sinusoidal", "learned" or "" (unknown)."""
    if isinstance(positions, Tensor):
        table = style.check_float("positions", positions)
        if table.dim() != 2 or table.numel() == 0:
            raise ValueError(f"positions must have shape (L, M), not {list(table.shape)}")
        return table, ""
    found: dict[int, Positions] = {}
    if isinstance(positions, torch.nn.Module):
        found = {id(m): m for m in positions.modules() if isinstance(m, Positions)}
    if not found:
        raise TypeError(
            "positions must be a table (L, M), or a module with models.SinusoidalPositions or "
            f"models.LearnedPositions, not {type(positions).__name__}"
        )
    first = next(iter(found.values()))
    kind = "sinusoidal" if isinstance(first, SinusoidalPositions) else "learned"
    return style.check_float("positions", first.table), kind


def loss_curves(
    histories: Mapping[str, History], *, window: int = 20, title: str | None = None
) -> Figure:
    """Draws the losses of one or several runs, over steps and over seconds.

    Pale lines show single steps, strong lines the mean of the last ``window`` steps, dots the
    validation loss.

    Args:
        histories: `training.Trainer.history` of each run, by the run's name; at most 6 runs.
        window: number of steps that the strong lines average.
        title: title of the figure; None: no title.

    Raises:
        TypeError: histories of another type.
        ValueError: no histories or more than 6, a history without steps, or a window below 1.
    """
    if not isinstance(histories, Mapping):
        raise TypeError(f"histories must be a dict of History, not {type(histories).__name__}")
    if not 1 <= len(histories) <= len(style.LINES):
        raise ValueError(f"histories must have 1 to {len(style.LINES)} runs, not {len(histories)}")
    if window < 1:
        raise ValueError(f"window must be at least 1, not {window}")
    figure = style.new_figure(10.0, 4.0)
    over_steps, over_time = figure.subplots(1, 2, sharey=True)
    for number, (name, history) in enumerate(histories.items()):
        if not isinstance(history, History):
            raise TypeError(f"histories[{name!r}] must be a History, not {type(history).__name__}")
        if not history.steps:
            raise ValueError(f"histories[{name!r}] has no steps")
        colour, dash = style.LINES[number], style.DASHES[number]
        sums = [0.0, *itertools.accumulate(history.loss)]
        mean = [
            (sums[end] - sums[max(0, end - window)]) / min(end, window)
            for end in range(1, len(sums))
        ]
        validated = [(step, found["loss"]) for step, found in history.validation if "loss" in found]
        times = list(itertools.accumulate(history.seconds))
        for axes, places in ((over_steps, list(range(1, history.steps + 1))), (over_time, times)):
            axes.plot(places, history.loss, color=colour, alpha=0.2, linewidth=0.7)
            axes.plot(places, mean, color=colour, linestyle=dash, linewidth=1.6, label=name)
            if validated:
                axes.plot(
                    [places[step - 1] for step, _ in validated], [loss for _, loss in validated],
                    "o", color=colour, markeredgecolor="white", label=f"{name}, validation",
                )  # fmt: skip
    style.curve_axes(over_steps, "step", "loss per token")
    style.curve_axes(over_time, "seconds in steps")
    over_steps.legend(fontsize=style.TICK_SIZE, frameon=False)
    style.head(figure, title)
    return figure
