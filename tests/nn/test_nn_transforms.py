"""Modules under autocast, torch.compile (one graph, no breaks), torch.fx, torch.jit and torch.func.

Tensor subclasses and other tensors without plain memory run through PyTorch's functions, as in
torch.nn.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from harness import Operators
from module_cases import CASES, PLAIN, B, H, M, T, hidden
from module_cases import x as rows
from module_checks import cast, check_budget, fast_path, run, tensors, to_ours
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from transformer_fast import dispatch, nn, use_backend
from transformer_fast import functional as F

pytestmark = [pytest.mark.sampled(15, 50), pytest.mark.usefixtures("fresh")]

HALVES = [torch.bfloat16, torch.float16]


def under_autocast(
    module: torch.nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype, grad: bool, **kw: Any
) -> list[Tensor]:
    with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype):
        return tensors(module(*inputs, **kw))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("lowp", HALVES, ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_autocast_dtypes_and_results(name: str, lowp: torch.dtype) -> None:
    torch.manual_seed(0)
    theirs, inputs = CASES[name].make(torch.nn), CASES[name].inputs()
    ours, exact = to_ours(theirs), copy.deepcopy(theirs).double()
    for dtype, training, grad in itertools.product(
        [torch.float32, *HALVES], [True, False], [True, False]
    ):
        given = tuple(x.to(dtype) for x in inputs)
        oracle = [t.detach() for t in tensors(exact(*cast(given, torch.float64)))]
        expected = under_autocast(theirs.train(training), given, lowp, grad)
        got = under_autocast(ours.train(training), given, lowp, grad)
        case = f"{dtype}, {'train' if training else 'eval'}, {'grad' if grad else 'no_grad'}"
        assert [t.dtype for t in got] == [t.dtype for t in expected], case
        # float32 results have low-precision rounding errors too.
        check_budget(got, expected, oracle, unit=torch.finfo(lowp).eps / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_low_precision_weights_under_autocast(dtype: torch.dtype) -> None:
    """PyTorch's operator for a layer accepts inputs of other dtypes: autocast converts them to the
    weights' dtype."""
    theirs = CASES["encoder layer"].make(torch.nn).bfloat16().eval()
    ours, x = to_ours(theirs), torch.randn(3, 4, 32, dtype=dtype)
    got, expected = (under_autocast(m, (x,), torch.bfloat16, False)[0] for m in (ours, theirs))
    assert got.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=0, atol=4 * 2**-8 * expected.abs().max().item())


@pytest.mark.parametrize("why", ["hook", "switched off", "needs gradients", "CUDA's autocast"])
def test_layers_that_pytorch_composes_under_autocast_return_float32(why: str) -> None:
    theirs = CASES["encoder layer"].make(torch.nn).eval()
    if why == "hook":
        theirs.linear1.register_forward_hook(lambda *_: None)
    with fast_path(why != "switched off"):
        torch.set_autocast_enabled("cuda", why == "CUDA's autocast")
        try:
            for module in (theirs, to_ours(theirs)):
                x = torch.randn(3, 4, 32)
                (y,) = under_autocast(module, (x,), torch.bfloat16, why == "needs gradients")
                assert y.dtype == torch.float32
        finally:
            torch.set_autocast_enabled("cuda", False)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("name", ["encoder", "encoder, pre-norm"])
def test_padding_under_autocast(name: str) -> None:
    """PyTorch's stack uses a nested tensor where possible, which raises under autocast."""
    theirs = CASES[name].make(torch.nn).eval()
    ours, x = to_ours(theirs), torch.randn(3, 4, 32)
    padding = torch.arange(4) >= torch.tensor([[4], [2], [3]])
    (got,) = under_autocast(ours, (x,), torch.bfloat16, False, src_key_padding_mask=padding)
    exact = copy.deepcopy(theirs).double()
    with fast_path(False):
        oracle = exact(x.double(), src_key_padding_mask=padding)
        (expected,) = under_autocast(
            theirs, (x,), torch.bfloat16, True, src_key_padding_mask=padding
        )
    assert got.dtype == torch.bfloat16
    check_budget(got[~padding], expected.to(got.dtype)[~padding], oracle[~padding])


