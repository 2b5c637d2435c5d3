"""linear and feed_forward on every code path that rows, sizes and instruction sets select.

Up to `direct_rows` rows read a weight in place. More rows use packed copies, which are cached for
parameters. Low precision has panels of pairs of rows, and packs them in chunks if they do not fit.
On CPUs with AMX, fp32 is multiplied as bf16x3: from 12 rows on panels are split as they are read,
and from 144 rows on they are packed as components.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import DTYPES, ISAS, Target, check_calls, check_target, in_use, kernel_of, run, targets
from torch import Tensor

from transformer_fast import _native, functional, memory
from transformer_fast.backends import cpu_packing
from transformer_fast.specs import OPS as SPECS
from transformer_fast.specs.spec import Draw
from transformer_fast.testing import (
    OUTPUT_FACTOR,
    Truth,
    check,
    check_gradients,
    nan_memory,
    truth_of,
)
from transformer_fast.testing.oracle import as_results, oracle
from transformer_fast.testing.parity import compare

pytestmark = [
    pytest.mark.sampled(35),
    pytest.mark.usefixtures("two_threads"),
    pytest.mark.skipif(_native.module is None, reason=str(_native.why_not)),
]
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")
OPS = torch.ops.transformer_fast
Call = tuple[str, tuple[Any, ...]]

#: Every build; AVX-512-BF16 has the fp32 kernels of AVX-512.
PRODUCTS = [
    p
    for op in ("linear", "feed_forward")
    for p in targets(op)
    if p.values[0].kernel.backend == "cpu"
    and (p.values[0].dtype, p.values[0].isa) != (torch.float32, "avx512_bf16")
]
FLOAT32 = [p for p in PRODUCTS if p.values[0].dtype == torch.float32]
BF16X3 = [p for p in FLOAT32 if p.values[0].isa == "amx"]
LINEAR = [p for p in BF16X3 if p.values[0].op == "linear"]


def drawing(dtype: torch.dtype = torch.float32) -> Draw:
    return Draw(dtype, "cpu", torch.Generator().manual_seed(0))


def linear(
    rows: int, inputs: int, outputs: int, activation: Any = None, residual: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, ...]:  # fmt: skip
    d = drawing(dtype)
    added = d.normal(rows, outputs) if residual else None
    return d.normal(rows, inputs), d.weight(outputs, inputs), d.normal(outputs), activation, added


def feed_forward(
    rows: int, model: int, hidden: int, activation: Any = "gelu", outputs: int | None = None,
    p: float = 0.0, dtype: torch.dtype = torch.float32,
) -> tuple[Any, ...]:  # fmt: skip
    d, out = drawing(dtype), model if outputs is None else outputs
    first = d.normal(rows, model), d.weight(hidden, model), d.normal(hidden)
    second = d.weight(out, hidden), d.normal(out)
    return *first, *second, activation, p, d.seed() if p else None


def built(target: Target, rows: int, *sizes: int, **options: Any) -> tuple[Any, ...]:
    build: Any = {"linear": linear, "feed_forward": feed_forward}[target.op]
    return build(rows, *sizes, **options)  # type: ignore[no-any-return]


def replaced(arguments: tuple[Any, ...], **places: Any) -> tuple[Any, ...]:
    """Returns the arguments with those at positions ``a0``, ``a1``, ... replaced."""
    changed = list(arguments)
    for place, value in places.items():
        changed[int(place[1:])] = value
    return tuple(changed)


def packed(op: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Turns weights into parameters, for which packed copies are cached. Other weights are read in
    place if there are few rows.
    """
    weights = {"a1": arguments[1]} | ({"a3": arguments[3]} if op == "feed_forward" else {})
    return replaced(arguments, **{name: torch.nn.Parameter(w) for name, w in weights.items()})


# Sizes ---------------------------------------------------------------------------------------------


