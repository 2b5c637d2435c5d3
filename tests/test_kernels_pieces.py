"""Linear maps and feed-forward networks in bfloat16 pieces, as CPUs with AMX run fp32.

That many rows go this way as no case of the op table has.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import ISAS, Target, check_target, in_use, kernel_of, run

from transformer_fast import _native
from transformer_fast.backends import cpu_packing
from transformer_fast.specs.spec import Draw
from transformer_fast.testing import OUTPUT_FACTOR, Truth, check, check_gradients, truth_of
from transformer_fast.testing.oracle import as_results, oracle
from transformer_fast.testing.parity import compare

pytestmark = [
    pytest.mark.skipif("amx" not in ISAS, reason=_native.why_not or "this CPU has no AMX"),
    pytest.mark.usefixtures("two_threads", "amx"),
]

ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")
OPS = torch.ops.transformer_fast
EPS, TINY = torch.finfo(torch.float32).eps, torch.finfo(torch.float32).tiny


def target(op: str, isa: str = "amx") -> Target:
    return Target(kernel_of(op), torch.float32, isa)


def draw() -> Draw:
    return Draw(torch.float32, "cpu", torch.Generator().manual_seed(0))


def linear(rows: int, inputs: int, outputs: int, activation: Any = None, residual: bool = False):
    d = draw()
    added = d.normal(rows, outputs) if residual else None
    return d.normal(rows, inputs), d.weight(outputs, inputs), d.normal(outputs), activation, added


def feed_forward(
    rows: int, model: int, hidden: int, activation: Any = "gelu", outputs: int | None = None
) -> tuple[Any, ...]:
    d, out = draw(), model if outputs is None else outputs
    first = d.normal(rows, model), d.weight(hidden, model), d.normal(hidden)
    return *first, d.weight(out, hidden), d.normal(out), activation, 0.0, None


CALLS = [("linear", linear), ("feed_forward", feed_forward)]
BOTH = pytest.mark.parametrize(("op", "build"), CALLS, ids=[op for op, _ in CALLS])


def replaced(arguments: tuple[Any, ...], **places: Any) -> tuple[Any, ...]:
    """Other arguments at the places ``a0``, ``a1``, ..."""
    changed = list(arguments)
    for place, value in places.items():
        changed[int(place[1:])] = value
    return tuple(changed)


def packed(op: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same with weights of which packed copies are kept; few rows read others as they are."""
    weights = {"a1": arguments[1]} | ({"a3": arguments[3]} if op == "feed_forward" else {})
    return replaced(arguments, **{name: torch.nn.Parameter(w) for name, w in weights.items()})


def result_of(op: str, arguments: tuple[Any, ...], isa: str = "amx") -> torch.Tensor:
    return run(target(op, isa), arguments)


@BOTH
def test_rows_decide_the_way(op, build):
    """Nothing here would be tested if products in pieces were never run."""
    native = _native.module
    ways = {11: (False, False), 12: (True, False), 143: (True, False), 144: (False, True)}
    for rows, way in ways.items():
        assert (native.splits_panels(rows), native.packs_pieces(rows)) == way
        arguments = packed(op, build(rows, 65, 40))
        ours, plain = result_of(op, arguments), result_of(op, arguments, "avx512")
        assert torch.equal(ours, plain) is (not any(way))
    with in_use("avx512"):
        assert not any(
            native.splits_panels(rows) or native.packs_pieces(rows) for rows in (20, 1 << 20)
        )


# From 1025 on rows are cut into slabs; 256 rows and 512 columns of a result are a block of theirs.
@pytest.mark.parametrize("inputs", [1, 31, 64, 257, 1023, 1024, 1025, 1537, 2051])
@pytest.mark.parametrize("rows", [12, 16, 17, 33, 72, 111, 143, 144, 300])
def test_linear(rows, inputs):
    outputs = 545 if (rows, inputs) == (300, 1025) else 33 + rows % 5
    number = rows + inputs
    check_target(target("linear"), linear(rows, inputs, outputs, ACTIVATIONS[number % 5]), number)


# Chunks of 64 inputs, running sums of 512, pairs of 16 rows; 32 outputs make a panel.
@pytest.mark.parametrize("inputs", [1, 31, 33, 64, 65, 96, 512, 513, 1100])
@pytest.mark.parametrize("rows", [12, 16, 17, 32, 33, 48, 49, 64, 143])
def test_few_rows(rows, inputs):
    number = rows + inputs
    for outputs in (1, 32, 33, 100):
        arguments = linear(rows, inputs, outputs, ACTIVATIONS[number % 5], outputs == 33)
        with torch.no_grad():
            result = result_of("linear", packed("linear", arguments))
        check("linear", result, arguments)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("inputs", [70, 1030])
