"""What the page "Same bits" promises: results that are equal to the last bit, promise by promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attention_calls import options, tensors
from harness import DTYPES, check_threads, same_bits
from torch import Tensor

import transformer_fast
from transformer_fast import _native, nn
from transformer_fast import functional as F
from transformer_fast.backends import cpu, cpu_packing
from transformer_fast.specs.attention import arrange
from transformer_fast.testing import gradients

pytestmark = pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))

#: Numbers of rows at which kernels, tiles and the work of threads change.
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 24, 25, 57, 72, 113, 129, 144, 260)


class Calls:
    """Forward calls on so many rows, whose weights stay."""

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
    """The result, and the gradient in training."""
    with torch.set_grad_enabled(training):
        y = call(x)
        return [y, *torch.autograd.grad(y.float().square().sum(), x)] if training else [y]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_threads(isa: str, calls: Calls, training: bool, threads: None) -> None:
    for rows in ROWS:
        x = calls.rows(rows).requires_grad_(training)
        for call in (*calls.of_rows.values(), calls.dropped):
            check_threads(lambda: called(call, x, training))  # noqa: B023


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_threads_attention(isa: str, calls: Calls, training: bool, threads: None) -> None:
    sizes = [(n, 300, {"causal": causal}) for n in (1, 3, 5, 40, 113) for causal in (False, True)]
    every = [(200, 600, given) for given in options(200, 600, calls.dtype).values()]
    for queries, keys, given in (*sizes, *every):
        arguments = arrange(*tensors(queries, keys, 32, dtype=calls.dtype), **given)
        if training:
            check_threads(lambda: gradients("attention", cpu.attention, arguments))  # noqa: B023
        else:
            check_threads(lambda: cpu.attention(*arguments))  # noqa: B023


def test_threads_and_norms_of_small_calls(threads: None, small_calls: None) -> None:
    """Where PyTorch's op hands over to ours, in training, does not depend on the threads."""
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


def test_runs(isa: str, calls: Calls, two_threads: None) -> None:
    """Results and gradients, call after call."""
    for rows in (3, 57, 260):
        for name, call in calls.of_rows.items():
            x = torch.linspace(-1, 1, rows * calls.columns).view(rows, -1).to(calls.dtype)
            found = [called(call, x.clone().requires_grad_(), True) for _ in range(3)]
            assert all(same_bits(one, found[0]) for one in found), (name, rows)


@pytest.fixture
def nothing_packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    def limit(on: bool) -> None:
        monkeypatch.setattr(cpu_packing, "_limit", 0 if on else 2**32)
        transformer_fast.memory.forget_packed()

    yield limit
    transformer_fast.memory.forget_packed()


@torch.no_grad()
def test_packed_copies(
    isa: str, calls: Calls, nothing_packed: Callable[[bool], None], two_threads: None
) -> None:
    """With and without room for them, in another thread, after `forget_packed`."""
    for rows in ROWS:
        x = calls.rows(rows)
        for name, call in calls.of_rows.items():
            nothing_packed(True)
            alone = call(x)
            assert transformer_fast.memory.packed() == 0
            nothing_packed(False)
            assert torch.equal(call(x), alone), (name, rows)


@torch.no_grad()
def test_memory_that_is_kept(calls: Calls) -> None:
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
def test_attention_and_what_else_is_in_the_batch(isa: str, calls: Calls) -> None:
    """Batch elements, padding behind the keys, and further queries, but for the first four."""
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
def test_batch_invariant(
    isa: str, calls: Calls, small: str, request: pytest.FixtureRequest
) -> None:
    """A row's result, whatever the number of rows beside it."""
    if small == "small calls":
        request.getfixturevalue("small_calls")
    x = calls.rows(max(ROWS))
    query, key, value = torch.randn(3, 3, 2, 260, 32).to(calls.dtype)
    with transformer_fast.batch_invariant():
        for name, call in calls.of_rows.items():
            whole = call(x)
            for rows in ROWS:
                if name != "encoder layer":
                    assert torch.equal(call(x[:rows]), whole[:rows]), (name, rows)
        layer = calls.layer(x[:240].view(8, 30, -1))
        for batch in (1, 2, 5):
            assert torch.equal(calls.layer(x[: 30 * batch].view(batch, 30, -1)), layer[:batch])
        attended = F.scaled_dot_product_attention(query, key, value)
        for rows in (1, 2, 4, 5, 16, 57):
            some = F.scaled_dot_product_attention(query[:, :, :rows], key, value)
            assert torch.equal(some, attended[:, :, :rows]), rows


@torch.no_grad()
def test_without_the_switch_few_rows_differ() -> None:
    """Or the tests above would show nothing."""
    calls = Calls(torch.float32, 512, 512)
    x = calls.rows(64)
    linear = calls.of_rows["linear"]
    assert not torch.equal(linear(x[:1]), linear(x)[:1])
    with transformer_fast.batch_invariant():
        assert torch.equal(linear(x[:1]), linear(x)[:1])
    assert not torch.equal(linear(x[:1]), linear(x)[:1])
