"""Compile kernels for architectures that are not at hand, and read what the assembler made of them.

The launchers are called with meta tensors and their launches recorded (`compile_cases.launches`),
so a kernel is compiled here exactly as a call would compile it. No driver and no GPU are needed:
Triton brings its own assembler.

``python -m transformer_fast.backends.triton.compile_ahead`` compiles the calls of `compile_cases` for
each architecture and prints, per kernel, a line of JSON: what ``info --kernels`` shows, and the
instructions that tell whether the assembler took the fast path. HGMMA and UTCHMMA are the matrix units
of Hopper and Blackwell, HMMA those before, UTMALDG is the copy engine, LDG.128 and LDGSTS.128 are loads
of 16 bytes a thread.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from .compile_cases import cases, launches
from .runtime import INTERPRETED, Launch

#: Shared memory one block may use, in bytes (CUDA programming guide, compute capabilities).
SHARED_LIMIT = {80: 166912, 86: 101376, 90: 232448, 100: 232448, 120: 101376}

_INSTRUCTIONS = {
    "HGMMA": r"\bHGMMA",
    "UTCHMMA": r"\bUTCHMMA",
    "HMMA": r"\bHMMA",
    "UTMALDG": r"\bUTMALDG",
    "LDG.128": r"\bLDG\S*\.128",
    "LDGSTS.128": r"\bLDGSTS\S*\.128",
}
_WAIT = r"\bDEPBAR\.LE SB0, (0x\w+)"


@dataclass(frozen=True)
class Compiled:
    """What the assembler reports of one kernel on one architecture."""

    kernel: str
    architecture: int
    registers: int
    #: Bytes of stack per thread: what did not fit in registers.
    spilled: int
    shared: int
    warps: int
    stages: int
    cubin: bytes

    @property
    def fits(self) -> bool:
        return self.shared <= SHARED_LIMIT[self.architecture]


@cache
def _binder(kernel: Any, architecture: int) -> tuple[Any, GPUTarget, Callable[..., Any]]:
    """What Triton itself derives types, constants and divisibilities of arguments with."""
    target = GPUTarget("cuda", architecture, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    return backend, target, bind


def _told(tool: Any, option: str, cubin: bytes) -> str:
    """What a tool of NVIDIA's prints about a binary."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [tool.path, option, str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread, as the assembler wrote them into the binary."""
    text = _told(triton.knobs.nvidia.cuobjdump, "-res-usage", cubin)
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if match is None:
        raise RuntimeError(f"cuobjdump printed no resource usage:\n{text}")
    return int(match[1]), int(match[2])


def disassemble(cubin: bytes) -> str:
    """The machine code (SASS) of a compiled kernel."""
    return _told(triton.knobs.nvidia.nvdisasm, "-c", cubin)


def compile_binary(launch: Launch, architecture: int) -> Any:
    """What Triton makes of a recorded launch: a CompiledKernel, with ``asm["ptx"]`` and the others."""
    if INTERPRETED:
        raise RuntimeError("kernels cannot be compiled in a process with TRITON_INTERPRET=1")
    backend, target, bind = _binder(launch.kernel, architecture)
    told = {"num_warps": launch.warps, "num_stages": launch.stages, "debug": False}
    bound, specialization, rest = bind(*launch.args, **launch.constants, **told)
    options, *described = launch.kernel._pack_args(backend, told, bound, specialization, rest)
    source = ASTSource(launch.kernel, *described)
    return triton.compile(source, target=target, options=vars(options))


def compile_launch(launch: Launch, architecture: int) -> Compiled:
    """Compile one recorded launch for ``architecture`` (80, 86, 90, 100 or 120)."""
    binary = compile_binary(launch, architecture)
    cubin = binary.asm["cubin"]
    registers, spilled = _resources(cubin)
    return Compiled(
        launch.kernel.fn.__name__,
        architecture,
        registers,
        spilled,
        binary.metadata.shared,
        launch.warps,
        launch.stages,
        cubin,
    )


def report(architectures: list[int], match: str, kernel: str) -> Iterator[dict[str, Any]]:
    """One record per kernel of the calls and kernels that the expressions match."""
    for architecture in architectures:
        for case in cases():
            if not re.search(match, case.name):
                continue
            for launch in launches(case, architecture):
                if not re.search(kernel, launch.kernel.fn.__name__):
                    continue
                compiled = compile_launch(launch, architecture)
                code = disassemble(compiled.cubin)
                yield {
                    "call": case.name,
                    **{name: value for name, value in vars(compiled).items() if name != "cubin"},
                    "fits": compiled.fits,
                    # Of Hopper's matrix instructions: columns (N) of what one makes.
                    "columns": sorted({int(n) for n in re.findall(r"\bHGMMA\.\d+x(\d+)x", code)}),
                    # Groups of asynchronous loads that waits leave in flight.
                    "in_flight": sorted({int(n, 16) for n in re.findall(_WAIT, code)}),
                    "instructions": {
                        name: len(re.findall(pattern, code))
                        for name, pattern in _INSTRUCTIONS.items()
                        if re.search(pattern, code)
                    },
                }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile the Triton kernels ahead of time.")
    parser.add_argument(
        "--architectures", type=int, nargs="+", choices=SHARED_LIMIT, default=list(SHARED_LIMIT)
    )
    parser.add_argument("--match", default="", help="regular expression for the calls")
    parser.add_argument("--kernel", default="", help="regular expression for the kernels")
    for record in report(**vars(parser.parse_args())):
        print(json.dumps(record), flush=True)
