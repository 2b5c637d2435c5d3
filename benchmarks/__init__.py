"""The benchmark suite: ``python -m benchmarks``. CONTRIBUTING.md describes how it measures.

``TRANSFORMER_FAST_CPU_ISA`` limits all candidates to one instruction set. PyTorch, oneDNN, MKL and
CTranslate2 have environment variables of their own, which they read once, when they are loaded. So
this package sets them before any other import.
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
#: Our instruction set -> values of the variables `_NAMES`. amx, the highest set, limits nothing.
_THEIRS = {
    "baseline": ("default", "SSE41", "SSE4_2", "GENERIC"),
    "avx2": ("avx2", "AVX2", "AVX2", "AVX2"),
    "avx_vnni": ("avx2", "AVX2_VNNI", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512", "AVX512"),
    "avx512_vnni": ("avx512", "AVX512_CORE_VNNI", "AVX512", "AVX512"),
    "avx512_bf16": ("avx512", "AVX512_CORE_BF16", "AVX512", "AVX512"),
}


def named_isa() -> str | None:
    """Returns the instruction set that all candidates are limited to, or None."""
    name = os.environ.get("TRANSFORMER_FAST_CPU_ISA", "").lower()
    return name if name in _THEIRS else None


if (_isa := named_isa()) is not None and "torch" not in sys.modules:  # read at their import
    for _name, _value in zip(_NAMES, _THEIRS[_isa], strict=True):
        os.environ.setdefault(_name, _value)

# The last import. An error in a TRANSFORMER_FAST_* variable has no traceback while the package of a
# command is imported (`transformer_fast._switches`).
import transformer_fast as transformer_fast  # noqa: E402
