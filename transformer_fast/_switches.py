"""The package's environment variables: what each may be, read once, when the package is imported.

A wrong value raises an error of one sentence that names the variable: a `ValueError` in a program, and
a `SystemExit`, which shows no traceback, in the commands ``python -m transformer_fast`` and
``python -m benchmarks``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

#: Those that decide what runs. ``TRANSFORMER_FAST_CPU_ISA`` is read by the native module.
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
    """What to raise for a wrong value."""
    # Python calls the module that it is to run "-m" for as long as it imports that one's package.
    return SystemExit(message) if sys.argv[:1] == ["-m"] else ValueError(message)  # type: ignore[return-value]


def _wrong(name: str, expected: str) -> Exception:
    return refuse(f"{name} must be {expected}, not {os.environ[name]!r}")


def _given(name: str) -> str:
    """In lower case."""
    return os.environ.get(name, "").lower()


def choice(name: str, choices: Sequence[str]) -> str | None:
    """One of these names, in any case; None if nothing is named."""
    value = _given(name)
    if not value:
        return None
    if value not in choices:
        raise _wrong(name, f"one of {', '.join(choices)}")
    return value


def flag(name: str) -> bool:
    """Whether it is on: 1, true, yes, on; 0, false, no, off and nothing are off."""
    value = _given(name)
    if value and value not in _ON + _OFF:
        raise _wrong(name, f"one of {', '.join(_ON + _OFF)}")
    return value in _ON


def count(name: str, default: int) -> int:
    """A whole number of at least 0."""
    value = _given(name)
    if not value:
        return default
    if not (value.isascii() and value.isdigit()):
        raise _wrong(name, "a whole number of at least 0")
    return int(value)
