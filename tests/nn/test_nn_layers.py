"""Encoder and decoder layers: torch's numbers, and every way to look into them or change them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from module_ruler import assert_close, to_ours
from torch import Tensor

from transformer_fast import functional, nn
from transformer_fast.backends import cpu_blocks

B, T, S, M, H, HIDDEN = 2, 5, 4, 8, 2, 12
LAYERS = ("TransformerEncoderLayer", "TransformerDecoderLayer")


def pair(name: str, **options: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    options = {"dropout": 0.0, "batch_first": True, **options}
    theirs = getattr(torch.nn, name)(M, H, HIDDEN, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    ours = getattr(nn, name)(M, H, HIDDEN, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(name: str) -> tuple[Tensor, ...]:
    x = torch.randn(B, T, M)
    return (x,) if name == "TransformerEncoderLayer" else (x, torch.randn(B, S, M))


def mask_names(name: str) -> tuple[str, str]:
    prefix = "src" if name == "TransformerEncoderLayer" else "tgt"
    return f"{prefix}_mask", f"{prefix}_key_padding_mask"


class Square(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


ACTIVATIONS: dict[str, tuple[Any, str | None]] = {
    "'relu'": ("relu", "relu"),
    "'gelu'": ("gelu", "gelu"),
    "F.relu": (F.relu, "relu"),
    "torch.relu": (torch.relu, "relu"),
    "F.gelu": (F.gelu, "gelu"),
    "F.silu": (F.silu, "silu"),
    "ReLU": (torch.nn.ReLU(), "relu"),
    "GELU": (torch.nn.GELU(), "gelu"),
    "GELU tanh": (torch.nn.GELU(approximate="tanh"), "gelu_tanh"),
    "partial": (functools.partial(F.gelu, approximate="tanh"), "gelu_tanh"),
    "SiLU": (torch.nn.SiLU(), "silu"),
    "torch.tanh": (torch.tanh, None),
    "lambda": (lambda x: x.clamp(-1, 2), None),
    "other partial": (functools.partial(F.leaky_relu, negative_slope=0.3), None),
    "PReLU": (torch.nn.PReLU(), None),
    "Square": (Square(), None),
}


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The activations that the fused FFN, alone or as a whole sub-layer, was called with."""
    calls: list[Any] = []
    right = functional.feed_forward

    def feed_forward(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs["activation"])
        return right(*args, **kwargs)

    blocks = cpu_blocks.layers

    def layers(owner: Any, sublayers: Any, each: int, *args: Any) -> Tensor:
        calls.extend(args[3] for s in sublayers if s.kind == cpu_blocks.Kind.FEED_FORWARD)
        return blocks(owner, sublayers, each, *args)

    monkeypatch.setattr(functional, "feed_forward", feed_forward)
    monkeypatch.setattr(cpu_blocks, "layers", layers)
    return calls


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, name: str, norm_first: bool, fused: list[Any]) -> None:
    given, known_as = ACTIVATIONS[activation]
    theirs, ours = pair(name, activation=given, norm_first=norm_first)
    assert_close(ours, theirs, *inputs(name))
    assert set(fused) == ({known_as} if known_as else set())


def test_an_activation_set_later_is_used() -> None:
    theirs, ours = pair(LAYERS[0])
    theirs.activation = ours.activation = torch.tanh
    theirs.activation_relu_or_gelu = 0
    assert_close(ours, theirs, *inputs(LAYERS[0]))


@pytest.mark.parametrize("options", [{"bias": False}, {"batch_first": False}, {"norm_first": True}])
@pytest.mark.parametrize("name", LAYERS)
def test_masks_and_gradients(name: str, options: dict[str, Any]) -> None:
    theirs, ours = pair(name, **options)
    given = inputs(name)
    if not options.get("batch_first", True):
        given = tuple(x.transpose(0, 1) for x in given)
    attn, padding = mask_names(name)
    hidden = torch.zeros(B, T, dtype=torch.bool)
    hidden[1, 3:] = True
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    for kwargs in (
        {},
        {padding: hidden},
        {attn: causal},
        {attn: causal, padding: hidden},
        {attn: torch.randn(T, T)},
    ):
        assert_close(ours, theirs, *given, **kwargs)
        for module in (theirs, ours):
            module.zero_grad()
            module(*given, **kwargs).square().sum().backward()
        for (key, p), q in zip(theirs.named_parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, msg=key, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_hooks_on_inner_modules_fire(name: str, norm_first: bool) -> None:
    _, ours = pair(name, norm_first=norm_first)
    given = inputs(name)
    inner = [key for key, _ in ours.named_modules() if key and key not in _WITHIN_ATTENTION]
    assert len(inner) >= 8
    with torch.no_grad():
        plain = ours(*given)
    for key in inner:
        module = ours.get_submodule(key)
        for register in ("register_forward_hook", "register_forward_pre_hook"):
            fired: list[str] = []
            handle = getattr(module, register)(lambda *args: fired.append("x"))  # noqa: B023
            with torch.no_grad():
                torch.testing.assert_close(ours(*given), plain)
            assert fired == ["x"], f"{register} of {key}"
            handle.remove()
        fired = []
        handle = module.register_full_backward_hook(lambda *args: fired.append("x"))  # noqa: B023
        ours(*(x.requires_grad_() for x in given)).sum().backward()
        assert fired == ["x"], f"backward hook of {key}"
        handle.remove()


_WITHIN_ATTENTION = ("self_attn.out_proj", "multihead_attn.out_proj")


def test_a_hook_may_change_the_output() -> None:
    theirs, ours = pair(LAYERS[0])
    for layer in (theirs, ours):
        layer.linear1.register_forward_hook(lambda module, args, output: output * 2)
        layer.norm1.register_forward_hook(lambda module, args, output: output + 1)
    assert_close(ours, theirs, *inputs(LAYERS[0]))


def test_global_hooks_see_every_module() -> None:
    _, ours = pair(LAYERS[0])
    seen: list[torch.nn.Module] = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: seen.append(module)
    )
    try:
        ours(*inputs(LAYERS[0]))
    finally:
        handle.remove()
    assert {*seen} >= {ours.linear1, ours.dropout, ours.linear2, ours.norm1, ours.dropout2}


