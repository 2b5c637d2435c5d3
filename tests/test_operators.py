"""Our operators: fakes, FLOP counts and DTensor rules, and direct calls.

Direct calls cover errors and memory reads that no public function can cause.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import Watch
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from transformer_fast import _native, functional, nn, reference, use_backend
from transformer_fast.backends import cpu_blocks  # defines all operators
from transformer_fast.ops import operator as _operator
from transformer_fast.ops.arguments import LayerStack

needs_native = pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))


def schemas() -> dict[str, Any]:
    found = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("transformer_fast::")]
    return {".".join(filter(None, (s.name.partition("::")[2], s.overload_name))): s for s in found}


SCHEMAS = schemas()
#: Operators without DTensor support: whole layers and decoding steps require plain tensors, and
#: packed weights, values of 8 bits and uninitialized memory belong to one process.
LOCAL = {"layers", "decode_stack", "pack_weight", "uninitialized"} | {
    f"cpu_int8_{op}_of_float" for op in ("linear", "feed_forward")
}


def test_all_operators_are_defined():
    assert cpu_blocks
    backends = {rest or name.partition("_")[0] for name, _, rest in map(_split, SCHEMAS)}
    built = {"cpu"} if _native.module is not None else set()
    # CUDA's library is loaded only if CUDA is available.
    assert backends - {"cuda"} == {"reference", "torch", "triton"} | built


def _split(name: str) -> tuple[str, str, str]:
    return name.partition(".")


@pytest.mark.parametrize("name", SCHEMAS)
def test_operators_have_fakes(name):
    found = torch._library.simple_registry.singleton.find(f"transformer_fast::{name}")
    assert found.fake_impl.kernel is not None


@pytest.mark.parametrize("name", SCHEMAS)
def test_rules_name_existing_arguments(name):
    if _split(name)[0] not in LOCAL:
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


def test_every_rule_has_an_operator():
    assert {name.partition(".")[0] for name in SCHEMAS} >= set(
        _operator.OPERATORS
    ) or not _native.module
    assert not LOCAL & set(_operator.OPERATORS)


@pytest.mark.parametrize("name", SCHEMAS)
def test_matrix_products_have_a_flop_count(name):
    packet = getattr(torch.ops.transformer_fast, _split(name)[0])
    assert (packet in flop_registry) == multiplies_matrices(name)


def multiplies_matrices(name: str) -> bool:
    products = ("linear", "feed_forward", "attention", "layers", "decode_stack")
    return any(word in name for word in products)


class _Count(Watch):
    """Like FlopCounterMode, but without its module hooks, which prevent fused layers."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.seen: set[str] = set()

    def see(self, func, arguments, result):
        self.seen.add(func.overloadpacket.__name__)
        if func.overloadpacket in flop_registry:
            self.total += flop_registry[func.overloadpacket](*arguments, out_val=result)


def _flops(call: Any) -> int:
    # On CPUs PyTorch counts its attention only in the math implementation.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        call()
    return counter.get_total_flops()


def _step(module: torch.nn.Module, *inputs: torch.Tensor) -> Any:
    return lambda: module(*inputs).sum().backward()


