"""Memory that the CPU kernels keep: for their next large results, and weights in their own layout.

A page that a process touches for the first time costs more than writing it several times. So
results of 256 KiB and more lie in memory that stays with the process when they are gone, and the
next ones get it, as in PyTorch's caching allocator for CUDA. At most `limit` bytes are kept that no
tensor uses; beyond that, those that have waited longest go back to the system, and all of them do
before a result is refused for want of memory.

Such tensors cannot grow in place, nor can their storage be resized, not to 0 either: ``resize_``
raises a RuntimeError. After ``set_limit(0)`` results are PyTorch's memory, which can.

In calls without gradients the kernels read a copy of each weight in a layout of their own, kept until
the weight changes. `forget_packed` drops copies after writes that cannot be found.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import _native, call_cache

__all__ = [
    "forget_calls", "forget_packed", "kept", "limit", "packed", "release", "set_limit",
]  # fmt: skip

_MOST = 1 << 30
#: Of each backend that keeps packed copies of weights: how many bytes they take, and what drops those
#: of a module, or all.
packings: list[tuple[Callable[[], int], Callable[[torch.nn.Module | None], None]]] = []


class Copies(NamedTuple):
    """`cpu_packing.PackedWeights`, which finds packed copies, and `Snapshot`, the state of a tensor."""

    packed: Callable[[], Any]
    snapshot: Callable[..., Any]


#: By backend.
COPIES: dict[str, Copies] = {}


class _Program(threading.local):
    """The compiled program that runs on this thread."""

    #: Parameters that it reads through views, by the address of their storage: a view that inductor
    #: makes does not know of what.
    parameters: Mapping[int, torch.Tensor] = {}


program = _Program()


def kept() -> int:
    """Bytes kept now that no tensor uses. 0 without the native module."""
    return 0 if _native.module is None else int(_native.module.kept_bytes())


def limit() -> int:
    """Bytes kept at most: `set_limit`'s, or 1 GiB, or a sixteenth of the memory if less.

    The memory is that of the machine, or what its control groups (a container's limit) allow this
    process. 0 without the native module.
    """
    return 0 if _native.module is None else int(_native.module.kept_limit())


def set_limit(size: int) -> None:
    """Keep at most ``size`` bytes, 0 for none. What is beyond it is freed at once.

    Raises:
        ValueError: ``size`` is negative.
    """
    if size < 0:
        raise ValueError(f"size must be a number of bytes, 0 or more, not {size}")
    if _native.module is not None:
        _native.module.set_kept_limit(size)


def release() -> None:
    """Give all memory back to the system that is kept and that no tensor uses."""
    if _native.module is not None:
        _native.module.release_kept()


def packed() -> int:
    """Bytes that copies of weights in the kernels' layout take now, at most
    ``TRANSFORMER_FAST_PACKED_MB`` MiB (default 4096)."""
    return sum(held_bytes() for held_bytes, _ in packings)


def forget_packed(module: torch.nn.Module | None = None) -> None:
    """Drop the kernels' copies of a module's weights, or of all weights; the next calls pack again.

    The constants of compiled programs are dropped in either case, and computed again.

    Needed only after writing single elements of a weight where PyTorch does not see it: through
    ``.data``, NumPy or another tensor on the same memory. All that PyTorch sees, and rows and
    columns however they are written, is found by itself.
    """
    for _, forget in packings:
        forget(module)


def forget_calls() -> None:
    """Drop what is remembered of calls on GPUs (which kernel takes them, what it launches), at most
    4096 of each op. No tensors are kept with it."""
    call_cache.forget()


def _memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: the machine's, or less in a control group."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        mount, name = root / "sys/fs/cgroup", "memory.max"  # version 2
        if controllers:  # version 1
            if "memory" not in controllers.split(","):
                continue
            mount, name = mount / "memory", "memory.limit_in_bytes"
        group = mount / path.lstrip("/")
        # In a container the path may be the host's, of which only the mount's root is there.
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
                sizes.append(int((folder / name).read_text()))
            if folder == mount:
                break
    return min(sizes)


if _native.module is not None:
    set_limit(min(_MOST, _memory() // 16))
