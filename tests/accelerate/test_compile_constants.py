"""torch.compile(backend="transformer_fast") precomputes values that depend only on parameters.

The values are recomputed when a parameter or buffer changes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import since_torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from transformer_fast import _native, compile_backend, memory
from transformer_fast.backends import cpu_packing
from transformer_fast.compile import constants, inner

pytestmark = [
    pytest.mark.sampled(25),
    pytest.mark.usefixtures("small_calls"),
    pytest.mark.skipif(_native.module is None, reason=str(_native.why_not)),
]


class Model(nn.Module):
    """A model with precomputable parts, and with parts that depend on the input.

    Precomputable are packed weights of a network, a weight norm, a relative position bias and a
    position table.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)
        self.conv = weight_norm(nn.Conv1d(64, 64, 3, padding=1), dim=2)
        self.bias = nn.Parameter(torch.randn(9, 4))
        self.register_buffer("positions", torch.arange(5)[:, None] - torch.arange(5) + 4)
        self.register_buffer("frequencies", torch.rand(32))

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(5)[:, None] * self.frequencies
        x = x + torch.cat((angles.sin(), angles.cos()), -1)
        x = x + self.conv(x.mT).mT
        heads = x.view(-1, 5, 4, 16).transpose(1, 2)
        mask = self.bias[self.positions].permute(2, 0, 1)
        heads = F.scaled_dot_product_attention(heads, heads, heads, mask)
        x = x + heads.transpose(1, 2).reshape(x.shape)
        return x + self.second(F.gelu(self.first(x)))


