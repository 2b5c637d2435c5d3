"""Attention: masks, few queries, large scores, gradients, memory, output strides, packed sequences.

Every call runs on each instruction set. Some calls are large because some kernels have a code path
for large sizes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as TF
from harness import (
    CPU,
    CUDA,
    DTYPES,
    TRITON,
    OnDevice,
    Target,
    check_calls,
    check_target,
    check_trained,
    in_use,
    kernel_of,
    on,
    run,
    same_bits,
    targets,
)
from ops.attention import draw, options, tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from transformer_fast import _native, explain
from transformer_fast import functional as F
from transformer_fast._native import TORCH_VERSION
from transformer_fast.backends.triton import config
from transformer_fast.measure.clock import peak
from transformer_fast.reference.attention import empty_output, visible_places
from transformer_fast.specs import OPS
from transformer_fast.specs.attention import arrange
from transformer_fast.testing import (
    GRADIENT_FACTOR,
    OUTPUT_FACTOR,
    check,
    check_gradients,
    gradients,
    nan_memory,
    truth_of,
    truth_of_gradients,
)
from transformer_fast.testing.oracle import oracle, promote
from transformer_fast.testing.parity import compare

pytestmark = [
    pytest.mark.sampled(15, 45),
    pytest.mark.usefixtures("two_threads", "small_tiles"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
needs_native = pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))

#: The kernels that support masks.
TARGETS = [p for p in targets("attention") if p.values[0].kernel.backend != "torch"]
CPU_TARGETS = [p for p in TARGETS if p.values[0].kernel.backend == "cpu"]
FLOAT32 = [p for p in CPU_TARGETS if p.values[0].dtype == torch.float32]
FLOAT16 = [p for p in CPU_TARGETS if p.values[0].dtype == torch.float16]
HALF = [p for p in CPU_TARGETS if p.values[0].dtype != torch.float32]


def on_units(target: Target) -> bool:
    """True if products run on bfloat16 matrix units; on AMX this includes fp32, as bf16x3."""
    bf16 = target.dtype == torch.bfloat16 and target.isa in ("avx512_bf16", "amx")
    return bf16 or (target.dtype == torch.float32 and target.isa == "amx")


UNITS = [p for p in CPU_TARGETS if on_units(p.values[0])]
BF16X3 = [p for p in UNITS if p.values[0].dtype == torch.float32]
#: More than the 35 queries up to which fp32 on AMX uses multiply-adds.
QUERIES = 43
SHAPES = list(itertools.product((1, 2), (1, 3), (1, QUERIES), (1, 37)))  # all of (B, H, T, S)

Call = tuple[str, tuple[Any, ...]]


def bool_masks(dtype: torch.dtype) -> list[Call]:
    return of_every_shape(dtype, lambda noise: noise < 0.4)


def float_masks(dtype: torch.dtype) -> list[Call]:
    return of_every_shape(dtype, lambda noise: noise.masked_fill(noise > 1.0, -math.inf))


def masks_of_the_dtype(dtype: torch.dtype) -> list[Call]:
    return of_every_shape(dtype, lambda noise: noise.masked_fill(noise > 1.0, -math.inf).to(dtype))


def of_every_shape(
    dtype: torch.dtype, to_mask: Callable[[torch.Tensor], torch.Tensor]
) -> list[Call]:
    qkv, calls = tensors(QUERIES, 37, 8, heads=3, dtype=dtype), []
    for shape in SHAPES:
        mask = to_mask(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
        calls.append((f"mask {shape}", arrange(*qkv, mask=mask)))
        if shape in ((1, 1, 1, 1), (2, 1, 1, 37), (1, 1, QUERIES, 37)):
            expanded = mask.expand(2, 3, QUERIES, 37)
            calls.append((f"mask {shape}, expanded", arrange(*qkv, mask=expanded)))
    return calls


def strided_masks(dtype: torch.dtype) -> list[Call]:
    qkv = tensors(QUERIES, 37, 8, heads=3, dtype=dtype)
    full = draw().bools(2, 3, QUERIES, 37, true=0.6)
    gaps = torch.zeros(4, 3, 88, 112, dtype=torch.bool)[::2, :, 1:87:2, ::3][..., :37]
    gaps.copy_(full)
    calls = [("gaps", arrange(*qkv, mask=gaps))]
    for order in itertools.permutations(range(4)):
        for mask in (full, torch.where(full, 0.25, -math.inf)):
            laid = in_memory_order(mask, order)
            calls.append((f"{mask.dtype} in order {order}", arrange(*qkv, mask=laid)))
    return calls


def in_memory_order(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Returns the same tensor, with its dimensions in the given order in memory."""
    back = [order.index(d) for d in range(4)]
    return tensor.permute(order).contiguous().permute(back)


def everything_together(dtype: torch.dtype) -> list[Call]:
    """Mask, causality and lengths in one call, over several tiles of keys."""
    qkv = tensors(70, 600, 8, dtype=dtype)
    generator, calls = torch.Generator().manual_seed(3), []
    for shape in ((1, 1, 1, 600), (2, 1, 70, 1), (1, 2, 70, 600)):
        mask = torch.rand(shape, generator=generator) < 0.5
        for lengths in ([0, 600], [255, 257], [1, 512]):
            options = {"mask": mask, "lengths": torch.tensor(lengths)}
            calls.append((f"{shape} {lengths}", arrange(*qkv, **options)))
            calls.append((f"{shape} {lengths} causal", arrange(*qkv, **options, causal=True)))
    return calls


#: Ranges of masked keys. The kernel keeps the probabilities of 128 keys, and skips groups of 32
#: that are masked.
HIDDEN = [(0, 300), (256, 512), (200, 900), (512, 1030), (0, 1030)]
HIDDEN += [(0, 32), (32, 64), (33, 95), (96, 160), (128, 256), (64, 300)]


def hidden_tiles(dtype: torch.dtype) -> list[Call]:
    """First, middle and last tiles of keys that are masked for all queries, or for all but one."""
    qkv, calls = tensors(60, 1030, 8, heads=1, dtype=dtype, batch=1), []
    for hidden in HIDDEN:
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


GARBAGE = [math.nan, math.inf, -math.inf]


def garbage_seen_by_some(dtype: torch.dtype) -> list[Call]:
    """NaN or infinity in keys that only some queries see; the oracle excludes it from the others."""
    calls, generator = [], torch.Generator().manual_seed(4)
    for (i, queries), keys, (j, wild) in itertools.product(
        enumerate((1, 19, QUERIES)), (37, 530), enumerate(("key", "value", "both"))
    ):
        mask = torch.rand(1, 1, queries, keys, generator=generator) < 0.5
        for k, position in enumerate((3, keys - 1)):
            garbage = GARBAGE[(i + j + k) % 3]  # each value beside each other one
            query, key, value = tensors(queries, keys, 8, dtype=dtype, batch=1)
            if wild != "value":
                key[:, :, position] = garbage
            if wild != "key":
                value[:, 1:, position, 2] = garbage
            name = f"{garbage} in {wild} at {position}"
            calls.append((f"{name}, mask", arrange(query, key, value, mask=mask)))
            calls.append((f"{name}, causal", arrange(query, key, value, causal=True)))
    return calls


