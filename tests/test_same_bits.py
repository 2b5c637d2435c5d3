"""Bitwise equal results, as the page "Same bits" promises them.

Results do not depend on the number of threads, on earlier or concurrent calls, or on packed weights
and cached memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import (
    DTYPES,
    Target,
    check_threads,
    drawn,
    in_threads,
    in_use,
    kernel_of,
    on,
    run,
    same_bits,
    targets,
)
from ops import ROWS
from ops.attention import options, tensors
from torch import Tensor

import transformer_fast
from transformer_fast import _native, nn
from transformer_fast import functional as F
from transformer_fast.backends import cpu_packing
from transformer_fast.specs import OPS
from transformer_fast.specs.attention import arrange
from transformer_fast.specs.spec import Draw
from transformer_fast.testing import check, gradients
from transformer_fast.testing.oracle import as_results

pytestmark = [
    pytest.mark.usefixtures("two_threads"),
    pytest.mark.skipif(_native.module is None, reason=str(_native.why_not)),
]

NATIVE = [p for p in targets() if p.values[0].kernel.backend == "cpu"]


def large(target: Target, filling: bool = False) -> list[tuple[Any, ...]]:
    """Returns calls with work for several threads; ``filling``: those that fill all scratch memory
    with NaN.
    """
    row = ROWS[target.op]
    make = (filling and row.filling) or row.large
    return make(Draw(target.dtype, "cpu", torch.Generator().manual_seed(0)))


@pytest.mark.sampled(10, 60)
@pytest.mark.parametrize("target", NATIVE)
def test_results_do_not_depend_on_the_number_of_threads(target, threads):
    for arguments in large(target):
        check_threads(lambda: run(target, arguments), (1, 2, 3, 4, 1))  # noqa: B023


@pytest.mark.sampled(10, 60)
@pytest.mark.parametrize("target", NATIVE)
def test_scratch_memory_of_earlier_calls_is_not_read(target):
    """Scratch memory is reused between calls; here a larger call has filled it with NaN."""
    calls = [c for c in large(target) if not target.refusal(c)]
    filling = [c for c in large(target, filling=True) if not target.refusal(c)]
    small = [drawn(target.op, c.name, target.dtype) for c in OPS[target.op].cases]
    small = [arguments for arguments in small if not target.refusal(arguments)]
    clean = [run(target, arguments) for arguments in (*small, *calls)]
    for arguments, before in zip((*small, *calls), clean, strict=True):
        for call in filling:
            run(target, tuple(_all_nan(x) for x in call))
        assert same_bits(run(target, arguments), before)


def _all_nan(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return torch.full_like(value, math.nan)
    return value


@pytest.mark.parametrize("target", NATIVE)
def test_results_are_not_overwritten_by_later_calls(target):
    for arguments in large(target):
        first = run(target, arguments)
        kept = [None if x is None else x.clone() for x in as_results(first)]
        run(target, tuple(_all_nan(x) for x in arguments))
        assert same_bits(first, tuple(kept))


@pytest.mark.parametrize("target", [p for p in NATIVE if p.values[0].isa in (None, "avx2")])
def test_concurrent_python_threads_do_not_interfere(target):
    calls = large(target)
    with in_use(target.isa), torch.no_grad():
        expected = [target.kernel.run(*call) for call in calls]
        wrong: list[int] = []

        def work(offset: int) -> None:
            for turn in range(12):
                place = (turn + offset) % len(calls)
                with torch.no_grad():
                    if not same_bits(target.kernel.run(*calls[place]), expected[place]):
                        wrong.append(place)

        in_threads(work, 3)
    assert wrong == []


def lazily_negative(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor equal to x that stores -x with the negative bit."""
    return torch._neg_view(-x)


@pytest.mark.parametrize("target", targets(all_isas=False))
def test_negative_views_give_the_same_bits(target):
    arguments = drawn(target.op, OPS[target.op].cases[0].name, target.dtype)
    expected = run(target, on(target, arguments))
    floating = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in arguments]
    for place in (p for p, is_floating in enumerate(floating) if is_floating):
        called = list(arguments)
        called[place] = lazily_negative(arguments[place])
        assert called[place].is_neg()
        assert same_bits(run(target, on(target, tuple(called))), expected)


@pytest.mark.parametrize("target", targets(all_isas=False))
def test_inference_mode_and_parameters_give_the_same_bits(target):
    arguments = on(target, drawn(target.op, OPS[target.op].cases[0].name, target.dtype))

    def wrapped():
        return tuple(
            torch.nn.Parameter(x.clone(), requires_grad=False)
            if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.dtype == torch.int8)
            else x
            for x in arguments
        )

    parameters = wrapped()
    first = run(target, parameters)
    with torch.inference_mode():
        assert same_bits(run(target, parameters), first)
        # These parameters have no version counter.
        assert same_bits(run(target, wrapped()), run(target, arguments))
    assert same_bits(run(target, parameters), first)
    check(target.op, first, arguments)


