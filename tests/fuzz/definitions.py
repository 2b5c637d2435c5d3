"""The ops from their definitions, in NumPy and fp64: the oracle of the fuzz tests.

It shares no code with the package. Every function returns its results and a function that takes
the gradients of the results and returns those of the arguments, worked out by hand; that they are
the derivatives is tested by differences (test_fuzz_oracle.py). What stands at places that nothing
may see is not computed with.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Gradients = dict[str, "Array | None"]

# Random numbers --------------------------------------------------------------------------------


def philox(key: tuple[int, int], counter: Array) -> Array:
    """Philox4x32-10 of counters (..., 4), as Salmon et al. 2011 define it."""
    words = [counter[..., i].astype(np.uint64) for i in range(4)]
    low32 = np.uint64(0xFFFFFFFF)
    for turn in range(10):
        k = [np.uint64((key[i] + turn * w) % 2**32) for i, w in enumerate((0x9E3779B9, 0xBB67AE85))]
        one = words[0] * np.uint64(0xD2511F53)
        two = words[2] * np.uint64(0xCD9E8D57)
        words = [
            (two >> np.uint64(32)) ^ words[1] ^ k[0],
            two & low32,
            (one >> np.uint64(32)) ^ words[3] ^ k[1],
            one & low32,
        ]
    return np.stack(words, axis=-1)


def numbers(seed: int, rows: Array, columns: int) -> Array:
    """The random numbers below 2^16 of these rows: eight of a counter, whose first word counts them."""
    counter = np.zeros((len(rows), -(-columns // 8), 4), np.uint64)
    counter[..., 0] = np.arange(counter.shape[1])[None, :]
    counter[..., 1] = (rows % 2**32)[:, None]
    counter[..., 2] = (rows // 2**32)[:, None]
    words = philox((seed % 2**32, (seed >> 32) % 2**32), counter)
    halves = np.stack([words % 2**16, words // 2**16], axis=-1)
    return halves.reshape(len(rows), 8 * counter.shape[1])[:, :columns]


def kept(shape: tuple[int, ...], p: float, seed: int | None) -> Array:
    """What dropout multiplies by: 0 or 1 / (1 - p) for each element."""
    if p == 0.0:
        return np.ones(shape)
    if p == 1.0:
        return np.zeros(shape)
    assert seed is not None
    drawn = numbers(seed, np.arange(math.prod(shape[:-1])), shape[-1])
    stays = drawn >= min(max(math.floor(p * 65536 + 0.5), 1), 65535)
    return (stays / (1.0 - p)).reshape(shape)
