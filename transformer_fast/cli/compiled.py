"""What the Triton kernels need on each architecture, for ``info --kernels``."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from .console import bullets, progress

_PACKAGE = "transformer_fast.backends.triton"


def _row(case: str, compiled: Any) -> tuple[str, ...]:
    return (
        f"sm_{compiled.architecture}",
        case,
        compiled.kernel,
        str(compiled.registers),
        str(compiled.spilled) if compiled.spilled == 0 else f"[yellow]{compiled.spilled}",
        f"{compiled.shared / 1024:.1f}",
        str(compiled.warps),
        str(compiled.stages),
        "yes" if compiled.fits else "[red]no",
    )


def show(console: Console, architectures: Sequence[int]) -> None:
    """Compile and print; says why where that cannot be done."""
    try:
        ahead = importlib.import_module(f"{_PACKAGE}.compile_ahead")
        calls = importlib.import_module(f"{_PACKAGE}.compile_cases")
    except ImportError as error:
        bullets(console, [f"none: {error}"])
        return
    if ahead.INTERPRETED:
        bullets(console, ["none: with TRITON_INTERPRET set, kernels are interpreted"])
        return
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for heading in ("on", "call", "kernel"):
        table.add_column(heading, no_wrap=heading == "on")
    for heading in ("registers", "spilled bytes", "shared KiB", "warps", "stages", "fits"):
        table.add_column(heading, justify="right")
    work = [
        (architecture, case.name, launch)
        for architecture in architectures
        for case in calls.cases()
        for launch in calls.launches(case, architecture)
    ]
    with progress() as bar:
        task = bar.add_task("compiling", total=len(work))
        for architecture, name, launch in work:
            table.add_row(*_row(name, ahead.compile_launch(launch, architecture)))
            bar.advance(task)
    console.print(table, highlight=False)