def few_queries(dtype: torch.dtype) -> list[Call]:
    """Numbers of queries around the limit up to which the decode kernels run."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    calls = []
    for queries in (1, 2, 3, 4, 5):
        for keys, size, value_size in ((1, 1, 1), (37, 8, 5), (140, 64, 64), (300, 72, 136)):
            q, k = normal(2, 3, queries, size), normal(2, 3, keys, size)
            v = normal(2, 3, keys, value_size)
            noise = torch.rand(2, 1, queries, keys, generator=generator)
            # Masks whole tiles and single keys; for the only query of one batch element everything.
            seen = (noise > 0.3) & (torch.arange(keys) % 256 < 130)
            seen[1] &= queries > 1
            added = torch.where(seen, noise - 0.5, -math.inf)
            lengths = torch.tensor([keys, keys // 2])
            for name, given in {
                "plain": {"scale": 0.3},
                "bool": {"scale": 0.3, "mask": seen},
                "added": {"scale": 0.3, "mask": added, "causal": True},
                "lengths": {"scale": -0.3, "mask": seen[:, :, :1], "lengths": lengths},
            }.items():
                arguments = arrange(q, k, v, weights=queries % 2 == 0, **given)
                calls.append((f"{queries} of {keys}, {size}, {value_size}, {name}", arguments))
    grouped = normal(2, 4, 2, 24), normal(2, 2, 50, 24), normal(2, 2, 50, 24)
    calls.append(("grouped", arrange(*grouped, causal=True, scale=0.3, gqa=True, weights=True)))
    return calls


def with_options(sizes: tuple[int, ...], dtype: torch.dtype) -> list[Call]:
    queries, keys, *_ = sizes
    qkv = tensors(*sizes, dtype=dtype)
    return [(name, arrange(*qkv, **o)) for name, o in options(queries, keys, dtype).items()]


def grouped_heads(dtype: torch.dtype) -> list[Call]:
    calls = []
    for heads, causal, weights in itertools.product((1, 2, 3), (False, True), (False, True)):
        qkv = tensors(50, 140, 24, heads=6, key_heads=heads, dtype=dtype)
        arguments = arrange(*qkv, gqa=True, causal=causal, weights=weights)
        calls.append((f"{heads}, causal {causal}, weights {weights}", arguments))
    return calls


def strides(dtype: torch.dtype) -> list[Call]:
    q, k, v = draw(dtype).normal(2, 70, 3, 4, 24).permute(2, 0, 3, 1, 4)
    return [
        ("packed", arrange(q, k, v, scale=-0.3)),
        ("channels", arrange(q[..., 3:-4], k[..., 1:18], v)),
        ("every third key", arrange(q, k[:, :, :69:3], v[:, :, 1::3], causal=True)),
    ]


# A block has 96 queries, a panel 32 keys, and a tile 512, 256 or 128 keys.
SIZES = [
    (36, 36, 16, 16), (37, 130, 40, 40), (64, 64, 64, 64), (100, 515, 128, 128), (40, 1, 16, 5),
    (200, 77, 256, 256), (97, 1030, 33, 70), (193, 300, 128, 128), (100, 270, 136, 160),
    (96, 600, 8, 8), (192, 300, 1, 1), (36, 70, 0, 16),
]  # fmt: skip
CALLS = (
    *(bool_masks, float_masks, masks_of_the_dtype, strided_masks, everything_together),
    *(hidden_tiles, garbage_seen_by_some, few_queries, grouped_heads, strides),
    *(functools.partial(with_options, sizes) for sizes in SIZES),
)


def of_call(build: Any) -> str:
    return str(getattr(build, "__name__", "") or (build.args[0] if build.args else ""))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("calls", CALLS, ids=of_call)
def test_calls_are_within_the_budget(target, calls):
    check_calls(target, calls, offsets=(0, 3) if calls is strided_masks else (1,))


def hidden_by_bools(dtype: torch.dtype) -> list[Call]:
    return [call for call in hidden_tiles(dtype) if "float" not in call[0]]


@pytest.mark.parametrize("target", UNITS)
@pytest.mark.parametrize("calls", [hidden_by_bools, grouped_heads, *CALLS[-12:-1]], ids=of_call)
def test_gradients_are_within_the_budget(target, calls):
    """Gradients with bfloat16 matrix units; the op table covers the other kernels."""
    check_calls(target, calls, gradients=True)


def saturated(dtype: torch.dtype) -> list[Call]:
    d, calls = draw(), []
    query, key = d.normal(1, 2, 70, 4).abs(), d.normal(1, 2, 140, 4).abs()
    value = d.normal(1, 2, 140, 20)
    masks = d.bools(1, 1, 70, 140), torch.zeros(1, 1, 1, 140)
    for size in (1e2, 1e4, -1e4, 1e7, 1e10, -1e13, 1e20):
        for given in ({}, {"causal": True}, *({"mask": m} for m in masks), {"weights": True}):
            calls.append(
                (f"{size} {[*given]}", arrange(query * size, key, value, scale=1.0, **given))
            )
    return calls


def growing(dtype: torch.dtype) -> list[Call]:
    """Scores grow after the first keys, which determine the initial reference of the exponents."""
    query, key, value = tensors(100, 300)
    calls = []
    for far, low in itertools.product((5.0, 14.0, 30.0, 100.0, 2000.0), (0.0, -1e31)):
        mask = (torch.arange(300) / 300 * far).expand(1, 1, 100, 300).clone()
        mask[..., 40::2, :40] += low
        calls.append((f"{far}, {low}", arrange(query, key, value, mask=mask, weights=True)))
    query[:, :, ::3] += 1.0
    key = key + torch.arange(300)[:, None] / 50
    for causal in (False, True):
        calls.append((f"keys, {causal}", arrange(query, key, value, causal=causal, weights=True)))
    return calls


def lowest(dtype: torch.dtype) -> list[Call]:
    """Masks that add the lowest finite number; where all keys have it, none is masked."""
    qkv = tensors(50, 140)
    masks = [torch.full((1, 1, 50, 140), torch.finfo(torch.float32).min)]
    masks.append(masks[0].clone())
    masks[1][..., ::2, 100:] = 0.0
    masks.append(masks[1].clone())
    masks[2][..., 5, :] = -math.inf
    return [(str(i), arrange(*qkv, mask=mask, weights=True)) for i, mask in enumerate(masks)]


GIVEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "mask": {"mask": draw().bools(1, 1, 40, 150)},
    "weights": {"weights": True},
}


def not_finite(dtype: torch.dtype) -> list[Call]:
    """NaN or infinity in one element, one row, or one channel."""
    calls = []
    for (name, given), value, tensor in itertools.product(GIVEN.items(), GARBAGE, range(3)):
        for place in ((0, 0, 5, 3), (0, 1, 5), (0, 1, slice(None), 5)):
            qkv = tensors(40, 150, 16)
            qkv[tensor][place] = value
            calls.append((f"{name}, {value} in {tensor} at {place}", arrange(*qkv, **given)))
    return calls


@pytest.mark.parametrize("target", FLOAT32)
@pytest.mark.parametrize("calls", [saturated, growing, lowest, not_finite], ids=of_call)
def test_extreme_scores_in_float32(target, calls):
    if calls is saturated and target.isa == "baseline":
        pytest.skip("one row is just outside the budget: its probabilities are 0 and 1")
    check_calls(target, calls)


@pytest.mark.parametrize("value", [3e38, -3e38, 1e36])
@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("target", FLOAT32)
def test_values_near_the_largest_number(target, name, value):
    """A value near the largest fp32 number; scores that overflow behave as in fp32."""
    qkv = tensors(40, 150, 16)
    qkv[2][0, 0, 5, 3] = value
    check_target(target, arrange(*qkv, **GIVEN[name]))
    qkv = tensors(40, 150, 16)
    qkv[0][0, 1, 5, 3] = value
    arguments = arrange(*qkv, scale=0.01, **GIVEN[name])
    truth = truth_of("attention", arguments)
    true = {
        name: None if t is None else torch.where(truth.expected[name].isfinite(), t, math.nan)
        for name, t in truth.true.items()
    }
    check_target(target, arguments, truth=replace(truth, true=true))


def accepted(target: Target, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if target.refusal(arguments):
        pytest.skip(target.refusal(arguments))
    return arguments


@pytest.mark.parametrize("target", TARGETS)
def test_masked_garbage_has_no_effect(target):
    """Garbage beyond a length, under a mask or in the future: bitwise the result with zeros there."""
    refused = None
    more = (3e38, 1e-36) if target.dtype == torch.float32 else ()
    for queries, keys in ((19, 37), (19, 300), (1, 300), (19, 530), (QUERIES, 300)):
        position = torch.arange(keys)
        late = gaps = position >= queries
        # On other kernels NaN selects another code path.
        if target.isa == "amx" and more and queries == QUERIES:
            gaps = late & (position < 130) | (position >= 290)
        lengths = torch.tensor([queries, min(queries, 7)])
        for hidden, given in (
            (late, {"lengths": lengths}),
            (gaps, {"mask": ~gaps[None, None, None]}),
            (gaps, {"mask": torch.where(gaps, -math.inf, 0.25)[None, None, None]}),
            (late, {"causal": True}),
        ):
            results = []
            for garbage in (0.0, *GARBAGE, 3e4, *more):
                query, key, value = tensors(queries, keys, 8, heads=3, dtype=target.dtype)
                key, value = (x.masked_fill(hidden[:, None], garbage) for x in (key, value))
                arguments = arrange(query, key, value, **given, weights=queries == QUERIES)
                refused = target.refusal(arguments)
                if not refused:
                    results.append(run(target, on(target, arguments)))
            assert all(same_bits(r, results[0]) for r in results), (queries, keys, given)
    if refused:
        pytest.skip(refused)


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_a_mask_of_keys_gives_the_bits_of_a_call_without_them(target):
    """If the mask is the same for all queries, the kernels omit hidden keys from the products."""
    query, key, value = tensors(QUERIES, 530, 8, heads=3, dtype=target.dtype, batch=1)
    mask = draw().bools(1, 1, 1, 530, true=0.6)
    seen = mask.flatten()
    masked = run(target, on(target, arrange(query, key, value, mask=mask)))
    fewer = run(target, on(target, arrange(query, key[:, :, seen], value[:, :, seen])))
    assert same_bits(masked, fewer)


@pytest.mark.parametrize("target", TARGETS)
def test_garbage_queries_affect_only_their_rows(target):
    query, key, value = tensors(130, 37, 8, heads=3, dtype=target.dtype)
    query[:, :, ::7] = math.nan
    query[0, 1, 5] = math.inf
    arguments = accepted(target, arrange(query, key, value))
    output, _ = run(target, on(target, arguments))
    rows = query.isfinite().all(dim=-1)
    assert torch.equal(output.cpu().isfinite().all(dim=-1), rows)


@pytest.mark.parametrize("target", TARGETS)
def test_fully_masked_rows_are_exactly_zero(target):
    query, key, value = tensors(QUERIES, 37, 8, heads=3, dtype=target.dtype)
    visible = draw().bools(2, 3, QUERIES, 37)
    visible[:, :, ::3] = False
    query[:, :, 6] = math.nan  # even if the query is NaN
    for mask in (visible, torch.where(visible, 0.0, -math.inf)):
        arguments = accepted(target, arrange(query, key, value, mask=mask, weights=True))
        output, weights = run(target, on(target, arguments))
        check("attention", (output, weights), on(target, arguments))
        assert torch.equal(output[:, :, ::3], torch.zeros_like(output[:, :, ::3]))
        assert torch.equal(weights[:, :, ::3], torch.zeros_like(weights[:, :, ::3]))


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3, "seed": torch.tensor(7)}], ids=len)
@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("target", HALF)
def test_a_dominant_key_gives_exactly_its_value(target, queries, options, generator):
    """Holds for every distance from the first keys' scores. Weights are rounded before they
    multiply the values, and still sum to 1.
    """
    mask = torch.zeros(1, 1, queries, 75)
    mask[..., 60] = torch.linspace(30.0, 50.0, queries)
    query = torch.zeros(1, 2, queries, 16)
    key, value = torch.zeros(1, 2, 75, 16), torch.zeros(1, 2, 75, 16)
    value[:, :, 60] = torch.randn(1, 2, 16, generator=generator)
    tensors = [x.to(target.dtype) for x in (query, key, value, mask)]
    arguments = arrange(*tensors[:3], mask=tensors[3], **options)
    (output, _) = run(target, accepted(target, arguments))
    kept, _ = OPS["attention"].reference(*promote(arguments))
    torch.testing.assert_close(output, kept.to(target.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("queries", [2, 20])
@pytest.mark.parametrize("power", [28, 34, 60])
@pytest.mark.parametrize("target", FLOAT32)
def test_scores_with_exact_large_exponents(target, queries, power, generator):
    """Integers times a power of two: all products, sums and therefore probabilities are exact."""
    query, key = (torch.randint(-9, 10, (1, 2, n, 16), generator=generator) for n in (queries, 75))
    key = key * 2.0 ** (power // 2)
    value = torch.randn(1, 2, 75, 16, generator=generator)
    # 0.3 is rounded, and so are its products.
    for scale in (0.25, 0.3):
        query_times = query * 2.0 ** (power - power // 2)
        check_target(target, accepted(target, arrange(query_times, key, value, scale=scale)))


@pytest.mark.parametrize("power", [20, 28, 34])
def test_gradients_with_exact_large_exponents(power, float_isa, generator):
    query, key = (torch.randint(-9, 10, (1, 2, n, 16), generator=generator) for n in (20, 75))
    value = torch.randn(1, 2, 75, 16, generator=generator)
    check_gradients_of(query.float(), key * 2.0**power, value)


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("target", FLOAT32)
def test_huge_values_masked_by_finfo_min_have_no_effect(target, queries, generator):
    """exp(finfo.min) is 0, although finfo.min is not -inf: masked values have no effect at all."""
    value = torch.randn(1, 1, 300, 16, generator=generator)
    value[:, :, :270] = 8.5e37
    mask = torch.zeros(1, 1, 1, 300)
    mask[..., :270] = torch.finfo(torch.float32).min
    query, key = (torch.randn(1, 1, n, 16, generator=generator) for n in (queries, 300))
    for weights in (False, True):
        arguments = arrange(query, key, value, mask=mask, weights=weights)
        # The unit of error is that of a call without the huge values: they would make the budget
        # huge.
        seen = arrange(query, key[:, :, 270:], value[:, :, 270:], weights=weights)
        result = run(target, accepted(target, arguments))
        output, found = result if isinstance(result, tuple) else (result, None)
        if weights:
            assert torch.count_nonzero(found[..., :270]) == 0
            found = found[..., 270:]
        check("attention", (output, found), seen)


@pytest.mark.parametrize("target", FLOAT16)
def test_denormal_queries(target, generator):
    """All elements of a query are below 2^-14, but its scores are not, because keys are large."""
    query = torch.randn(1, 2, 20, 16, generator=generator).half() * 2.0**-15
    assert query.abs().max() < 2.0**-13
    key, value = (torch.randn(1, 2, 75, 16, generator=generator) for _ in range(2))
    arguments = arrange(query, (key * 2.0**13).half(), value.half(), scale=4.0)
    check_target(target, accepted(target, arguments))


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"weights": True}, {"dropout_p": 0.3}], ids=str
)
@pytest.mark.parametrize("keys", [40, 300])
def test_gradients_if_one_key_has_almost_all_of_a_row(keys, options, float_isa, generator):
    """Each query has one key with a score of up to 200, so that dP - delta is a difference of nearly
    equal terms.
    """
    key, value = (torch.randn(1, 2, keys, 16, generator=generator) for _ in range(2))
    if "dropout_p" in options:
        options = {**options, "seed": torch.tensor(7)}
    for score in (8.0, 12.0, 200.0):
        query = key / key.norm(dim=-1, keepdim=True) ** 2 * (score * math.sqrt(16))
        check_gradients_of(query, key, value, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("queries", [17, 256])
def test_equal_values_give_query_and_key_gradients_near_zero(queries, dtype, isa, generator):
    """If values are equal, dP = dO V is the same for all keys, and only fp32 summation errors
    remain.

    Values are integers, so that O equals V. Scores are so large that the forward stores their
    maximum and sum separately.
    """

    def integers(least, most, *size):
        return torch.randint(least, most + 1, size, generator=generator).to(dtype)

    query, key = 64 * integers(-3, 3, 1, 2, queries, 16), integers(-3, 3, 1, 2, 256, 16)
    value = integers(60, 120, 1, 2, 1, 16).expand(1, 2, 256, 16).contiguous()
    grad = integers(-9, 9, 1, 2, queries, 16)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    output, _ = kernel_of("attention").run(*arrange(*inputs))
    torch.testing.assert_close(output, value[:, :, :1].expand_as(output), rtol=0, atol=0)
    dquery, dkey = torch.autograd.grad(output, (query, key), grad)
    # The largest sum of |dO V|, times one unit of rounding for dP and one for delta.
    rounding = (grad.abs().double() @ value.double().mT).max() * 2 * torch.finfo(torch.float32).eps
    assert dquery.abs().max() <= rounding * key.abs().max() / math.sqrt(16)
    assert dkey.abs().max() <= rounding * query.abs().max() / math.sqrt(16) * queries


@pytest.mark.parametrize("queries", [1, 2, 4])
def test_gradients_of_few_queries_with_large_scores(queries, float_isa, generator):
    """The backward recomputes the scores of the forward, although inference has another code path
    here.
    """
    query = 1e4 * torch.randn(4, 1, queries, 16, generator=generator)
    key, value = (torch.randn(4, 1, 90, 16, generator=generator) for _ in range(2))
    check_gradients_of(query, key, value)


def check_gradients_of(*qkv: Tensor, **options: Any) -> None:
    with nan_memory():
        check_gradients("attention", kernel_of("attention").run, arrange(*qkv, **options))


def every_broadcast() -> list[tuple[bool, ...]]:
    return [tuple(bool(bits >> d & 1) for d in range(4)) for bits in range(16)]


def broadcast_name(full: tuple[bool, ...]) -> str:
    return "".join(letter if f else "1" for letter, f in zip("BHTS", full, strict=True))


@pytest.mark.parametrize("full", every_broadcast(), ids=broadcast_name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mask_gradient_of_every_broadcast(full, dtype, backend):
    """Sums over several tiles of keys and blocks of queries, combined with the other options."""
    target = backend.of("attention", dtype)
    if dtype == torch.bfloat16 and not on_units(target):
        pytest.skip("for the CPU's units of bfloat16")
    sizes = (2, 2, 131, 530) if backend.name == "cpu" else (2, 2, 20, 35)
    shape = tuple(n if f else 1 for n, f in zip(sizes, full, strict=True))
    if backend.name != "cpu":  # the other backends also support masks of fewer dimensions
        shape = shape[full.index(True) if any(full) else 3 :]
    mask = draw(dtype).normal(*shape)
    given: dict[str, Any] = {"dropout_p": 0.1, "seed": torch.tensor(5)}
    given |= {"lengths": torch.tensor([sizes[3], 0 if full[3] else sizes[3] // 2])}
    if backend.name == "cpu":
        mask = mask.masked_fill(draw().bools(*shape, true=0.2), -math.inf)
        given |= {"weights": full[0], "causal": full[1]}
    given |= {"mask": mask}
    arguments = arrange(*tensors(*sizes[2:], 8, key_heads=1, dtype=dtype), gqa=True, **given)
    with nan_memory():
        check_gradients("attention", target.kernel.run, on(target, arguments))


@pytest.mark.parametrize("size", [1, 3, 16, 17, 64, 80, 128, 136])
@pytest.mark.parametrize("length", [1, 15, 113, 225])
def test_gradients_of_head_sizes_and_lengths(size, length, isa):
    # The error unit is the reference's own error, which would be a matter of luck for few values.
    batch = 4 if length == 1 else 1
    q, k, v = tensors(length, 300 if length > 100 else 47, size, batch=batch)
    check_gradients_of(q, k, v, causal=length > 100)


def test_gradients_with_keys_in_several_splits(isa):
    """With few heads and many keys, each split of the keys has its own sum of query gradients."""
    q, k, v = tensors(40, 1100, 16, batch=1, key_heads=1)
    check_gradients_of(q, k, v, lengths=torch.tensor([900]), gqa=True)


def finite(*tensors: Tensor) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors)


def trained(target: Target, qkv: tuple[Tensor, ...], up: Tensor, **options: Any) -> list[Tensor]:
    """Returns the output and the gradients of query, key, value and a mask that requires one."""
    leaves = [x.clone().to(target.device).requires_grad_() for x in qkv]
    _, _, _, mask, *rest = on(target, arrange(*qkv, **options))
    with in_use(target.isa):
        output, _ = target.kernel.run(*leaves, mask, *rest)
        leaves += [mask] if mask is not None and mask.requires_grad else []
        return [output.detach(), *torch.autograd.grad(output, leaves, up.to(target.device))]


def assert_same(found: list[Tensor], clean: list[Tensor], *, exact: bool) -> None:
    """``exact``: bitwise. NaN or infinity may select another code path."""
    eps = torch.finfo(found[0].dtype).eps
    close = 0.0 if exact else max(1e-5, 10 * eps)
    torch.testing.assert_close(found, clean, rtol=close, atol=close)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_visible_garbage_affects_only_queries_that_see_it(dtype, added, backend):
    """NaN in a key or value affects only the queries that see it."""
    target = backend.of("attention", dtype)
    q, k, v = tensors(20, 150, 16, batch=1, dtype=dtype)
    mask = torch.randn(20, 150, generator=torch.Generator().manual_seed(4)) > 0
    given = torch.where(mask, 0.5, -math.inf) if added else mask
    truth = truth_of_gradients("attention", arrange(q, k, v, mask=given[None, None]))
    k[0, 0, 5], v[0, 0, 6], v[0, 1, 77, 3] = math.nan, math.inf, -math.inf
    arguments = arrange(q, k, v, mask=given[None, None])
    check_target(target, arguments)
    found = gradients("attention", target.kernel.run, on(target, arguments))["query"].cpu()
    for head, keys in ((0, (5, 6)), (1, (77,))):
        unaware = ~mask[:, list(keys)].any(1)
        assert unaware.any()
        assert not finite(found[0, head][~unaware])
        rows = (x[0, head][unaware] for x in (found, truth.expected["query"], truth.true["query"]))
        parity = compare("grad of query", *rows, GRADIENT_FACTOR, truth.units["query"])
        assert parity.ok, parity


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_garbage_in_fully_masked_queries_has_no_effect(dtype, backend):
    """Fully masked queries and their incoming gradients affect nothing else."""
    target = backend.of("attention", dtype)
    q, k, v = tensors(40, 53, 16, batch=1, dtype=dtype)
    mask = torch.rand(1, 1, 40, 53, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[:, :, [7, 8]], mask[..., 16:32, :16] = False, False
    results = []
    for garbage, up in ((0.0, 0.0), (math.nan, math.inf)):
        query, grad = q.clone(), q.sin()
        query[:, :, 7], grad[:, :, 8] = garbage, up
        results.append(trained(target, (query, k, v), grad, mask=mask))
    assert finite(*results[1])
    assert_same(*results, exact=backend == CUDA)
    assert not any(x[:, :, 7:9].any() for x in results[1][:2])


# One split of the keys and several; empty splits, and lengths that end within a split.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [1, 60, 700])
@pytest.mark.parametrize("sizes", [(24, 24), (33, 40), (128, 64)], ids=str)
def test_decoding_one_query(sizes, keys, dtype, backend, monkeypatch):
    target = backend.of("attention", dtype)
    if backend.name == "triton":
        tile = config.DecodeTile(16, 16 if keys == 700 else 1024, 4, 1)
        monkeypatch.setattr(config, "attention_decode", lambda *sizes: tile)
    q, k, v = tensors(1, keys, sizes[0], batch=3, heads=4, key_heads=2, dtype=dtype)
    v = v.repeat(1, 1, 1, 2)[..., : sizes[1]]
    k[-1, :, -1], v[-1, :, -1] = math.nan, math.inf  # beyond the sequence's length
    lengths = torch.tensor([keys, 0, min(keys - 1, keys // 2 + 1)])
    mask = torch.randn(3, 1, 1, keys, generator=torch.Generator().manual_seed(4)) > -1
    if keys > 7:
        mask[..., 7] = False
        k[:, :, 7], v[:, :, 7] = math.nan, math.inf
    added = torch.where(mask, 0.5, -math.inf)
    for given in (mask, added, added.to(dtype)):
        arguments = arrange(q, k, v, mask=given, lengths=lengths, gqa=True)
        assert target.refusal(arguments) is None
        check_target(target, arguments, offset=int(backend != CUDA))
    # In float32 the reference's error on so few numbers varies by chance, and Triton's is close to
    # the budget. The op table has a larger call.
    lucky = backend.name == "triton" and dtype == torch.float32 and keys == 60
    if keys < 512 and not lucky:
        check_gradients("attention", target.kernel.run, on(target, arguments))


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
@pytest.mark.parametrize("stride", [0, 1, 3])
def test_lengths_of_every_type_and_stride(stride, kind, backend, monkeypatch):
    """Covers every kernel that reads lengths of keys or queries."""
    if backend.name == "triton":
        monkeypatch.setattr(config, "use_block_lists", lambda *sizes: stride > 0)
    q, k, v = tensors(9, 20, 16, batch=3)
    mask = torch.randn(1, 1, 9, 20, generator=torch.Generator().manual_seed(8))
    lengths = torch.tensor([11, 20, 3] if stride else [11] * 3, dtype=kind)
    lengths = lengths.repeat_interleave(stride)[::stride] if stride else lengths[:1].expand(3)
    target, dropped = backend.of("attention"), {"dropout_p": 0.1, "seed": torch.tensor(7)}
    for arguments in (
        arrange(q, k, v, mask=mask, lengths=lengths, weights=True, **dropped),
        arrange(q, k, v, lengths=lengths, causal=True),
        arrange(q[:, :, :1], k, v, lengths=lengths),
        arrange(q, k, v, lengths=lengths, weights=True, query_lengths=lengths // 2),
        arrange(q, k, v, mask=mask, query_lengths=lengths // 2, **dropped),
    ):
        check_trained(target.kernel, on(target, arguments))


@pytest.mark.parametrize("value", [*GARBAGE, 3e38, 1e-36, 1e-42])
@pytest.mark.parametrize("tensor", ["query", "key", "value", "upstream"])
@pytest.mark.parametrize("target", UNITS)
def test_gradients_of_values_that_matrix_units_cannot_multiply(target, tensor, value):
    """Such a number makes the call fall back to multiply-adds: the same elements are finite."""
    dtype, eps = target.dtype, torch.finfo(target.dtype).eps
    if value == 3e38 and tensor in ("query", "key"):
        pytest.skip("whether scores overflow depends on the order of sums")
    if value == 3e38 and dtype == torch.bfloat16:
        pytest.skip("whether dP overflows depends on where the division by row_sum is")
    # The value is in the second batch element, so that the mask's gradient has to restart.
    masked = {"mask": draw(dtype).normal(1, 2, 200, 600).requires_grad_()}
    calls = [(60, 150, (0, 1, 7, 5), {"causal": True}), (200, 600, (1, 1, 150, 5), masked)]
    for queries, keys, place, given in calls[:1] if tensor == "upstream" else calls:
        parts = [*tensors(queries, keys, 16, dtype=dtype), draw(dtype).normal(2, 2, queries, 16)]
        parts[("query", "key", "value", "upstream").index(tensor)][place] = value
        *qkv, up = parts
        ways = (target, target._replace(isa="avx512"))
        found = (trained(way, tuple(qkv), up, **given)[1:] for way in ways)
        for one, two in zip(*found, strict=True):
            assert torch.equal(one.isfinite(), two.isfinite())
            size = two[two.isfinite()].abs().max().item()
            if size < 1e30:
                close = {"rtol": 1000 * eps, "atol": size * 100 * eps}
                torch.testing.assert_close(one, two, equal_nan=True, **close)


@pytest.mark.parametrize("target", [p for p in UNITS if p not in BF16X3])
def test_fp32_masks_of_bfloat16_calls_have_fp32_gradients(target):
    """The gradient has the mask's dtype, and is not rounded to bfloat16."""
    up, mask = draw(target.dtype).normal(2, 2, 50, 16), draw().normal(1, 2, 50, 70)
    qkv = tensors(50, 70, 16, dtype=target.dtype)
    *_, found = trained(target, qkv, up, mask=mask.requires_grad_())
    assert found.dtype == torch.float32
    assert not torch.equal(found, found.bfloat16().float())


