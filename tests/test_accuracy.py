"""The error budget itself: its arithmetic, and planted bugs that exceed it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ops import ROWS
from ops.layer_norm import FORMULA_BUGS, by_formula
from torch import Tensor

from transformer_fast import _native, reference, testing
from transformer_fast.specs import OPS
from transformer_fast.testing import upstream
from transformer_fast.testing.parity import compare


def arguments_of(op: str, case: str, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    return OPS[op].case(case).build(dtype, "cpu", torch.Generator().manual_seed(0))


@pytest.mark.parametrize("op", OPS)
def test_other_summation_orders_pass(op, generator):
    """fp64 results rounded to fp32, and the reference with reversed sums, are both right."""
    for case in OPS[op].cases:
        arguments = case.build(torch.float32, "cpu", generator)
        rounded = tuple(None if x is None else x.float() for x in testing.oracle(op, arguments))
        parity = testing.check(op, rounded[0] if len(rounded) == 1 else rounded, arguments)
        assert parity.ratio <= 1.0


def test_truths_are_cached_by_value(monkeypatch):
    once = arguments_of("linear", "bias")
    for truth in (testing.truth_of, testing.truth_of_gradients):
        known = truth("linear", once)
        assert truth("linear", testing.embed_all_in_nan(once)) is known
        changed = once[0].clone()
        changed.view(-1)[-1] += 1
        for other in (
            (changed, *once[1:]),
            (once[0].t().contiguous().t(), *once[1:]),
            (once[0][:-1], *once[1:]),
            (*once[:3], "relu", once[4]),
        ):
            assert truth("linear", other) is not known
        with monkeypatch.context() as patch:
            patch.setattr(reference, "linear", lambda *a, right=reference.linear: 2 * right(*a))
            assert truth("linear", once) is not known
        assert truth("linear", once) is known


def test_truths_of_single_elements_with_any_stride():
    one = torch.randn(1, 2)[:, ::2]
    assert one.stride(-1) == 2
    assert one.is_contiguous()
    testing.truth_of("linear", (one, one, None, None, None))


# Gradients ---------------------------------------------------------------------------------------


class WrongGradient(torch.autograd.Function):
    """The identity, with a bug in its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bug: str) -> Tensor:
        ctx.bug = bug
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        if ctx.bug == "doubled":
            grad = grad * 2
        elif ctx.bug == "zero":
            grad = torch.zeros_like(grad)
        elif ctx.bug == "NaN":
            grad.view(-1)[-1] = math.nan
        elif ctx.bug == "one element":
            grad.view(-1)[grad.numel() // 2] += 1e-4 * grad.abs().max()
        elif ctx.bug == "rounded to bf16":
            grad = grad.bfloat16().to(grad.dtype)
        return grad, None


@pytest.mark.parametrize("bug", ["doubled", "zero", "NaN", "one element", "rounded to bf16"])
@pytest.mark.parametrize(
    ("op", "case", "name"),
    [
        ("layer_norm", "rows of 64", "weight"),
        ("add_layer_norm", "rows of 64", "residual"),
        ("attention", "causal", "key"),
        ("attention", "float mask (B,H,T,S)", "attn_mask"),
        ("linear", "residual", "weight"),
        ("feed_forward", "gelu", "weight1"),
    ],
)
def test_wrong_gradients_fail(op, case, name, bug):
    spec, arguments = OPS[op], arguments_of(op, case)
    place = spec.arguments.index(name)

    def run(*called):
        wrong = WrongGradient.apply(called[place], bug)
        return spec.reference(*called[:place], wrong, *called[place + 1 :])

    with pytest.raises(AssertionError, match=rf"^{op}: grad of {name}\["):
        testing.check_gradients(op, run, arguments)


def test_gradient_errors_match_a_hand_computed_example():
    arguments = (torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), None, None, None)
    found = testing.gradients("linear", reference.linear, arguments)
    start = upstream(torch.empty(1, 1), 0)
    assert torch.equal(found["input"], start * torch.tensor([[3.0, 4.0]]))
    assert torch.equal(found["weight"], start * torch.tensor([[1.0, 2.0]]))
    assert found.keys() == {"input", "weight"}


def test_detached_results_are_reported():
    arguments = arguments_of("linear", "bias")
    with pytest.raises(AssertionError, match="no result has a gradient"):
        testing.check_gradients("linear", lambda *a: reference.linear(*a).detach(), arguments)


# Arithmetic of the budget -------------------------------------------------------------------------

TRUE = torch.tensor([1.0, -4.0, 2.0], dtype=torch.float64)
EPS = torch.finfo(torch.float32).eps


def test_limits_match_a_hand_computed_example():
    expected = torch.tensor([1.0, -4.0 - 8 * EPS, 2.0])
    found = compare("x", torch.tensor([1.0, -4.0, 2.0 + 4 * EPS]), expected, TRUE, 2.0)
    assert found.reference_error == 8 * EPS
    assert found.error == 4 * EPS
    assert found.limit == 2 * 8 * EPS + EPS * 4
    assert found.ratio == 0.5
    assert found.ok
    assert found.where == "x[2] is 2.00000048, not 2"


def test_the_unit_is_at_least_half_a_rounding():
    found = compare("x", TRUE.float(), TRUE.float(), TRUE, 2.0)
    assert found.reference_error == 0.0
    assert found.limit == 2 * (EPS / 2 * 4) + EPS * 4
    assert found.ratio == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_fail_first(bad):
    found = compare("x", torch.tensor([1.0, bad, 2.0]), TRUE.float(), TRUE, 1e9)
    assert not found.ok
    assert found.where == f"x[1] is {bad:g}, not -4"


