"""``python -m transformer_fast info``: what can run on this machine, and why the rest cannot."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable

import torch
from rich.console import Console
from rich.table import Table

from .. import _native, _switches, proof
from ..backends.triton import ARCHITECTURES, table_for
from ..dispatch import BACKENDS, OPS, compute_capability, kernels
from ..measure import machine
from . import form, probes
from .compiled import show
from .console import bullets, output
from .limits import kernel_row, reasons


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--probe", action="store_true", help="measure the machine's peak rates too (seconds)"
    )
    parser.add_argument(
        "--kernels", nargs="*", type=int, choices=ARCHITECTURES, metavar="SM",
        help="compile the Triton kernels ahead of time, without a GPU, for these compute "
        f"capabilities of {', '.join(map(str, ARCHITECTURES))} (90), and show what they need of "
        "one (minutes)",
    )  # fmt: skip


def gpu_state() -> str:
    """One sentence about GPUs."""
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return f"{', '.join(names)} (CUDA {torch.version.cuda})"
    if torch.version.cuda is None:
        return f"none: torch {torch.__version__} was built without CUDA"
    return f"none: torch was built for CUDA {torch.version.cuda}, but it finds no device"


def triton_state() -> str:
    """One sentence about Triton, without importing it."""
    if importlib.util.find_spec("triton") is None:
        return "not installed (pip install triton); its kernels cannot run or be compiled"
    version = importlib.metadata.version("triton")
    if torch.cuda.is_available():
        capability = compute_capability()
        tiles = table_for(capability)
        own = (
            ""
            if tiles == capability
            else f" with the tiles of sm_{tiles} (sm_{capability} has none)"
        )
        return f"{version}, runs on the GPU{own}"
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return f"{version}, in its interpreter, on CPU tensors (TRITON_INTERPRET)"
    return f"{version}; without a GPU it runs only in its interpreter (TRITON_INTERPRET=1)"


def proof_state() -> str:
    """One sentence about what was measured on the GPU."""
    if not torch.cuda.is_available():
        return "none: kernels are proven on the GPU that is to run them"
    found, problem = proof.known(torch.cuda.current_device())
    if found is None:
        return f"none: {problem}"
    chosen = sum(verdict.chosen for verdict in found.verdicts)
    return (
        f"of {found.taken}, in {found.seconds / 60:.0f} minutes: {chosen} of {len(found.verdicts)} "
        f"are right and faster than PyTorch{proof.longer_way(found)}"
    )


def cuda_state() -> str:
    """One sentence about the kernels in CUDA C++."""
    why_not = _native.cuda_why_not
    if why_not is None and torch.cuda.is_available():
        why_not = _native.why_no_code(*torch.cuda.get_device_capability())
    return why_not or f"loaded from {_native.CUDA_LIBRARY.name}"


def _native_lines() -> Iterable[tuple[str, str]]:
    module = _native.module
    if module is None:
        yield "native kernels", f"none: {_native.why_not}"
        return
    build = module.build_info()
    yield "native kernels", f"{build['compiler']}, for torch {build['torch_version']}"
    yield "flags", build["flags"]
    features = module.cpu_features()
    has = [name for name, there in features.items() if there]
    lacks = [name for name, there in features.items() if not there]
    yield "CPU has", " ".join(has) or "nothing beyond x86-64"
    if lacks:
        yield "CPU lacks", " ".join(lacks)
    supported = module.supported_isas()
    beyond = [isa for isa in build["isa_flags"] if isa not in supported]
    text = f"{module.isa()} in use, of {', '.join(supported)}"
    if beyond:
        text += f"; built, but not in this CPU: {', '.join(beyond)}"
    yield "instruction sets", text


def _facts() -> Table:
    about = machine.describe()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    commit = f" ({about['commit']})" if about["commit"] else ""
    rows = [
        ("transformer_fast", about["transformer_fast"] + commit),
        ("python", f"{about['python']}, {about['system']}, {sys.executable}"),
        ("torch", about["torch"]),
        ("CPU", about["cpu"]),
        ("threads", f"{about['threads']} of {form.count(about['logical_cpus'] or 1, 'CPU')}"),
        *_native_lines(),
        ("GPU", gpu_state()),
        ("proof", proof_state()),
        ("CUDA C++", cuda_state()),
        ("triton", triton_state()),
    ]
    for name in (*_switches.NAMES, "TRITON_INTERPRET"):
        if name in os.environ:
            rows.append((name, os.environ[name]))
    for row in rows:
        grid.add_row(*row)
    return grid


def _kernel_table() -> Table:
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for heading in ("op", "backend", "state", "devices", "dtypes", "gradients", "dropout"):
        table.add_column(heading, no_wrap=True)
    table.add_column("activations")
    for op in OPS:
        for number, kernel in enumerate(kernels(op)):
            table.add_row("" if number else op, *kernel_row(kernel))
    return table


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Returns 0: a missing part is no error."""
    console: Console = output()
    console.print(_facts(), highlight=False)
    console.print("\n[bold]Kernels[/], in the dispatcher's order")
    console.print(_kernel_table(), highlight=False)
    every = [kernel for op in OPS for kernel in kernels(op)]
    present = {kernel.backend for kernel in every}
    lines = reasons(every)
    lines += [f"{name}: it has no kernels yet" for name in BACKENDS if name not in present]
    if lines:
        console.print("\n[bold]Not selected on this machine[/]")
        bullets(console, lines)
    if options.probe:
        console.print("\n[bold]Measured peaks[/]")
        if _native.module is None:
            bullets(console, [f"no probes: {_native.why_not}"])
        else:
            console.print(probes.table(), highlight=False)
    if options.kernels is not None:
        console.print("\n[bold]Triton kernels, compiled ahead of time[/]")
        show(console, options.kernels or (90,))
    return 0
