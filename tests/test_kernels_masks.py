"""Attention's masks in every broadcastable shape, and garbage at hidden places."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Target, check_target, on, run, targets

from transformer_fast.specs.attention_cases import arrange
from transformer_fast.testing import check, truth_of

pytestmark = pytest.mark.usefixtures("two_threads")

#: The kernels that have masks.
TARGETS = [p for p in targets("attention") if p.values[0].kernel.backend != "torch"]
SHAPES = list(itertools.product((1, 2), (1, 3), (1, 19), (1, 37)))  # all of (B, H, T, S)


def draw(dtype, *, batch=2, heads=3, queries=19, keys=37, size=8):
    generator = torch.Generator().manual_seed(0)

    def normal(length):
        return torch.randn(batch, heads, length, size, generator=generator).to(dtype)

    return normal(queries), normal(keys), normal(keys)


Call = tuple[str, tuple[Any, ...]]


@functools.cache
def known(build: Callable[[torch.dtype], list[Call]], dtype: torch.dtype) -> list[Any]:
    """(name, arguments, truth) of every call, computed once for all instruction sets."""
    return [(name, arguments, truth_of("attention", arguments)) for name, arguments in build(dtype)]


def check_all(
    target: Target, build: Callable[[torch.dtype], list[Call]], offsets: tuple[int, ...] = (1,)
) -> None:
    """Holds each call to the budget; skips if the kernel refuses all of them."""
    refusals = [target.refusal(arguments) for _, arguments in build(target.dtype)]
    if all(refusals):
        pytest.skip(refusals[0])
    for (name, arguments, truth), refused in zip(known(build, target.dtype), refusals, strict=True):
        for offset in () if refused else offsets:
            try:
                check_target(target, arguments, offset, truth)
            except AssertionError as error:
                raise AssertionError(f"{name}, {offset} off alignment: {error}") from None


def bool_masks(dtype: torch.dtype) -> list[Call]:
    return of_every_shape(dtype, lambda noise: noise < 0.4)


def float_masks(dtype: torch.dtype) -> list[Call]:
    return of_every_shape(dtype, lambda noise: noise.masked_fill(noise > 1.0, -math.inf))


def masks_of_the_dtype(dtype: torch.dtype) -> list[Call]:
    return of_every_shape(dtype, lambda noise: noise.masked_fill(noise > 1.0, -math.inf).to(dtype))


def of_every_shape(
    dtype: torch.dtype, to_mask: Callable[[torch.Tensor], torch.Tensor]
) -> list[Call]:
    qkv, calls = draw(dtype), []
    for shape in SHAPES:
        mask = to_mask(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
        calls.append((f"mask {shape}", arrange(*qkv, mask=mask)))
        if shape in ((1, 1, 1, 1), (2, 1, 1, 37), (1, 1, 19, 37)):
            expanded = mask.expand(2, 3, 19, 37)
            calls.append((f"mask {shape}, expanded", arrange(*qkv, mask=expanded)))
    return calls


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("masks", [bool_masks, float_masks, masks_of_the_dtype])
def test_every_broadcastable_shape(target, masks):
    check_all(target, masks)


def strided_masks(dtype: torch.dtype) -> list[Call]:
    qkv = draw(dtype)
    full = torch.rand(2, 3, 19, 37, generator=torch.Generator().manual_seed(2)) < 0.6
    gaps = torch.zeros(4, 3, 40, 112, dtype=torch.bool)[::2, :, 1:39:2, ::3][..., :37]
    gaps.copy_(full)
    calls = [("gaps", arrange(*qkv, mask=gaps))]
    for order in itertools.permutations(range(4)):
        for mask in (full, torch.where(full, 0.25, -math.inf)):
            laid = in_memory_order(mask, order)
            calls.append((f"{mask.dtype} in order {order}", arrange(*qkv, mask=laid)))
    return calls


def in_memory_order(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The same tensor, whose dimensions lie in memory in that order."""
    back = [order.index(d) for d in range(4)]
    return tensor.permute(order).contiguous().permute(back)


@pytest.mark.parametrize("target", TARGETS)
def test_strides_of_masks(target):
    check_all(target, strided_masks, offsets=(0, 3))


def everything_together(dtype: torch.dtype) -> list[Call]:
    """Mask, causality and lengths at once, over several tiles of keys."""
    qkv = draw(dtype, heads=2, queries=70, keys=600)
    generator, calls = torch.Generator().manual_seed(3), []
    for shape in ((1, 1, 1, 600), (2, 1, 70, 1), (1, 2, 70, 600)):
        mask = torch.rand(shape, generator=generator) < 0.5
        for lengths in ([0, 600], [255, 257], [1, 512]):
            options = {"mask": mask, "lengths": torch.tensor(lengths)}
            calls.append((f"{shape} {lengths}", arrange(*qkv, **options)))
            calls.append((f"{shape} {lengths} causal", arrange(*qkv, **options, causal=True)))
    return calls


