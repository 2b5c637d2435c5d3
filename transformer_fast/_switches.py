"""The package's environment variables: their names and valid values; read once, when the package is
imported.

An invalid value raises an error that names the variable: a `ValueError` in a program, and a
`SystemExit`, which prints no traceback, in the commands ``python -m transformer_fast`` and
``python -m benchmarks``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

#: Variables that affect which kernels run. ``TRANSFORMER_FAST_CPU_ISA`` is read by the native
#: module.
NAMES = (
    "TRANSFORMER_FAST_BACKEND",
    "TRANSFORMER_FAST_STRICT",
    "TRANSFORMER_FAST_EXPORT_OPERATORS",
    "TRANSFORMER_FAST_BATCH_INVARIANT",
    "TRANSFORMER_FAST_CPU_ISA",
    "TRANSFORMER_FAST_PACKED_MB",
    "TRANSFORMER_FAST_CUDA_GRAPHS",
)
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def refuse(message: str) -> Exception:
    """Returns the exception for an invalid value."""
    # With ``python -m``, argv[0] is "-m" until the package of the module is imported.
    return SystemExit(message) if sys.argv[:1] == ["-m"] else ValueError(message)  # type: ignore[return-value]


def _wrong(name: str, expected: str) -> Exception:
    return refuse(f"{name} must be {expected}, not {os.environ[name]!r}")


def _given(name: str) -> str:
    """Returns the variable's value in lower case; "" if it is not set."""
    return os.environ.get(name, "").lower()


def choice(name: str, choices: Sequence[str]) -> str | None:
    """Returns the value, one of ``choices`` in any case; None if it is not set."""
    value = _given(name)
    if not value:
        return None
    if value not in choices:
        raise _wrong(name, f"one of {', '.join(choices)}")
    return value


def flag(name: str) -> bool:
    """True for 1, true, yes, on; False for 0, false, no, off, and if not set."""
    value = _given(name)
    if value and value not in _ON + _OFF:
        raise _wrong(name, f"one of {', '.join(_ON + _OFF)}")
    return value in _ON


def count(name: str, default: int) -> int:
    """Returns the value as an integer >= 0."""
    value = _given(name)
    if not value:
        return default
    if not (value.isascii() and value.isdigit()):
        raise _wrong(name, "a whole number of at least 0")
    return int(value)
