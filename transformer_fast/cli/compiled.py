"""What the Triton kernels need on each architecture, for ``info --kernels``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..dispatch import OPS, kernels
from ..specs import OPS as SPECS
from .console import bullets, progress

_DTYPES = (torch.float32, torch.bfloat16)


def _launches(runtime: Any, config: Any, architecture: int) -> Iterator[tuple[str, str, Any]]:
    """(op, dtype, launch) of the first bench case of each op, called with meta tensors."""
    for op in OPS:
        for kernel in kernels(op):
            if kernel.backend != "triton":
                continue
            for dtype in _DTYPES:
                arguments = SPECS[op].bench_cases[0].build(dtype, "meta", None)
                with config.use_architecture(architecture), runtime.record_launches() as launches:
                    kernel.run(*arguments)
                for launch in launches:
                    yield op, str(dtype).removeprefix("torch."), launch


def _cells(compiled: Any) -> tuple[str, ...]:
    return (
        f"sm_{compiled.architecture}",
        str(compiled.registers),
        str(compiled.spilled),
        f"{compiled.shared / 1024:.1f}",
        str(compiled.warps),
        str(compiled.stages),
        "yes" if compiled.fits else "[red]no",
    )


def show(console: Console) -> None:
    """Compile and print; says why where that cannot be done."""
    try:
        ahead = importlib.import_module("transformer_fast.backends.triton.compile_ahead")
        config = importlib.import_module("transformer_fast.backends.triton.config")
        runtime = importlib.import_module("transformer_fast.backends.triton.runtime")
    except ImportError as error:
        bullets(console, [f"none: {error}"])
        return
    if runtime.INTERPRETED:
        bullets(console, ["none: with TRITON_INTERPRET set, kernels are interpreted"])
        return
    work = [
        (architecture, *found)
        for architecture in ahead.SHARED_LIMIT
        for found in _launches(runtime, config, architecture)
    ]
    if not work:
        bullets(console, ["none: no Triton kernel is registered with the dispatcher"])
        return
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for heading in ("op", "dtype", "kernel", "on"):
        table.add_column(heading, no_wrap=True)
    for heading in ("registers", "spilled bytes", "shared KiB", "warps", "stages", "fits"):
        table.add_column(heading, justify="right")
    with progress() as bar:
        task = bar.add_task("compiling", total=len(work))
        for architecture, op, dtype, launch in work:
            compiled = ahead.compile_launch(launch, architecture)
            table.add_row(op, dtype, compiled.kernel, *_cells(compiled))
            bar.advance(task)
    console.print(table, highlight=False)
