"""What the op table does not reach of cross entropy on Triton: garbage in ignored rows and beside
them, rows and blocks of nothing but -inf, targets that are no class, large strides, equal bits."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from harness import DTYPES, kernel_of
from test_cross_entropy import Largest, chunked_loss

import transformer_fast
from transformer_fast.backends.triton.cross_entropy import (
    cross_entropy_backward,
    cross_entropy_forward,
)
from transformer_fast.backends.triton.operators import cross_entropy, linear_cross_entropy
from transformer_fast.specs.spec import Draw
from transformer_fast.testing import check, check_gradients, gradients

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

IGNORED = -100


def drawn(device, rows=9, classes=150, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows + classes)
    x = 2 * torch.randn(rows, classes, generator=generator)
    target = torch.randint(classes, (rows,), generator=generator)
    return x.to(device, dtype), target.to(device)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_garbage_in_ignored_rows(device, dtype, garbage, smoothing):
    """Their losses and gradients are 0, the other rows' are those without garbage; so it is with
    garbage in the gradient that comes to them."""
    x, target = drawn(device, dtype=dtype)
    target[1::3] = IGNORED
    results = []
    for spoilt in (False, True):
        up = torch.linspace(1.0, 2.0, 9, device=device)
        if spoilt:
            x[1::3] = garbage
            x[4, ::2] = 1.0
            up[1] = math.nan
        leaf = x.clone().requires_grad_()
        losses = cross_entropy(leaf, target, IGNORED, smoothing)
        (gradient,) = torch.autograd.grad(losses, leaf, up)
        assert losses.dtype == torch.float32
        assert gradient.dtype == dtype
        assert (losses[1::3] == 0).all()
        assert (gradient[1::3] == 0).all()
        results.append((losses.detach(), gradient))
    for clean, spoilt in zip(*results, strict=True):
        assert torch.equal(clean, spoilt)


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
@pytest.mark.parametrize("column", [0, 70, 149])
def test_garbage_stays_in_its_row(device, column, garbage):
    x, target = drawn(device)
    x[3, column] = garbage
    leaf = x.requires_grad_()
    losses = cross_entropy(leaf, target, IGNORED, 0.1)
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    for found in (losses, gradient.sum(1)):
        assert found[3].isnan()
        assert found.isfinite().sum() == 8
    assert gradient[3].isnan().all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_nothing_but_hidden_classes(device, smoothing):
    """NaN, losses and gradients, as the reference has it."""
    x, target = drawn(device)
    x[5] = -math.inf
    call = x, target, IGNORED, smoothing
    losses = cross_entropy(*call)
    assert losses[5].isnan()
    assert losses.isfinite().sum() == 8
    check("cross_entropy", losses, call)
    check_gradients("cross_entropy", cross_entropy, call)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("hidden", [slice(0, 70), slice(60, 140), slice(80, 150)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_hidden_classes(device, dtype, hidden, smoothing):
    """-inf throughout the first block, or a later one. With smoothing the losses are infinite, and
    the gradients are not."""
    x, target = drawn(device, dtype=dtype)
    x[:, hidden] = -math.inf
    target[:] = 75 if hidden.start == 0 else 3
    call = x, target, IGNORED, smoothing
    losses = cross_entropy(*call)
    assert (losses.isinf() if smoothing else losses.isfinite()).all()
    check("cross_entropy", losses, call)
    check_gradients("cross_entropy", cross_entropy, call)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_a_target_that_is_hidden(device, smoothing):
    x, target = drawn(device)
    x.scatter_(1, target[:, None], -math.inf)
    call = x, target, IGNORED, smoothing
    check("cross_entropy", cross_entropy(*call), call)
    check_gradients("cross_entropy", cross_entropy, call)


@pytest.mark.parametrize("target", [-1, 150, 2**40])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_target_that_is_no_class(device, target, smoothing):
    """NaN, and not the loss of a logit that stands outside of the row."""
    x, targets = drawn(device)
    expected = cross_entropy(x, targets, IGNORED, smoothing)
    targets[2] = target
    losses = cross_entropy(x, targets, IGNORED, smoothing)
    assert losses[2].isnan()
    others = torch.arange(9, device=device) != 2
    assert torch.equal(losses[others], expected[others])


def test_one_maximum_after_another(device):
    """Every block raises the maximum by more than fp32 has room for."""
    x = torch.linspace(-600.0, 600.0, 300, device=device).repeat(3, 1)
    x[1] = x[1].flip(0)
    call = x, torch.tensor([299, 0, 150], device=device), IGNORED, 0.1
    check("cross_entropy", cross_entropy(*call), call)
    check_gradients("cross_entropy", cross_entropy, call)


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_lse(device, shift):
    x, target = drawn(device)
    x += shift
    _, known = cross_entropy_forward(x, target, IGNORED, 0.0)
    lse = known.double().sum(0)
    exact = torch.logsumexp(x.double(), 1)
    torch.testing.assert_close(lse, exact, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("stride", [0, 2])
def test_strides_of_gradients_and_targets(device, stride):
    x, target = drawn(device)
    places = torch.zeros(9, 2, dtype=torch.int64, device=device)
    places[:, 0] = target
    up = torch.linspace(1.0, 2.0, 9, device=device)
    grad = up[:1].expand(9) if stride == 0 else up[:, None].repeat(1, 2)[:, 0]
    leaf, same = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours = cross_entropy(leaf, places[:, 0], IGNORED, 0.1)
    theirs = F.cross_entropy(same, target, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(ours, theirs)
    found = torch.autograd.grad(ours, leaf, grad)
    torch.testing.assert_close(found, torch.autograd.grad(theirs, same, grad))


@pytest.mark.parametrize("far", ["rows", "columns"])
def test_offsets_beyond_32_bits(device, far):
    """Rows, or columns, 2^30 elements apart. The memory between them is never touched."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("12 GiB of free memory are needed")
    apart = 2**30 + 16
    x, target = drawn(device, rows=3, classes=3, dtype=torch.float16)
    place = torch.empty(2 * apart + 3, dtype=torch.float16, device=device)
    strides = (apart, 1) if far == "rows" else (1, apart)
    distant = place.as_strided((3, 3), strides).copy_(x)
    up = torch.ones(3, device=device)
    found = []
    for logits in (x, distant):
        losses, known = cross_entropy_forward(logits, target, IGNORED, 0.1)
        grad = cross_entropy_backward(up, logits, target, known, IGNORED, 0.1)
        found.append((losses, known, grad))
    for near, ours in zip(*found, strict=True):
        assert torch.equal(near, ours)


