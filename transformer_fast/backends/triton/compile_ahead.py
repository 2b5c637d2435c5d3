"""Compile kernels for architectures that are not at hand, and read what the assembler made of them.

The launchers are called with meta tensors and their launches recorded (`runtime.record_launches`),
so a kernel is compiled here exactly as a call would compile it. No driver and no GPU are needed:
Triton brings its own assembler.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from .runtime import INTERPRETED, Launch

_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}

#: Shared memory one block may use, in bytes (CUDA programming guide, compute capabilities).
SHARED_LIMIT = {80: 166912, 86: 101376, 90: 232448, 100: 232448, 120: 101376}


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


def _describe(launch: Launch) -> ASTSource:
    """The types, constants and divisibilities that Triton itself would derive from the arguments."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    values = [
        *launch.args,
        *(launch.constants[p.name] for p in launch.kernel.params[len(launch.args) :]),
    ]
    for index, (parameter, value) in enumerate(zip(launch.kernel.params, values, strict=True)):
        divisible = False
        if parameter.is_constexpr or value is None:
            kind = "constexpr"
        elif isinstance(value, TensorDescriptor):
            block = ", ".join(map(str, value.block_shape))
            kind = f"tensordesc<{_TYPES[value.base.dtype]}[{block}]>"
        elif isinstance(value, Tensor):
            kind = "*" + _TYPES[value.dtype]
            divisible = value.storage_offset() * value.element_size() % 16 == 0
        elif isinstance(value, int):
            if value == 1 and not parameter.do_not_specialize:
                kind = "constexpr"
            else:
                kind = "i32" if -(2**31) <= value < 2**31 else "i64"
                divisible = value % 16 == 0 and not parameter.do_not_specialize
        else:
            kind = "fp32"
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(index,)] = value
        if divisible:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


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
    return triton.compile(
        _describe(launch),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": launch.warps, "num_stages": launch.stages},
    )


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
