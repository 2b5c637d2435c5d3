"""``python -m transformer_fast.backends.triton.compile_report``: what the assembler made of every kernel.

Compiles the calls of `compile_cases` for each architecture and prints, per kernel, a line of JSON: what
``info --kernels`` shows, and the instructions that tell whether the assembler took the fast path.
HGMMA and UTCHMMA are the matrix units of Hopper and Blackwell, HMMA those before, UTMALDG is the copy
engine, LDG.128 and LDGSTS.128 are loads of 16 bytes a thread.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from typing import Any

from .compile_ahead import SHARED_LIMIT, compile_launch, disassemble
from .compile_cases import cases, launches

_INSTRUCTIONS = {
    "HGMMA": r"\bHGMMA",
    "UTCHMMA": r"\bUTCHMMA",
    "HMMA": r"\bHMMA",
    "UTMALDG": r"\bUTMALDG",
    "LDG.128": r"\bLDG\S*\.128",
    "LDGSTS.128": r"\bLDGSTS\S*\.128",
}
_WAIT = r"\bDEPBAR\.LE SB0, (0x\w+)"


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
                    "kernel": compiled.kernel,
                    "architecture": architecture,
                    "registers": compiled.registers,
                    "spilled": compiled.spilled,
                    "shared": compiled.shared,
                    "warps": compiled.warps,
                    "stages": compiled.stages,
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