# fp32 by bf16x3 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", [35, 36])
@pytest.mark.parametrize("target", BF16X3)
def test_bf16x3_is_used_from_36_queries_on(target, queries):
    """Proves that bf16x3 is used from 36 queries on; other tests depend on that."""
    qkv, up = tensors(queries, 70), draw().normal(2, 2, queries, 40)
    for call in (
        lambda way: [run(way, arrange(*qkv))[0]],
        lambda way: trained(way, qkv, up),
    ):
        for one, two in zip(call(target), call(target._replace(isa="avx512")), strict=True):
            assert torch.equal(one, two) is (queries < 36)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("target", BF16X3)
def test_strided_channels_give_the_same_gradients(target, which):
    """The backward recomputes exactly the scores of the forward, whatever the strides."""
    query, key, value = tensors(49, 45)
    near = [30.0 * query, key[:, :, :1].expand(key.shape).contiguous(), value]
    far = list(near)
    far[which] = near[which].transpose(-1, -2).contiguous().transpose(-1, -2)
    with in_use(target.isa):
        found = [gradients("attention", target.kernel.run, arrange(*x)) for x in (near, far)]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("target", BF16X3)
def test_one_visible_key_gives_exactly_its_value(target):
    """The output is the value of that key, bitwise with a mask that is added."""
    query, key, value = tensors(80, 200)
    positions = torch.randint(0, 200, (80,), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(80, 200, dtype=torch.bool)
    mask[torch.arange(80), positions] = True
    for given, rounding in ((mask, 2 * 2**-23), (torch.where(mask, 1.5, -math.inf), 0.0)):
        output, _ = run(target, arrange(query * 50, key, value, mask=given[None, None]))
        torch.testing.assert_close(output, value[:, :, positions], rtol=rounding, atol=0.0)
    check_target(target, arrange(query, key, value, lengths=torch.tensor([1, 1])))


@pytest.mark.parametrize("size", [1e-30, 1e-34, 1e-36, 1e-42])
@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("target", BF16X3)
def test_tiny_values_have_errors_below_the_smallest_normal(target, name, size):
    """Where fp32 underflows, errors are at most the smallest normal number."""
    least = torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps
    for tensor in range(3):
        qkv = list(tensors(40, 150, 16))
        qkv[tensor] = qkv[tensor] * size
        arguments = arrange(*qkv, **GIVEN[name])
        got, expected = (run(way, arguments)[0] for way in (target, target._replace(isa="avx512")))
        true = oracle("attention", arguments)[0]
        parity = compare("output", got, expected, true, OUTPUT_FACTOR, least_size=least)
        assert parity.ok, parity
    # A tiny row and a tiny channel among normal ones.
    query, key, value = tensors(40, 150, 16)
    value[:, :, 33] *= size
    value[:, :, :, 3] *= size
    check_target(target, arrange(query, key, value, **GIVEN[name]))


@pytest.mark.parametrize("size", [1e-20, 1e-33, 1e-37])
@pytest.mark.parametrize("target", BF16X3)
def test_tiny_gradients_do_not_vanish(target, size):
    """Gradients stay nonzero where their bfloat16 components would underflow."""
    qkv, up = tensors(60, 150, 16), draw().normal(2, 2, 60, 16)
    ours, plain = (trained(target, qkv, up * s)[1:] for s in (size, 1.0))
    for one, two in zip(ours, plain, strict=True):
        torch.testing.assert_close(one.double() / size, two.double(), rtol=1e-3, atol=2e-2)
        assert one.abs().max() > 0


@pytest.mark.parametrize("target", BF16X3)
def test_gradients_of_growing_and_saturated_scores(target):
    """Scores that grow along the keys, and saturated scores, whose probabilities sum to 1."""
    grown = [(name, (*a[:10], False, *a[11:])) for name, a in growing(torch.float32)]
    check_calls(target, lambda dtype: [c for c in grown if "-1e" not in c[0]], gradients=True)
    up = draw().normal(1, 2, 70, 20)
    for name, arguments in saturated(torch.float32):
        if arguments[0].abs().max() > 1e8 or arguments[3] is not None:
            continue
        (*_, dvalue) = trained(target, arguments[:3], up, scale=1.0, causal=arguments[5])
        for got, true in zip(dvalue.sum(2), up.sum(2), strict=True):
            torch.testing.assert_close(got, true, rtol=1e-4, atol=1e-4, msg=name)


def rows_of_others(given: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    whole = "mask" not in given or given["mask"].shape[2] == 1
    return given if whole else {**given, "mask": given["mask"][:, :, begin:end]}


@pytest.mark.parametrize("name", [n for n in options(1, 1) if "dropout" not in n])
@pytest.mark.parametrize("target", BF16X3)
def test_a_row_does_not_depend_on_the_others(target, name):
    """A row is independent of the number, content, score range and mask of the other rows."""
    query, key, value = tensors(200, 300)
    given = options(200, 300)[name]
    whole = run(target, arrange(query, key, value, **given))
    for begin, end in ((0, 36), (0, 97), (50, 150)):
        if not (given.get("causal") and begin):
            part = rows_of_others(given, begin, end)
            found = run(target, arrange(query[:, :, begin:end], key, value, **part))
            for one, two in zip(whole, found, strict=True):
                assert one is two is None or torch.equal(one[:, :, begin:end], two)
    for other in (math.nan, math.inf, 1e-40, 1e4, 40 * query):
        among = query.clone()
        among[:, :, ::2] = other if isinstance(other, float) else other[:, :, ::2]
        output, _ = run(target, arrange(among, key, value, **given))
        assert torch.equal(output[:, :, 1::2], whole[0][:, :, 1::2])
    mask = torch.zeros(1, 1, 200, 300)
    plain = run(target, arrange(query, key, value, mask=mask, weights=True))
    for far in (14.0, 100.0, 2000.0, -math.inf):
        added = mask.clone()
        added[:, :, ::2, 32:64] = far
        found = run(target, arrange(query, key, value, mask=added, weights=True))
        for one, two in zip(plain, found, strict=True):
            assert torch.equal(one[:, :, 1::2], two[:, :, 1::2]), far


# Memory, layouts and autograd --------------------------------------------------------------------


@needs_native
def test_gradients_have_the_strides_of_their_tensors():
    packed = torch.randn(2, 9, 3, 4, 8)
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in packed.unbind(2))
    output, _ = kernel_of("attention").run(*arrange(q, k, v))
    for grad in torch.autograd.grad(output.sum(), (q, k, v)):
        assert grad.transpose(1, 2).is_contiguous()
    q, k, v = (x.requires_grad_() for x in tensors(9, 9, 8, heads=4))
    output, _ = kernel_of("attention").run(*arrange(q, k, v))
    for grad in torch.autograd.grad(output.sum(), (q, k, v)):
        assert grad.is_contiguous()


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("leading", [(2, 4), (2,), (3, 2, 4)], ids=str)
def test_changing_the_output_in_place_raises_in_backward(leading, p):
    """Changing the output in place is an error in backward, because backward reads the returned
    output.
    """
    q, k, v = (torch.randn(*leading, 40, 16, requires_grad=True) for _ in range(3))
    for change in (lambda y: y.mul_(2), lambda y: y[..., 0].zero_()):
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p)
        change(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_masks_made_in_inference_mode_can_be_trained_with():
    q, k, v = (x.requires_grad_() for x in tensors(40, 40, 16))
    with torch.inference_mode():
        mask = torch.rand(40, 40) < 0.5
    for given in (mask, mask.clone()):
        F.scaled_dot_product_attention(q, k, v, given).square().sum().backward()
    once = q.grad
    q.grad = None
    F.scaled_dot_product_attention(q, k, v, mask.clone()).square().sum().backward()
    torch.testing.assert_close(once, 2 * q.grad)


def grown(call: Callable[[], Any]) -> float:
    """Returns the peak memory of the call in MiB."""
    found = peak(call)
    if found is None:
        pytest.skip("the peak memory of a call cannot be measured on this system")
    return found / 2**20


@needs_native
def test_training_does_not_store_the_scores() -> None:
    """(1, 8, 4096, 4096) scores would take 512 MiB; training must use less than a third of that."""
    q, k, v = (x.requires_grad_() for x in tensors(4096, 4096, 8, batch=1, heads=8))

    def train() -> None:
        output, _ = kernel_of("attention").run(*arrange(q, k, v, causal=True))
        torch.autograd.grad(output.sum(), (q, k, v))

    assert grown(train) < 160


KEYS = 4096
NEEDS_NO_SQUARE: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "key lengths": {"lengths": torch.tensor([KEYS - 5])},
    "key mask": {"mask": torch.ones(1, 1, 1, KEYS, dtype=torch.bool)},
    "expanded mask": {"mask": torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(1, 1, KEYS, KEYS)},
    "float mask": {"mask": torch.zeros(1, 1, 1, KEYS)},
    "dropout": {"dropout_p": 0.1, "seed": torch.tensor(3)},
}


