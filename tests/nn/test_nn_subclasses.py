"""Tensors that are more than memory: PyTorch's own functions are asked for them, as torch.nn asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from module_cases import CASES
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from transformer_fast import functional as F
from transformer_fast import nn, use_backend


class Doubling(Tensor):
    """Whose linear maps give twice as much, as a quantised weight might rescale."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        return 2 * result if func is torch.nn.functional.linear else result


class Wrapped(Tensor):
    """int8 values with a scale: there is no memory of floats, only what ATen's operators make."""

    values: Tensor
    scale: float

    @staticmethod
    def __new__(cls, values: Tensor, scale: float) -> Wrapped:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values: Tensor, scale: float) -> None:
        self.values, self.scale = values, scale

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.namespace == "aten", func
        if func is torch.ops.aten.detach.default:
            return Wrapped(args[0].values, args[0].scale)
        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def plain(x: Any) -> Any:
    return x.values * x.scale if isinstance(x, Wrapped) else x


def wrapped(weight: Tensor) -> Wrapped:
    return Wrapped(torch.randint(-9, 9, weight.shape, dtype=torch.int8), 0.1)


def doubling(weight: Tensor) -> Tensor:
    return weight.detach().clone().as_subclass(Doubling)


#: Their inference is no single call of PyTorch's.
MODULES = ("Linear", "LayerNorm", "attention", "encoder layer, length first", "decoder layer")


@pytest.mark.parametrize("kind", [doubling, wrapped])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("name", [*MODULES, "encoder, length first"])
def test_weights(name: str, training: bool, kind: Any) -> None:
    torch.manual_seed(0)
    ours, theirs = CASES[name].make(nn), CASES[name].make(torch.nn)
    theirs.load_state_dict(ours.state_dict())
    for key, parameter in list(ours.named_parameters()):
        if parameter.dim() == 2 or (name == "LayerNorm" and "bias" in key):
            other = torch.nn.Parameter(kind(parameter), requires_grad=False)
            for module in (ours, theirs):
                path, _, leaf = key.rpartition(".")
                setattr(module.get_submodule(path), leaf, other)
    inputs, results = CASES[name].inputs(), []
    for module in (ours, theirs):
        module.train(training)
        with torch.set_grad_enabled(training):
            result = module(*inputs)
        results.append(result[0] if isinstance(result, tuple) else result)
    assert type(results[0]) is type(results[1])
    torch.testing.assert_close(*(r.as_subclass(Tensor) for r in results))


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:enable_nested_tensor")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
@pytest.mark.parametrize("make", ["TransformerEncoderLayer", "TransformerDecoderLayer"])
@pytest.mark.parametrize("stacked", [False, True])
def test_sparse_weights_of_networks_in_inference(make: str, layout: str, stacked: bool) -> None:
    """Of sizes that go through one call if all weights are dense."""
    torch.manual_seed(0)
    results: list[Tensor] = []
    state: dict[str, Tensor] = {}
    for module in (torch.nn, nn):
        layer = getattr(module, make)(32, 2, 64, 0.0)
        if stacked:
            layer = getattr(module, make.removesuffix("Layer"))(layer, 2)
        layer.eval()
        layer.load_state_dict(state or layer.state_dict())
        state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        for part in layer.modules():
            if hasattr(part, "linear1"):
                weight = getattr(part.linear1.weight.detach(), layout)()
                part.linear1.weight = torch.nn.Parameter(weight, requires_grad=False)
        x = torch.linspace(-2, 2, 3 * 4 * 32).cos().reshape(3, 4, 32)
        with torch.no_grad():
            results.append(layer(*(x,) * (1 + ("Decoder" in make))))
    torch.testing.assert_close(*results)


FUNCTIONS: dict[str, Any] = {
    "linear": ((3, 8), (5, 8), (5,)),
    "layer_norm": ((3, 8), [8], (8,), (8,)),
    "scaled_dot_product_attention": ((1, 2, 3, 8),) * 3,
}