def of_linear(dtype: torch.dtype) -> Iterator[Call]:
    """Edges of inputs: chunks of 64, running sums of 512, slabs of 1024.

    Edges of rows: pairs of 16, blocks of 256. Edges of outputs: panels of 32, blocks of 512.
    """
    for rows, inputs in itertools.product(
        (12, 16, 17, 32, 33, 48, 49, 64, 72, 111, 143, 144, 300),
        (1, 31, 33, 64, 65, 96, 257, 512, 513, 1023, 1024, 1025, 1100, 1537, 2051),
    ):
        activation = ACTIVATIONS[(rows + inputs) % 5]
        for outputs in (33, (1, 32, 100)[rows % 3]):
            arguments = linear(rows, inputs, outputs, activation, outputs == 33)
            yield f"{rows}, {inputs}, {outputs}", arguments
    yield "many outputs", linear(300, 1025, 545)


def of_ends(dtype: torch.dtype) -> Iterator[Call]:
    """Activation, residual and bias, with and without gaps between rows."""
    for inputs, activation in itertools.product((70, 1030), ACTIVATIONS):
        for residual, outputs in itertools.product((False, True), (1, 16, 32, 47, 96)):
            arguments = linear(75, inputs, outputs, activation, residual)
            yield f"{inputs}, {activation}, {outputs}", arguments
            yield f"{inputs}, {activation}, {outputs}, no bias", replaced(arguments, a2=None)
        d = drawing()
        x, weight = d.normal(6, 40, inputs + 7)[:, ::2, 3:-4], d.weight(50, 2 * inputs)[:, :inputs]
        residual = d.normal(20, 6, 50).transpose(0, 1)
        yield "strided", (x, weight, d.normal(50, 2)[:, 0], activation, residual)
        row, wide = d.normal(1, inputs).expand(120, inputs), d.weight(inputs, 50).t()
        yield "transposed", (row, wide, None, activation, None)


def of_network(dtype: torch.dtype) -> Iterator[Call]:
    """Two threads split the columns up to 143 rows, and the rows from 144 rows on."""
    every = (12, 31, 48, 65, 112, 143, 144, 145, 300)
    for rows, activation in itertools.product(every, ACTIVATIONS[1:]):
        for model, hidden, outputs in ((40, 129, 40), (33, 127, 70), (65, 300, 1)):
            arguments = feed_forward(rows, model, hidden, activation, outputs)
            yield f"{rows}, {activation}, {hidden}", arguments
        yield f"{rows}, {activation}, no bias", replaced(arguments, a2=None, a4=None)


SIZES = {"linear": (of_linear, of_ends), "feed_forward": (of_network,)}


@pytest.mark.parametrize(
    ("target", "calls"),
    [
        pytest.param(*p.values, calls, id=f"{p.id}-{calls.__name__}")
        for p in BF16X3
        for calls in SIZES[p.values[0].op]
    ],
)
def test_sizes_at_panel_and_block_edges(target, calls):
    """Unaligned weights, and packed copies of parameters. The sweeps of `ops` cover other sizes."""
    check_calls(target, calls)
    for _, arguments in calls(target.dtype):
        check(target.op, run(target, packed(target.op, arguments)), arguments)
    cpu_packing.forget()


# Gradients -----------------------------------------------------------------------------------------


#: Numbers of rows that select a code path: few, odd, and more than a block.
ROWS = {
    torch.float32: (1, 2, 5, 6, 7, 47, 48, 49, 64, 150, 257, 300),
    **dict.fromkeys(DTYPES[1:], (1, 23, 24, 31, 32, 33, 45, 64, 65, 256, 257)),
}


