"""``python -m transformer_fast.backends.triton.embed``: attention's kernels for the CUDA library.

The build of that library runs it. It compiles the kernels of attention ahead of time and writes a C++
source for each architecture, ``embedded_<architecture>.cpp``, that has their machine code and a table
for csrc/cuda/attention_embedded.cuh, which launches them without Python. One kernel for each dtype,
head size and causality takes all sizes, key lengths, and heads in groups; only the one of dK and dV
takes no groups, since a loop over the heads of a group needs registers that it does not have.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import config, table_for
from .attention import attention_forward
from .attention_bwd import attention_backward
from .compile_ahead import compile_binary
from .runtime import Launch, record_launches

HEADS = (64, 128)
#: How csrc/cuda/attention_embedded.cuh gives parameters: PTX's types by those of Triton.
_TYPES = {"*": "u64", "i32": "u32", "fp32": "f32"}
_REALS = ("scale", "grad_scale", "keep_scale")


class Variant(NamedTuple):
    """One kernel: the launch that it is compiled from, and which calls it serves."""

    launch: Launch
    dtype: torch.dtype
    head: int
    causal: bool

    @property
    def kind(self) -> str:
        """forward, backward_query or backward_key."""
        name: str = self.launch.kernel.fn.__name__
        return name.removeprefix("attention_").removesuffix("_kernel")

    @property
    def name(self) -> str:
        order = "causal" if self.causal else "all"
        return f"{self.kind}_{str(self.dtype).removeprefix('torch.')}_{self.head}_{order}"

    @property
    def tile(self) -> int:
        """Queries of a program; keys for gradients of keys and values."""
        side = "BLOCK_S" if self.kind == "backward_key" else "BLOCK_T"
        return int(self.launch.constants[side])  # type: ignore[call-overload]


def _launches(dtype: torch.dtype, head: int, causal: bool, group: int) -> list[Launch]:
    """Of a call whose sizes are neither 1 nor multiples of anything, so that none is a constant."""

    def meta(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    query, key = meta(5, 6, 2047, head), meta(5, 6 // group, 2047, head)
    lengths = meta(6, dtype=torch.int64)[1:]  # need not start at a multiple of 16 bytes
    arguments = (query, key, key, None, lengths, causal, 0.125, 0.0, None)
    with record_launches() as found:
        output, shift, norm = attention_forward(*arguments)
        attention_backward(output, None, *arguments, output, None, shift, norm, False)
    return found


def variants(architecture: int, dtypes: Iterable[torch.dtype]) -> Iterator[Variant]:
    """The kernels for an architecture, with its tiles."""
    with config.use_architecture(table_for(architecture)):
        for dtype, head, causal in itertools.product(dtypes, HEADS, (False, True)):
            grouped = _launches(dtype, head, causal, 3)
            classic = _launches(dtype, head, causal, 1)
            for launch in (*grouped[:2], classic[2]):
                yield Variant(launch, dtype, head, causal)


def parameters(binary: Any) -> list[str]:
    """The names of a compiled kernel's parameters, in order, as the C++ enumeration has them.

    Triton adds some behind its own, for memory that these kernels do not ask for.
    """
    signature = binary.src.signature
    names = [name for name, kind in signature.items() if kind != "constexpr"]
    given = re.findall(r"\.param \.(\w+)", binary.asm["ptx"].partition(")\n")[0])
    expected = [_TYPES["*" if kind[0] == "*" else kind] for kind in map(signature.get, names)]
    fills = ["u64" if n.endswith("_ptr") else "f32" if n in _REALS else "u32" for n in names]
    hidden = len(given) - len(names)
    asks = binary.metadata.global_scratch_size or binary.metadata.profile_scratch_size
    if given != [*expected, *["u64"] * hidden] or fills != expected or asks:
        raise RuntimeError(f"{binary.metadata.name} takes {given} for {names}")
    return [*names, *["scratch_ptr"] * hidden]


def write(architecture: int, dtypes: Iterable[torch.dtype], folder: Path) -> None:
    """Compile all variants into ``folder``: a C++ source, each kernel's cubin, which it includes, and
    for tests the PTX."""
    codes, rows, lists = [], [], []
    codes_in = folder / str(architecture)
    codes_in.mkdir(parents=True, exist_ok=True)
    for variant in variants(architecture, dtypes):
        binary = compile_binary(variant.launch, architecture)
        cubin = codes_in / f"{variant.name}.cubin"
        cubin.write_bytes(binary.asm["cubin"])
        cubin.with_suffix(".ptx").write_text(binary.asm["ptx"])
        symbol, names = f"tf_{architecture}_{variant.name}", parameters(binary)
        codes.append(
            f'asm(".section .rodata\\n.balign 64\\n{symbol}:\\n.incbin \\"{cubin.resolve()}\\"\\n'
            f'.previous\\n");\n'
            f'extern "C" __attribute__((visibility("hidden"))) const unsigned char {symbol}[];'
        )
        lists.append(f"const P {variant.name}[] = {{{', '.join('P::' + name for name in names)}}};")
        is_bfloat16 = str(variant.dtype == torch.bfloat16).lower()
        rows.append(
            f'{{"{binary.metadata.name}", {symbol}, {architecture}, EmbeddedKind::{variant.kind}, '
            f"{is_bfloat16}, {variant.head}, {str(variant.causal).lower()}, {variant.tile}, "
            f"{32 * binary.metadata.num_warps}, {binary.metadata.shared}, {variant.name}, "
            f"{len(names)}}},"
        )
    text = "\n".join(
        (
            "// Written by backends/triton/embed.py.",
            '#include "cuda/embedded.h"',
            *codes,
            "namespace tf::cuda {\nnamespace {\nusing P = EmbeddedParameter;",
            *lists,
            "const EmbeddedKernel kTable[] = {",
            *rows,
            "};\nconst Embedded kEmbedded(kTable);\n}  // namespace\n}  // namespace tf::cuda\n",
        )
    )
    (folder / f"embedded_{architecture}.cpp").write_text(text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile attention into a C++ source.")
    parser.add_argument(
        "--architectures", type=int, nargs="+", required=True, help="90 for sm_90a, and so on"
    )
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float16"), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args(arguments)
    dtypes = [getattr(torch, name) for name in options.dtypes]
    for architecture in options.architectures:
        write(architecture, dtypes, options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
