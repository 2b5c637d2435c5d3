"""The modules in torch.compile (one graph, no breaks), torch.fx, torch.jit and torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_checks import fast_path

from transformer_fast import nn

B, T, S, M, H, HIDDEN = 2, 5, 4, 8, 2, 12
CAUSAL = nn.Transformer.generate_square_subsequent_mask


def _padding(length: int) -> torch.Tensor:
    hidden = torch.zeros(B, length, dtype=torch.bool)
    hidden[1, 2:] = True
    return hidden


def _x(length: int = T) -> torch.Tensor:
    return torch.randn(B, length, M)


CASES: dict[str, Callable[[], tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]]] = {
    "LayerNorm": lambda: (nn.LayerNorm(M), (_x(),), {}),
    "RMSNorm": lambda: (nn.RMSNorm(M), (_x(),), {}),
    "Linear": lambda: (nn.Linear(M, HIDDEN), (_x(),), {}),
    "attention": lambda: (nn.MultiheadAttention(M, H, batch_first=True), 3 * (_x(),), {}),
    "attention, masks": lambda: (
        nn.MultiheadAttention(M, H, add_zero_attn=True, batch_first=True),
        (_x(), _x(S), _x(S)),
        {"key_padding_mask": _padding(S), "need_weights": False},
    ),
    "encoder layer": lambda: (
        nn.TransformerEncoderLayer(M, H, HIDDEN, 0.0, batch_first=True),
        (_x(),),
        {"src_mask": CAUSAL(T), "is_causal": True},
    ),
    "encoder layer, hooked": lambda: (
        _hooked(nn.TransformerEncoderLayer(M, H, HIDDEN, 0.0, norm_first=True, batch_first=True)),
        (_x(),),
        {"src_key_padding_mask": _padding(T)},
    ),
    "decoder layer": lambda: (
        nn.TransformerDecoderLayer(M, H, HIDDEN, 0.0, "gelu", norm_first=True, batch_first=True),
        (_x(), _x(S)),
        {"tgt_mask": CAUSAL(T).isinf(), "memory_key_padding_mask": _padding(S)},
    ),
    "encoder": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(M, H, HIDDEN, 0.0, batch_first=True), 2),
        (_x(), CAUSAL(T).isinf(), _padding(T)),
        {},
    ),
    "transformer": lambda: (
        nn.Transformer(M, H, 1, 1, HIDDEN, 0.0, batch_first=True),
        (_x(S), _x()),
        {"tgt_mask": CAUSAL(T), "src_key_padding_mask": _padding(S)},
    ),
}


def _hooked(layer: torch.nn.Module) -> torch.nn.Module:
    layer.linear1.register_forward_hook(lambda module, args, output: output + 1)
    return layer


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("name", CASES)
def test_one_graph_forward_and_backward(name: str) -> None:
    module, args, kwargs = CASES[name]()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    grads = []
    for call in (module, compiled):
        module.zero_grad()
        output = _first(call(*args, **kwargs))
        output.square().sum().backward()
        grads.append([output.detach(), *(p.grad for p in module.parameters())])
    torch.testing.assert_close(*grads)
    module.eval()
    # Without torch's fast path, whose zeros at padded places compiled encoders have not, torch's
    # neither.
    with torch.no_grad(), fast_path(False):
        torch.testing.assert_close(compiled(*args, **kwargs), module(*args, **kwargs))


def test_dropout_in_the_graph() -> None:
    layer = nn.TransformerEncoderLayer(M, H, HIDDEN, 0.4, batch_first=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = _x()
    torch.manual_seed(5)
    first = compiled(x)
    assert not torch.equal(compiled(x), first)
    torch.manual_seed(5)
    assert torch.equal(compiled(x), first)


def test_a_hook_added_later_is_seen() -> None:
    layer = nn.TransformerEncoderLayer(M, H, HIDDEN, 0.0, batch_first=True)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x = _x()
    before = compiled(x)
    layer.norm1.register_forward_hook(lambda module, args, output: output * 2)
    torch.compiler.reset()
    torch.testing.assert_close(compiled(x), layer(x))
    assert not torch.allclose(compiled(x), before)


def test_lengths_may_vary() -> None:
    layer = nn.TransformerEncoderLayer(M, H, HIDDEN, 0.0, batch_first=True).eval()
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for length in (5, 6, 9):
            x, hidden = _x(length), _padding(length)
            torch.testing.assert_close(
                compiled(x, src_key_padding_mask=hidden), layer(x, src_key_padding_mask=hidden)
            )


class WithMask(torch.nn.Module):
    """Attention with a mask of its own, and one tensor in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(24, 24))
        self.register_buffer("mask", torch.rand(24, 24) > 0.3)

    def forward(self, x: torch.Tensor, learned: bool) -> torch.Tensor:
        mask = self.bias if learned else self.mask
        y = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        y = nn.functional.add_layer_norm(y, y, y.shape[-1:])[0]
        return nn.functional.linear(y, self.bias[:16, :16], residual=y)


@pytest.mark.parametrize("learned", [False, True])
def test_masks_of_fixed_size_and_one_tensor_in_several_places(learned: bool) -> None:
    module, x = WithMask(), torch.randn(2, 4, 24, 16, requires_grad=True)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    found, expected = compiled(x, learned), module(x, learned)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)]
    torch.testing.assert_close(*grads)


class Inside(torch.nn.Module):
    """A user's module with one of ours in it."""

    def __init__(self, inner: torch.nn.Module, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.inner, self.kwargs = inner, kwargs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, **self.kwargs) * 2


class InsideTwo(Inside):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.inner(x, y, **self.kwargs) * 2


class Attending(Inside):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, _weights = self.inner(x, x, x, **self.kwargs)
        return output * 2


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("encoder",)])
def test_fx_makes_one_node(name: str) -> None:
    """As it does of modules of torch.nn, which it never looks into."""
    inner, args, kwargs = CASES[name]()
    if name == "attention":
        args = args[:1]
    if name == "attention, masks":
        args, kwargs = args[:1], {"key_padding_mask": _padding(T)}
    wrapper = (Attending if "attention" in name else Inside) if len(args) == 1 else InsideTwo
    module = wrapper(inner, kwargs).eval()
    traced = torch.fx.symbolic_trace(module)
    calls = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert calls == ["inner"]
    torch.testing.assert_close(traced(*args), module(*args))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["LayerNorm", "encoder layer", "decoder layer"])
def test_jit_trace_records_torchs_ops(name: str, training: bool) -> None:
    inner, args, _ = CASES[name]()
    inner.train(training)
    with torch.set_grad_enabled(training):
        traced = torch.jit.trace(inner, args)
        assert "transformer_fast::" not in str(traced.inlined_graph)
        torch.testing.assert_close(traced(*args), inner(*args))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_mask_for_each_sample(compiled: bool) -> None:
    """Under vmap nobody knows whether one is causal."""
    layer = nn.TransformerEncoderLayer(M, H, HIDDEN, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.stack([_x(), _x()])
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
    """vmap of grad, as differential privacy and meta-learning use it."""
    layer = nn.TransformerEncoderLayer(M, H, HIDDEN, 0.0, batch_first=True)
    parameters = dict(layer.named_parameters())

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, parameters, (x[None],)).square().sum()

    x = _x()
    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for index in range(B):
        layer.zero_grad()
        layer(x[index : index + 1]).square().sum().backward()
        for key, parameter in parameters.items():
            torch.testing.assert_close(
                found[key][index], parameter.grad, rtol=1e-4, atol=1e-5, msg=key
            )