def trained_linear(dtype: torch.dtype) -> Iterator[Call]:
    sizes = ((64, 96), (70, 300), (129, 1), (1, 65), (33, 90), (75, 31))
    # Combines each number of rows with half of the sizes.
    every = ((rows, size) for i, rows in enumerate(ROWS[dtype]) for size in sizes[i % 2 :: 2])
    for rows, (inputs, outputs) in every:
        name, d = f"{rows}, {inputs}, {outputs}", drawing(dtype)
        activation = ACTIVATIONS[1 + rows % 4]
        yield name, linear(rows, inputs, outputs, activation, dtype=dtype)
        wide, transposed = d.normal(rows, inputs + 9)[:, 4:-5], d.weight(inputs, outputs).t()
        yield f"{name}, strided", (wide, transposed, None, None, d.normal(rows, outputs))
    if dtype != torch.float16:
        yield "a vocabulary's", linear(130, 20, 4200, dtype=dtype)
    if dtype == torch.bfloat16:
        yield "in parts", linear(600, 16500, 7, dtype=dtype)
        yield "many outputs", linear(40, 33, 9000, dtype=dtype)
    if dtype == torch.float32:
        yield from ((str(a), linear(300, 530, 270, a, True)) for a in ACTIVATIONS)


def trained_network(dtype: torch.dtype) -> Iterator[Call]:
    every = itertools.product(enumerate(ROWS[dtype]), enumerate(ACTIVATIONS[1:]))
    for (i, rows), (j, activation) in every:
        p = (0.0, 0.3)[(i + j) % 2]
        arguments = feed_forward(rows, 70, 130, activation, 33, p, dtype)
        yield f"{rows}, {activation}, {p}", arguments
    if dtype == torch.bfloat16:
        yield "in parts", feed_forward(600, 9, 16500, "gelu", 5, 0.4, dtype)


@pytest.mark.sampled(30, 60)
@pytest.mark.parametrize("target", PRODUCTS)
def test_gradients_are_within_the_budget(target):
    calls = trained_linear if target.op == "linear" else trained_network
    check_calls(target, calls, gradients=True)


def test_second_derivatives_without_input_features():
    x, weight = (torch.ones(*sizes, 0, requires_grad=True) for sizes in ((3, 4), (5,)))
    loss = functional.linear(x, weight, torch.ones(5, requires_grad=True)).square().sum()
    first = torch.autograd.grad(loss, (x, weight), create_graph=True)
    assert [gradient.shape for gradient in first] == [x.shape, weight.shape]
    second = torch.autograd.grad(sum(gradient.sum() for gradient in first), (x, weight))
    assert [gradient.shape for gradient in second] == [x.shape, weight.shape]


