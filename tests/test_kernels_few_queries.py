"""Attention of few queries, as in decoding, which has kernels of its own on the CPU."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from harness import ISAS, Target, check_target, targets, use

from transformer_fast import _native
from transformer_fast.backends import cpu_blocks
from transformer_fast.reference import add_layer_norm, attention, layer_norm, linear
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


def sublayer(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int | None,
    norm_first: bool,
    lengths: torch.Tensor | None,
) -> torch.Tensor:
    """The step of `cpu_blocks.decode_attention`, from the references; writes to the cache too."""
    in_weight, in_bias, out_weight, out_bias, norm_weight, norm_bias = weights
    (rows, heads, _, size), width = keys.shape, x.shape[1]
    entered = layer_norm(x, (width,), norm_weight, norm_bias, 1e-5) if norm_first else x
    projected = linear(entered, in_weight, in_bias, None, None)
    projected = projected.view(rows, -1, in_weight.shape[0] // width, heads, size)
    query, *new = projected.permute(2, 0, 3, 1, 4).unbind(0)
    if start is not None:
        end = start + query.shape[2]
        for cache, part in zip((keys, values), new, strict=True):
            cache[:, :, start:end] = part
        keys, values = keys[:, :, :end], values[:, :, :end]
    y = attention(
        query, keys, values, None, lengths, start == 0, size**-0.5, 0.0, None, False, False
    )[0]
    y = linear(y.transpose(1, 2).reshape(x.shape), out_weight, out_bias, None, None)
    if norm_first:
        return x + y
    return add_layer_norm(y, x, (width,), norm_weight, norm_bias, 1e-5, 0.0, None)[0]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    ("tokens", "start"), [(1, 7), (1, 0), (5, 0), (1, None), (3, None), (6, None)]
)
def test_a_step_is_its_parts(
    isa: str, dtype: torch.dtype, norm_first: bool, tokens: int, start: int | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, heads, places, size = 3, 2, 12, 16
    width = heads * size
    parts = 1 if start is None else 3
    shapes = [(parts * width, width), (parts * width,), (width, width)] + 3 * [(width,)]
    weights = [torch.randn(s, generator=generator) * 0.3 for s in shapes]
    x = torch.randn(rows * tokens, width, generator=generator)
    caches = [torch.randn(rows, heads, places, size, generator=generator) for _ in range(2)]
    lengths = torch.tensor([12, 5, 0]) if start is None else None

    def given(kind: torch.dtype) -> tuple[Any, ...]:
        mine = [t.to(dtype).to(kind) for t in (x, *weights, *caches)]
        return mine[0], mine[1:7], mine[7].clone(), mine[8].clone()

    def close(of: Any, kind: torch.dtype) -> list[torch.Tensor]:
        y, w, k, v = given(kind)
        return [of(y, w, k, v, start, norm_first, lengths), k, v]

    def ours(y: Any, w: Any, k: Any, v: Any, *_: Any) -> torch.Tensor:
        return cpu_blocks.decode_attention(
            y, k, v, start, *w, 1e-5, norm_first, key_lengths=lengths
        )

    before = _native.module.isa()
    use(isa)
    try:
        with torch.no_grad():
            true, reference = close(sublayer, torch.float64), close(sublayer, dtype)
            found, again = close(ours, dtype), close(ours, dtype)
    finally:
        use(before)
    for a, b, t, same in zip(found, reference, true, again, strict=True):
        assert torch.equal(a, same)
        limit = 2 * (b - t).abs().max() + 2 * torch.finfo(dtype).eps * t.abs().max()
        assert (a - t).abs().max() <= limit


@pytest.mark.skipif(not ISAS, reason="no native kernels here")
def test_bad_steps_are_errors() -> None:
    x, cache = torch.randn(2, 8), torch.zeros(2, 2, 3, 4)
    w3, w1 = torch.randn(24, 8), torch.randn(8, 8)

    def step(x=x, keys=cache, values=cache, start=0, w_in=w3, w_out=w1, norm=None):
        return cpu_blocks.decode_attention(
            x, keys, values, start, w_in, None, w_out, None, norm, None, 1e-5, False
        )

    step()
    for wrong, change in {
        "the cache has 3 places": {"start": 3},
        "several tokens at once must be the first": {"x": x.repeat(2, 1), "start": 1},
        "in_weight must be": {"start": None},
        "out_weight must be": {"w_out": w3},
        "does not fit the keys": {"x": torch.randn(3, 8)},
        "keys and values must be": {"values": cache.double()},
        "the norm must have 8": {"norm": torch.ones(4)},
    }.items():
        with pytest.raises(RuntimeError, match=wrong):
            step(**change)


@pytest.mark.skipif(not ISAS, reason="no native kernels here")
def test_opcheck_of_a_step() -> None:
    x, cache = torch.randn(2, 8), torch.zeros(2, 2, 3, 4)
    w3, w1 = torch.randn(24, 8), torch.randn(8, 8)
    arguments = (
        x, cache, cache.clone(), 1, w3, None, None, w1, None, None, None, None, 1e-5, False,
        None, None,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.transformer_fast.cpu_decode_attention.default, arguments)
