"""Tile sizes, warps and pipeline stages, from tables keyed by architecture and shape class.

Nothing is tuned at call time. The interpreter has its own entry, with small tiles, so that small test
cases still have several of them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from ..._context import settings
from ...dispatch import compute_capability
from .. import call_cache
from . import FEW_ROWS, table_for
from .runtime import INTERPRETED, next_power_of_2

#: (queries, keys) of an attention tile in the interpreter; tests reduce it to have more tiles.
interpreter_tile = (32, 32)

#: Products of up to this many rows call PyTorch (cuBLAS); tests set it to cover both paths.
few_rows = FEW_ROWS


def use_architecture(architecture: int) -> AbstractContextManager[None]:
    """Context manager in which tables are read for ``architecture`` instead of the device's."""
    return call_cache.key_scope(architecture, architecture=architecture)


_table_of = cache(lambda device: table_for(compute_capability(device)))


def architecture(device: torch.device) -> int:
    """Returns the table key of ``device``; 0 is the interpreter."""
    if (chosen := settings.current.architecture) is not None:
        return chosen  # type: ignore[no-any-return]
    return _table_of(device) if device.type == "cuda" else 0


class RowTile(NamedTuple):
    rows: int
    columns: int
    warps: int
    stages: int = 1
    per_multiprocessor: int = 1


