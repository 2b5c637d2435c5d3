"""Triton's kernels run on the GPU where there is one, and else in Triton's interpreter.

Triton decides when it is imported, and for the whole process. So the switch is set for the import of
the kernels only, and what other tests start does not inherit it.
"""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytest.importorskip("triton", reason="Triton is not installed") if DEVICE == "cuda" else None

_before = os.environ.get("TRITON_INTERPRET")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
try:
    from transformer_fast.backends.triton import runtime
finally:
    if _before is None:
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = _before


@pytest.fixture
def device() -> str:
    if DEVICE == "cpu" and not runtime.INTERPRETED:
        pytest.skip("Triton was imported before with its interpreter off")
    return DEVICE
