"""The progress bar of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

#: Advances the bar by a step of this loss, learning rate and speed in tokens per second.
Advance = Callable[[float, float, float], None]


@contextmanager
def step_progress(total: int | None, done: int, shown: bool) -> Iterator[Advance]:
    """Steps, loss, learning rate, speed and the time that is left; silent if not ``shown``."""
    # On something that is no terminal a bar would only leave garbage.
    console = Console(stderr=True)
    smooth: float | None = None

    def advance(loss: float, learning_rate: float, speed: float) -> None:
        nonlocal smooth
        smooth = loss if smooth is None else 0.95 * smooth + 0.05 * loss
        text = f"loss {smooth:.3f}  lr {learning_rate:.1e}  {speed:,.0f} tokens/s"
        bar.update(task, advance=1, text=text)

    with Progress(
        TextColumn("[bold]training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not (shown and console.is_terminal),
    ) as bar:
        task = bar.add_task("training", total=total, completed=done, text="")
        yield advance