@needs_native
@pytest.mark.parametrize("kind", NEEDS_NO_SQUARE)
def test_no_score_matrix_is_stored(kind: str) -> None:
    """A score matrix would take 64 MiB. The output takes 128 KiB; huge pages round up."""
    arguments = arrange(*tensors(KEYS, KEYS, 8, batch=1, heads=1), **NEEDS_NO_SQUARE[kind])

    def attend() -> None:
        output, _ = kernel_of("attention").run(*arguments)
        assert output.isfinite().all()

    assert grown(attend) < 24


# Packed sequences: compared with single sequences and with padded ones ---------------------------

EVERY = pytest.mark.parametrize("backend", [CPU, TRITON, CUDA], indirect=True, ids=str)

ROWS, KEY_ROWS = [5, 0, 17, 3, 1, 9], [7, 4, 20, 0, 1, 9]


def starts_of(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def packed(behind: int = 2, heads: int = 4, key_heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values; ``behind`` rows after the last sequence are NaN."""
    torch.manual_seed(0)
    q = torch.randn(sum(ROWS) + behind, heads, 8)
    k = torch.randn(sum(KEY_ROWS) + behind, key_heads, 8)
    v = torch.randn(sum(KEY_ROWS) + behind, key_heads, 12)
    for x, n in ((q, sum(ROWS)), (k, sum(KEY_ROWS)), (v, sum(KEY_ROWS))):
        x[n:] = math.nan
    return q, k, v


def one_by_one(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    found, at, key_at = [], 0, 0
    for queries, keys in zip(ROWS, KEY_ROWS, strict=True):
        own = (
            x[None].transpose(1, 2) for x in (k[key_at : key_at + keys], v[key_at : key_at + keys])
        )
        query = q[at : at + queries][None].transpose(1, 2)
        alone = F.scaled_dot_product_attention(query, *own, backend="reference", **how)
        found.append(alone[0].transpose(0, 1))
        at, key_at = at + queries, key_at + keys
    return torch.cat([*found, q.new_zeros(q.shape[0] - at, q.shape[1], v.shape[2])])


@EVERY
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("more", [0, 6])
@pytest.mark.parametrize(
    "how", [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}], ids=str
)
def test_packed_sequences_match_single_sequences(how, more, dtype, backend):
    target = backend.of("attention")
    tensors = on(target, packed(key_heads=2 if "enable_gqa" in how else 4))
    starts, key_starts = on(target, (starts_of(ROWS, dtype), starts_of(KEY_ROWS, dtype)))
    strided = starts.repeat_interleave(2)[::2]
    leaves = [x.clone().requires_grad_() for x in tensors]
    rest = (strided, key_starts, 17 + more, 20 + more)
    found = F.varlen_attn(*leaves, *rest, **how, backend=backend.name)
    expected = one_by_one(*(alone := [x.clone().requires_grad_() for x in tensors]), **how)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(found)
    upstream[sum(ROWS) :] = math.nan
    grads = torch.autograd.grad(found, leaves, upstream)
    wanted = torch.autograd.grad(expected[: sum(ROWS)], alone, upstream[: sum(ROWS)])
    torch.testing.assert_close(grads, wanted)


@pytest.mark.skipif(_native.module is None, reason="the native kernels are missing")
def test_packed_sequences_are_not_padded_on_the_cpu(monkeypatch):
    monkeypatch.setitem(visible_places.__globals__, "via_padding", lambda *_: 1 / 0)
    leaves = [x.requires_grad_() for x in packed()]
    starts = starts_of(ROWS), starts_of(KEY_ROWS)
    F.varlen_attn(*leaves, *starts, 17, 20, backend="cpu").sum().backward()
    with pytest.raises(ZeroDivisionError):  # sequences longer than that take the padded path
        F.varlen_attn(*leaves, *starts, 3, 20, backend="cpu")


@EVERY
def test_packed_dropout_matches_padded_dropout(backend):
    tensors = on(backend.of("attention"), packed(behind=0))
    starts = on(backend.of("attention"), (starts_of(ROWS), starts_of(KEY_ROWS)))
    leaves, padded = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
    how = {"dropout_p": 0.4, "backend": backend.name}
    torch.manual_seed(7)
    found = F.varlen_attn(*leaves, *starts, 17, 20, **how)

    def pad(x: Tensor, lengths: list[int]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2)

    torch.manual_seed(7)
    lengths = on(backend.of("attention"), (torch.tensor(KEY_ROWS), torch.tensor(ROWS)))
    plain = F.scaled_dot_product_attention(
        *map(pad, padded, (ROWS, KEY_ROWS, KEY_ROWS)), key_lengths=lengths[0], query_lengths=lengths[1],
        **how,
    )  # fmt: skip
    rows = torch.cat([x[:, :n].transpose(0, 1) for x, n in zip(plain, ROWS, strict=True)])
    torch.testing.assert_close(found, rows)
    grads = (torch.autograd.grad(y.sin().sum(), x) for y, x in ((found, leaves), (rows, padded)))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_packed_sequences_without_queries_or_keys(lengths):
    some = starts_of([2] * len(lengths))
    none, rows = starts_of(lengths), torch.randn(2 * len(lengths), 2, 8)
    empty = torch.empty(0, 2, 8, requires_grad=True)
    for given in ((empty, rows, rows, none, some), (rows, empty, empty, some, none)):
        found = F.varlen_attn(*given, 2, 2)
        assert torch.autograd.grad(found.sum(), empty)[0].shape == empty.shape
    assert F.varlen_attn(empty, rows, rows, none, some, 2, 2).shape == (0, 2, 8)
    assert not F.varlen_attn(rows, empty, empty, some, none, 2, 2).any()
    assert not F.varlen_attn(rows, rows, rows, some, some, 0, 2).any()


@pytest.mark.thorough
@pytest.mark.parametrize("backend", [CPU, CUDA], indirect=True, ids=str)
def test_packed_sequences_compile_to_one_graph(backend):
    """Queries and keys have the same offsets."""
    target = backend.of("attention")
    starts = on(target, (starts_of(ROWS),))[0]

    def total(rows: Tensor) -> Tensor:
        given = (rows, rows, rows, starts, starts, 17, 17)
        return F.varlen_attn(*given, is_causal=True, backend=backend.name).square().sum()

    found = []
    for function in (total, torch.compile(total, fullgraph=True, backend="aot_eager")):
        (rows,) = on(target, packed(behind=0)[:1])
        value = function(rows.requires_grad_())
        found.append((value.detach(), *torch.autograd.grad(value, rows)))
    torch.testing.assert_close(*found)


def test_packed_sequences_do_not_synchronize():
    with torch.device("meta"):
        q = torch.empty(30, 4, 8, requires_grad=True)
        starts = torch.empty(5, dtype=torch.int32)
        with OnDevice():
            found = F.varlen_attn(q, q, q, starts, starts, 9, 9, is_causal=True, dropout_p=0.1)
            found.sum().backward()
    assert found.shape == (30, 4, 8)


def test_invalid_packed_sequences_raise():
    rows, starts = torch.randn(4, 2, 8), torch.tensor([0, 4])
    call = F.varlen_attn
    with pytest.raises(TypeError, match=r"cu_seq_q must be int32 or int64, not torch\.float32"):
        call(rows, rows, rows, starts.float(), starts, 4, 4)
    with pytest.raises(ValueError, match=r"cu_seq_k must have shape \[sequences \+ 1\], not \[0\]"):
        call(rows, rows, rows, starts, starts[:0], 4, 4)
    with pytest.raises(ValueError, match="same sequences, but there are 1 and 0"):
        call(rows, rows, rows, starts, starts[:1], 4, 4)
    with pytest.raises(ValueError, match="key must have shape"):
        call(rows, rows[None], rows, starts, starts, 4, 4)
    with pytest.raises(TypeError, match="argument 'cu_seq_k'"):
        call(rows, rows, rows, starts, [0, 4], 4, 4)  # type: ignore[arg-type]


@EVERY
def test_rows_beyond_the_maximum_length_are_zero(backend):
    given = on(backend.of("attention"), (*packed(behind=0), starts_of(ROWS), starts_of(KEY_ROWS)))
    whole = F.varlen_attn(*given, 17, 20, backend=backend.name)
    part = F.varlen_attn(*given, 4, 20, backend=backend.name)
    kept = torch.cat([torch.arange(n) < 4 for n in ROWS]).to(whole.device)
    torch.testing.assert_close(part, whole.masked_fill(~kept[:, None, None], 0.0))
    assert whole[~kept].any()


#: Memory orders of the queries, and calls for which PyTorch has different rules for strides.
ORDERS = ("bhtd", "bthd", "tbhd", "hbtd", "thbd", "bhdt")
LAID_OUT: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.ones(9, 11, dtype=torch.bool).tril(2)},
    "trained mask": {"attn_mask": torch.zeros(9, 11, requires_grad=True)},
    "dropout": {"dropout_p": 0.1},
    "fewer key heads": {"h": 2, "enable_gqa": True},
    "values of another size": {"dv": 5},
    "keys transposed": {"keys": "bhdt"},
    "no keys": {"s": 0},
    "no queries": {"t": 0},
    "no batch": {"b": 0},
    "no channels": {"d": 0},
    "one query": {"t": 1},
    "odd channels": {"d": 13},
    "large": {"t": 65, "s": 150, "d": 24},
    "expanded": {"expand": True},
    "three dimensions": {"lead": lambda x: x[0]},
    "five dimensions": {"lead": lambda x: x[None]},
}


def in_order(order: str, **sizes: int) -> Tensor:
    x = torch.randn([sizes[letter] for letter in order])
    return x.permute([order.index(letter) for letter in "bhtd"])


def laid_out_calls(name: str) -> list[tuple[list[Tensor], dict[str, Any]]]:
    call = LAID_OUT[name]
    sizes = {
        "b": 2,
        "h": 4,
        "t": 9,
        "s": 11,
        "d": 8,
        **{k: v for k, v in call.items() if len(k) == 1},
    }
    b, t, s, d = (sizes[letter] for letter in "btsd")
    given = {key: x for key, x in call.items() if key in ("attn_mask", "is_causal", "dropout_p",
                                                         "enable_gqa")}  # fmt: skip
    calls = []
    for order in ORDERS:
        query = in_order(order, b=b, h=4, t=t, d=d)
        if "expand" in call:
            query = query[:1].expand(b, -1, -1, -1)
        key = in_order(call.get("keys", "bhtd"), b=b, h=sizes["h"], t=s, d=d)
        value = in_order("bthd", b=b, h=sizes["h"], t=s, d=call.get("dv", d))
        calls.append((list(map(call.get("lead", lambda x: x), (query, key, value))), given))
    packed = torch.randn(2, 9, 3, 4, 8).permute(2, 0, 3, 1, 4)
    return [*calls, (list(packed), {})] if name == "plain" else calls


def strides_of(x: Tensor) -> list[int]:
    """Returns the strides of dimensions of more than one element; others are never used."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1]


@pytest.mark.parametrize("backend", [None, "cpu", "torch", "reference"])
@pytest.mark.parametrize("name", LAID_OUT)
def test_the_output_has_pytorchs_strides(backend, name):
    """With and without gradients, and for fake tensors, whose strides compiled programs rely on."""
    if name == "no channels" and TORCH_VERSION < (2, 11):
        pytest.skip("PyTorch 2.10 has other strides")
    for (query, key, value), given in laid_out_calls(name):
        for grad in (False, True):
            q, k, v = (x.detach().requires_grad_(grad) for x in (query, key, value))
            expected = TF.scaled_dot_product_attention(q, k, v, **given)
            try:
                found = F.scaled_dot_product_attention(q, k, v, **given, backend=backend)
            except NotImplementedError as refusal:
                pytest.skip(str(refusal))
            assert strides_of(found) == strides_of(expected), (query.stride(), grad)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            q, k, v = (mode.from_tensor(x) for x in (query, key, value))
            fake = F.scaled_dot_product_attention(q, k, v, **given, backend=backend)
        assert strides_of(fake) == strides_of(expected), query.stride()


@EVERY
@pytest.mark.parametrize("contiguous", [False, True])
def test_kernels_return_the_requested_strides(backend, contiguous):
    target = backend.of("attention")
    for order, size in (("bthd", 8), ("tbhd", 8), ("bthd", 5)):
        query, key = in_order(order, b=2, h=2, t=3, d=8), in_order("bhtd", b=2, h=2, t=4, d=8)
        arguments = on(target, arrange(query, key, key[..., :size]))
        query, key, value = arguments[:3]
        output, _ = run(target, (*arguments[:11], None, None, None, contiguous))
        assert output.stride() == empty_output(query, key, value, contiguous).stride()
        torch.testing.assert_close(output, run(target, arguments)[0])


@pytest.mark.parametrize("softcap", [0.0, -1.0, math.inf, math.nan])
def test_softcap_must_be_positive(softcap):
    x = torch.randn(1, 1, 3, 8)
    with pytest.raises(
        ValueError, match=f"softcap must be a positive number or None, not {softcap}"
    ):
        F.scaled_dot_product_attention(x, x, x, softcap=softcap)


def test_gradients_with_softcap_are_those_of_the_reference():
    query, key, value = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    explained = explain(F.scaled_dot_product_attention, query, key, value, softcap=2.0)
    assert explained.backend == "reference"
    assert "softcap" in str(explained)
    F.scaled_dot_product_attention(query, key, value, softcap=2.0).square().sum().backward()
    scores = 2.0 * torch.tanh(query @ key.transpose(-2, -1) / math.sqrt(8) / 2.0)
    expected = torch.autograd.grad((scores.softmax(-1) @ value).square().sum(), (query, key, value))
    torch.testing.assert_close((query.grad, key.grad, value.grad), expected)


def test_large_softcap_is_none_and_small_scores_keep_their_precision():
    query, key, value = (torch.randn(1, 2, 40, 16, dtype=torch.float32) for _ in range(3))
    plain = F.scaled_dot_product_attention(query, key, value)
    capped = F.scaled_dot_product_attention(query, key, value, softcap=1e6)
    torch.testing.assert_close(capped, plain)


def test_packed_results_are_contiguous():
    rows, starts = torch.randn(4, 2, 8), torch.tensor([0, 4])
    for value in (rows, rows[..., :5]):
        for p in (0.0, 0.1):
            found = F.varlen_attn(rows, rows, value, starts, starts, 4, 4, dropout_p=p)
            assert found.is_contiguous()


@pytest.mark.parametrize("name", ["key_lengths", "query_lengths"])
@pytest.mark.parametrize("values", [[2, 8], [-1, 7]])
def test_lengths_beyond_the_padded_one(name, values):
    x = torch.randn(2, 1, 7, 8)
    with pytest.raises(ValueError, match=rf"{name} must be between 0 and the padded length, 7"):
        F.scaled_dot_product_attention(x, x, x, **{name: torch.tensor(values)})
    with torch.device("meta"):  # no values are read on other devices
        x, lengths = torch.empty(2, 1, 7, 8), torch.tensor(values)
        assert F.scaled_dot_product_attention(x, x, x, **{name: lengths}).shape == x.shape
