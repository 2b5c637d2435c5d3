"""The progress bar of training."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class StepProgress:
    """Steps, loss, learning rate, speed and the time that is left; silent if not ``shown``."""

    def __init__(self, total: int | None, done: int, shown: bool) -> None:
        # On something that is no terminal a bar would only leave garbage.
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("[bold]training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._bar.add_task("training", total=total, completed=done, text="")
        self._loss: float | None = None

    def __enter__(self) -> StepProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def advance(self, loss: float, learning_rate: float, tokens_per_second: float) -> None:
        self._loss = loss if self._loss is None else 0.95 * self._loss + 0.05 * loss
        text = f"loss {self._loss:.3f}  lr {learning_rate:.1e}  {tokens_per_second:,.0f} tokens/s"
        self._bar.update(self._task, advance=1, text=text)
