"""Finds the tiles of a mask that are not fully masked, so that attention skips the others.

Two small kernels do this. The first reads the mask once and writes one code per granule of GM x GN
elements: nothing visible (0), something (1), everything (2; for an additive mask: all zeros). The
second computes a list of tile numbers per row (or column) of tiles from codes, causality and key
lengths, with fully visible tiles separate. Attention walks over the list without a branch in its loop.

Both run in every call. Lists are not cached, because the host cannot see whether NumPy, a collective
of torch.distributed or a replayed CUDA graph has written to the mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .runtime import ceil_div, launch
from .tiles import BOOL_MASK, FLOAT_MASK, NO_MASK, PER_BATCH, Mask, sequence_end

_CHUNK = 64
_BOOL_MASK: tl.constexpr = tl.constexpr(BOOL_MASK)


class TileLists(NamedTuple):
    """Lists of visible tiles, one per row of tiles.

    ``counts``: (rows of tiles, 2), numbers of fully visible and of all visible tiles. ``numbers``:
    (rows of tiles, 2 * capacity), fully visible tiles from 0 on, the others from ``capacity`` on.
    Strides are in rows of tiles.
    """

    counts: Tensor | None
    numbers: Tensor | None
    stride_b: int
    stride_h: int
    capacity: int


NO_LISTS = TileLists(None, None, 0, 0, 0)


def prepare_mask(mask: Tensor | None) -> Mask:
    """Returns the kernels' `Mask`, with size 1 in dimensions that the mask does not depend on."""
    if mask is None:
        return Mask(None, 0, 0, 0, 0)
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    for dim in range(4):
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)
    both = zip(mask.shape, mask.stride(), strict=True)
    strides = [0 if size == 1 else stride for size, stride in both]
    if mask.dtype == torch.bool:
        return Mask(mask.view(torch.uint8), *strides)
    return Mask(mask.float() if mask.dtype == torch.float64 else mask, *strides)


def kind_of(mask: Mask) -> int:
    """Returns the kernels' code for the kind of the mask."""
    if mask.data is None:
        return NO_MASK
    return BOOL_MASK if mask.data.dtype == torch.uint8 else FLOAT_MASK


