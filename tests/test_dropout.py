"""Dropout inside the CPU kernels: the reference's elements, on every instruction set."""

from __future__ import annotations

import pytest
import torch

from transformer_fast import _native, reference
from transformer_fast.backends import cpu
from transformer_fast.functional.layer_norm import add_norm_on

pytestmark = pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))

P = (0.01, 0.1, 0.5, 0.9, 1.0)
SEEDS = (0, 1, 2**32, 2**63 - 1, 123456789012345678)


def seed_of(p: float, seed: int) -> torch.Tensor | None:
    return torch.tensor(seed) if p < 1.0 else None


def same_elements(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Zero at the same places, and the same values up to rounding elsewhere."""
    assert torch.equal(got == 0, expected == 0)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", P)
def test_add_layer_norm_drops_the_references_elements(p, seed, isa):
    for columns in (*range(1, 36), 63, 64, 65, 257):
        x = torch.rand(5, columns) + 1.0
        zeros = torch.zeros_like(x)
        _, total = add_norm_on("cpu")(x, zeros, (columns,), None, None, 1e-5, p, seed_of(p, seed))
        assert torch.equal(total, reference.dropout(x, p, seed_of(p, seed)))


def test_columns_are_those_of_the_last_dimension(isa):
    x, seed = torch.rand(3, 5, 7, 9) + 1.0, torch.tensor(3)
    zeros = torch.zeros_like(x)
    for shape in ((9,), (7, 9), (5, 7, 9)):
        _, total = add_norm_on("cpu")(x, zeros, shape, None, None, 1e-5, 0.4, seed)
        assert torch.equal(total, reference.dropout(x, 0.4, seed))


@pytest.mark.parametrize("p", P)
def test_attention_drops_the_references_elements(p, isa):
    generator = torch.Generator().manual_seed(0)
    for length, keys in ((1, 1), (3, 31), (17, 33), (70, 300), (5, 530)):
        q, k, v = (torch.randn(2, 3, n, 8, generator=generator) for n in (length, keys, keys))
        rest = (None, None, False, None, p, seed_of(p, 11), False, True)
        output, weights = cpu.attention(q, k, v, *rest)
        expected, expected_weights = reference.attention(q, k, v, *rest)
        same_elements(weights, expected_weights)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("p", P)
@pytest.mark.parametrize("rows", [3, 150])
def test_feed_forward_drops_the_references_elements(p, rows, isa):
    """The second matrix is the identity, so the hidden values are the result."""
    x, seed = torch.rand(rows, 8) + 0.5, seed_of(p, 21)
    for hidden in (1, 5, 31, 64, 550):
        w1 = torch.rand(hidden, 8) + 0.1
        arguments = (x, w1, None, torch.eye(hidden), None, "relu", p, seed)
        same_elements(cpu.feed_forward(*arguments), reference.feed_forward(*arguments))


@pytest.mark.parametrize("values", [float("nan"), float("inf")])
def test_what_is_dropped_is_gone(values, isa):
    """A dropped element gives 0 whatever it was, and passes no gradient."""
    seed = torch.tensor(4)
    dropped = reference.dropout(torch.ones(6, 40), 0.5, seed) == 0
    x = torch.ones(6, 40).masked_fill(dropped, values).requires_grad_()
    normalized, total = add_norm_on("cpu")(x, torch.ones(6, 40), (40,), None, None, 1e-5, 0.5, seed)
    assert bool(total.isfinite().all())
    (grad,) = torch.autograd.grad(normalized.sin().sum() + total.sum(), x)
    assert bool(grad.isfinite().all())
    assert not grad[dropped].any()


def test_seed_is_checked():
    x = torch.rand(4, 8)
    ops = torch.ops.transformer_fast
    with pytest.raises(RuntimeError, match="dropout needs a seed"):
        ops.layer_norm_training.cpu(x, x, None, None, 1, 1e-5, 0, 0.5, None)
    with pytest.raises(RuntimeError, match="int64 scalar"):
        ops.layer_norm_training.cpu(x, x, None, None, 1, 1e-5, 0, 0.5, torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        ops.layer_norm_training.cpu(x, x, None, None, 1, 1e-5, 0, 1.5, torch.tensor(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("p", [0.0, *P])
def test_dropout_by_itself(p, dtype, isa):
    for shape in ((), (1,), (3, 0), (2, 3, 5), (7, 64), (3, 131)):
        x = torch.randn(shape).to(dtype)
        x[x == 0] = 1.0
        got = torch.ops.transformer_fast.dropout.cpu(x, p, seed_of(p, 7))
        expected = reference.dropout(x, p, seed_of(p, 7))
        assert torch.equal(got == 0, expected == 0)
        torch.testing.assert_close(got, expected)


def test_opcheck_of_dropout():
    arguments = torch.randn(3, 5), 0.5, torch.tensor(1)
    torch.library.opcheck(torch.ops.transformer_fast.dropout.cpu, arguments)