def test_ends_of_linear(activation, inputs):
    """Activation, residual and bias, without and with gaps between rows."""
    for residual, outputs in itertools.product((False, True), (1, 16, 32, 47, 96)):
        arguments = linear(75, inputs, outputs, activation, residual)
        check_target(target("linear"), arguments)
        check_target(target("linear"), replaced(arguments, a2=None))
    d = draw()
    x, weight = d.normal(6, 40, inputs + 7)[:, ::2, 3:-4], d.weight(50, 2 * inputs)[:, :inputs]
    residual = d.normal(20, 6, 50).transpose(0, 1)
    check_target(target("linear"), (x, weight, d.normal(50, 2)[:, 0], activation, residual))
    row, wide = d.normal(1, inputs).expand(120, inputs), d.weight(inputs, 50).t()
    check_target(target("linear"), (row, wide, None, activation, None))


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
# Up to 143 rows two threads take columns, from 144 on rows.
@pytest.mark.parametrize("rows", [12, 31, 48, 65, 112, 143, 144, 145, 300])
def test_feed_forward(activation, rows):
    for model, hidden, outputs in ((40, 129, 40), (33, 127, 70), (65, 300, 1)):
        arguments = feed_forward(rows, model, hidden, activation, outputs)
        check_target(target("feed_forward"), arguments)
    check_target(target("feed_forward"), replaced(arguments, a2=None, a4=None))


def test_sizes_of_nothing():
    earlier = feed_forward(300, 64, 128)
    for model, hidden in ((64, 0), (0, 64), (0, 0)):
        for rows in (30, 80, 300):
            arguments = feed_forward(rows, model, hidden, outputs=64)
            result_of("feed_forward", earlier)  # what is left in memory must not be read
            check_target(target("feed_forward"), arguments)
    check_target(target("linear"), linear(80, 0, 50))
    assert result_of("linear", linear(80, 50, 0)).shape == (80, 0)


@pytest.mark.parametrize("rows", [30, 80, 300])
def test_dropout_drops_the_same(rows):
    """Through an identity the hidden units can be seen."""
    d = draw()
    x, weight, bias = d.normal(rows, 40), d.weight(160, 40), d.normal(160)
    arguments = x, weight, bias, torch.eye(160), None, "gelu", 0.3, d.seed()
    check_target(target("feed_forward"), arguments)
    ours, plain = (result_of("feed_forward", arguments, isa) for isa in ("amx", "avx512"))
    assert torch.equal(ours == 0, plain == 0)
    assert 0.28 < (ours == 0).float().mean() < 0.32


# Training takes this way from 129 rows on; outputs decide whether weight gradients do.
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(150, 33, 90), (300, 530, 270)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_linear(rows, inputs, outputs, activation):
    run_linear = target("linear").kernel.run
    check_gradients("linear", run_linear, linear(rows, inputs, outputs, activation, True))
    few = linear(rows, inputs, 31, activation)
    wide = draw().normal(rows, inputs + 9)[:, 4:-5]
    check_gradients("linear", run_linear, replaced(few, a0=wide, a2=None))


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_gradients_of_feed_forward(activation):
    seed = draw().seed()
    for rows, hidden, p in ((150, 129, 0.0), (300, 100, 0.1)):
        arguments = feed_forward(rows, 75, hidden, activation, 80)
        arguments = replaced(arguments, a6=p, a7=seed if p else None)
        check_gradients("feed_forward", target("feed_forward").kernel.run, arguments)


def test_gradients_of_a_long_weight():
    """A vocabulary's: its parts' products are added up."""
    arguments = linear(130, 20, 4200)
    check_gradients("linear", target("linear").kernel.run, arguments)
    check_target(target("linear"), arguments)


# What pieces cannot say ---------------------------------------------------------------------------


def as_floats(op: str, arguments: tuple[Any, ...]) -> Truth:
    """The truth, but what is too large for fp32 is infinite."""
    truth = truth_of(op, arguments)
    ((name, true),) = truth.true.items()
    large = true.abs() > torch.finfo(torch.float32).max
    return replace(truth, true={name: torch.where(large, true * math.inf, true)})


WILD = [math.inf, -math.inf, math.nan, 3e38, -3e38, 1e-36, 1e-42]


