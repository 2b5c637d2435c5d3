"""Dropout whose pattern depends on the seed and the element's position only.

The random numbers are those of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011). The tensor is viewed as (rows, columns), where columns is its last dimension.
One Philox call serves eight columns: the four words of

    Philox(counter = (column // 8, row mod 2^32, row div 2^32, 0), key = seed)

are eight numbers of 16 bits. Element (row, column) uses number ``column % 8``. That is word
``column % 8 // 2``: its low 16 bits for even columns, its high 16 bits for odd ones. The element is
kept if and only if its number is at least

    threshold(p) = floor(p * 2^16 + 1/2), at least 1 if p > 0 and at most 2^16 - 1 if p < 1.

So an element is dropped with probability threshold(p) / 2^16. That differs from p by at most 2^-17,
unless p or 1 - p is smaller than that, and it is never 0 or 1 unless p is. Kept elements are
multiplied by 1 / (1 - p) of the unrounded p. Every backend draws the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dropout"]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def draw_seed(device: torch.device) -> Tensor:
    """Draws an int64 seed from PyTorch's generator, so that manual_seed and checkpointing apply."""
    return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=device)


def _multiply(constant: int, word: Tensor) -> tuple[Tensor, Tensor]:
    # int64 products wrap modulo 2^64, so they have the bit pattern of the unsigned 64-bit product.
    product = word * constant
    return (product >> 32) & _MASK, product & _MASK


def threshold(p: float) -> int:
    """Returns the bound below which an element's 16-bit random number drops it; p in (0, 1)."""
    return min(max(int(p * 2**16 + 0.5), 1), 2**16 - 1)


def philox_numbers(seed: Tensor, rows: int, columns: int) -> Tensor:
    """Returns the random numbers of a (rows, columns) tensor, as int64 in [0, 2^16)."""
    device = seed.device
    groups = (columns + 7) // 8
    row = torch.arange(rows, device=device, dtype=torch.int64)[:, None]
    group = torch.arange(groups, device=device, dtype=torch.int64)[None, :]
    zero = torch.zeros((rows, groups), device=device, dtype=torch.int64)
    c0, c1, c2, c3 = zero + group, zero + (row & _MASK), zero + (row >> 32), zero
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    numbers = [half for word in (c0, c1, c2, c3) for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(numbers, dim=-1).reshape(rows, groups * 8)[:, :columns]


def dropout(input: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """Returns ``input / (1 - p)`` where kept, else 0; p = 1 gives zeros, p = 0 the input itself."""
    if p == 0.0:
        return input
    if p == 1.0:
        return torch.where(torch.ones_like(input, dtype=torch.bool), 0.0, input)
    assert seed is not None
    columns = input.shape[-1] if input.dim() else 1
    rows = input.numel() // columns if columns else 0
    keep = philox_numbers(seed.to(input.device), rows, columns) >= threshold(p)
    return torch.where(keep.reshape(input.shape), input * (1.0 / (1.0 - p)), 0.0)