class Adapted(torch.nn.Module):
    """A low-rank adapter around a linear layer, as fine-tuning libraries put in."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = torch.nn.Parameter(torch.randn(2, base.in_features))
        self.b = torch.nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("where", ["linear1", "linear2"])
def test_replaced_linear(name: str, where: str) -> None:
    theirs, _ = pair(name)
    setattr(theirs, where, Adapted(getattr(theirs, where)))
    ours = to_ours(theirs).train()
    assert_close(ours, theirs, *inputs(name))
    ours(*inputs(name)).sum().backward()
    assert getattr(ours, where).a.grad.any()


def _swap_norm(layer: Any) -> None:
    layer.norm1 = torch.nn.Identity()


def _swap_dropout(layer: Any) -> None:
    layer.dropout1 = torch.nn.Identity()


def _parametrise(layer: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(layer.linear1)


def _prune(layer: Any) -> None:
    torch.nn.utils.prune.l1_unstructured(layer.linear2, "weight", 0.5)


def _own_forward(layer: Any) -> None:
    layer.linear2.forward = lambda x: F.linear(x, layer.linear2.weight) - 1


@pytest.mark.parametrize("change", [_swap_norm, _swap_dropout, _parametrise, _prune, _own_forward])
def test_other_changes_to_inner_modules(change: Callable[[Any], None]) -> None:
    theirs, ours = pair(LAYERS[0])
    given = inputs(LAYERS[0])
    before = ours(*given)
    for layer in (theirs, ours):
        change(layer)
    torch.testing.assert_close(ours(*given), theirs(*given))
    if change is not _swap_dropout and change is not _parametrise:  # those keep the numbers
        assert not torch.allclose(ours(*given), before)


@pytest.mark.parametrize(
    ("name", "block"),
    [
        (name, block)
        for name in LAYERS
        for block in ("_sa_block", "_mha_block", "_ff_block")
        if hasattr(getattr(torch.nn, name), block)
    ],
)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("on_instance", [True, False])
def test_overridden_blocks(name: str, block: str, norm_first: bool, on_instance: bool) -> None:
    theirs, ours = pair(name, norm_first=norm_first)

    def wrapped(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: right(*args, **kwargs) * 3 + 1

    for layer in (theirs, ours):
        if on_instance:
            setattr(layer, block, wrapped(getattr(layer, block)))
        else:
            changed = {block: wrapped(getattr(type(layer), block))}
            layer.__class__ = type("Own", (type(layer),), changed)
    attn, padding = mask_names(name)
    hidden = torch.zeros(B, T, dtype=torch.bool)
    hidden[0, 2:] = True
    kwargs = {attn: torch.ones(T, T, dtype=torch.bool).triu(1), padding: hidden}
    theirs.train()  # torch's inference path passes overridden blocks by
    given = inputs(name)
    for training in (True, False):
        ours.train(training)
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(ours(*given, **kwargs), theirs(*given, **kwargs))


def test_an_overridden_block_gets_float_masks() -> None:
    seen: list[Any] = []

    class Own(nn.TransformerEncoderLayer):
        def _sa_block(self, x: Tensor, *masks: Any, **kwargs: Any) -> Tensor:
            seen.extend(masks)
            return super()._sa_block(x, *masks, **kwargs)

    layer = Own(M, H, HIDDEN, batch_first=True)
    padding = torch.zeros(B, T, dtype=torch.bool)
    layer(torch.randn(B, T, M), torch.zeros(T, T, dtype=torch.bool), padding)
    assert [m.dtype for m in seen] == [torch.float32, torch.float32]
