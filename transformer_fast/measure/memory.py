"""Peak memory of a call, beyond what is allocated before it."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

import torch

from .. import memory

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def _resident(field: str) -> int:
    found = re.search(rf"^{field}:\s*(\d+) kB", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _trim() -> None:
    gc.collect()
    memory.release()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def peak(call: Callable[[], object], device: torch.device | str = "cpu") -> int | None:
    """Peak bytes that ``call`` allocates, its result included; None where it cannot be measured.

    On the CPU the peak resident set size (Linux), which includes memory outside torch's allocator.
    Buffers that a library keeps between calls are not counted; those of `transformer_fast.memory`
    are.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    try:
        _trim()
        _CLEAR.write_text("5", encoding="ascii")  # "the highest so far" becomes "now"
        before = _resident("VmRSS")
        call()
        return max(0, _resident("VmHWM") - before)
    except (OSError, AssertionError):
        return None