@cache
def layer_norm_forward(columns: int) -> RowTile:
    """Returns the tile with 32 elements per thread.

    So a warp has 1024 elements, and 32 such warps on a multiprocessor have 64 KB of loads in flight.
    That is several times what is needed to hide the memory latency.
    """
    block = max(16, next_power_of_2(columns))
    if INTERPRETED:
        return RowTile(4, block, 1)
    return RowTile(max(1, 1024 // block), block, max(1, min(16, block // 1024)))


@cache
def layer_norm_backward(columns: int, item: int) -> RowTile:
    """Returns the tile with 8 elements per thread, so that x, dy and two sums fit in registers.

    There are few programs, because each writes a partial dweight and dbias, which are added later. So
    loads are pipelined several chunks ahead.
    """
    block = max(16, next_power_of_2(columns))
    if INTERPRETED:
        return RowTile(4, block, 1)
    warps = min(32, max(8, block // 256))
    stages = 4 if block * item <= 8192 else 3 if block * item <= 16384 else 1
    return RowTile(max(1, 2048 // block), block, warps, stages, 2 if warps == 8 else 1)


@cache
def cross_entropy(columns: int) -> RowTile:
    """Returns the tile with 16 elements per thread; each has a logit and two sums in registers.

    Longer rows are processed in blocks.
    """
    block = min(4096, max(16, next_power_of_2(columns)))
    if INTERPRETED:
        return RowTile(4, max(min(64, block), block // 8), 1)
    return RowTile(max(1, 1024 // block), block, max(1, min(8, block // 512)))


class AttentionTile(NamedTuple):
    queries: int
    keys: int
    warps: int
    stages: int


class _Row(NamedTuple):
    """Attention tiles for head sizes up to ``head``.

    ``lowp``: bf16 and fp16. ``heavy``: the same with dropout or an additive mask, which need more
    registers. ``float``: fp32.
    """

    head: int
    lowp: AttentionTile
    heavy: AttentionTile
    float: AttentionTile


#: Rows: compute capability and largest head size. Columns: the tiles of low precision, heavy and
#: float. A tile is (queries)x(keys) w(warps) s(stages).
_TABLES = """
attention_forward
   80  64: 128x64 w8 s3 |  64x64 w4 s3 | 32x32 w8 s2
   80 128: 128x32 w8 s3 | 128x32 w8 s2 | 16x32 w8 s2
   80 256:  64x64 w8 s2 |  64x32 w8 s2 | 16x16 w8 s2
   86  64: 128x64 w8 s2 |  64x64 w4 s2 | 32x32 w8 s2
   86 128: 128x32 w8 s2 | 128x32 w8 s2 | 16x32 w8 s2
   86 256:  64x32 w8 s2 |  64x32 w8 s2 | 16x16 w8 s2
   90  64: 128x64 w8 s3 | 128x64 w8 s3 | 32x32 w8 s2
   90 128: 128x128 w8 s2 | 128x64 w8 s2 | 16x32 w8 s2
   90 256:  64x64 w8 s2 |  64x64 w8 s2 | 16x16 w8 s2
  100  64: 128x64 w4 s3 | 128x64 w8 s3 | 32x32 w8 s2
  100 128: 128x64 w8 s3 | 128x64 w8 s2 | 16x32 w8 s2
  100 256:  64x64 w8 s2 |  64x64 w8 s2 | 16x16 w8 s2
attention_backward_query
   80  64:  64x32 w4 s3 |  64x32 w4 s2 | 32x32 w4 s2
   80 128:  64x64 w8 s2 |  64x64 w8 s2 | 16x32 w8 s2
   80 256:  64x32 w8 s2 |  64x32 w8 s2 | 16x16 w8 s2
   86  64:  64x32 w4 s3 |  64x32 w4 s2 | 32x32 w4 s2
   86 128:  64x32 w4 s2 |  64x32 w4 s2 | 16x32 w8 s2
   86 256:  32x32 w4 s2 |  32x32 w4 s2 | 16x16 w8 s2
   90  64: 128x64 w8 s2 | 128x64 w8 s2 | 32x32 w4 s2
   90 128: 128x64 w8 s2 |  64x64 w8 s2 | 16x32 w8 s2
   90 256:  64x64 w8 s2 |  32x32 w4 s2 | 16x16 w8 s2
  100  64: 128x64 w8 s2 | 128x64 w8 s2 | 32x32 w4 s2
  100 128:  64x64 w8 s2 |  64x64 w8 s2 | 16x32 w8 s2
  100 256:  64x32 w8 s2 |  32x32 w4 s2 | 16x16 w8 s2
attention_backward_key
   80  64:  32x64 w4 s3 |  32x64 w4 s2 | 32x32 w8 s2
   80 128:  64x64 w8 s2 |  64x64 w8 s2 | 16x32 w8 s2
   80 256:  32x32 w8 s2 |  32x32 w8 s2 | 16x32 w8 s2
   86  64:  32x64 w4 s3 |  32x64 w4 s2 | 32x32 w8 s2
   86 128:  32x64 w8 s2 |  32x64 w8 s2 | 16x32 w8 s2
   86 256:  32x32 w8 s2 |  32x32 w8 s2 | 16x16 w8 s2
   90  64:  64x64 w4 s2 |  32x64 w4 s2 | 32x32 w8 s2
   90 128: 64x128 w8 s2 |  32x64 w8 s2 | 16x32 w8 s2
   90 256:  32x64 w8 s2 |  16x32 w4 s2 | 16x16 w8 s2
  100  64:  64x64 w4 s2 |  64x64 w4 s2 | 32x32 w8 s2
  100 128:  64x64 w8 s2 |  64x64 w8 s2 | 16x32 w8 s2
  100 256:  32x32 w8 s2 |  32x32 w8 s2 | 16x32 w8 s2
attention_bias
   80  64:  64x32 w4 s2 |  64x32 w4 s2 | 32x32 w8 s2
   80 128:  64x32 w8 s2 |  64x32 w8 s2 | 16x32 w8 s2
   80 256:  32x32 w8 s2 |  32x32 w8 s2 | 16x16 w8 s2
   90  64:  64x64 w4 s2 |  64x64 w4 s2 | 32x32 w8 s2
   90 128:  64x32 w4 s2 |  64x32 w4 s2 | 16x32 w8 s2
   90 256:  32x32 w4 s2 |  32x32 w8 s2 | 16x16 w8 s2
attention_weights
   80  64:  64x64 w4 s1 |  64x64 w4 s1 | 32x32 w8 s1
   80 128:  64x64 w4 s1 |  64x64 w4 s1 | 32x32 w8 s1
   80 256:  64x64 w8 s1 |  64x64 w8 s1 | 16x32 w8 s1
"""


def _parsed(text: str) -> dict[str, dict[int, tuple[_Row, ...]]]:
    found: dict[str, dict[int, tuple[_Row, ...]]] = {}
    for line in text.split("\n")[1:-1]:
        if not line.startswith(" "):
            table = found[line] = {}
            continue
        place, _, tiles = line.partition(":")
        architecture, head = map(int, place.split())
        numbers = [map(int, re.findall(r"\d+", tile)) for tile in tiles.split("|")]
        row = _Row(head, *(AttentionTile(*n) for n in numbers))
        table[architecture] = (*table.get(architecture, ()), row)
    return found


_ATTENTION = _parsed(_TABLES)


def attention(kernel: str, architecture: int, head: int, lowp: bool, heavy: bool) -> AttentionTile:
    """Returns the tile of a kernel of `_ATTENTION`."""
    if architecture == 0:
        return AttentionTile(*interpreter_tile, 4, 1)
    # Consumer Blackwell has the instructions and the shared memory of consumer Ampere.
    wanted = 86 if architecture == 120 else architecture
    table = _ATTENTION[kernel]
    rows = table[max(a for a in table if a <= wanted)]
    row = next(row for row in rows if head <= row.head)
    return row.float if not lowp else row.heavy if heavy else row.lowp


def attention_granule(architecture: int, head: int, lowp: bool) -> tuple[int, int]:
    """Returns (queries, keys) per mask code, of which the tiles of all kernels are multiples."""
    tiles = [
        attention(kernel, architecture, head, lowp, heavy)
        for kernel in ("attention_forward", "attention_backward_query", "attention_backward_key")
        for heavy in (False, True)
    ]
    return min(tile.queries for tile in tiles), min(tile.keys for tile in tiles)


def use_block_lists(
    architecture: int, places: int, mask_places: int, queries: int, tiles: int
) -> bool:
    """True if it pays to search a mask for fully masked tiles that the kernels can skip.

    The search costs two launches and reads the mask once more, so the mask should be shared by several
    heads or batches.

    Args:
        places: number of scores. mask_places: number of elements of the mask.
        queries: T. tiles: number of tiles in a row of scores.
    """
    if architecture == 0:
        return tiles > 1
    return queries > 1 and tiles >= 8 and mask_places * 4 <= places


class DecodeTile(NamedTuple):
    keys: int
    each: int  # least number of keys per program, to be worth the launch
    warps: int
    stages: int


def attention_decode(architecture: int, head: int, lowp: bool) -> DecodeTile:
    if architecture == 0:
        return DecodeTile(16, 16, 4, 1)
    if not lowp:
        return DecodeTile(32 if head <= 128 else 16, 256, 8, 2)
    return DecodeTile(64 if head <= 128 else 32, 256, 4, 2 if architecture in (86, 120) else 3)


class ProductTile(NamedTuple):
    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int
    descriptors: bool = False  # load through tensor descriptors
    slices: int = 1  # of the epilogue


def matmul(
    architecture: int, rows: int, columns: int, lowp: bool, describable: bool = True
) -> ProductTile:
    """Returns the tile of a product; ``describable``: tensor descriptors can load both matrices."""
    if architecture == 0:
        return ProductTile(32, 32, 16, 2, 4, 1, lowp, 2)
    if not lowp:
        return ProductTile(64, 64, 32, 8, 8, 3, slices=2)
    if architecture == 90 and describable and -(-rows // 128) * -(-columns // 256) >= 2 * 132:
        # Matrix instructions with 256 columns read less shared memory per product. For smaller results
        # some of the 132 multiprocessors would idle much of the time, and without descriptors the
        # pointers would need too many registers.
        return ProductTile(128, 256, 64, 8, 8, 3, True, 8)
    if architecture in (90, 100):
        return ProductTile(128, 128, 64, 8, 8, 4, True, 4)
    if architecture == 80:
        return ProductTile(128, 128, 32, 8, 8, 4, slices=4)
    return ProductTile(128, 128, 32, 8, 8, 3, slices=4)


def epilogue(rows: int) -> ProductTile:
    """Returns the tile of the epilogue of a cuBLAS product.

    Few rows have 8 elements per thread, so that there are more programs.
    """
    return ProductTile(16 if rows <= 16 else 64, 64, 0, 0, 4, 1)


def alternatives(name: str, lowp: bool, columns: int) -> list[Any]:
    """Returns candidate tiles for tuning ``name``: a kernel of `_ATTENTION`, or a function here.

    For attention and products these are the tiles of all architectures, otherwise smaller and larger
    tiles than the current one. ``columns``: row size, for tiles that depend on it.
    """
    found: list[Any] = []
    if name in _ATTENTION:
        rows = [row for table in _ATTENTION[name].values() for row in table]
        found += [t for row in rows for t in ((row.lowp, row.heavy) if lowp else (row.float,))]
    elif name == "matmul":
        found += [matmul(a, 4096, 1024, lowp) for a in (80, 86, 90)]
        if lowp:
            found.append(ProductTile(64, 64, 64, 8, 4, 4, slices=2))
            found.append(matmul(90, 2**15, 2**15, lowp))
    elif name == "attention_decode":
        numbers = itertools.product((32, 64, 128), (128, 256, 512), (4, 8), (2, 3))
        found += [DecodeTile(*n) for n in numbers]
    else:
        sizes = (columns, 2 if lowp else 4) if name == "layer_norm_backward" else (columns,)
        now = globals()[name](*sizes)
        for n in sorted({max(1, now.rows // 2), now.rows, 2 * now.rows, 4 * now.rows}):
            found += [now._replace(rows=n, warps=warps) for warps in (1, 2, 4, 8, 16)]
    return list(dict.fromkeys(found))


@contextmanager
def use_tile(name: str, numbers: Sequence[int]) -> Iterator[None]:
    """Context manager in which ``name``, as in `alternatives`, has this tile for all calls."""
    tile, function = type(alternatives(name, True, 1024)[0])(*numbers), globals().get(name)
    table = _ATTENTION.get(name, {})
    before = dict(table)
    if isinstance(tile, AttentionTile):
        # Changes the table itself, because `attention_granule` depends on it, too.
        table.update(dict.fromkeys(table, (_Row(256, tile, tile, tile),)))
    else:
        globals()[name] = lambda *_: tile
    try:
        with call_cache.key_scope((name, tile)):
            yield
    finally:
        if function is not None:
            globals()[name] = function
        table.update(before)
