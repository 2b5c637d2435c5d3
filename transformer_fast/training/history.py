"""What a run of training did, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class History:
    """One entry per step in each list, and what validation found."""

    loss: list[float] = field(default_factory=list)  #: mean per real token
    learning_rate: list[float] = field(default_factory=list)
    gradient_norm: list[float] = field(default_factory=list)  #: before clipping
    tokens: list[int] = field(default_factory=list)  #: real ones, of all processes
    seconds: list[float] = field(default_factory=list)  #: the step's own
    #: (step, {name: value})
    validation: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return len(self.loss)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, list(value))


def smoothed(values: list[float], window: int) -> list[float]:
    """The mean of each value and up to ``window - 1`` before it."""
    found, total = [], 0.0
    for place, value in enumerate(values):
        total += value - (values[place - window] if place >= window else 0.0)
        found.append(total / min(place + 1, window))
    return found


def plot_loss(
    histories: Mapping[str, History], path: str | Path, *, window: int = 20, title: str = ""
) -> None:
    """Save the curves of the loss over the steps, and beside them over the time, as a picture.

    Thin lines are single steps, thick ones the mean of the last ``window``; dots are validation's
    "loss".

    Raises:
        ImportError: matplotlib is missing (``pip install 'transformer_fast[viz]'``).
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot_loss needs matplotlib: pip install 'transformer_fast[viz]'"
        ) from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    over_steps, over_time = figure.subplots(1, 2, sharey=True)
    for place, (name, history) in enumerate(histories.items()):
        colour, style = f"C{place}", ("-", "--", ":", "-.")[place % 4]
        times, total = [], 0.0
        for seconds in history.seconds:
            total += seconds
            times.append(total)
        mean = smoothed(history.loss, window)
        for axes, x in ((over_steps, range(1, history.steps + 1)), (over_time, times)):
            axes.plot(x, history.loss, color=colour, alpha=0.2, linewidth=0.7)
            axes.plot(x, mean, style, color=colour, linewidth=1.6, label=name)
            dots = [(x[step - 1], found["loss"]) for step, found in history.validation
                    if "loss" in found and 1 <= step <= history.steps]  # fmt: skip
            if dots:
                axes.plot(*zip(*dots, strict=True), "o", color=colour, label=f"{name}, validation")
    over_steps.set(xlabel="step", ylabel="loss per token")
    over_time.set(xlabel="seconds of training")
    over_steps.legend()
    if title:
        figure.suptitle(title)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