CHANGES = {
    "in place": lambda w: w.mul_(2),
    "through .data": lambda w: w.data.mul_(2),
    "copied": lambda w: w.copy_(w * 2),
    "assigned to .data": lambda w: setattr(w, "data", w.detach() * 2),
    "through NumPy": lambda w: w.detach().numpy().__imul__(2),
}


def weights_of(target: Target) -> list[str]:
    return [n for n in OPS[target.op].arguments if n.startswith("weight")]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("target", [p for p in targets(all_isas=False) if weights_of(p.values[0])])
def test_changed_weights_take_effect(target, change):
    """What a kernel caches for a parameter must not outlive the parameter's values."""
    if change == "through NumPy" and target.dtype == torch.bfloat16:
        pytest.skip("NumPy has no bfloat16")
    spec = OPS[target.op]
    arguments = drawn(target.op, spec.cases[0].name, target.dtype)
    for name in weights_of(target):
        place = spec.arguments.index(name)
        weight = on(target, arguments)[place].clone()
        parameter = torch.nn.Parameter(weight, weight.is_floating_point())
        called = list(on(target, arguments))
        called[place] = parameter
        first = run(target, tuple(called))
        with torch.no_grad():
            CHANGES[change](parameter)
        second = run(target, tuple(called))
        called[place] = torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        assert same_bits(second, run(target, tuple(called)))
        assert not same_bits(second, first)


# Functions and layers ---------------------------------------------------------------------------

#: Numbers of rows at which kernels, tiles and the division of work change.
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 24, 25, 57, 72, 113, 129, 144, 260)


class Calls:
    """Forward calls for any number of rows, with fixed weights."""

    def __init__(self, dtype: torch.dtype, columns: int = 96, hidden: int = 160) -> None:
        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(shape).div(shape[-1] ** 0.5).to(dtype))

        self.dtype, self.columns = dtype, columns
        weight1, bias1 = parameter(hidden, columns), parameter(hidden)
        weight2, bias2 = parameter(columns, hidden), parameter(columns)
        self.layer = nn.TransformerEncoderLayer(
            columns, 2, hidden, 0.0, batch_first=True, dtype=dtype
        ).eval()
        norm = ((columns,), bias2, bias2)
        self.of_rows: dict[str, Callable[[Tensor], Tensor]] = {
            "linear": lambda x: F.linear(x, weight1, bias1),
            "feed_forward": lambda x: F.feed_forward(
                x, weight1, bias1, weight2, bias2, activation="gelu"
            ),
            "layer_norm": lambda x: F.layer_norm(x, *norm),
            "add_layer_norm": lambda x: F.add_layer_norm(x, x.neg().exp(), *norm)[0],
            "encoder layer": lambda x: self.layer(x[:, None]),
        }

        first, second = (
            (*F.quantize_weight(w), b.detach()) for w, b in ((weight1, bias1), (weight2, bias2))
        )
        #: Without gradients.
        self.int8: dict[str, Callable[[Tensor], Tensor]] = {
            "int8_linear": lambda x: F.int8_linear(x, *first, activation="silu"),
            "int8_feed_forward": lambda x: F.int8_feed_forward(x, *first, *second),
        }

        def dropped(x: Tensor) -> Tensor:
            torch.manual_seed(0)
            how = {"activation": "gelu", "dropout_p": 0.5}
            return F.feed_forward(x, weight1, bias1, weight2, bias2, **how)

        self.dropped = dropped

    def rows(self, rows: int) -> Tensor:
        return torch.randn(rows, self.columns).to(self.dtype)


@pytest.fixture(params=DTYPES, ids=["fp32", "bf16", "fp16"])
def calls(request: pytest.FixtureRequest) -> Calls:
    return Calls(request.param)


def called(call: Callable[[Tensor], Tensor], x: Tensor, training: bool) -> list[Tensor]:
    """Returns the result and, in training, the gradient."""
    with torch.set_grad_enabled(training):
        y = call(x)
        return [y, *torch.autograd.grad(y.float().square().sum(), x)] if training else [y]


@pytest.mark.sampled(50)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_layers_do_not_depend_on_the_number_of_threads(
    isa: str, calls: Calls, training: bool, threads: None
) -> None:
    for rows in COUNTS:
        x = calls.rows(rows).requires_grad_(training)
        for call in (*calls.of_rows.values(), calls.dropped):
            check_threads(lambda: called(call, x, training))  # noqa: B023


@pytest.mark.sampled(50)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_attention_does_not_depend_on_the_number_of_threads(
    isa: str, calls: Calls, training: bool, threads: None
) -> None:
    sizes = [(n, 300, {"causal": causal}) for n in (1, 3, 5, 40, 113) for causal in (False, True)]
    every = [(200, 600, given) for given in options(200, 600, calls.dtype).values()]
    for queries, keys, given in (*sizes, *every):
        arguments = arrange(*tensors(queries, keys, 32, dtype=calls.dtype), **given)
        if training:
            check_threads(lambda: gradients("attention", kernel_of("attention").run, arguments))  # noqa: B023
        else:
            check_threads(lambda: kernel_of("attention").run(*arguments))  # noqa: B023


