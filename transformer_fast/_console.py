"""Console output of the commands: tables, lists, progress bars."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text


def output() -> Console:
    """Returns a console on standard output; 100 columns without a terminal and without $COLUMNS."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 100
    return Console(width=width, highlight=False)


def columns(words: Iterable[str], figures: Iterable[str] = ()) -> Table:
    """Returns a table without lines, with these headings; columns of ``figures`` are right-aligned."""
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for heading in words:
        table.add_column(heading)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def bullets(console: Console, lines: Iterable[str]) -> None:
    """Prints a bulleted list with hanging indents."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for line in lines:
        grid.add_row("-", Text(line))
    console.print(grid)


def progress(shown: bool = True, transient: bool = True) -> Progress:
    """Returns a progress bar on standard error; disabled without a terminal, to keep logs clean."""
    console = Console(stderr=True)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=transient,
        disable=not (shown and console.is_terminal),
    )


#: The exit status that shells report for a program killed by SIGINT.
INTERRUPTED = 130


def until_interrupted(run: Callable[..., int], *arguments: Any) -> int:
    """Returns the exit status of ``run(*arguments)``; `INTERRUPTED`, without traceback, on Ctrl-C."""
    try:
        return run(*arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
