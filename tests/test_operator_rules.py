"""What PyTorch's tools know of our operators: fakes, costs, and how DTensor may shard them."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from transformer_fast import _native, functional, nn, use_backend
from transformer_fast.backends import cpu_blocks  # all operators
from transformer_fast.functional import _operator

needs_native = pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))


def schemas() -> dict[str, Any]:
    found = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("transformer_fast::")]
    return {".".join(filter(None, (s.name.partition("::")[2], s.overload_name))): s for s in found}


SCHEMAS = schemas()


def test_all_operators_are_looked_at():
    assert cpu_blocks
    backends = {rest or name.partition("_")[0] for name, _, rest in map(_split, SCHEMAS)}
    built = {"cpu"} if _native.module is not None else set()
    # CUDA's library is loaded only where CUDA is.
    assert backends - {"cuda"} == {"reference", "torch", "triton"} | built


def _split(name: str) -> tuple[str, str, str]:
    return name.partition(".")


@pytest.mark.parametrize("name", SCHEMAS)
def test_it_has_a_fake(name):
    found = torch._library.simple_registry.singleton.find(f"transformer_fast::{name}")
    assert found.fake_impl.kernel is not None


@pytest.mark.parametrize("name", SCHEMAS)
def test_its_rule_names_what_it_has(name):
    if name not in _operator.LOCAL:
        rule_names_what_there_is(name, SCHEMAS[name])


def rule_of(name: str) -> _operator.Rule:
    return _operator.OPERATORS[_split(name)[0]].rule


def rule_names_what_there_is(name: str, schema: Any) -> None:
    rule = rule_of(name)
    names = {argument.name for argument in schema.arguments}
    results = rule.results.split()
    assert len(results) == len(schema.returns)
    conditions = [token.partition("?")[2] for token in (*results, *rule.products.split())]
    assert {c for c in conditions if c} <= names
    like = {_operator._result(token).like for token in results}
    assert like - {""} <= names


def test_no_rule_is_of_an_operator_that_does_not_exist():
    assert {name.partition(".")[0] for name in SCHEMAS} >= set(
        _operator.OPERATORS
    ) or not _native.module
    assert not _operator.LOCAL & set(_operator.OPERATORS)


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_multiplies_matrices_has_a_cost(name):
    packet = getattr(torch.ops.transformer_fast, _split(name)[0])
    assert (packet in flop_registry) == multiplies_matrices(name)


def multiplies_matrices(name: str) -> bool:
    products = ("linear", "feed_forward", "attention", "layers", "decode_stack")
    return any(word in name for word in products)


class _Count(TorchDispatchMode):
    """As FlopCounterMode, but without its hooks on modules, which keep layers from being fused."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen.add(func.overloadpacket.__name__)
        if func.overloadpacket in flop_registry:
            self.total += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def _flops(call: Any) -> int:
    # PyTorch counts no attention of its own on CPUs, but for that of plain products.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        call()
    return counter.get_total_flops()


def _step(module: torch.nn.Module, *inputs: torch.Tensor) -> Any:
    return lambda: module(*inputs).sum().backward()


#: Of each: the scores of its attentions, head size included, which a backward works out again.
MODULES = {
    "linear": (lambda nn: nn.Linear(24, 40), [(3, 5, 24)], 0),
    "encoder layer": (
        lambda nn: nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True),
        [(3, 7, 32)],
        3 * 32 * 7 * 7,
    ),
    "decoder layer": (
        lambda nn: nn.TransformerDecoderLayer(32, 4, 48, 0.0, batch_first=True),
        [(3, 7, 32), (3, 5, 32)],
        3 * 32 * (7 * 7 + 7 * 5),
    ),
}