def _compiled(model: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(model, backend=compile_backend, options={"inner": inner.compile_rest})


@pytest.fixture
def lifted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Records the results of `constants.lift` for the compiled programs."""
    found: list[tuple[Any, ...]] = []

    def lift(*arguments: Any) -> Any:
        result = constants.lift(*arguments)
        found.extend(() if result is None else (result,))
        return result

    monkeypatch.setattr(inner, "lift", lift)
    return found


def _changes(model: Model) -> dict[str, Callable[[], Any]]:
    return {
        "in place": lambda: [each.mul_(-0.5) for each in model.parameters()],
        "through data": lambda: [each.data.view(-1).mul_(1.5) for each in model.parameters()],
        "one channel through data": lambda: model.conv.parametrizations.weight.original1.data[
            7
        ].mul_(3.0),
        "other memory": lambda: [
            setattr(each, "data", each.detach().clone() * 0.7) for each in model.parameters()
        ],
        "buffers": lambda: [x.copy_(x.flip(0) + (x.dim() - 2)) for x in model.buffers()],
        "a state_dict": lambda: model.load_state_dict(
            {name: x.flip(0) for name, x in model.state_dict().items()}
        ),
    }


@since_torch(2, 13, why="with PyTorch 2.10 these programs have no packed weights")
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_changed_parameters_are_detected(context: Any, lifted: list[tuple[Any, ...]]) -> None:
    model, x = Model().eval(), torch.randn(20, 5, 64)
    compiled = _compiled(model)
    with context():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x))
    [(program, _, first)] = lifted
    # Two packed copies for the network, and three values: normed weight, bias and position table.
    given = [node.name for node in program.graph.nodes if node.op == "placeholder"][-5:]
    assert [name.partition("_")[0] for name in given] == ["packed"] * 2 + ["value"] * 3
    shapes = {tuple(each.shape) for each in first[2:]}
    assert shapes == {(64, 64, 3), (4, 5, 5), (5, 64)}
    assert not [node for node in program.graph.nodes if "norm" in str(node.target)]
    for change in _changes(model).values():
        with torch.no_grad():
            change()
        with context():
            for _ in range(2):
                torch.testing.assert_close(compiled(x), model(x))
    assert len(lifted) == 1


@since_torch(2, 13, why="with PyTorch 2.10 these programs have no packed weights")
@torch.no_grad()
def test_memory_packed_counts_values_and_forget_packed_drops_them(
    lifted: list[tuple[Any, ...]],
) -> None:
    model, x = Model().eval(), torch.randn(20, 5, 64)
    memory.forget_packed()
    before = memory.packed()
    compiled = _compiled(model)
    compiled(x)
    expected = compiled(x)
    kept = 4 * (64 * 64 * 3 + 4 * 5 * 5 + 5 * 64)
    assert memory.packed() - before >= kept + 4 * 2 * 64 * 256
    memory.forget_packed()
    assert memory.packed() == 0
    torch.testing.assert_close(compiled(x), expected)
    assert memory.packed() > kept


@since_torch(2, 13, why="with PyTorch 2.10 these programs have no packed weights")
@torch.no_grad()
def test_without_packing_memory_nothing_is_cached(
    lifted: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Model().eval(), torch.randn(20, 5, 64)
    compiled = _compiled(model)
    compiled(x)
    expected = compiled(x)
    memory.forget_packed()
    monkeypatch.setattr(cpu_packing, "_limit", 0)
    torch.testing.assert_close(compiled(x), expected)
    [(_, found, _)] = lifted
    assert found.held_bytes() == 0


class Gated(nn.Module):
    """A model whose first call is a product."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.scale = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.maps[0](x) * self.maps[1](x) @ self.scale.exp()


class Returned(nn.Module):
    """Returns a view of a precomputable value: a caller may write to it without effect on the next
    call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        table = self.weight.exp()
        return x @ table, table.mT


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x * self.count.exp()


class CountingData(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.count.data.add_(1)
        return x * self.count.exp()


class Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(8, 8) * self.weight + F.dropout(self.weight, 0.5)


@torch.no_grad()
@pytest.mark.parametrize("kind", [Returned, Counting, CountingData, Drawn])
def test_mutable_and_random_values_are_not_cached(kind: type[nn.Module]) -> None:
    def results(run: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(1)
        found = []
        for _ in range(3):
            result = run(torch.ones(8, 8))
            found.append(torch.utils._pytree.tree_map(torch.clone, result))
            for each in torch.utils._pytree.tree_leaves(result):
                each.zero_()
        return found

    torch.manual_seed(0)
    model = kind()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    expected = results(model)
    model.load_state_dict(state)
    torch.testing.assert_close(results(_compiled(model)), expected)


class Step(nn.Module):
    """Writes to a cache between two products; ``shares``: it is a part of the products' weight."""

    def __init__(self, shares: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.last = nn.Linear(64, 32)
        self.register_buffer("cache", self.weight.detach()[:5] if shares else torch.randn(5, 64))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        self.cache.mul_(0.5)
        self.cache[1:2].copy_(y[:1])
        return self.last(F.gelu(x @ self.weight)) + self.cache.sum()


@since_torch(2, 13, why="with PyTorch 2.10 these programs have no packed weights")
@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("shares", [False, True])
def test_weights_are_packed_beside_writes_to_other_memory(
    rows: int, shares: bool, lifted: list[tuple[Any, ...]]
) -> None:
    model, same, x = Step(shares), Step(shares), torch.randn(rows, 64)
    compiled = _compiled(model)
    for _ in range(4):
        torch.testing.assert_close(compiled(x), same(x))
        torch.testing.assert_close(model.cache, same.cache)
    if shares:
        assert not lifted
        return
    [(program, *_)] = lifted
    functions = {getattr(node.target, "__module__", "") for node in program.graph.nodes}
    assert not any(name.startswith("transformer_fast.functional") for name in functions)


@since_torch(2, 13, why="inductor of PyTorch 2.10 computes wrong values")
@torch.no_grad()
def test_a_module_whose_cache_is_its_weight_may_share_a_program() -> None:
    models, same = ([Step(), Step(shares=True)] for _ in range(2))
    x = torch.randn(20, 64)
    torch.compiler.reset()
    for model in models:
        model.compile(backend=compile_backend, options={"inner": inner.compile_rest})
    for model, other in zip(models, same, strict=True):
        for _ in range(4):
            torch.testing.assert_close(model(x), other(x))
            torch.testing.assert_close(model.cache, other.cache)


@torch.library.custom_op("transformer_fast_tests::double_", mutates_args=("second",))
def _double(first: Tensor, second: Tensor) -> None:
    second.mul_(2.0)


def _set_one(x: Tensor, weight: Tensor) -> None:
    weight[3, 5] = x[0, 0]


#: Functions of (input, weight) that write to the weight.
_WRITES: dict[str, Callable[..., Any]] = {
    "one element": _set_one,
    "a view": lambda x, weight: weight.detach().t().select(0, 5).neg_(),
    "an activation": lambda x, weight: F.leaky_relu(weight, 0.5, True),
    "an embedding": lambda x, weight: F.embedding(torch.arange(9), weight, None, 0.5),
    "a custom operator": _double,
    "an overload": lambda x, weight: torch.ops.aten.mul_.Scalar(weight, 2.0),
    "a checkpoint": lambda x, weight: checkpoint(weight.mul_, 2.0, use_reentrant=False),
}


class Writing(nn.Module):
    """Writes between two products: to a weight, or to a buffer from which a value is ``derived``."""

    def __init__(self, write: Callable[..., Any], derived: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write, self.map = write, nn.Linear(64, 256)
        self.buffer = nn.Buffer(torch.rand(64, 64)) if derived else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.map(x)
        self.write(x, self.map.weight if self.buffer is None else self.buffer)
        return y + self.map(x) + (0.0 if self.buffer is None else (self.buffer * 3).cos().sum())


@torch.no_grad()
@pytest.mark.parametrize(
    ("write", "derived"),
    [*((name, False) for name in _WRITES), ("a view", True), ("a custom operator", True)],
)
def test_writes_of_a_program_are_seen(write: str, derived: bool) -> None:
    model, same = (Writing(_WRITES[write], derived) for _ in range(2))
    compiled = _compiled(model)
    for call in range(6):
        x = torch.randn(20, 64)
        torch.testing.assert_close(compiled(x), same(x), rtol=1e-4, atol=1e-3)
        if call == 3:
            for each in (*model.state_dict().values(), *same.state_dict().values()):
                each.mul_(-0.7)


@torch.no_grad()
def test_modules_that_share_a_program_have_separate_values(lifted: list[tuple[Any, ...]]) -> None:
    models, x = [Gated(), Gated()], torch.randn(20, 64)
    torch.compiler.reset()
    for model in models:
        model.compile(backend=compile_backend, options={"inner": inner.compile_rest})
    for _ in range(3):
        for model in models:
            torch.testing.assert_close(model(x), model.forward(x))
    [(_, found, _)] = lifted
    assert found.held_bytes() == 2 * 4 * 64 * 64
    del models[0], model
    gc.collect()
    assert found.held_bytes() == 4 * 64 * 64
