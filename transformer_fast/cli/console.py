"""Where the commands print, and how."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text


def output() -> Console:
    """Standard output; 100 columns where it is no terminal and nobody says how wide it is."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 100
    return Console(width=width)


def bullets(console: Console, lines: Iterable[str]) -> None:
    """A list; long lines go on under their own first word."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for line in lines:
        grid.add_row("-", Text(line))
    console.print(grid, highlight=False)


def progress() -> Progress:
    """A bar on standard error; nothing where that is not a terminal."""
    console = Console(stderr=True)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
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
