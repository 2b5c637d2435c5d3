"""Runs Triton's kernels on the GPU if there is one, otherwise in Triton's interpreter.

Triton reads the switch from the environment when a kernel is decorated. It is therefore set only
while the kernels are imported; subprocesses of the tests do not inherit it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def switched_on() -> Iterator[None]:
    """Context manager within which Triton decorates kernels for the GPU or for the interpreter."""
    before = os.environ.get("TRITON_INTERPRET")
    if DEVICE == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before
        elif DEVICE == "cpu":
            del os.environ["TRITON_INTERPRET"]


def _why_not() -> str | None:
    spec = importlib.util.find_spec("triton")
    if spec is None:
        return "Triton is not installed"
    if DEVICE == "cpu" and "triton" in sys.modules and "TRITON_INTERPRET" not in os.environ:
        # Triton reads the switch at its first import. A skip here would lose every Triton test.
        raise RuntimeError(
            "Triton was imported before tests/conftest.py, with its interpreter off: "
            "find out which plugin or module imports it, or set TRITON_INTERPRET=1"
        )
    return None


WHY_NOT = _why_not()
if WHY_NOT is None:
    with switched_on():
        import triton.experimental.gluon  # the interpreter imports it at its first run

        import transformer_fast.backends.triton.compile_ahead  # noqa: F401 - imports all kernels


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """Decorates a kernel of a test."""
    with switched_on():
        return triton.jit(function, **options)