@needs_native
@pytest.mark.parametrize("name", MODULES)
def test_costs_of_training_are_torchs(name):
    make, shapes, scores = MODULES[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with use_backend("cpu"):
        found = _flops(_step(make(nn), *inputs))
    assert found == _flops(_step(make(torch.nn), *inputs)) + 2 * scores


@needs_native
@pytest.mark.parametrize("name", MODULES)
def test_costs_of_inference_are_torchs(name):
    make, shapes, _ = MODULES[name]
    inputs = [torch.randn(shape) for shape in shapes]
    with torch.no_grad(), use_backend("cpu"):
        expected = _flops(lambda: make(torch.nn)(*inputs))
        ours = make(nn).eval()
        assert _flops(lambda: ours(*inputs)) == expected
        with _Count() as fused:
            ours(*inputs)
    assert fused.total == expected
    assert name == "linear" or "cpu_layers" in fused.seen


@needs_native
@pytest.mark.parametrize(("op", "p"), [("feed_forward", 0.0), ("feed_forward", 0.5)])
def test_costs_of_the_network(op, p):
    x = torch.randn(3, 5, 16, requires_grad=True)
    w1, w2 = torch.randn(24, 16, requires_grad=True), torch.randn(8, 24)
    once = 3 * 5 * 24 * (16 + 8) * 2

    def call() -> torch.Tensor:
        return functional.feed_forward(x, w1, None, w2, None, dropout_p=p, backend="cpu")

    with torch.no_grad():
        assert _flops(call) == once
    assert _flops(lambda: call().sum().backward()) == once + 3 * 5 * 24 * (16 * 2 + 8) * 2


@needs_native
def test_costs_of_the_loss():
    x, weight = torch.randn(6, 16, requires_grad=True), torch.randn(30, 16, requires_grad=True)
    target = torch.arange(6)
    one = 2 * 6 * 16 * 30

    def call() -> torch.Tensor:
        return functional.linear_cross_entropy(x, weight, target, backend="cpu")

    assert _flops(call) == one
    # Logits are worked out again, for the gradients of both.
    assert _flops(lambda: call().backward()) == one + 3 * one


@needs_native
def test_costs_of_the_loss_in_parts(monkeypatch):
    """Half types' gradients are worked out with the losses if these are added up."""
    rules = importlib.import_module("transformer_fast.reference.chunked_loss")
    monkeypatch.setattr(rules, "MOST_LOGITS", 1)
    x = torch.randn(200, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(30, 16, dtype=torch.bfloat16, requires_grad=True)
    one = 2 * 200 * 16 * 30

    def call(**options) -> torch.Tensor:
        target = torch.arange(200) % 30
        return functional.linear_cross_entropy(x, weight, target, backend="cpu", **options)

    assert _flops(lambda: call().backward()) == 3 * one
    assert _flops(lambda: call(reduction="none").square().sum().backward()) == 4 * one
    with torch.no_grad():
        assert _flops(call) == one


@needs_native
def test_costs_of_a_ragged_stack_are_those_of_the_real_places():
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 2).eval()
    x, padding = torch.randn(2, 7, 32), torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad():
        with _Count() as ragged:
            stack(x, src_key_padding_mask=padding)
        with _Count() as each:
            stack(x[:1]), stack(x[:1, :3])
    assert ragged.total == each.total > 0


@needs_native
def test_costs_of_decoding():
    """A step's products with weights, and with the keys and values of the tokens until then."""
    layers, width, rows, keys, cross = 2, 32, 3, 6, 5
    sizes = [(96, 32), (32, 32), (32, 32), (32, 32), (48, 32), (32, 48)]
    weights = [torch.randn(size) for size in sizes]
    norm = torch.ones(width)
    maps = ((weights[i], None, weights[i + 1], None, norm, norm) for i in (0, 2, 4))
    parameters = [tensor for each in maps for tensor in each] * layers
    memories = [torch.randn(2, rows, 4, cross, 8) for _ in range(layers)]
    step = cpu_blocks.DecodeStack(parameters, [1e-5] * 6, False, "relu", rows, memories)
    cache = torch.zeros(layers, 2, rows, 4, 9, 8)
    with torch.no_grad(), _Count() as found:
        step(torch.randn(rows, width), cache, keys - 1)
    products = sum(weight.numel() for weight in weights) + 2 * width * (keys + cross)
    assert found.total == 2 * layers * rows * products


def test_packed_sequences_cost_what_padded_ones_do_and_are_cut_by_heads():
    rule = _operator.OPERATORS["attention_training"].rule

    def given(batch: int, rows: int, keys: int, lengths: int, longest: Any) -> dict[str, Any]:
        shapes = {
            "query": (batch, 4, rows, 8), "key": (batch, 4, keys, 8), "value": (batch, 4, keys, 8),
            "key_lengths": (lengths,), "query_lengths": (lengths,),
        }  # fmt: skip
        tensors = {n: SimpleNamespace(shape=s, mesh=torch.empty(2)) for n, s in shapes.items()}
        ends = dict(zip(("longest_queries", "longest_keys"), longest or (-1, -1), strict=True))
        return {**tensors, "dropout_p": 0.0, "need_weights": False, **ends}

    padded, packed = given(2, 20, 30, 2, None), given(1, 31, 38, 3, [20, 30])
    assert _operator.flops(rule, packed) == _operator.flops(rule, padded)
    dimensions = [
        {p.dim for p in arguments if isinstance(p, Shard)}
        for _, arguments in _operator.placements(rule, packed)
    ]
    assert dimensions == [set(), {1}]