def test_same_bits_every_time(device):
    x, target = drawn(device, dtype=torch.bfloat16)
    runs = []
    for _ in range(2):
        losses, known = cross_entropy_forward(x, target, IGNORED, 0.1)
        runs.append((losses, known, cross_entropy_backward(losses, x, target, known, IGNORED, 0.1)))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


def test_input_and_weight_that_want_no_gradient(device):
    x, target = drawn(device, rows=5, classes=24)
    weight, bias = drawn(device, rows=40, classes=24)[0], torch.zeros(40, device=device)
    target = target % 40
    with torch.no_grad():
        expected = linear_cross_entropy(x, weight, bias, target, IGNORED, 0.1)
    leaf = weight.clone().requires_grad_()
    losses = linear_cross_entropy(x, leaf, None, target, IGNORED, 0.1)
    assert torch.equal(losses, expected)
    same = weight.clone().requires_grad_()
    theirs = F.cross_entropy(x @ same.t(), target, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(losses, theirs)
    (ours,) = torch.autograd.grad(losses.sum(), leaf)
    torch.testing.assert_close(ours, torch.autograd.grad(theirs.sum(), same)[0])


def test_by_name(device):
    x, target = drawn(device)
    target[4] = IGNORED
    leaf, same = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours = transformer_fast.functional.cross_entropy(
        leaf, target, label_smoothing=0.1, backend="triton"
    )
    theirs = F.cross_entropy(same, target, label_smoothing=0.1)
    torch.testing.assert_close(ours, theirs)
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(leaf.grad, same.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_all_logits_are_never_in_memory(monkeypatch, device, dtype):
    """And what is worked out in parts is what the oracle says, gradients included."""
    draw = Draw(dtype, device, torch.Generator().manual_seed(0))
    rows, classes, at_once = 40, 50, 14
    target = draw.integers(rows, end=classes).masked_fill(draw.bools(rows, true=0.2), -100)
    x, weight, bias = draw.normal(rows, 8), draw.weight(classes, 8), draw.normal(classes)
    arguments = (x, weight, bias, target, -100, 0.1)
    kernel = kernel_of("linear_cross_entropy", "triton")

    def run(*arguments):
        """In parts, while the reference that checks makes all logits at once."""
        with monkeypatch.context() as patch:
            patch.setattr(chunked_loss, "MOST_LOGITS", at_once * classes)
            patch.setattr(chunked_loss, "_LEAST_ROWS", 1)
            return kernel.run(*arguments)

    with Largest() as seen, torch.no_grad():
        run(*arguments)
    assert at_once * classes <= seen.elements <= 2 * at_once * classes
    with Largest() as seen:
        gradients("linear_cross_entropy", run, arguments)
    assert at_once * classes <= seen.elements <= 2 * at_once * classes
    check_gradients("linear_cross_entropy", run, arguments)