@pytest.mark.parametrize("rows", [9, 15, 64, 256, 257, 512])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=["bf16", "fp16"])
def test_panels_packed_on_the_fly_give_the_same_bits(
    rows: int, dtype: torch.dtype, isa: str
) -> None:
    """Outputs and input gradients are bitwise those of panels packed beforehand."""
    generator = torch.Generator().manual_seed(rows)
    for n, k in ((128, 67), (131, 256), (520, 130), (4600, 300), (300, 4600)):
        x, weight, bias, grad = (
            torch.randn(shape, generator=generator).to(dtype)
            for shape in ((rows, k), (n, k), (n,), (rows, n))
        )
        wide = torch.nn.functional.pad(weight, (3, 5))[:, 3 : 3 + k]  # a larger row stride
        copy, turned = OPS.pack_weight.cpu(weight, rows), weight.t().contiguous()
        expected = OPS.linear_packed.cpu(x, weight, copy, bias, None, 2)
        by_columns = OPS.linear_packed.cpu(
            grad, turned, OPS.pack_weight.cpu(turned, rows), None, None, 0
        )
        for w in (weight, wide):
            with nan_memory():
                assert torch.equal(OPS.linear_packed.cpu(x, w, None, bias, None, 2), expected)
                found = OPS.linear_backward.cpu(grad, x, w, None, 0, True, False, False)[0]
            assert torch.equal(found, by_columns)


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("target", [p for p in FLOAT32 if p.values[0].op == "linear"])
def test_activation_derivatives_of_large_inputs(target: Target, activation: str) -> None:
    """Derivatives are 1 for large inputs and 0 for very negative ones; in between they match fp64."""
    far = torch.tensor([100.0, 1e4, 1e10, 7e12, 1e20, 1e38])
    x = torch.cat([far, -far, torch.linspace(-14, 14, 2001)])[:, None].requires_grad_()
    with in_use(target.isa):
        y = target.kernel.run(x, torch.ones(1, 1), None, activation, None)
        (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(slope[:6], torch.ones(6, 1))
    assert torch.equal(slope[6:12], torch.zeros(6, 1))
    true = x.detach().double().requires_grad_()
    exact = SPECS["linear"].reference(true, torch.ones(1, 1).double(), None, activation, None)
    (wanted,) = torch.autograd.grad(exact.sum(), true)
    torch.testing.assert_close(slope[12:], wanted[12:].float(), rtol=0.0, atol=3e-7)


# Values that bf16x3 cannot represent
# ---------------------------------------------------------------


def as_floats(op: str, arguments: tuple[Any, ...]) -> Truth:
    """Returns the truth, with infinity for results beyond fp32's range."""
    truth = truth_of(op, arguments)
    ((name, true),) = truth.true.items()
    large = true.abs() > torch.finfo(torch.float32).max
    return replace(truth, true={name: torch.where(large, true * math.inf, true)})


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38, -3e38, 1e-36, 1e-42])
@pytest.mark.parametrize("target", FLOAT32)
def test_extreme_values_are_within_the_budget(target, value):
    """Such a value anywhere, a row of them, and rows of tiny values."""
    network = target.op == "feed_forward"
    places = itertools.product(("x", "w", "both", "row", "rest"), (20, 75, 150), ACTIVATIONS)
    for place, rows, activation in places:
        if (network and activation is None) or (place == "rest" and abs(value) == 3e38):
            continue
        options = {} if network else {"residual": place == "rest"}
        arguments = built(target, rows, 70, 50, activation=activation, **options)
        x, weight, bias, other, last, *_ = arguments
        if place == "x":
            x[3, 5] = value
        if place in ("w", "both"):
            x[:, 5] *= 0.1  # avoids overflow
            weight[7, 5] = value
        if place == "both":
            x[3, 5], weight[7, 5] = value, 0.5
        if place == "row":
            x[rows - 1] = value * 0.01
        if place == "rest" and abs(value) < 1.0:  # only tiny inputs in the whole call
            arguments = replaced(arguments, a2=None, **({"a4": None} if network else {}))
            x.mul_(1e-36)
        elif place == "rest":
            bias[5], last[5] = value, value
            if network:
                other[2, 3] = value
        check_target(target, arguments, truth=as_floats(target.op, arguments))


@pytest.mark.parametrize("target", LINEAR)
def test_overflowing_sums_are_infinite(target):
    """Sums beyond fp32's range are infinite; sums that only approach the limit are finite."""
    arguments = linear(80, 70, 50)
    arguments[0][3, 5], arguments[1][:, 5] = 3e38, 0.9
    arguments[1][7, 5], arguments[1][9, 5] = 8.0, -8.0
    result = run(target, arguments)
    assert (result[3, 7], result[3, 9]) == (math.inf, -math.inf)
    check_target(target, arguments, truth=as_floats("linear", arguments))


@pytest.mark.parametrize(("place", "size"), [(0, 1e-42), (1, 1e-36), (1, 1e-42), (1, 1e-30)])
@pytest.mark.parametrize("target", BF16X3)
def test_tiny_values_have_errors_below_the_smallest_normal(target, place, size):
    """Where fp32 underflows, errors are at most the smallest normal number."""
    arguments = replaced(built(target, 130, 70, 50, activation="relu"), a2=None)
    arguments = replaced(arguments, a4=None)
    arguments[place].mul_(size)
    with in_use(target.isa):
        (expected,) = as_results(target.kernel.run(*arguments))
    (true,), least = oracle(target.op, arguments), torch.finfo(torch.float32).tiny / 2**-23
    got = run(target, arguments)
    parity = compare(target.op, got, expected, true, OUTPUT_FACTOR, least_size=least)
    assert parity.ok, parity


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e-36])
@pytest.mark.parametrize("target", FLOAT32)
def test_gradients_of_extreme_values(target, value):
    arguments = built(target, 150, 70, 90, activation="relu")
    if value == 1e-36:
        arguments[0].mul_(value)
        arguments = replaced(arguments, a2=None)
    else:
        arguments[0][3, 5] = value
    with in_use(target.isa):
        check_gradients(target.op, target.kernel.run, arguments)