@pytest.mark.parametrize(
    ("got", "true", "ok"),
    [(math.inf, 65400.0, True), (-math.inf, -65400.0, True), (math.inf, -65400.0, False),
     (math.inf, 64000.0, False), (math.nan, 65400.0, False)],
)  # fmt: skip
def test_an_error_within_the_limit_may_overflow(got, true, ok):
    # The limit is 176: 2 * 56 + eps * 65400.
    wide = torch.tensor([true, 1.0], dtype=torch.float64)
    expected = (wide * (1 - 0.8e-3)).half()
    assert compare("x", torch.tensor([got, 1.0]).half(), expected, wide, 2.0).ok == ok


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_must_match_the_oracle(special):
    true = torch.tensor([1.0, special], dtype=torch.float64)
    right = torch.tensor([1.0, special])
    assert compare("x", right, right, true, 2.0).ok
    assert not compare("x", torch.tensor([1.0, 7.0]), right, true, 2.0).ok
    assert not compare("x", torch.tensor([2.0, special]), right, true, 2.0).ok


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (torch.zeros(3, 1), r"x is float32 \[3, 1\] on cpu instead of float32 \[3\] on cpu"),
        (torch.zeros(3).bfloat16(), r"x is bfloat16 \[3\]"),
        (torch.zeros(3, device="meta"), r"on meta instead of"),
        (None, "x is None instead of"),
    ],
)
def test_shape_dtype_and_number_of_results_must_match(got, message):
    found = compare("x", got, TRUE.float(), TRUE, 2.0)
    assert not found.ok
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(found.where)


def test_empty_and_missing_results_pass():
    empty = torch.empty(0, 3)
    assert compare("x", empty, empty, empty.double(), 2.0).ok
    assert compare("x", None, None, None, 2.0).ok


# NaN-filled memory --------------------------------------------------------------------------------


def test_nan_memory_fills_new_tensors_within_the_block():
    with testing.nan_memory():
        assert torch.empty(100).isnan().all()
        assert torch.randn(3).new_empty(50).isnan().all()
        assert torch.empty_like(torch.randn(9).bfloat16()).isnan().all()
        if _native.module is not None:
            for size in (5, 1 << 20):  # memory of the C library, and cached memory
                for dtype in (torch.float32, torch.bfloat16, torch.float16):
                    like = torch.zeros(size, dtype=dtype)
                    assert (
                        torch.ops.transformer_fast.uninitialized.cpu(like, like.shape).isnan().all()
                    )
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.skipif(_native.module is None, reason=_native.why_not or "needs the native module")
def test_nested_nan_memory_ends_with_the_outermost_block():
    assert _native.module is not None
    with testing.nan_memory():
        with testing.nan_memory():
            pass
        assert torch.ops.transformer_fast.uninitialized.cpu(torch.zeros(5), [5]).isnan().all()
    assert not _native.module.fill_fresh(False)


def test_nan_memory_ends_after_an_error():
    with pytest.raises(KeyError), testing.nan_memory():
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(4, 3).t(),
        torch.randn(6, 8)[::2, 1:7:3],
        torch.randn(1, 5).expand(4, 5),
        torch.randn(2, 1, 3).expand(2, 4, 3),
        torch.randn(()),
        torch.randn(0, 3),
        torch.rand(5, 6) < 0.5,
        torch.arange(7),
    ],
    ids=lambda t: f"{t.dtype} {list(t.shape)} {list(t.stride())}",
)
@pytest.mark.parametrize("offset", [0, 1, 5])
def test_embed_in_nan_preserves_values_and_strides(tensor, offset):
    placed = testing.embed_in_nan(tensor, offset)
    assert torch.equal(placed, tensor)
    assert placed.stride() == tensor.stride()
    assert placed.data_ptr() % 64 == offset * tensor.element_size() % 64 or not tensor.numel()
    if tensor.is_floating_point():
        around = placed.as_strided((placed.untyped_storage().nbytes() // 4,), (1,), 0)
        distinct = tensor.numel() and 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            distinct *= size if stride else 1
        assert around.isfinite().sum() == distinct


# Planted bugs: functions with the signature of the reference --------------------------------------

ALL_BUGS = [
    pytest.param(op, bug, case, id=f"{op}-{bug}")
    for op, row in ROWS.items()
    for bug, (case, _) in row.bugs.items()
]


@pytest.mark.parametrize(("op", "bug", "case"), ALL_BUGS)
def test_planted_bugs_fail(op, bug, case):
    arguments = arguments_of(op, case)
    result = ROWS[op].bugs[bug][1](*arguments)
    assert not testing.measure(op, result, arguments).ok
    with pytest.raises(AssertionError, match=f"^{op}: "):
        testing.check(op, result, arguments)


# Bugs no larger than the rounding of low precision, which hides them.
FINE = (
    *("1e-4", "12 bits", "one element", "gelu by tanh", "eps outside", "sums in bf16", "E[x^2]"),
    *("tail column", "unbiased"),
)
COARSE_BUGS = [bug for bug in ALL_BUGS if not any(word in str(bug.id) for word in FINE)]


@pytest.mark.sampled(25)
@pytest.mark.parametrize(("op", "bug", "case"), COARSE_BUGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_planted_bugs_fail_in_low_precision(op, bug, case, dtype):
    arguments = arguments_of(op, case, dtype)
    assert not testing.measure(op, ROWS[op].bugs[bug][1](*arguments), arguments).ok


def test_the_formula_without_a_bug_passes():
    """The other planted bugs are the reference with one change."""
    for case in set(FORMULA_BUGS.values()):
        arguments = arguments_of("layer_norm", case)
        testing.check("layer_norm", by_formula("none")(*arguments), arguments)