@pytest.mark.parametrize("op", ["linear", "feed_forward"])
def test_without_kernels_autocast_casts_parameters_once(
    monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """Without kernels, calls run as on a GPU for which no kernel is validated.

    PyTorch caches casts until the autocast region ends.
    """
    kernels = dispatch.kernels(op)
    pytorchs = tuple(k for k in kernels if k.backend in ("torch", "reference"))
    monkeypatch.setitem(dispatch.registry.usable, op, (kernels, {"cpu": pytorchs}))
    x, w1, w2 = torch.randn(3, 8), torch.randn(16, 8), torch.randn(8, 16)
    weights = [t.requires_grad_() for t in (w1, torch.randn(16), w2, torch.randn(8))]
    call = getattr(F, op)
    weights = weights[:2] if op == "linear" else weights
    for residual in [None, torch.randn(3, 16)] if op == "linear" else [None]:
        options = {} if residual is None else {"residual": residual}
        autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=True)
        with autocast, Operators() as found:
            first = call(x, *weights, **options)
            once = found.casts
            second = call(x, *weights, **options)
        # Parameters are cast once, in the first call.
        assert found.casts - once == once - len(weights)
        assert first.dtype == second.dtype == torch.bfloat16
        first.float().sum().backward()
        assert all(w.grad is not None and w.grad.dtype == torch.float32 for w in weights)


#: The case to which a hook is added.
HOOKED = "encoder layer, causal"
COMPILED = (
    *("LayerNorm", "RMSNorm", "Linear", "attention", "attention, other sizes", HOOKED),
    *("encoder layer, padding", "decoder layer, masks", "encoder, norm, causal"),
    "Transformer, masks",
)


