"""Where the commands print, and how."""

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
    """Standard output; 100 columns where it is no terminal and nobody says how wide it is."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 100
    return Console(width=width, highlight=False)


def columns(words: Iterable[str], figures: Iterable[str] = ()) -> Table:
    """A table without lines, of columns with these headings; figures are set to the right."""
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for heading in words:
        table.add_column(heading)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def bullets(console: Console, lines: Iterable[str]) -> None:
    """A list; long lines go on under their own first word."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for line in lines:
        grid.add_row("-", Text(line))
    console.print(grid)


def progress(shown: bool = True, transient: bool = True) -> Progress:
    """A bar on standard error; nothing where that is not a terminal, which it would only litter."""
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


#: What shells report of a program that SIGINT ended.
INTERRUPTED = 130


def until_interrupted(run: Callable[..., int], *arguments: Any) -> int:
    """The exit status of ``run(*arguments)``, or `INTERRUPTED` after Ctrl-C, without a traceback."""
    try:
        return run(*arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
