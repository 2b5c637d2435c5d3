"""The benchmark suite: ``python -m benchmarks``. How its figures are taken: CONTRIBUTING.md.

Where ``TRANSFORMER_FAST_CPU_ISA`` names an instruction set, it is one for all candidates. PyTorch,
oneDNN, MKL and CTranslate2 have variables of their own, which they read once, when they are loaded.
So this comes before any other import.
"""

from __future__ import annotations

import os
import sys

_NAMES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "CT2_FORCE_CPU_ISA",
)
#: From ours to theirs; on amx nobody needs to be held back.
_THEIRS = {
    "baseline": ("default", "SSE41", "SSE4_2", "GENERIC"),
    "avx2": ("avx2", "AVX2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512", "AVX512"),
    "avx512_bf16": ("avx512", "AVX512_CORE_BF16", "AVX512", "AVX512"),
}


def named_isa() -> str | None:
    """The instruction set that all are to be held to, or None."""
    name = os.environ.get("TRANSFORMER_FAST_CPU_ISA", "").lower()
    return name if name in _THEIRS else None


def hold_others() -> None:
    """Set their variables, those that are not set; too late, and left alone, if torch is there."""
    if (name := named_isa()) is not None and "torch" not in sys.modules:
        for theirs, value in zip(_NAMES, _THEIRS[name], strict=True):
            os.environ.setdefault(theirs, value)


hold_others()

# Last: a wrong TRANSFORMER_FAST_* variable is told without a traceback while a command's package is
# being imported (`transformer_fast._switches`).
import transformer_fast as transformer_fast  # noqa: E402
