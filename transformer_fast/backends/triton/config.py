"""Tile sizes, warps and pipeline stages, from tables keyed by architecture and shape class.

Nothing is tuned at call time. The interpreter has its own entry: small tiles, so that small test
cases still take several of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch

from .runtime import INTERPRETED, next_power_of_2

#: Architectures with tables; others use the nearest one below (8.9 has the memory of 8.6).
ARCHITECTURES = (80, 86, 90, 100, 120)

_forced: int | None = None


@contextmanager
def use_architecture(architecture: int) -> Iterator[None]:
    """Within the block tables are read for ``architecture``, whatever the device."""
    global _forced
    before, _forced = _forced, architecture
    try:
        yield
    finally:
        _forced = before


@lru_cache(maxsize=None)
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return max((a for a in ARCHITECTURES if a <= 10 * major + minor), default=ARCHITECTURES[0])


def architecture(device: torch.device) -> int:
    """The table's key for ``device``; 0 stands for the interpreter."""
    if _forced is not None:
        return _forced
    if device.type != "cuda":
        return 0
    return _capability(device)


class RowTile(NamedTuple):
    rows: int
    columns: int
    warps: int
    stages: int = 1
    per_multiprocessor: int = 1


def layer_norm_forward(columns: int) -> RowTile:
    """32 elements a thread: a warp holds 1024, and 32 such warps on a multiprocessor keep 64 KB of
    loads in flight, several times what hides the latency of memory."""
    block = max(16, next_power_of_2(columns))
    if INTERPRETED:
        return RowTile(4, block, 1)
    return RowTile(max(1, 1024 // block), block, max(1, min(16, block // 1024)))


def layer_norm_backward(columns: int, item: int) -> RowTile:
    """8 elements a thread, so that x, dy and two sums stay in registers, and few programs, because
    each leaves a share of dweight and dbias to write and add; loads run several chunks ahead."""
    block = max(16, next_power_of_2(columns))
    if INTERPRETED:
        return RowTile(4, block, 1)
    warps = min(32, max(8, block // 256))
    stages = 4 if block * item <= 8192 else 3 if block * item <= 16384 else 1
    return RowTile(max(1, 2048 // block), block, warps, stages, 2 if warps == 8 else 1)


class AttentionTile(NamedTuple):
    queries: int
    keys: int
    warps: int
    stages: int


#: Forward attention: {architecture: {largest head size: (half types, fp32)}}.
_ATTENTION_FORWARD: dict[int, dict[int, tuple[AttentionTile, AttentionTile]]] = {
    80: {
        64: (AttentionTile(128, 64, 4, 3), AttentionTile(64, 32, 4, 2)),
        128: (AttentionTile(128, 64, 8, 2), AttentionTile(64, 32, 8, 2)),
        256: (AttentionTile(64, 32, 4, 2), AttentionTile(32, 16, 4, 2)),
    },
}


def attention_forward(architecture: int, head: int, half: bool) -> AttentionTile:
    if architecture == 0:
        return AttentionTile(16, 16, 4, 1)
    table = _ATTENTION_FORWARD[80]
    return table[next(size for size in table if head <= size)][0 if half else 1]


def attention_granule(architecture: int, head: int, half: bool) -> tuple[int, int]:
    """Queries and keys that one code of a mask covers: what every tile is a multiple of."""
    if architecture == 0:
        return 16, 16
    return 16, 16


def lists_pay(architecture: int, places: int, mask_places: int, queries: int, tiles: int) -> bool:
    if architecture == 0:
        return tiles > 1
    return queries > 1 and tiles >= 8 and mask_places * 4 <= places


def attention_backward_query(architecture: int, head: int, half: bool) -> AttentionTile:
    if architecture == 0:
        return AttentionTile(16, 32, 4, 1)
    return AttentionTile(64, 64, 4, 2)


def attention_backward_key(architecture: int, head: int, half: bool) -> AttentionTile:
    if architecture == 0:
        return AttentionTile(32, 16, 4, 1)
    return AttentionTile(64, 64, 4, 2)


def attention_bias(architecture: int, head: int, half: bool) -> AttentionTile:
    if architecture == 0:
        return AttentionTile(16, 16, 4, 1)
    return AttentionTile(64, 64, 4, 2)


class ProductTile(NamedTuple):
    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int
    descriptors: bool = False
    slices: int = 1


def matmul(architecture: int, rows: int, columns: int, half: bool) -> ProductTile:
    if architecture == 0:
        return ProductTile(32, 32, 16, 2, 4, 1, half, 2)
    if not half:
        return ProductTile(64, 64, 32, 8, 4, 3)
    if architecture in (90, 100):
        return ProductTile(128, 128, 64, 8, 8, 4, True)
    return ProductTile(128, 128, 32, 8, 8, 3)


def attention_weights(architecture: int, head: int, half: bool) -> AttentionTile:
    if architecture == 0:
        return AttentionTile(16, 32, 4, 1)
    return AttentionTile(64, 64, 4, 1) if half else AttentionTile(32, 32, 4, 1)


class DecodeTile(NamedTuple):
    keys: int
    each: int  # keys that make a program worth its start
    warps: int
    stages: int


def attention_decode(architecture: int, head: int, half: bool) -> DecodeTile:
    if architecture == 0:
        return DecodeTile(16, 16, 4, 1)
    return DecodeTile(64, 256, 4, 3)
