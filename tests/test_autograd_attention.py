"""Gradients of attention: masks of every broadcast, garbage at hidden places, no (T, S) memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from transformer_fast import _native
from transformer_fast import functional as F
from transformer_fast.backends import cpu
from transformer_fast.measure.memory import peak
from transformer_fast.testing import check_gradients, nan_memory

pytestmark = [
    pytest.mark.skipif(_native.module is None, reason=str(_native.why_not)),
    pytest.mark.usefixtures("two_threads"),
]


def inputs(*sizes: int, key_heads: int | None = None, seed: int = 0) -> tuple[Tensor, ...]:
    batch, heads, length, keys, size = sizes
    generator = torch.Generator().manual_seed(seed)
    h = heads if key_heads is None else key_heads
    shapes = (heads, length), (h, keys), (h, keys)
    return tuple(torch.randn(batch, n, m, size, generator=generator) for n, m in shapes)


def call(query, key, value, mask=None, lengths=None, causal=False, p=0.0, seed=None, weights=False):
    gqa = key.shape[1] != query.shape[1]
    return query, key, value, mask, lengths, causal, None, p, seed, gqa, weights


def every_broadcast() -> list[tuple[bool, ...]]:
    return [tuple(bool(bits >> d & 1) for d in range(4)) for bits in range(16)]


def broadcast_name(full: tuple[bool, ...]) -> str:
    return "".join(letter if f else "1" for letter, f in zip("BHTS", full, strict=True))


@pytest.mark.parametrize("full", every_broadcast(), ids=broadcast_name)
def test_mask_gradient_of_every_broadcast(full, isa):
    """Tiles of keys and blocks of queries on every side of the sums."""
    sizes = (2, 2, 131, 270)
    q, k, v = inputs(*sizes, 8)
    shape = tuple(n if f else 1 for n, f in zip(sizes, full, strict=True))
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    with nan_memory():
        check_gradients("attention", cpu.attention, call(q, k, v, mask))


@pytest.mark.parametrize("causal", [False, True])
def test_mask_gradient_with_everything(causal, isa):
    q, k, v = inputs(3, 4, 70, 90, 16, key_heads=2)
    generator = torch.Generator().manual_seed(2)
    mask = torch.randn(1, 4, 70, 90, generator=generator)
    mask[torch.rand(mask.shape, generator=generator) < 0.3] = -math.inf
    arguments = call(
        q, k, v, mask, torch.tensor([90, 0, 37]), causal, 0.2, torch.tensor(99), weights=True
    )
    with nan_memory():
        check_gradients("attention", cpu.attention, arguments)


@pytest.mark.parametrize("size", [1, 3, 16, 17, 64, 80, 128, 136])
@pytest.mark.parametrize("length", [1, 15, 113, 225])
def test_head_sizes_and_lengths(size, length, isa):
    # Few values would make the reference's own error, the unit, a matter of luck.
    batch = 4 if length == 1 else 1
    q, k, v = inputs(batch, 2, length, 300 if length > 100 else 47, size)
    with nan_memory():
        check_gradients("attention", cpu.attention, call(q, k, v, causal=length > 100))


def test_keys_shared_out_in_parts(isa):
    """Few heads and many keys: each part of the keys has its own sum for the queries."""
    q, k, v = inputs(1, 2, 40, 1100, 16, key_heads=1)
    with nan_memory():
        check_gradients("attention", cpu.attention, call(q, k, v, lengths=torch.tensor([900])))


def finite(*tensors: Tensor) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("how", ["mask", "float mask", "lengths", "causal"])
def test_garbage_at_hidden_places(garbage, how, isa):
    """Keys and values hidden from a query reach neither its gradient nor, through it, others'."""
    q, k, v = inputs(2, 2, 30, 60, 16)
    visible = torch.ones(1, 1, 30, 60, dtype=torch.bool)
    mask = lengths = None
    if how == "lengths":
        visible[..., 41:] = False
        lengths = torch.tensor([41, 41])
    elif how == "causal":
        visible = visible.tril()
    else:
        visible[..., 5::7] = False
        mask = (
            visible if how == "mask" else torch.zeros(1, 1, 30, 60).masked_fill(~visible, -math.inf)
        )
    hidden = ~visible.any(dim=-2)[0, 0]
    dirty = k.clone(), v.clone()
    for x in dirty:
        x[:, :, hidden] = garbage
    found = []
    for key, value in (dirty, (k, v)):
        leaves = [x.clone().requires_grad_() for x in (q, key, value)]
        output, _ = cpu.attention(*call(*leaves, mask, lengths, how == "causal"))
        found.append(torch.autograd.grad(output.sin().sum(), leaves))
    assert finite(*found[0])
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)
    assert not found[0][1][:, :, hidden].any()
    assert not found[0][2][:, :, hidden].any()