def test_the_fallback_of_norms_does_not_depend_on_threads(threads: None, small_calls: None) -> None:
    """In training, the limit of the small-size fallback does not depend on the number of threads."""
    module = nn.LayerNorm(64)
    for rows in (100, 128, 129, 200, 256, 257, 400):
        x, names = torch.randn(rows, 64, requires_grad=True), set()

        def call(x: Tensor = x, names: set[Any] = names) -> Any:
            y = module(x)
            z, _ = F.add_layer_norm(x, x, (64,), module.weight, module.bias)
            names.add((y.grad_fn.name(), z.grad_fn.name()))
            return y, z

        check_threads(call, (1, 2, 4))
        assert len(names) == 1


@pytest.fixture
def nothing_packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    def limit(on: bool) -> None:
        monkeypatch.setattr(cpu_packing, "_limit", 0 if on else 2**32)
        transformer_fast.memory.forget_packed()

    yield limit
    transformer_fast.memory.forget_packed()


@torch.no_grad()
def test_packed_copies_give_the_same_bits(
    isa: str, calls: Calls, nothing_packed: Callable[[bool], None]
) -> None:
    """With and without cached copies."""
    for rows in COUNTS:
        x = calls.rows(rows)
        for name, call in (calls.of_rows | calls.int8).items():
            nothing_packed(True)
            alone = call(x)
            assert transformer_fast.memory.packed() == 0
            nothing_packed(False)
            assert torch.equal(call(x), alone), (name, rows)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_large_weights_give_the_same_bits_beside_small_ones(
    isa: str, dtype: torch.dtype, nothing_packed: Callable[[bool], None]
) -> None:
    """Rows for which the small weights of a layer have packed copies, and the large ones need none."""
    calls = Calls(dtype, 64, 2**17)
    for rows in (3, 6, 11):
        x = calls.rows(rows)
        nothing_packed(True)
        alone = calls.of_rows["encoder layer"](x)
        nothing_packed(False)
        assert torch.equal(calls.of_rows["encoder layer"](x), alone), rows


@torch.no_grad()
def test_cached_memory_gives_the_same_bits(calls: Calls) -> None:
    x = calls.rows(4096)
    before = {name: call(x) for name, call in calls.of_rows.items()}
    limit = transformer_fast.memory.limit()
    transformer_fast.memory.set_limit(0)
    try:
        for name, call in calls.of_rows.items():
            assert torch.equal(call(x), before[name]), name
    finally:
        transformer_fast.memory.set_limit(limit)


@torch.no_grad()
def test_attention_does_not_depend_on_the_batch(isa: str, calls: Calls) -> None:
    """Results are independent of other batch elements, padding, and queries beyond the first four."""
    query, key, value = torch.randn(3, 5, 2, 300, 32).to(calls.dtype)
    lengths = torch.tensor([40, 300, 7, 1, 113])
    whole = F.scaled_dot_product_attention(query, key, value, key_lengths=lengths)
    for one, length in enumerate(lengths.tolist()):
        q = query[one : one + 1]
        k, v = (x[one : one + 1, :, :length] for x in (key, value))
        assert torch.equal(F.scaled_dot_product_attention(q, k, v)[0], whole[one])
        assert torch.equal(
            F.scaled_dot_product_attention(q[:, :, :57], k, v)[0], whole[one, :, :57]
        )
    masks = torch.arange(300) < lengths[:, None, None, None]
    masked = F.scaled_dot_product_attention(query, key, value, masks)
    for one in range(5):
        parts = (x[one : one + 1] for x in (query, key, value, masks))
        assert torch.equal(F.scaled_dot_product_attention(*parts)[0], masked[one])


@torch.no_grad()
@pytest.mark.parametrize("small", ["small calls", "kernels"])
def test_batch_invariant_rows_do_not_depend_on_their_number(
    isa: str, calls: Calls, small: str, request: pytest.FixtureRequest
) -> None:
    """A row's result does not depend on the number of other rows."""
    if small == "small calls":
        request.getfixturevalue("small_calls")
    x = calls.rows(max(COUNTS))
    query, key, value = torch.randn(3, 3, 2, 260, 32).to(calls.dtype)
    with transformer_fast.batch_invariant():
        for name, call in (calls.of_rows | calls.int8).items():
            whole = call(x)
            for rows in COUNTS:
                if name != "encoder layer":
                    assert torch.equal(call(x[:rows]), whole[:rows]), (name, rows)
        layer = calls.layer(x[:240].view(8, 30, -1))
        for batch in (1, 2, 5):
            assert torch.equal(calls.layer(x[: 30 * batch].view(batch, 30, -1)), layer[:batch])
        attended = F.scaled_dot_product_attention(query, key, value)
        for rows in (1, 2, 4, 5, 16, 57):
            some = F.scaled_dot_product_attention(query[:, :, :rows], key, value)
            assert torch.equal(some, attended[:, :, :rows]), rows