@pytest.mark.parametrize("columns", [512, 516])
@pytest.mark.parametrize("target", [p for p in FLOAT32 if p.values[0].op == "linear"])
def test_large_gradients_of_few_rows(target: Target, columns: int) -> None:
    """Gradients of 16 MiB and more bypass the caches if their rows are whole cache lines."""
    x, weight = torch.randn(7, columns), torch.randn(8200, columns).requires_grad_()
    grad = torch.randn(7, 8200)
    with in_use(target.isa):
        (found,) = torch.autograd.grad(functional.linear(x, weight, backend="cpu"), weight, grad)
    torch.testing.assert_close(found, grad.t() @ x)


@pytest.mark.parametrize("rows", [20, 300])
@pytest.mark.parametrize("target", [p for p in FLOAT32 if p.values[0].op == "linear"])
def test_long_sums_are_added_up_in_parts(target: Target, rows: int) -> None:
    """Summed over 32,000 words from end to end, the error would be 2 to 3 times as large."""
    weight, grad = torch.rand(32000, 72), torch.full((rows, 32000), 1 / 32000)
    x = torch.zeros(rows, 72, requires_grad=True)
    with in_use(target.isa):
        (found,) = torch.autograd.grad(functional.linear(x, weight, backend="cpu"), x, grad)
    exact = grad.double() @ weight.double()
    parts = sum(a @ b for a, b in zip(grad.split(4096, 1), weight.split(4096), strict=True))
    assert (found - exact).norm() <= 2 * (parts - exact).norm()


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("target", [p for p in PRODUCTS if p.values[0].op == "feed_forward"])
def test_infinity_and_nan_reach_gradients_as_in_pytorch(target: Target, value: float) -> None:
    d = drawing(target.dtype)
    x, weight1, weight2 = d.normal(50, 40), d.weight(60, 40), d.weight(40, 60)
    x[3, 5] = value
    tensors = [t.requires_grad_() for t in (x, weight1, weight2)]
    plain = torch.relu(x @ weight1.t()) @ weight2.t()
    with in_use(target.isa):
        ours = target.kernel.run(x, weight1, None, weight2, None, "relu", 0.0, None)
        found = [torch.autograd.grad(y, tensors, d.normal(50, 40)) for y in (ours, plain)]
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got.isfinite(), expected.isfinite())


@pytest.mark.parametrize("target", LINEAR)
def test_weights_of_negative_zero_give_the_bias(target):
    x, weight, bias, *rest = linear(80, 70, 50)
    parameter = torch.nn.Parameter(torch.full_like(weight, -0.0))
    for _ in range(2):
        assert torch.equal(run(target, (x, parameter, bias, *rest)), bias.expand(80, 50))