def test_garbage_that_some_may_see(isa):
    """NaN in a key that only late queries see spoils those and nothing before them."""
    q, k, v = inputs(1, 1, 40, 40, 16)
    k[:, :, 30], v[:, :, 30] = math.nan, math.inf
    leaves = [x.requires_grad_() for x in (q, k, v)]
    output, _ = cpu.attention(*call(*leaves, causal=True))
    (dq,) = torch.autograd.grad(output[:, :, :30].sum(), leaves[:1], retain_graph=True)
    assert finite(output[:, :, :30], dq[:, :, :30])
    dq, dk, dv = torch.autograd.grad(output.sum(), leaves)
    assert finite(dq[:, :, :30])
    assert not finite(dq[:, :, 30:])
    assert finite(dk[:, :, 31:]) is False
    assert finite(dv[:, :, 31:]) is False


def test_garbage_in_queries_that_see_nothing(isa):
    q, k, v = inputs(1, 2, 30, 20, 16)
    mask = torch.ones(1, 1, 30, 20, dtype=torch.bool)
    mask[:, :, 7:9] = False
    grad = torch.ones_like(q)
    q[:, :, 7], grad[:, :, 8] = math.nan, math.inf
    leaves = [x.requires_grad_() for x in (q, k, v)]
    output, _ = cpu.attention(*call(*leaves, mask))
    found = torch.autograd.grad(output, leaves, grad)
    assert finite(output, *found)
    assert not found[0][:, :, 7:9].any()


def test_saturated_rows_are_exact(isa):
    """Rows where one weight is 1 and the others underflow: no NaN, no denormal results."""
    q, k, v = inputs(1, 1, 20, 50, 16)
    check_gradients("attention", cpu.attention, call(q * 40, k * 10, v))


def test_gradients_lie_as_their_tensors_do():
    packed = torch.randn(2, 9, 3, 4, 8)
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in packed.unbind(2))
    output, _ = cpu.attention(*call(q, k, v))
    for grad in torch.autograd.grad(output.sum(), (q, k, v)):
        assert grad.transpose(1, 2).is_contiguous()
    q, k, v = (x.requires_grad_() for x in inputs(2, 4, 9, 9, 8))
    output, _ = cpu.attention(*call(q, k, v))
    for grad in torch.autograd.grad(output.sum(), (q, k, v)):
        assert grad.is_contiguous()


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("leading", [(2, 4), (2,), (3, 2, 4)], ids=str)
def test_the_output_may_be_changed_in_place(leading, p):
    """Where nothing else is to be known of it: the backward reads the output that was returned."""
    q, k, v = (torch.randn(*leading, 40, 16, requires_grad=True) for _ in range(3))
    for change in (lambda y: y.mul_(2), lambda y: y[..., 0].zero_()):
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p)
        change(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_mask_made_in_inference_mode():
    q, k, v = (x.requires_grad_() for x in inputs(2, 2, 40, 40, 16))
    with torch.inference_mode():
        mask = torch.rand(40, 40) < 0.5
    for given in (mask, mask.clone()):
        F.scaled_dot_product_attention(q, k, v, given).square().sum().backward()
    once = q.grad
    q.grad = None
    F.scaled_dot_product_attention(q, k, v, mask.clone()).square().sum().backward()
    torch.testing.assert_close(once, 2 * q.grad)


def test_no_memory_for_the_scores():
    """(1, 8, 4096, 4096) scores take 512 MiB; training may not take a third of that."""
    q, k, v = (x.requires_grad_() for x in inputs(1, 8, 4096, 4096, 8))

    def train() -> None:
        output, _ = cpu.attention(*call(q, k, v, causal=True))
        torch.autograd.grad(output.sum(), (q, k, v))

    grown = peak(train)
    if grown is None:
        pytest.skip("this system does not tell the peak of a call's memory")
    assert grown < 160 * 2**20
