"""Encoder and decoder layers that are trained run in one call of their entry in C++."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import same_bits, spied
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from transformer_fast import _native, fast_path, nn
from transformer_fast.nn import fused_layers
from transformer_fast.testing.parity import compare

pytestmark = [
    pytest.mark.usefixtures("small_calls"),
    pytest.mark.skipif(_native.autograd is None, reason=str(_native.why_no_autograd)),
]
B, T, M, H, F = 3, 7, 32, 4, 48


@pytest.fixture(autouse=True)
def entered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of the entry, whether it ran the layer."""
    return spied(monkeypatch, fused_layers, "_enter", lambda y, *given: y is not None)


def make(crossed: bool, p: float = 0.0, **options: Any) -> Any:
    torch.manual_seed(0)
    kind = nn.TransformerDecoderLayer if crossed else nn.TransformerEncoderLayer
    return kind(M, H, F, p, **{"batch_first": True, **options}).train()


def layer(p: float = 0.0, **options: Any) -> nn.TransformerEncoderLayer:
    return make(False, p, **options)  # type: ignore[no-any-return]


def inputs(batch_first: bool = True, length: int = T, seed: int = 1) -> Tensor:
    x = torch.randn(B, length, M, generator=torch.Generator().manual_seed(seed))
    return (x if batch_first else x.transpose(0, 1).contiguous()).requires_grad_()


def given_to(crossed: bool, batch_first: bool = True) -> list[Tensor]:
    """Returns the inputs of a layer: x, and the memory of a decoder layer."""
    memory = [inputs(batch_first, T + 2, 3)] if crossed else []
    return [inputs(batch_first), *memory]


def loss_of(y: Tensor) -> Tensor:
    return (y * torch.linspace(0.1, 1.0, M)).sum()


def gradients(model: Any, *given: Tensor, **masks: Any) -> list[Tensor]:
    """Returns the output, and the gradients of the inputs and of all parameters."""
    torch.manual_seed(2)
    y = model(*given, **masks)
    return [y, *torch.autograd.grad(loss_of(y), [*given, *model.parameters()])]


def masks(kind: str) -> dict[str, Any]:
    padding = torch.zeros(B, T + 2, dtype=torch.bool)
    padding[1, 5:] = True
    causal = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)
    if kind == "decoder":
        return {
            "tgt_mask": causal, "tgt_key_padding_mask": padding[:, :T], "tgt_is_causal": True,
            "memory_key_padding_mask": padding,
        }  # fmt: skip
    found = {"src_key_padding_mask": padding[:, :T], "src_mask": causal}
    return {name: x for name, x in found.items() if kind in (name, "both")}


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    ("crossed", "mask"),
    [*((False, kind) for kind in ("none", "src_key_padding_mask", "src_mask", "both")),
     (True, "none"), (True, "decoder")],
)  # fmt: skip
def test_results_are_those_of_the_ops(
    crossed: bool, mask: str, batch_first: bool, norm_first: bool, p: float, entered: list[bool]
) -> None:
    """With dropout, too: both draw the same seeds."""
    model = make(crossed, p, batch_first=batch_first, norm_first=norm_first, activation="gelu")
    given, hidden = given_to(crossed, batch_first), masks(mask)
    ours = gradients(model, *given, **hidden)
    assert entered == [True]
    with fast_path.small_size_fallback(short=False):
        ops = gradients(model, *given, **hidden)
    assert not any(entered[1:])
    if p == 0.0:
        wide = [x.detach().double().requires_grad_() for x in given]
        exact = gradients(copy.deepcopy(model).double(), *wide, **hidden)
        for index, (one, other, oracle) in enumerate(zip(ours, ops, exact, strict=True)):
            found = compare(f"{index}", one, other, oracle, factor=3.0)
            assert found.ok, found
    for one, other in zip(ours, ops, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("parity", [0, 1])
def test_layers_trained_in_part(crossed: bool, parity: int, entered: list[bool]) -> None:
    """The last input alone, every second parameter, and a saved tensor that was written to."""
    model, (*others, last) = make(crossed), given_to(crossed)
    hidden = masks("decoder" if crossed else "none")
    every = gradients(model, *others, last, **hidden)[1 + len(others) :]

    def loss(last: Tensor) -> Tensor:
        return loss_of(model(*(x.detach() for x in others), last, **hidden))

    (found,) = torch.autograd.grad(loss(last), last)
    torch.testing.assert_close(found, every[0])
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == parity)
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found_all = torch.autograd.grad(loss(last.detach()), wanted)
    torch.testing.assert_close(list(found_all), every[1 + parity :: 2])
    result = loss(last)
    with torch.no_grad():
        model.linear2.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()
    result = loss(last)
    result.backward()
    with pytest.raises(RuntimeError, match="second time"):
        result.backward()
    assert all(entered)


