"""``python -m transformer_fast info``: kernels available here, and why others are not."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .. import _cgroup, _native, _switches, proof, specs
from .._console import bullets, columns, output, progress
from ..dispatch import AHEAD, BACKENDS, OPS, STATES, Kernel, kernels, why_unproven
from ..measure import machine
from ..measure.device import unproven
from ..reference.linear import ACTIVATIONS
from . import form


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--probe", action="store_true", help="measure the machine's peak rates too (seconds)"
    )
    parser.add_argument(
        "--kernels", nargs="*", type=int, choices=AHEAD, metavar="SM",
        help="compile the Triton kernels without a GPU and show the resources they use. SM: one "
        f"or more of {', '.join(map(str, AHEAD))} (default: 90). Takes minutes",
    )  # fmt: skip


def gpu_state() -> str:
    """Returns a sentence on the GPUs of this machine."""
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return f"{', '.join(names)} (CUDA {torch.version.cuda})"
    if torch.version.cuda is None:
        return f"none: torch {torch.__version__} was built without CUDA"
    return f"none: torch was built for CUDA {torch.version.cuda}, but it finds no device"


def proof_state() -> str:
    """Returns a sentence on the validation records of this machine's devices."""
    devices = unproven()
    if not devices:
        return (
            "not needed for this CPU; kernels for GPUs are validated on the GPU that will run them"
        )
    return "; ".join(f"{one.type}: {_record_state(one)}" for one in devices)


def _record_state(device: torch.device) -> str:
    found, problem = proof.record_of(device)
    if found is None:
        return f"none: {problem}"
    chosen = sum(verdict.chosen for verdict in found.verdicts)
    return (
        f"of {found.taken}, in {found.seconds / 60:.0f} minutes: {chosen} of {len(found.verdicts)} "
        "are right and faster than PyTorch"
    )


def _native_lines() -> Iterable[tuple[str, str]]:
    module = _native.module
    if module is None:
        yield "native kernels", f"none: {_native.why_not}"
        return
    build = module.build_info()
    yield "native kernels", f"{build['compiler']}, for torch {build['torch_version']}"
    if _native.autograd is None:
        yield "small calls", f"checked in Python: {_native.why_no_autograd}"
    else:
        yield "small calls", f"entries in C++, for torch {_native.autograd.torch_version}"
    yield "flags", build["flags"]
    features = module.cpu_features()
    has = [name for name, there in features.items() if there]
    lacks = [name for name, there in features.items() if not there]
    yield "CPU has", " ".join(has) or "nothing that kernels use"
    if lacks:
        yield "CPU lacks", " ".join(lacks)
    supported = module.supported_isas()
    beyond = [isa for isa in build["isa_flags"] if isa not in supported]
    text = f"{module.isa()} in use, of {', '.join(supported)}"
    if beyond:
        text += f"; built, but not in this CPU: {', '.join(beyond)}"
    if (why := _native.why_unproven()) is not None:
        text += f"; {why}, so they are selected by `{proof.COMMAND}` only, or if named"
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
        ("CPU", machine.cpu(about)),
        ("threads", f"{about['threads']} of {form.count(about['logical_cpus'] or 1, 'CPU')}"),
        *(("", line) for line in [_cgroup.thread_advice()] if line is not None),
        *_native_lines(),
        ("GPU", gpu_state()),
        ("validation", proof_state()),
        *((name, state()) for name, state in STATES.items()),
    ]
    for name in (*_switches.NAMES, "TRITON_INTERPRET"):
        if name in os.environ:
            rows.append((name, os.environ[name]))
    for row in rows:
        grid.add_row(*row)
    return grid


_DTYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"
}  # fmt: skip


def dtype_names(dtypes: frozenset[torch.dtype]) -> str:
    """Returns names such as 'fp32 bf16', or 'any' if there is no limit."""
    named = [name for dtype, name in _DTYPES.items() if dtype in dtypes]
    return " ".join([*named, *(str(d)[6:] for d in dtypes if d not in _DTYPES)]) or "any"


def activation_names(kernel: Kernel) -> str:
    """Returns 'named' for all named activations, 'any' for callables, too, '' if the op has none."""
    if "activation" not in specs.OPS[kernel.op].arguments:
        return ""
    if kernel.activations is None:
        return "any"
    known = {name for name in kernel.activations if name}
    return "named" if known == set(ACTIVATIONS) else " ".join(sorted(known))


