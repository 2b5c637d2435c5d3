"""Calls of attention that several tests draw."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from transformer_fast.specs.spec import Draw


def draw(dtype: torch.dtype = torch.float32) -> Draw:
    return Draw(dtype, "cpu", torch.Generator().manual_seed(0))


def tensors(
    queries: int,
    keys: int,
    size: int = 40,
    value_size: int | None = None,
    heads: int = 2,
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
    key_heads: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    d, h = draw(dtype), heads if key_heads is None else key_heads
    query, key = d.normal(batch, heads, queries, size), d.normal(batch, h, keys, size)
    return query, key, d.normal(batch, h, keys, size if value_size is None else value_size)


def options(
    queries: int, keys: int, dtype: torch.dtype = torch.float32
) -> dict[str, dict[str, Any]]:
    """Keywords of `arrange`, by name."""
    d = draw(dtype)
    seen = d.bools(2, 1, queries, keys, true=0.7)
    added = d.normal(1, 2, queries, keys).masked_fill(seen[:1] < 1, -math.inf)
    lengths = torch.tensor([keys - keys // 3, keys])
    return {
        "plain": {},
        "causal": {"causal": True},
        "lengths": {"lengths": lengths, "weights": True},
        "no keys": {"lengths": torch.tensor([0, keys])},
        "bool mask": {"mask": seen},
        "float mask": {"mask": added, "causal": True},
        "mask of keys": {"mask": seen[:, :, :1], "lengths": lengths},
        "added to keys": {"mask": added[:, :1, :1]},
        "mask of zeros": {"mask": torch.zeros(1, 1, 1, keys, dtype=dtype)},
        "weights": {"weights": True, "mask": seen, "causal": True},
        "dropout": {"dropout_p": 0.2, "seed": d.seed()},
        "weights behind dropout": {"dropout_p": 0.5, "seed": d.seed(), "weights": True},
    }