@pytest.mark.parametrize("value", WILD)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_wild_values(value, activation):
    """One of them, in the input, the weight or both, and a row of them."""
    for place in ("x", "w", "both", "row"):
        for op, build in CALLS if activation else CALLS[:1]:
            for rows in (20, 75, 150):
                arguments = build(rows, 70, 50, activation)
                x, weight = arguments[:2]
                if place == "x":
                    x[3, 5] = value
                if place in ("w", "both"):
                    x[:, 5] *= 0.1  # no overflow
                    weight[7, 5] = value
                if place == "both":
                    x[3, 5], weight[7, 5] = value, 0.5
                if place == "row":
                    x[rows - 1] = value * 0.01
                check_target(target(op), arguments, truth=as_floats(op, arguments))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_wild_second_weights_biases_and_residuals(value):
    for rows in (20, 75, 150):
        for place, index in ((3, (2, 3)), (2, (5,)), (4, (5,))):
            arguments = feed_forward(rows, 70, 50)
            arguments[place][index] = value
            check_target(target("feed_forward"), arguments)
        arguments = linear(rows, 70, 50, "relu", True)
        arguments[2][5] = arguments[4][7, 8] = value
        check_target(target("linear"), arguments)


def test_overflow_on_the_way():
    """Sums that leave the range are infinite, and those that stay are not."""
    arguments = linear(80, 70, 50)
    arguments[0][3, 5], arguments[1][:, 5] = 3e38, 0.9
    arguments[1][7, 5], arguments[1][9, 5] = 8.0, -8.0
    result = result_of("linear", arguments)
    assert result[3, 7] == math.inf
    assert result[3, 9] == -math.inf
    check_target(target("linear"), arguments, truth=as_floats("linear", arguments))


@BOTH
@pytest.mark.parametrize("rows", [20, 75, 150])
def test_tiny_inputs(op, build, rows):
    """Results whose pieces would be lost are as exact as any."""
    arguments = replaced(build(rows, 70, 50, "relu"), a2=None)
    if op == "feed_forward":
        arguments = replaced(arguments, a4=None)
    arguments[0].mul_(1e-36)
    check_target(target(op), arguments)


@pytest.mark.parametrize(("place", "size"), [(0, 1e-42), (1, 1e-36), (1, 1e-42), (1, 1e-30)])
def test_below_the_smallest(place, size):
    """Where fp32 runs out of bits, errors are no larger than the smallest normal number."""
    for op, build in CALLS:
        arguments = replaced(build(130, 70, 50, "relu"), a2=None)
        if op == "feed_forward":
            arguments = replaced(arguments, a4=None)
        arguments[place].mul_(size)
        (expected,), (true,) = as_results(target(op).kernel.run(*arguments)), oracle(op, arguments)
        got = result_of(op, arguments)
        parity = compare(op, got, expected, true, OUTPUT_FACTOR, least_size=TINY / EPS)
        assert parity.ok, parity


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e-36])
def test_wild_gradients(value):
    for op, build in CALLS:
        arguments = build(150, 70, 90, "relu")
        if value == 1e-36:
            arguments[0].mul_(value)
            arguments = replaced(arguments, a2=None)
        else:
            arguments[0][3, 5] = value
        check_gradients(op, target(op).kernel.run, arguments)


def test_negative_zero():
    x, weight, bias, *rest = linear(80, 70, 50)
    parameter = torch.nn.Parameter(torch.full_like(weight, -0.0))
    for _ in range(2):
        assert torch.equal(result_of("linear", (x, parameter, bias, *rest)), bias.expand(80, 50))


# Packed copies ------------------------------------------------------------------------------------