@pytest.mark.parametrize("crossed", [False, True])
def test_gradients_of_gradients(crossed: bool, entered: list[bool]) -> None:
    model, inputs = make(crossed, activation="gelu"), given_to(crossed)

    def penalty(double: bool) -> list[Tensor]:
        own: Any = copy.deepcopy(model).double() if double else model
        given = [x.detach().double().requires_grad_() if double else x for x in inputs]
        with sdpa_kernel(SDPBackend.MATH):  # PyTorch's only implementation with second derivatives
            first = torch.autograd.grad(own(*given).square().sum(), given, create_graph=True)
        sums = sum(each.square().sum() for each in first)
        return [*torch.autograd.grad(sums, [*given, *own.parameters()], allow_unused=True)]

    for one, other in zip(penalty(False), penalty(True), strict=True):
        if other is not None and other.any():
            torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3)
    assert entered[0]


def test_checkpoints_draw_the_same_dropout(entered: list[bool]) -> None:
    model, x = layer(0.3), inputs()
    plain = gradients(model, x)
    torch.manual_seed(2)
    y = checkpoint(model, x, use_reentrant=False)
    (grad,) = torch.autograd.grad(loss_of(y), x)
    assert all(entered)
    assert torch.equal(y, plain[0])
    assert torch.equal(grad, plain[1])


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("crossed", [False, True])
def test_compiled_autograd(crossed: bool, norm_first: bool, entered: list[bool]) -> None:
    """A compiled step whose forward is eager."""
    torch._dynamo.reset()
    model, given = make(crossed, 0.3, norm_first=norm_first), given_to(crossed)

    @torch._dynamo.disable
    def loss() -> Tensor:
        torch.manual_seed(2)
        return loss_of(model(*given))

    leaves = [*given, *model.parameters()]
    expected = torch.autograd.grad(loss(), leaves)
    counters.clear()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: loss().backward(), backend="eager")()
    assert entered == [True, True]
    assert counters["compiled_autograd"]["captures"] == 1
    assert same_bits([leaf.grad for leaf in leaves], expected)


def _hooked(model: Any) -> None:
    model.norm1.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    "change",
    [
        _hooked,
        lambda model: setattr(model, "activation", torch.tanh),
        lambda model: model.double(),
        lambda model: setattr(model, "norm1", torch.nn.RMSNorm(M)),
    ],
)
def test_other_layers_are_composed(change: Callable[[Any], Any], entered: list[bool]) -> None:
    model, x = layer(), inputs()
    change(model)
    theirs = torch.nn.TransformerEncoderLayer(M, H, F, 0.0, batch_first=True)
    change(theirs)
    theirs.load_state_dict(model.state_dict())
    x = x.detach().to(next(model.parameters()).dtype).requires_grad_()
    for one, other in zip(gradients(model, x), gradients(theirs.train(), x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not any(entered)


def test_autocast_and_transforms_are_composed(entered: list[bool]) -> None:
    model, x = layer(), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16 or model(x).dtype == torch.float32
    torch.func.vmap(lambda x: model(x))(x.detach()[:, None])
    assert not any(entered)


def test_large_layers_are_composed(entered: list[bool]) -> None:
    model = nn.TransformerEncoderLayer(256, 4, 64, 0.0, batch_first=True).train()
    model(torch.randn(64, 86, 256)).sum().backward()
    assert entered == []
    model(torch.randn(1, 4, 256)).sum().backward()
    assert entered == [True]
