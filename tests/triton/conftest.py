"""Triton's kernels run on the GPU where there is one, and else in Triton's interpreter.

Triton decides when it is imported, and for the whole process. So the switch is set for the import of
the kernels only, and what other tests start does not inherit it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator

import pytest
import torch

from transformer_fast import dispatch
from transformer_fast.backends import triton as triton_backend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

WHY_NOT = None
if importlib.util.find_spec("triton") is None:
    WHY_NOT = "Triton is not installed"
    collect_ignore_glob = ["test_*.py"]
elif DEVICE == "cpu" and "triton" in sys.modules and "TRITON_INTERPRET" not in os.environ:
    WHY_NOT = "Triton was imported before, with its interpreter off"
elif DEVICE == "cpu":
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton.experimental.gluon  # noqa: F401 - the interpreter imports it at its first run

        import transformer_fast.backends.triton.compile_cases  # noqa: F401 - imports all kernels
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
if WHY_NOT is None:
    from transformer_fast.backends.triton import config


@pytest.fixture
def device() -> Iterator[str]:
    """Where the kernels run; the dispatcher knows of the interpreter for as long as the test runs."""
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    before = dict(dispatch._state.kernels)
    for kernel in triton_backend.kernels(interpreted=DEVICE == "cpu"):
        dispatch.register(kernel)
    yield DEVICE
    dispatch._state.kernels.update(before)


@pytest.fixture
def small_tiles(device: str) -> Iterator[None]:
    """Tiles of 16 x 16 in the interpreter, so that small calls take many."""
    before = config.interpreter_tile
    config.interpreter_tile = (16, 16)
    yield
    config.interpreter_tile = before