#: name -> (module, input shapes, FLOPs of the attention scores, which our backward recomputes).
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
def test_flops_of_training_match_pytorch(name):
    make, shapes, scores = MODULES[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with use_backend("cpu"):
        found = _flops(_step(make(nn), *inputs))
    assert found == _flops(_step(make(torch.nn), *inputs)) + 2 * scores


@needs_native
@pytest.mark.parametrize("name", MODULES)
def test_flops_of_inference_match_pytorch(name):
    make, shapes, _ = MODULES[name]
    inputs = [torch.randn(shape) for shape in shapes]
    with torch.no_grad(), use_backend("cpu"):
        expected = _flops(lambda: make(torch.nn)(*inputs))
        ours = make(nn).eval()
        assert _flops(lambda: ours(*inputs)) == expected
        with _Count() as fused:
            ours(*inputs)
    assert fused.total == expected
    assert name == "linear" or "layers" in fused.seen


@needs_native
def test_flops_of_linear_cross_entropy(monkeypatch):
    x, weight = torch.randn(6, 16, requires_grad=True), torch.randn(30, 16, requires_grad=True)
    target = torch.arange(6)
    one = 2 * 6 * 16 * 30

    def call() -> torch.Tensor:
        return functional.linear_cross_entropy(x, weight, target, backend="cpu")

    assert _flops(call) == one
    assert _flops(lambda: call().backward()) == one + 2 * one
    rules = importlib.import_module("transformer_fast.ops.chunked_loss")
    monkeypatch.setattr(rules, "MOST_LOGITS", 1)
    # The backward recomputes the logits, and computes both gradients.
    assert _flops(lambda: call().backward()) == one + 3 * one


@needs_native
def test_flops_of_chunked_losses(monkeypatch):
    """In low precision the forward computes the gradients too, if the losses are summed."""
    rules = importlib.import_module("transformer_fast.ops.chunked_loss")
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
def test_flops_of_ragged_stacks_exclude_padding():
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
def test_flops_of_decoding():
    """A step's products with the weights, and with the keys and values of all tokens so far."""
    layers, width, rows, keys, cross = 2, 32, 3, 6, 5
    sizes = [(96, 32), (32, 32), (32, 32), (32, 32), (48, 32), (32, 48)]
    weights = [torch.randn(size) for size in sizes]
    norm = torch.ones(width)
    maps = ((weights[i], None, weights[i + 1], None, norm, norm) for i in (0, 2, 4))
    parameters = [tensor for each in maps for tensor in each] * layers
    memories = [torch.randn(2, rows, 4, cross, 8) for _ in range(layers)]
    stack = LayerStack([0, 1, 2], False, [0] * 3, 4, True, "relu", parameters, [], [1e-5] * 6)
    step = cpu_blocks.DecodeStack(stack, rows, memories)
    cache = torch.zeros(layers, 2, rows, 4, 9, 8)
    with torch.no_grad(), _Count() as found:
        step(torch.randn(rows, width), cache, keys - 1)
    products = sum(weight.numel() for weight in weights) + 2 * width * (keys + cross)
    assert found.total == 2 * layers * rows * products


def test_packed_sequences_count_like_padded_and_shard_by_heads():
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


# Direct calls -------------------------------------------------------------------------------------

OPS = torch.ops.transformer_fast
DTYPES = [torch.float32, torch.bfloat16]


def layers(x: Tensor, starts: Tensor | None, activation: int = 1, heads: int = 2) -> Tensor:
    width = x.shape[-1]
    parameters = [torch.randn(shape).to(x.dtype) if shape else None for shape in (
        (3 * width, width), (), (width, width), (), (width,), ()
    )]  # fmt: skip
    return OPS.layers.cpu(  # type: ignore[no-any-return]
        x, None, [0], parameters, [None] * 2, [], [1e-5], False, [0], heads, activation, True, None,
        False, None, False, starts, None, None, None,
    )  # fmt: skip


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("starts", [[0], [0, 4], [1, 5], [2], [0, 2, 6], [0, -1, 5], [0, 3, 2, 5]])
def test_sequence_offsets_must_cover_all_rows(starts: list[int], dtype: torch.dtype) -> None:
    x = torch.randn(5, 8).to(dtype)
    assert layers(x, torch.tensor([0, 2, 5])).isfinite().all()
    with pytest.raises(RuntimeError, match="starts"):
        layers(x, torch.tensor(starts))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_sequences_give_empty_results(dtype: torch.dtype) -> None:
    assert layers(torch.randn(0, 8).to(dtype), torch.tensor([0])).shape == (0, 8)
    assert layers(torch.randn(0, 8).to(dtype), torch.tensor([0, 0])).shape == (0, 8)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("power", [32, 40])
def test_results_of_too_many_bytes_raise(power: int, dtype: torch.dtype) -> None:
    """2^64 bytes and more; products that are 0 or small modulo 2^64."""
    x = torch.zeros(1, 4, dtype=dtype).expand(2 ** (power - 1), 4)
    weight = torch.zeros(1, 4, dtype=dtype).expand(2 ** (power - 1), 4)
    with pytest.raises(RuntimeError, match="Storage size calculation overflowed"):
        functional.linear(x, weight, backend="cpu")
    with pytest.raises(RuntimeError, match="can't allocate memory: you tried to allocate"):
        functional.linear(x[: 2**20], weight, backend="cpu")


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hidden_layers_of_too_many_bytes_raise(dtype: torch.dtype) -> None:
    one = torch.zeros(1, 1, dtype=dtype)
    x, weight1, weight2 = one.expand(2**24, 1), one.expand(2**40, 1), one.expand(1, 2**40)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        functional.feed_forward(x, weight1, None, weight2, None, backend="cpu")


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [1, 100])
def test_scratch_of_too_many_bytes_raises(queries: int, dtype: torch.dtype) -> None:
    """Threads that run a kernel allocate it."""
    query = torch.zeros(1, 2, queries, 64, dtype=dtype)
    keys = query[:, :, :1].expand(1, 2, 2**45, 64)
    with pytest.raises(RuntimeError, match="can't allocate memory: you tried to allocate"):
        functional.scaled_dot_product_attention(query, keys, keys, backend="cpu")


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_over_missing_dimensions_raise(dtype: torch.dtype) -> None:
    x = torch.randn(4, 6).to(dtype)
    for dims in (0, -1, 3):
        with pytest.raises(RuntimeError, match=f"the last {dims} dimensions .* of 2"):
            OPS.layer_norm.cpu(x, None, None, dims, 1e-5, 0)
        with pytest.raises(RuntimeError, match=f"the last {dims} dimensions .* of 2"):
            OPS.add_layer_norm.cpu(x, x, None, None, dims, 1e-5, 0)
    assert OPS.layer_norm.cpu(x[:0], None, None, 2, 1e-5, 0).shape == (0, 6)