class Named(Tensor):
    """Overrides nothing; results are of its type."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_inputs(name: str) -> None:
    torch.manual_seed(0)
    args = [torch.randn(s) if isinstance(s, tuple) else s for s in FUNCTIONS[name]]
    args[0] = args[0].as_subclass(Named)
    ours, theirs = (getattr(f, name)(*args) for f in (F, torch.nn.functional))
    assert type(ours) is type(theirs) is Named
    torch.testing.assert_close(ours, theirs)
    with use_backend("cpu"), pytest.raises(NotImplementedError, match="of a subclass"):
        getattr(F, name)(*args)


def test_losses_and_look_ups() -> None:
    logits, target = torch.randn(5, 7), torch.tensor([1, 0, 3, 6, 2])
    loss = nn.CrossEntropyLoss()(logits.as_subclass(Named), target)
    assert type(loss) is Named
    torch.testing.assert_close(
        loss.as_subclass(Tensor), torch.nn.functional.cross_entropy(logits, target)
    )
    embedding = nn.Embedding(7, 4)
    embedding.weight = torch.nn.Parameter(wrapped(embedding.weight), requires_grad=False)
    torch.testing.assert_close(embedding(target), plain(embedding.weight.data)[target])
    x, w1, w2 = torch.randn(3, 8), doubling(torch.randn(16, 8)), torch.randn(8, 16)
    got = F.feed_forward(x, w1, None, w2, None)
    torch.testing.assert_close(
        got.as_subclass(Tensor), 4 * torch.relu(x @ w1.as_subclass(Tensor).T) @ w2.T
    )


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
def test_layouts_of_pytorchs(layout: str) -> None:
    x, w = torch.randn(3, 8), torch.randn(5, 8)
    other = getattr(w, layout)()
    given = x.to_mkldnn() if layout == "to_mkldnn" else x
    got, expected = (f.linear(given, other) for f in (F, torch.nn.functional))
    assert got.layout == expected.layout
    torch.testing.assert_close(got.to_dense() if layout == "to_mkldnn" else got, x @ w.T)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors(layout: torch.layout) -> None:
    rows = [torch.randn(n, 2, 8) for n in (3, 5)]
    nested = torch.nested.nested_tensor(rows, layout=layout).transpose(1, 2)
    if layout == torch.strided:
        nested = nested.contiguous()
    got = F.scaled_dot_product_attention(nested, nested, nested)
    for one, row in zip(got.transpose(1, 2).unbind(), rows, strict=True):
        q = row.transpose(0, 1)
        expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        torch.testing.assert_close(one.transpose(0, 1), expected)


@pytest.mark.parametrize("name", ["key_lengths", "query_lengths"])
def test_lengths_are_integers_of_each_sequence(name: str) -> None:
    q = torch.randn(2, 2, 3, 8)
    for wrong in (torch.ones(2, dtype=torch.complex64), torch.ones(2), torch.ones(2).bool()):
        with pytest.raises(TypeError, match=f"{name} must have an integer dtype, not torch"):
            F.scaled_dot_product_attention(q, q, q, **{name: wrong})
    with pytest.raises(ValueError, match=rf"{name} must have shape \[2\]"):
        F.scaled_dot_product_attention(q, q, q, **{name: torch.ones(3, dtype=torch.int64)})
    with pytest.raises(TypeError, match=name):
        F.scaled_dot_product_attention(q, q, q, **{name: [1, 2]})  # type: ignore[arg-type]


LOSSES = [
    {},
    {"reduction": "none"},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"ignore_index": 2},
]


@pytest.mark.parametrize("options", LOSSES, ids=str)
def test_losses_whose_targets_nobody_may_look_at(options: dict[str, Any]) -> None:
    """In fakes, in traced programs, under vmap, and without memory."""
    logits, target = torch.randn(4, 5, 7), torch.randint(0, 7, (4, 5))
    loss = nn.CrossEntropyLoss(**options)
    expected = torch.nn.CrossEntropyLoss(**options)
    each = torch.stack([expected(x, t) for x, t in zip(logits, target, strict=True)])
    torch.testing.assert_close(torch.func.vmap(loss)(logits, target), each)
    for traced in (
        make_fx(loss)(logits[0], target[0]),
        make_fx(loss, tracing_mode="fake")(logits[0], target[0]),
    ):
        for x, t in zip(logits, target, strict=True):
            torch.testing.assert_close(traced(x, t), expected(x, t))
    mode, logits, target, each = FakeTensorMode(), logits[0], target[0], each[0]
    with mode:
        x, t = mode.from_tensor(logits).requires_grad_(), mode.from_tensor(target)
        fake = loss(x, t)
        fake.sum().backward()
        assert (fake.shape, fake.dtype, x.grad.shape) == (each.shape, each.dtype, x.shape)
    x = logits.to("meta").requires_grad_()
    on_meta = loss(x, target.to("meta"))
    on_meta.sum().backward()
    assert on_meta.is_meta
    assert on_meta.shape == each.shape
    assert x.grad.shape == x.shape


def test_targets_of_bytes() -> None:
    logits, target = torch.randn(5, 7), torch.tensor([1, 0, 3, 6, 2])
    got = F.cross_entropy(logits, target.byte(), backend="cpu")
    torch.testing.assert_close(got, F.cross_entropy(logits, target))
    with pytest.raises(IndexError, match="Target 200"):
        F.cross_entropy(logits, torch.full((5,), 200, dtype=torch.uint8))