def state(kernel: Kernel) -> str:
    if kernel.unavailable is not None:
        return "cannot run"
    return "ready" if why_unproven(kernel) is None else "if named"


def kernel_row(kernel: Kernel) -> tuple[str, ...]:
    """Returns (backend, state, devices, dtypes, gradients, dropout, activations)."""
    gradients = "yes" if kernel.gradients else "no"
    if kernel.op == "attention" and kernel.gradients and not kernel.mask_gradient:
        gradients = "not of masks"
    dropout = "yes" if kernel.dropout else "no"
    if "dropout_p" not in specs.OPS[kernel.op].arguments:
        dropout = ""
    return (
        kernel.backend, state(kernel), " ".join(kernel.devices) or "any",
        dtype_names(kernel.dtypes), gradients, dropout, activation_names(kernel),
    )  # fmt: skip


def reasons(kernels: Iterable[Kernel]) -> list[str]:
    """Lists why kernels cannot run here: 'cpu: the native module was not built (all its ops)'."""
    found: dict[tuple[str, str], list[str]] = {}
    totals: dict[str, int] = {}
    for kernel in kernels:
        totals[kernel.backend] = totals.get(kernel.backend, 0) + 1
        why = kernel.unavailable or why_unproven(kernel)
        if why is not None:
            found.setdefault((kernel.backend, why), []).append(kernel.op)
    return [
        f"{backend}: {why} ({'all its ops' if len(ops) == totals[backend] else ', '.join(ops)})"
        for (backend, why), ops in found.items()
    ]


def _kernel_table() -> Table:
    headings = ("op", "backend", "state", "devices", "dtypes", "gradients", "dropout")
    table = columns((*headings, "activations"))
    for op in OPS:
        for number, kernel in enumerate(kernels(op)):
            table.add_row("" if number else op, *kernel_row(kernel))
    return table


#: Buffer sizes in bytes per thread, with their names.
_SIZES = ((1 << 15, "32 KiB"), (1 << 19, "512 KiB"), (1 << 22, "4 MiB"), (1 << 26, "64 MiB"))


def _peaks() -> Table:
    """Returns a table of arithmetic rates by instruction set and of bandwidth by buffer size."""
    module: Any = _native.module
    threads = torch.get_num_threads()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(justify="right")
    grid.add_column()
    for isa in module.supported_isas():
        rate = module.probe_fma(threads, isa)
        grid.add_row(f"fp32 multiply-add, {isa}", form.three_digits(rate), "Gflop/s")
    for name, probe in (("bf16", module.probe_bf16_dot), ("int8", module.probe_int8_dot)):
        for isa in module.supported_isas():
            if name in module.dot_types(isa):
                rate = form.three_digits(probe(threads, isa))
                grid.add_row(f"{name} dot product, {isa}", rate, "Gflop/s")
    for size, name in _SIZES:
        share = size * threads
        read = module.probe_read_bandwidth(share, threads)
        copy = module.probe_copy_bandwidth(share, threads)
        grid.add_row(f"read, {name} per thread", form.three_digits(read), "GB/s")
        grid.add_row(f"copy, {name} per thread", form.three_digits(copy), "GB/s read and written")
    return grid


def show_compiled(console: Console, architectures: Sequence[int]) -> None:
    """Compiles the Triton kernels and prints their resources, or the reason why it cannot."""
    try:
        work = [one for architecture in architectures for one in AHEAD[architecture]()]
    except NotImplementedError as error:
        bullets(console, [f"none: {error}"])
        return
    figures = ("registers", "spilled bytes", "shared KiB", "warps", "stages", "fits")
    table = columns(("on", "call", "kernel"), figures)
    with progress() as bar:
        task = bar.add_task("compiling", total=len(work))
        for name, run in work:
            one = run()
            table.add_row(
                f"sm_{one.architecture}", name, one.kernel, str(one.registers),
                f"{'[yellow]' * (one.spilled > 0)}{one.spilled}", f"{one.shared / 1024:.1f}",
                str(one.warps), str(one.stages), "yes" if one.fits else "[red]no",
            )  # fmt: skip
            bar.advance(task)
    console.print(table)


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Returns the exit status 0, because an unavailable kernel is not an error."""
    console: Console = output()
    console.print(_facts())
    console.print("\n[bold]Kernels[/], in the dispatcher's order")
    console.print(_kernel_table())
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
            console.print(_peaks())
    if options.kernels is not None:
        console.print("\n[bold]Triton kernels, compiled ahead of time[/]")
        show_compiled(console, options.kernels or (90,))
    return 0
