"""Memory that the CPU kernels keep for their next large results.

A page that a process touches for the first time costs more than writing it several times. So
results of 2 MiB and more lie in memory that stays with the process when they are gone, and the next
ones get it, as in PyTorch's caching allocator for CUDA. At most `limit` bytes are kept that no
tensor uses; beyond that, those that have waited longest go back to the system.

Such tensors cannot grow in place: ``resize_`` beyond their size raises a RuntimeError.
"""

from __future__ import annotations

from . import _native

__all__ = ["kept", "limit", "release", "set_limit"]


def kept() -> int:
    """Bytes kept now that no tensor uses. 0 without the native module."""
    return 0 if _native.module is None else int(_native.module.kept_bytes())


def limit() -> int:
    """Bytes kept at most: `set_limit`'s, or 1 GiB, or a sixteenth of the machine's memory if less.

    0 without the native module.
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
    size = limit()
    set_limit(0)
    set_limit(size)