# Code paths
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_rows_read_the_weight_in_place(dtype: torch.dtype, rows: int, isa: str) -> None:
    """No packed copy is cached, and a write of a single element takes effect."""
    assert _native.module is not None
    cpu_packing.forget()
    name, generator = str(dtype).removeprefix("torch."), torch.Generator().manual_seed(rows)
    assert _native.module.direct_rows("float32", 1) > 0  # some instruction sets lack the others
    if rows > _native.module.direct_rows(name, 1):
        pytest.skip("so many are packed")

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    for n, k in [(1, 1), (5, 3), (31, 33), (64, 64), (130, 513), (19, 1030), (2, 0), (700, 40)]:
        w1, w2 = (draw(*shape) / max(1, k) ** 0.5 for shape in ((n, k), (k, n)))
        for activation in ("relu", "gelu"):
            of_op = {"linear": (draw(rows, k), w1, draw(n), activation, draw(rows, n))}
            of_op["feed_forward"] = draw(rows, k), w1, draw(n), w2, None, activation, 0.0, None
            for op, arguments in of_op.items():
                target = Target(kernel_of(op), dtype, isa)
                check_target(target, arguments)
                run(target, kept := packed(op, arguments))
                if k and op == "linear":
                    kept[1].data[-1, -1] = 3.0
                    check(op, run(target, kept), replaced(arguments, a1=kept[1].detach()))
    assert memory.packed() == 0


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_more_rows_read_an_uncached_weight_in_place(dtype: torch.dtype, isa: str) -> None:
    assert _native.module is not None
    cpu_packing.forget()
    name = str(dtype).removeprefix("torch.")
    k = 64
    n = (16 << 20) // (k * dtype.itemsize) + 1
    rows = _native.module.direct_rows(name, n * k)
    if rows <= _native.module.direct_rows(name, 1):
        pytest.skip("so many are packed")
    d, target = drawing(dtype), Target(kernel_of("linear"), dtype, isa)
    weight = torch.nn.Parameter(d.normal(n, k))
    for count in (rows - 3, rows - 1, rows, rows):
        x = d.normal(count, k)
        check(
            "linear", run(target, (x, weight, None, None, None)), (x, weight.detach(), *[None] * 3)
        )
        weight.data[-1, -1] = 100.0 + count  # a single element changes
    assert memory.packed() == 0


@pytest.mark.parametrize("rows", [11, 12, 143, 144])
@pytest.mark.parametrize("target", BF16X3)
def test_bf16x3_is_selected_by_the_number_of_rows(target, rows):
    """Proves that bf16x3 is used; other tests depend on that."""
    native = _native.module
    with in_use("amx"):
        way = native.splits_panels(rows), native.packs_pieces(rows)
    assert way == (rows in (12, 143), rows == 144)
    arguments = packed(target.op, built(target, rows, 65, 40))
    ours, plain = (run(t, arguments) for t in (target, target._replace(isa="avx512")))
    assert torch.equal(ours, plain) is (not any(way))
    with in_use("avx512"):
        assert not any(native.splits_panels(n) or native.packs_pieces(n) for n in (rows, 1 << 20))


# Packed copies of both formats
# ---------------------------------------------------------------------


def packed_both_ways(weight: Tensor) -> tuple[Tensor, Tensor]:
    pieces, whole = (OPS.pack_weight.cpu(weight, rows) for rows in (144, 143))
    assert (pieces.dtype, whole.dtype) == (torch.bfloat16, torch.float32)
    return pieces, whole


on_amx = pytest.mark.skipif("amx" not in ISAS, reason=_native.why_not or "this CPU has no AMX")


@on_amx
@pytest.mark.parametrize("rows", [8, 20, 75, 300])
def test_packed_copies_of_either_format_are_usable(rows, amx):
    x, weight, bias, *_ = arguments = linear(rows, 70, 50)
    pieces, whole = packed_both_ways(weight)
    got = [OPS.linear_packed.cpu(x, weight, copy, bias, None, 0) for copy in (pieces, whole)]
    for result in got:
        check("linear", result, arguments)
    assert not torch.equal(*got)
    # With 144 rows or more, a copy in fp32 is multiplied in fp32.
    plain = run(LINEAR[0].values[0]._replace(isa="avx512"), linear(rows, 70, 50))
    assert torch.equal(got[1], plain) or rows < 144
    x, w1, b1, w2, b2, *_ = arguments = feed_forward(rows, 70, 50)
    for first, second in itertools.product(packed_both_ways(w1), packed_both_ways(w2)):
        result = OPS.feed_forward_packed.cpu(x, w1, first, b1, w2, second, b2, 2)
        check("feed_forward", result, arguments)