@needs_native
def test_losses_without_classes_are_zero() -> None:
    losses, known = OPS.linear_cross_entropy.cpu(
        torch.randn(3, 4), torch.randn(0, 4), None, torch.full((3,), -100), -100, 0.0
    )
    assert torch.equal(losses, torch.zeros(3))
    assert torch.equal(known, torch.zeros(3, 2))


@pytest.mark.thorough
@needs_native
@pytest.mark.parametrize("wants", [(True, True, True), (True, False, False), (False, True, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "reference", "torch"])
def test_opcheck_of_gradients_computed_with_losses(
    backend: str, dtype: torch.dtype, wants: Any
) -> None:
    if backend == "cpu" and dtype != torch.bfloat16:
        pytest.skip("the CPU's kernel is for half types")
    tensors = (torch.randn(shape).to(dtype) for shape in ((9, 4), (7, 4), (7,)))
    torch.library.opcheck(
        getattr(OPS.linear_cross_entropy_gradients, backend),
        (None, *tensors, torch.arange(9) % 7, 4, 2, 0.1, *wants),
        test_utils=("test_schema", "test_faketensor"),
    )


def _activation_calls(dtype: torch.dtype) -> dict[str, Callable[[int], Any]]:
    x, w1, w2 = (torch.randn(shape).to(dtype) for shape in ((3, 4), (5, 4), (4, 5)))
    y, z = torch.randn(3, 5).to(dtype), torch.randn(3, 5).to(dtype)
    wanted = [True] * 5
    return {
        "linear": lambda a: OPS.linear.cpu(x, w1, None, None, a),
        "linear, kept": lambda a: OPS.linear_training.cpu(x, w1, None, None, a, True),
        "linear backward": lambda a: OPS.linear_backward.cpu(y, x, w1, z, a, True, True, True),
        "network": lambda a: OPS.feed_forward.cpu(x, w1, None, w2, None, a),
        "training": lambda a: OPS.feed_forward_training.cpu(
            x, w1, None, w2, None, a, 0.0, None, True
        ),
        "network backward": lambda a: OPS.feed_forward_backward.cpu(
            x, x, w1, w2, z, a, 0.0, None, *wanted
        ),
        "layers": lambda a: layers(x, torch.tensor([0, 3]), a),
    }


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(_activation_calls(torch.float32)))
def test_unknown_activation_codes_raise(name: str, dtype: torch.dtype) -> None:
    call = _activation_calls(dtype)[name]
    for activation in range(1 if "backward" in name else 0, 5):
        call(activation)
    for activation in (-1, 5, 2**32 + 1):
        with pytest.raises(RuntimeError, match=f"there is no activation {activation}"):
            call(activation)


@needs_native
def test_invalid_seeds_raise():
    x = torch.rand(4, 8)
    with pytest.raises(RuntimeError, match="dropout needs a seed"):
        OPS.layer_norm_training.cpu(x, x, None, None, 1, 1e-5, 0, 0.5, None)
    with pytest.raises(RuntimeError, match="int64 scalar"):
        OPS.layer_norm_training.cpu(x, x, None, None, 1, 1e-5, 0, 0.5, torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        OPS.layer_norm_training.cpu(x, x, None, None, 1, 1e-5, 0, 1.5, torch.tensor(1))


@needs_native
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.01, 0.1, 0.5, 0.9, 1.0])
def test_dropout_matches_the_reference(p, dtype, isa):
    seed = None if p == 1.0 else torch.tensor(7)
    for shape in ((), (1,), (3, 0), (2, 3, 5), (7, 64), (3, 131)):
        x = torch.randn(shape).to(dtype)
        x[x == 0] = 1.0
        got, expected = (f(x, p, seed) for f in (OPS.dropout.cpu, reference.dropout))
        assert torch.equal(got == 0, expected == 0)
        torch.testing.assert_close(got, expected)


@pytest.mark.thorough
@needs_native
def test_opcheck_of_dropout():
    arguments = torch.randn(3, 5), 0.5, torch.tensor(1)
    torch.library.opcheck(OPS.dropout.cpu, arguments)
