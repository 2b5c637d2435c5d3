"""The modules in torch.compile (one graph, no breaks), torch.fx, torch.jit and torch.func."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from module_cases import CASES
from module_checks import fast_path, run

from transformer_fast import nn

B, T, S, M, H, HIDDEN = 2, 5, 4, 8, 2, 12


def _padding(length: int) -> torch.Tensor:
    hidden = torch.zeros(B, length, dtype=torch.bool)
    hidden[1, 2:] = True
    return hidden


def _x(length: int = T) -> torch.Tensor:
    return torch.randn(B, length, M)


#: A hook is added to one of them.
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


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("name", COMPILED)
def test_one_graph_forward_and_backward(name: str) -> None:
    module, args, kwargs = _made(name)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(*(run(m, args, kwargs, grad=True) for m in (module, compiled)))
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
    torch.testing.assert_close(*(run(m, (x, learned), {}, grad=True) for m in (compiled, module)))


class Inside(torch.nn.Module):
    """A user's module with one of ours in it, which takes so many inputs."""

    def __init__(self, inner: torch.nn.Module, count: int, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.inner, self.count, self.kwargs = inner, count, kwargs

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        output = self.inner(*(x, y, z)[: self.count], **self.kwargs)
        return (output[0] if self.count == 3 else output) * 2


@pytest.mark.parametrize("name", [name for name in COMPILED if not name.startswith("encoder, ")])
def test_fx_makes_one_node(name: str) -> None:
    """As it does of modules of torch.nn, which it never looks into."""
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
def test_jit_trace_records_torchs_ops(name: str, training: bool) -> None:
    inner, args, _ = _made(name)
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