@triton.jit(do_not_specialize=["queries"])
def mask_code_kernel(
    mask,
    code_ptr,  # (Bm, Hm, granules in T, granules in S) uint8
    heads, queries, keys,
    GRANULE_T: tl.constexpr, GRANULE_S: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    across, down = tl.cdiv(keys, GRANULE_S), tl.cdiv(queries, GRANULE_T)
    s = (program % across) * GRANULE_S + tl.arange(0, GRANULE_S)
    rest = program // across
    t = (rest % down) * GRANULE_T + tl.arange(0, GRANULE_T)
    rest = rest // down
    inside = (t < queries)[:, None] & (s < keys)[None, :]
    at = mask.data + rest // heads * mask.stride_b + rest % heads * mask.stride_h
    at += t[:, None] * mask.stride_t + s[None, :] * mask.stride_s
    entry = tl.load(at, mask=inside, other=0)
    if MASK == _BOOL_MASK:
        seen = entry != 0
        plain = seen
    else:
        seen = entry != float("-inf")
        plain = entry == 0.0
    some = tl.max(tl.max((seen & inside).to(tl.int32), 1), 0)
    every = 1 - tl.max(tl.max((~plain & inside).to(tl.int32), 1), 0)
    tl.store(code_ptr + program, (some + some * every).to(tl.uint8))


@triton.jit(
    do_not_specialize=(
        *PER_BATCH, "stride_b", "stride_h", "stride_t", "heads", "tiles", "others", "granules_t",
        "granules_s",
    )
)  # fmt: skip
def tile_list_kernel(
    code_ptr,
    length_ptr,  # (B,) or None
    count_ptr,  # (rows of tiles, 2) int32
    number_ptr,  # (rows of tiles, 2 * capacity) int32
    stride_b, stride_h, stride_t, stride_s, stride_length,
    heads, tiles, others, granules_t, granules_s, queries, keys, capacity,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    FACTOR_T: tl.constexpr,  # granules per tile
    FACTOR_S: tl.constexpr,
    CAUSAL: tl.constexpr, CHUNK: tl.constexpr,
    BY_KEYS: tl.constexpr,  # one list per tile of keys instead of per tile of queries
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    tile = program % tiles
    rest = program // tiles
    base = code_ptr + (rest // heads) * stride_b + (rest % heads) * stride_h
    end = sequence_end(length_ptr, stride_length, rest // heads, keys)
    full_count = 0
    part_count = 0
    for start in range(0, others, CHUNK):
        other = start + tl.arange(0, CHUNK)
        if BY_KEYS:
            tile_t, tile_s = other.to(tl.int64), tile + other * 0
        else:
            tile_t, tile_s = tile + other * 0, other.to(tl.int64)
        some = tl.zeros([CHUNK], tl.int32)
        every = tl.full([CHUNK], 1, tl.int32)
        for i in tl.static_range(FACTOR_T):
            for j in tl.static_range(FACTOR_S):
                gt, gs = tile_t * FACTOR_T + i, tile_s * FACTOR_S + j
                # A broadcast dimension of the mask has one granule and stride 0.
                inside = (other < others) & ((gt < granules_t) | (stride_t == 0))
                inside = inside & ((gs < granules_s) | (stride_s == 0))
                code = tl.load(base + gt * stride_t + gs * stride_s, mask=inside, other=0).to(
                    tl.int32
                )
                some = tl.maximum(some, tl.minimum(code, 1))
                every = tl.where(inside & (code < 2), 0, every)
        first_t, first_s = tile_t * BLOCK_T, tile_s * BLOCK_S
        seen = (some > 0) & (other < others) & (first_s < end)
        full = seen & (every > 0) & (first_s + BLOCK_S <= end)
        if CAUSAL:
            seen = seen & (first_s <= tl.minimum(first_t + BLOCK_T, queries) - 1)
            full = full & seen & (first_s + BLOCK_S - 1 <= first_t)
        part = seen & ~full
        full_place = full_count + tl.cumsum(full.to(tl.int32), 0) - 1
        part_place = part_count + tl.cumsum(part.to(tl.int32), 0) - 1
        row = number_ptr + program * 2 * capacity
        tl.store(row + full_place, other, mask=full)
        tl.store(row + capacity + part_place, other, mask=part)
        full_count += tl.sum(full.to(tl.int32), 0)
        part_count += tl.sum(part.to(tl.int32), 0)
    tl.store(count_ptr + program * 2, full_count)
    tl.store(count_ptr + program * 2 + 1, full_count + part_count)


def _codes(mask: Mask, granule: tuple[int, int]) -> Tensor:
    batch, heads, queries, keys = mask.data.shape
    down, across = ceil_div(queries, granule[0]), ceil_div(keys, granule[1])
    codes = torch.empty((batch, heads, down, across), dtype=torch.uint8, device=mask.data.device)
    launch(
        mask_code_kernel, (codes.numel(),), mask, codes, heads, queries, keys, warps=4, stages=1,
        GRANULE_T=granule[0] if queries > 1 else 1, GRANULE_S=granule[1], MASK=kind_of(mask),
    )  # fmt: skip
    return codes


def tile_lists(
    mask: Mask, sizes: tuple[int, int, int, int], lengths: Tensor | None, causal: bool,
    granule: tuple[int, int], block: tuple[int, int], by_keys: bool,
) -> TileLists:  # fmt: skip
    """Returns the lists of visible tiles, of size ``block`` (queries, keys), for (B, H, T, S)."""
    codes = _codes(mask, granule)
    if by_keys:
        lengths = None
    batch, _, queries, keys = sizes
    rows_b = codes.shape[0] if lengths is None else batch
    rows_h = codes.shape[1]
    down, across = ceil_div(queries, block[0]), ceil_div(keys, block[1])
    tiles, others = (across, down) if by_keys else (down, across)
    device = codes.device
    counts = torch.empty((rows_b * rows_h * tiles, 2), dtype=torch.int32, device=device)
    numbers = torch.empty((rows_b * rows_h * tiles, 2 * others), dtype=torch.int32, device=device)
    strides = [0 if n == 1 else s for n, s in zip(codes.shape, codes.stride(), strict=True)]
    launch(
        tile_list_kernel, (rows_b * rows_h * tiles,), codes, lengths, counts, numbers, *strides,
        0 if lengths is None else lengths.stride(0), rows_h, tiles, others, codes.shape[2],
        codes.shape[3], queries, keys, others, warps=1, stages=1, BLOCK_T=block[0],
        BLOCK_S=block[1], FACTOR_T=block[0] // granule[0], FACTOR_S=block[1] // granule[1],
        CAUSAL=causal, BY_KEYS=by_keys, CHUNK=_CHUNK,
    )  # fmt: skip
    stride_h = tiles if rows_h > 1 else 0
    stride_b = tiles * rows_h if rows_b > 1 else 0
    return TileLists(counts, numbers, stride_b, stride_h, others)