def packed_both_ways(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    pieces, whole = (OPS.cpu_pack_weight(weight, rows) for rows in (144, 143))
    assert (pieces.dtype, whole.dtype) == (torch.bfloat16, torch.float32)
    return pieces, whole


@pytest.mark.parametrize("rows", [8, 20, 75, 300])
def test_a_copy_of_the_other_kind_serves(rows):
    x, weight, bias, *_ = arguments = linear(rows, 70, 50)
    pieces, whole = packed_both_ways(weight)
    got = [OPS.linear_packed.cpu(x, weight, packed, bias, None, 0) for packed in (pieces, whole)]
    for result in got:
        check("linear", result, arguments)
    assert not torch.equal(*got)
    # A copy in fp32 that 144 rows or more are given is multiplied in fp32.
    plain = result_of("linear", linear(rows, 70, 50), "avx512")
    assert torch.equal(got[1], plain) or rows < 144
    x, w1, b1, w2, b2, *_ = arguments = feed_forward(rows, 70, 50)
    for first, second in itertools.product(packed_both_ways(w1), packed_both_ways(w2)):
        result = OPS.feed_forward_packed.cpu(x, w1, first, b1, w2, second, b2, 2)
        check("feed_forward", result, arguments)


def test_a_copy_that_cannot_be_read_is_not():
    x, weight, bias, *_ = arguments = linear(75, 70, 50)
    pieces, _ = packed_both_ways(weight)
    with in_use("avx512"):
        result = OPS.linear_packed.cpu(x, weight, pieces, bias, None, 0)
    assert torch.equal(result, result_of("linear", arguments, "avx512"))
    # Of 65 to 96 inputs a copy takes as much room as of 70.
    for wrong in (packed_both_ways(weight[:, 6:])[0], pieces[1:]):
        result = OPS.linear_packed.cpu(x, weight, wrong, bias, None, 0)
        assert torch.equal(result, result_of("linear", arguments))


def test_a_copy_is_used():
    """Whether it is one of this weight its caller knows."""
    x, weight, *_ = linear(150, 70, 50)
    pieces, _ = packed_both_ways(weight)
    assert torch.equal(
        OPS.linear_packed.cpu(x, weight + 1, pieces, None, None, 0),
        OPS.linear_packed.cpu(x, weight, None, None, None, 0),
    )


@pytest.mark.parametrize("rows", [8, 75, 150])
@BOTH
def test_an_update_in_place_is_seen(op, build, rows):
    arguments = list(build(rows, 70, 50))
    before = cpu_packing.held_bytes()
    parameter = arguments[1] = torch.nn.Parameter(arguments[1])
    one = result_of(op, tuple(arguments))
    held = cpu_packing.held_bytes() - before
    assert held >= parameter.numel() * (6 if rows == 150 else 4)
    with torch.no_grad():
        parameter.view(-1)[::7] += 1
    two = result_of(op, tuple(arguments))
    assert not torch.equal(one, two)
    fresh = replaced(tuple(arguments), a1=parameter.detach().clone())
    if rows > 8:
        assert torch.equal(two, result_of(op, fresh))
    check(op, two, fresh)
    assert cpu_packing.held_bytes() - before == held
    del parameter, arguments
    gc.collect()
    assert cpu_packing.held_bytes() == before


# Bits ---------------------------------------------------------------------------------------------

LARGE = [
    ("linear", linear(300, 70, 130, "gelu", True)),
    ("linear", linear(130, 1100, 600)),
    ("linear", linear(75, 300, 130)),
    ("linear", linear(150, 300, 130)),
    ("feed_forward", feed_forward(75, 70, 300)),
    ("feed_forward", feed_forward(300, 70, 1300)),
]


@pytest.mark.parametrize(("op", "arguments"), LARGE)
def test_a_row_does_not_depend_on_the_others(op, arguments):
    whole = result_of(op, arguments)
    x, residual = arguments[0], arguments[4] if op == "linear" else None
    packs = _native.module.packs_pieces
    n = len(x)
    for begin, end in ((0, 25), (0, 144), (max(0, n - 145), n), (n - 43, n), (50, 250)):
        rows = slice(begin, end)
        part = replaced(arguments, a0=x[rows])
        if residual is not None:
            part = replaced(part, a4=residual[rows])
        if packs(len(part[0])) == packs(len(x)):
            assert torch.equal(result_of(op, part), whole[rows]), (begin, end)
    for garbage in (math.nan, 1e-40, 3e38):
        dirty = x.clone()
        dirty[::2] = garbage
        result = result_of(op, replaced(arguments, a0=dirty))
        assert torch.equal(result[1::2], whole[1::2]), garbage


# How exact ----------------------------------------------------------------------------------------


def test_as_exact_as_torch():
    """Sums are rounded less often than torch's: not only within the budget, but closer."""
    shapes = [(72, 33, 45), (111, 257, 31), (128, 64, 96), (300, 1030, 33), (100, 4096, 64)]
    calls = [("linear", linear(*shape)) for shape in shapes]
    shapes = [(73, 129, 277), (128, 64, 256), (300, 70, 130), (200, 256, 1030)]
    calls += [("feed_forward", feed_forward(*shape)) for shape in shapes]
    shares = []
    for op, arguments in calls:
        truth = truth_of(op, arguments)
        got = result_of(op, arguments)
        check(op, got, arguments, truth=truth)
        (expected,), (true,) = truth.expected.values(), truth.true.values()
        errors = [(x.double() - true).square().mean().sqrt().item() for x in (got, expected)]
        shares.append(errors[0] / errors[1])
    assert max(shares) < 1.0, shares
    assert statistics.median(shares) < 0.75, shares
