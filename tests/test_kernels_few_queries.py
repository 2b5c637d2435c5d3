"""Attention of few queries, as in decoding, which has kernels of its own on the CPU."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from harness import Target, check_target, targets

from transformer_fast.testing import truth_of

pytestmark = pytest.mark.usefixtures("two_threads")

TARGETS = [p for p in targets("attention") if p.values[0].kernel.backend != "torch"]


def build(dtype: torch.dtype) -> list[tuple[str, tuple[Any, ...]]]:
    """Calls around the border between the kernels for few queries and the others."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    calls = []
    for queries in (1, 2, 3, 4, 5):
        for keys, size, value_size in ((1, 1, 1), (37, 8, 5), (140, 64, 64), (300, 72, 136)):
            q, k = normal(2, 3, queries, size), normal(2, 3, keys, size)
            v = normal(2, 3, keys, value_size)
            noise = torch.rand(2, 1, queries, keys, generator=generator)
            # Whole tiles, single keys, and for one batch element everything.
            seen = (noise > 0.3) & (torch.arange(keys) % 256 < 130)
            seen[1] &= queries > 1
            added = torch.where(seen, noise - 0.5, -math.inf)
            lengths = torch.tensor([keys, keys // 2])
            shape = f"{queries} of {keys}, {size}, {value_size}"
            weights = queries % 2 == 0
            calls += [
                (f"{shape}", (q, k, v, None, None, False, 0.3, 0.0, None, False, weights)),
                (f"{shape}, bool", (q, k, v, seen, None, False, 0.3, 0.0, None, False, weights)),
                (f"{shape}, added", (q, k, v, added, None, True, 0.3, 0.0, None, False, weights)),
                (
                    f"{shape}, lengths",
                    (q, k, v, seen[:, :, :1], lengths, False, -0.3, 0.0, None, False, weights),
                ),
            ]
    grouped = normal(2, 4, 2, 24), normal(2, 2, 50, 24), normal(2, 2, 50, 24)
    calls.append(("grouped", (*grouped, None, None, True, 0.3, 0.0, None, True, True)))
    return calls


@functools.cache
def known(dtype: torch.dtype) -> list[Any]:
    return [(name, call, truth_of("attention", call)) for name, call in build(dtype)]


@pytest.mark.parametrize("target", TARGETS)
def test_parity(target: Target) -> None:
    for name, arguments, truth in known(target.dtype):
        if target.refusal(arguments):
            continue
        try:
            check_target(target, arguments, truth=truth)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_garbage_at_hidden_places(target: Target, garbage: float) -> None:
    q = torch.randn(2, 2, 1, 16).to(target.dtype)
    k, v = (torch.randn(2, 2, 40, 16).to(target.dtype) for _ in range(2))
    seen = torch.rand(2, 1, 1, 40) < 0.5
    hidden = ~seen.expand(2, 2, 1, 40).squeeze(2)
    arguments = (q, k, v, seen, None, False, 0.3, 0.0, None, False, False)
    truth = truth_of("attention", arguments)
    dirty = (q, *(t.masked_fill(hidden[..., None], garbage) for t in (k, v)), *arguments[3:])
    if target.refusal(dirty):
        pytest.skip("refused")
    check_target(target, dirty, truth=truth)
