"""The loss of training, over steps and over time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from matplotlib.figure import Figure

from ..training import History
from . import style


def loss_curves(
    histories: Mapping[str, History], *, window: int = 20, title: str | None = None
) -> Figure:
    """The losses of one or several runs, over the steps and over the seconds they took.

    Pale lines are single steps, strong ones the mean of the last ``window``; dots are the "loss" of
    validation.

    Args:
        histories: `training.Trainer.history` of each run, by the run's name; at most 6.
        window: steps that the strong lines are means of.
        title: of the whole picture; None: none.

    Raises:
        TypeError: something else as histories.
        ValueError: no histories or more than 6, one without steps, or a window below 1.
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
        mean = _means(history.loss, window)
        validated = [(step, found["loss"]) for step, found in history.validation if "loss" in found]
        times = list(itertools.accumulate(history.seconds))
        for axes, places in ((over_steps, list(range(1, history.steps + 1))), (over_time, times)):
            axes.plot(places, history.loss, color=colour, alpha=0.2, linewidth=0.7)
            axes.plot(places, mean, color=colour, linestyle=dash, linewidth=1.6, label=name)
            if validated:
                axes.plot(
                    [places[step - 1] for step, _ in validated],
                    [loss for _, loss in validated],
                    "o",
                    color=colour,
                    markeredgecolor="white",
                    label=f"{name}, validation",
                )
    style.curve_axes(over_steps, "step", "loss per token")
    style.curve_axes(over_time, "seconds in steps")
    over_steps.legend(fontsize=style.TICK_SIZE, frameon=False)
    style.head(figure, title)
    return figure


def _means(values: list[float], window: int) -> list[float]:
    """The mean of each value and up to ``window - 1`` before it."""
    sums = [0.0, *itertools.accumulate(values)]
    return [
        (sums[end] - sums[max(0, end - window)]) / min(end, window)
        for end in range(1, len(values) + 1)
    ]
