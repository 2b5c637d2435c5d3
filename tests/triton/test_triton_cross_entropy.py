"""What the op table does not reach of cross entropy on Triton: targets that are no class, statistics,
large strides."""

from __future__ import annotations

import pytest
import torch

from transformer_fast.backends.triton.cross_entropy import (
    cross_entropy_backward,
    cross_entropy_forward,
)
from transformer_fast.backends.triton.operators import cross_entropy

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

IGNORED = -100


def drawn(device, rows=9, classes=150, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows + classes)
    x = 2 * torch.randn(rows, classes, generator=generator)
    target = torch.randint(classes, (rows,), generator=generator)
    return x.to(device, dtype), target.to(device)


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


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_lse(device, shift):
    x, target = drawn(device)
    x += shift
    _, known = cross_entropy_forward(x, target, IGNORED, 0.0)
    lse = known.double().sum(0)
    exact = torch.logsumexp(x.double(), 1)
    torch.testing.assert_close(lse, exact, rtol=0.0, atol=2e-6)


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