def _made(name: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    case = CASES[name]
    module = case.make(nn)
    if name == HOOKED:
        module.linear1.register_forward_hook(lambda module, args, output: output + 1)
    return module, case.inputs(), case.masks


@pytest.mark.thorough
@pytest.mark.parametrize("name", COMPILED)
def test_one_graph_forward_and_backward(name: str) -> None:
    module, args, kwargs = _made(name)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(*(run(m, args, kwargs, grad=True) for m in (module, compiled)))
    module.eval()
    # Without PyTorch's fast path: it returns zeros at padded positions, which compiled encoders do
    # not, neither PyTorch's nor this library's.
    with torch.no_grad(), fast_path(False):
        torch.testing.assert_close(compiled(*args, **kwargs), module(*args, **kwargs))


@pytest.mark.thorough
def test_dropout_in_the_graph() -> None:
    layer = nn.TransformerEncoderLayer(M, H, 48, 0.4, batch_first=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = rows()
    torch.manual_seed(5)
    first = compiled(x)
    assert not torch.equal(compiled(x), first)
    torch.manual_seed(5)
    assert torch.equal(compiled(x), first)


@pytest.mark.thorough
def test_one_dynamic_graph_serves_all_lengths() -> None:
    layer = nn.TransformerEncoderLayer(M, H, 48, 0.0, batch_first=True).eval()
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for length in (5, 6, 9):
            given, padding = rows(length), hidden(B, length)
            torch.testing.assert_close(
                compiled(given, src_key_padding_mask=padding),
                layer(given, src_key_padding_mask=padding),
            )


class WithMask(torch.nn.Module):
    """Attention with a mask that it owns, and an op with the same tensor as several arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(24, 24))
        self.register_buffer("mask", torch.rand(24, 24) > 0.3)

    def forward(self, x: Tensor, learned: bool) -> Tensor:
        mask = self.bias if learned else self.mask
        y = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        y = nn.functional.add_layer_norm(y, y, y.shape[-1:])[0]
        return nn.functional.linear(y, self.bias[:16, :16], residual=y)


@pytest.mark.thorough
@pytest.mark.parametrize("learned", [False, True])
def test_fixed_size_masks_and_repeated_arguments_in_dynamic_graphs(learned: bool) -> None:
    module, x = WithMask(), torch.randn(2, 4, 24, 16, requires_grad=True)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(*(run(m, (x, learned), {}, grad=True) for m in (compiled, module)))


class Inside(torch.nn.Module):
    """A user's module around a module of this library that takes ``count`` inputs."""

    def __init__(self, inner: torch.nn.Module, count: int, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.inner, self.count, self.kwargs = inner, count, kwargs

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        output = self.inner(*(x, y, z)[: self.count], **self.kwargs)
        return (output[0] if self.count == 3 else output) * 2


@pytest.mark.parametrize("name", [name for name in COMPILED if not name.startswith("encoder, ")])
def test_fx_traces_a_module_as_one_node(name: str) -> None:
    """torch.fx does not trace into torch.nn modules either."""
    inner, args, kwargs = _made(name)
    module = Inside(inner, len(args), dict(kwargs)).eval()
    traced = torch.fx.symbolic_trace(module)
    calls = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert calls == ["inner"]
    given = (args * 3)[:3]
    torch.testing.assert_close(traced(*given), module(*given))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["LayerNorm", "encoder layer", "decoder layer"])
def test_jit_trace_records_pytorch_ops(name: str, training: bool) -> None:
    inner, args, _ = _made(name)
    inner.train(training)
    with torch.set_grad_enabled(training):
        traced = torch.jit.trace(inner, args)
        assert "transformer_fast::" not in str(traced.inlined_graph)
        torch.testing.assert_close(traced(*args), inner(*args))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("compiled", [False, True])
def test_vmap_over_masks(compiled: bool) -> None:
    """Under vmap, the values of a mask are unknown: it cannot be recognised as causal."""
    layer = nn.TransformerEncoderLayer(M, H, 48, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.stack([rows(), rows()])
    masks = torch.stack([torch.ones(T, T, dtype=torch.bool).triu(k) for k in (1, 2)])
    run = torch.vmap(lambda x, mask: encoder(x, mask))
    found = (
        torch.compile(run, fullgraph=True, backend="aot_eager")(x, masks)
        if compiled
        else run(x, masks)
    )
    torch.testing.assert_close(
        found, torch.stack([encoder(*one) for one in zip(x, masks, strict=True)])
    )


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_per_sample_gradients() -> None:
    """vmap of grad, as used by differential privacy and meta-learning."""
    layer = nn.TransformerEncoderLayer(M, H, 48, 0.0, batch_first=True)
    parameters = dict(layer.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x[None],)).square().sum()

    x = rows()
    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for index in range(B):
        layer.zero_grad()
        layer(x[index : index + 1]).square().sum().backward()
        for key, parameter in parameters.items():
            torch.testing.assert_close(
                found[key][index], parameter.grad, rtol=1e-4, atol=1e-5, msg=key
            )


class Doubling(Tensor):
    """Doubles the results of linear maps, as a quantised weight might rescale them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        return 2 * result if func is torch.nn.functional.linear else result


class Wrapped(Tensor):
    """int8 values with a scale: no float memory exists, only ATen's operators produce floats."""

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


#: Modules that PyTorch does not run as one operator in inference.
MODULES = ("Linear", "LayerNorm", "attention", "encoder layer, length first", "decoder layer")


@pytest.mark.parametrize("kind", [doubling, wrapped])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("name", [*MODULES, "encoder, length first"])
def test_subclass_weights(name: str, training: bool, kind: Any) -> None:
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
    """With these sizes, layers with dense weights run as one call."""
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
    """A subclass without overrides: PyTorch returns results of its type."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_subclass_inputs_give_subclass_results(name: str) -> None:
    torch.manual_seed(0)
    args = [torch.randn(s) if isinstance(s, tuple) else s for s in FUNCTIONS[name]]
    args[0] = args[0].as_subclass(Named)
    ours, theirs = (getattr(f, name)(*args) for f in (F, torch.nn.functional))
    assert type(ours) is type(theirs) is Named
    torch.testing.assert_close(ours, theirs)
    with use_backend("cpu"), pytest.raises(NotImplementedError, match="of a subclass"):
        getattr(F, name)(*args)


def test_losses_and_embeddings_of_subclasses() -> None:
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
def test_mkldnn_and_sparse_layouts(layout: str) -> None:
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
def test_lengths_must_be_integer_tensors(name: str) -> None:
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
def test_losses_whose_targets_have_no_values(options: dict[str, Any]) -> None:
    """Python cannot read the values of fake tensors, of meta tensors, while tracing and in vmap."""
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


def test_uint8_targets() -> None:
    logits, target = torch.randn(5, 7), torch.tensor([1, 0, 3, 6, 2])
    got = F.cross_entropy(logits, target.byte(), backend="cpu")
    torch.testing.assert_close(got, F.cross_entropy(logits, target))
    with pytest.raises(IndexError, match="Target 200"):
        F.cross_entropy(logits, torch.full((5,), 200, dtype=torch.uint8))