@on_amx
def test_unreadable_packed_copies_are_ignored(amx):
    """The caller ensures that a copy belongs to the weight; a copy in an unreadable format is
    ignored.
    """
    target = LINEAR[0].values[0]
    x, weight, bias, *_ = arguments = linear(150, 70, 50)
    assert torch.equal(
        OPS.linear_packed.cpu(x, weight + 1, packed_both_ways(weight)[0], None, None, 0),
        OPS.linear_packed.cpu(x, weight, None, None, None, 0),
    )
    x, weight, bias, *_ = arguments = linear(75, 70, 50)
    pieces, _ = packed_both_ways(weight)
    with in_use("avx512"):
        result = OPS.linear_packed.cpu(x, weight, pieces, bias, None, 0)
    assert torch.equal(result, run(target._replace(isa="avx512"), arguments))
    # Copies for 65 to 96 inputs have the same size.
    for wrong in (packed_both_ways(weight[:, 6:])[0], pieces[1:]):
        result = OPS.linear_packed.cpu(x, weight, wrong, bias, None, 0)
        assert torch.equal(result, run(target, arguments))


# Bitwise equality, and accuracy
# ---------------------------------------------------------------------

LARGE = {
    "linear": (
        linear(300, 70, 130, "gelu", True), linear(130, 1100, 600), linear(75, 300, 130),
        linear(150, 300, 130),
    ),
    "feed_forward": (feed_forward(75, 70, 300), feed_forward(300, 70, 1300)),
}  # fmt: skip


@pytest.mark.parametrize("target", BF16X3)
def test_a_row_does_not_depend_on_the_others(target):
    packs = _native.module.packs_pieces
    for arguments in LARGE[target.op]:
        whole, x = run(target, arguments), arguments[0]
        residual = arguments[4] if target.op == "linear" else None
        n = len(x)
        for begin, end in ((0, 25), (0, 144), (max(0, n - 145), n), (n - 43, n), (50, 250)):
            rows = slice(begin, end)
            part = replaced(arguments, a0=x[rows])
            if residual is not None:
                part = replaced(part, a4=residual[rows])
            with in_use("amx"):
                same_way = packs(len(part[0])) == packs(n)
            assert not same_way or torch.equal(run(target, part), whole[rows]), (begin, end)
        for garbage in (math.nan, 1e-40, 3e38):
            dirty = x.clone()
            dirty[::2] = garbage
            result = run(target, replaced(arguments, a0=dirty))
            assert torch.equal(result[1::2], whole[1::2]), garbage


#: In float64, without the cancellation of PyTorch's formulas where x is far below 0.
EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: x * torch.erfc(-x / math.sqrt(2.0)) / 2,
    "gelu_tanh": lambda x: x * torch.sigmoid(math.sqrt(8.0 / math.pi) * (x + 0.044715 * x**3)),
    "silu": lambda x: x * torch.sigmoid(x),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", EXACT)
def test_activations_in_low_precision_err_by_their_rounding(
    isa: str, activation: str, dtype: torch.dtype
) -> None:
    """In bfloat16 their relative error before rounding is 2e-4, even where they are nearly 0."""
    tiny = torch.logspace(-30, 0, 95)
    x = torch.cat([torch.linspace(-12.0, 12.0, 4001), tiny, -tiny]).to(dtype)[:, None]
    one, bias = torch.ones(1, 1, dtype=dtype), torch.zeros(1, dtype=dtype)
    exact = EXACT[activation](x.double())
    limit = 1.1 * torch.finfo(dtype).eps / 2 * exact.abs()
    for rows in (1, len(x)):  # weights are read in place, or packed
        found = [
            functional.linear(part, one, bias, activation=activation, backend="cpu")
            for part in x.split(rows)
        ]
        error = (torch.cat(found).double() - exact).abs()
        least = 1e-36 if dtype == torch.bfloat16 else torch.finfo(dtype).smallest_normal / 2**8
        assert (error <= limit.clamp(min=least)).all()