@pytest.mark.parametrize("target", TARGETS)
def test_everything_together(target):
    check_all(target, everything_together)


def hidden_tiles(dtype: torch.dtype) -> list[Call]:
    """First, middle and last tiles of keys that nobody, or only one query, may see."""
    qkv, calls = draw(dtype, batch=1, heads=1, queries=60, keys=1030), []
    for hidden in ((0, 300), (256, 512), (200, 900), (512, 1030), (0, 1030)):
        mask = torch.ones(1, 1, 60, 1030, dtype=torch.bool)
        mask[..., slice(*hidden)] = False
        calls.append((f"hidden {hidden}", arrange(*qkv, mask=mask)))
        calls.append((f"hidden {hidden}, of keys", arrange(*qkv, mask=mask[:, :, :1])))
        one = mask.clone()
        one[..., 31, hidden[0] + 7] = True
        calls.append((f"hidden {hidden} but once", arrange(*qkv, mask=one)))
        added = torch.where(one, 0.5, -math.inf)
        calls.append((f"hidden {hidden} but once, float", arrange(*qkv, mask=added)))
    return calls


@pytest.mark.parametrize("target", TARGETS)
def test_whole_tiles_hidden(target):
    check_all(target, hidden_tiles)


GARBAGE = [math.nan, math.inf, -math.inf]


def garbage_seen_by_some(dtype: torch.dtype) -> list[Call]:
    calls, generator = [], torch.Generator().manual_seed(4)
    for keys, garbage, wild in itertools.product((37, 530), GARBAGE, ("key", "value", "both")):
        mask = torch.rand(1, 1, 19, keys, generator=generator) < 0.5
        for place in (3, keys - 1):
            query, key, value = draw(dtype, keys=keys, batch=1, heads=2)
            if wild != "value":
                key[:, :, place] = garbage
            if wild != "key":
                value[:, 1:, place, 2] = garbage
            name = f"{garbage} in {wild} at {place}"
            calls.append((f"{name}, mask", arrange(query, key, value, mask=mask)))
            calls.append((f"{name}, causal", arrange(query, key, value, causal=True)))
    return calls


@pytest.mark.parametrize("target", TARGETS)
def test_garbage_seen_by_some_reaches_only_them(target):
    """The oracle keeps it from every query that does not see it."""
    check_all(target, garbage_seen_by_some)


@pytest.mark.parametrize("target", TARGETS)
def test_garbage_hidden_from_all_changes_no_bit(target):
    """Beyond a length, under a mask, in the future: the same result as with zeros there."""
    refused = None
    for keys in (37, 300, 530):
        hidden = torch.zeros(keys, dtype=torch.bool)
        hidden[19:] = True
        for options in (
            {"lengths": torch.tensor([19, 19])},
            {"mask": ~hidden[None, None, None]},
            {"mask": torch.where(hidden, -math.inf, 0.0)[None, None, None]},
            {"causal": True},
        ):
            results = []
            for garbage in (0.0, *GARBAGE, 3e4):
                query, key, value = draw(target.dtype, keys=keys)
                key, value = (x.masked_fill(hidden[:, None], garbage) for x in (key, value))
                arguments = arrange(query, key, value, **options)
                refused = target.refusal(arguments)
                if not refused:
                    results.append(run(target, on(target, arguments))[0])
            for result in results[1:]:
                assert torch.equal(result, results[0]), (keys, options)
    if refused:
        pytest.skip(refused)


@pytest.mark.parametrize("target", TARGETS)
def test_garbage_queries_stay_in_their_rows(target):
    query, key, value = draw(target.dtype, queries=130)
    query[:, :, ::7] = math.nan
    query[0, 1, 5] = math.inf
    arguments = arrange(query, key, value)
    reason = target.refusal(arguments)
    if reason:
        pytest.skip(reason)
    output, _ = run(target, on(target, arguments))
    rows = query.isfinite().all(dim=-1)
    assert torch.equal(output.cpu().isfinite().all(dim=-1), rows)


@pytest.mark.parametrize("target", TARGETS)
def test_rows_that_see_nothing_are_exactly_zero(target):
    query, key, value = draw(target.dtype)
    visible = torch.rand(2, 3, 19, 37, generator=torch.Generator().manual_seed(5)) < 0.5
    visible[:, :, ::3] = False
    query[:, :, 6] = math.nan  # even then
    for mask in (visible, torch.where(visible, 0.0, -math.inf)):
        arguments = arrange(query, key, value, mask=mask, weights=True)
        reason = target.refusal(arguments)
        if reason:
            pytest.skip(reason)
        output, weights = run(target, on(target, arguments))
        check("attention", (output, weights), on(target, arguments))
        assert torch.equal(output[:, :, ::3], torch.zeros_like(output[:, :, ::3]))
        assert torch.equal(weights[:, :, ::3], torch.zeros_like(weights[:, :, ::3]))
