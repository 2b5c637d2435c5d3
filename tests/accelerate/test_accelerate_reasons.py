"""Nothing is left as it was in silence: the report names it and says why."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate_ruler import B, F, H, M, T, decoder_layer, encoder_layer
from module_ruler import assert_same_numbers
from torch import Tensor

from transformer_fast import accelerate, nn
from transformer_fast.accelerate import register_converter


def _x() -> Tensor:
    return torch.randn(B, T, M)


class OwnMix(torch.nn.Module):
    """A mixin in front of torch's class counts like an override."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) * 2


class MixedNorm(OwnMix, torch.nn.LayerNorm):
    pass


class OwnEncoder(torch.nn.TransformerEncoder):
    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(src + 1, *args, **kwargs)


class OwnDecoder(torch.nn.TransformerDecoder):
    def forward(self, tgt: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(tgt + 1, *args, **kwargs)


class OwnTransformer(torch.nn.Transformer):
    def forward(self, src: Tensor, tgt: Tensor, **kwargs: Any) -> Tensor:
        return super().forward(src, tgt, **kwargs) * 2


class OwnCross(torch.nn.TransformerDecoderLayer):
    def _mha_block(self, *args: Any, **kwargs: Any) -> Tensor:
        return super()._mha_block(*args, **kwargs) * 2


class OwnAttention(torch.nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(*args, **kwargs)
        return output * 2, weights


def _encoder() -> torch.nn.Module:
    return OwnEncoder(encoder_layer(dropout=0.0), 2, enable_nested_tensor=False)


def _layer_with_own_attention() -> torch.nn.Module:
    layer = encoder_layer(dropout=0.0)
    layer.self_attn.__class__ = OwnAttention
    return layer


SUBCLASSES: dict[str, tuple[Any, int, str, str]] = {
    "norm": (lambda: MixedNorm(M), 1, "", "MixedNorm has its own forward"),
    "encoder": (_encoder, 1, "", "OwnEncoder has its own forward"),
    "decoder": (
        lambda: OwnDecoder(decoder_layer(dropout=0.0), 2), 2, "", "OwnDecoder has its own forward"
    ),
    "transformer": (
        lambda: OwnTransformer(M, H, 1, 1, F, 0.0, batch_first=True), 2, "",
        "OwnTransformer has its own forward",
    ),
    "cross": (
        lambda: OwnCross(M, H, F, 0.0, batch_first=True), 2, "", "OwnCross has its own _mha_block"
    ),
    "attention": (
        _layer_with_own_attention, 1, "self_attn", "OwnAttention has its own forward"
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("name", SUBCLASSES)
def test_subclasses_keep_what_they_override(name: str) -> None:
    make, inputs, place, reason = SUBCLASSES[name]
    theirs = make()
    ours = copy.deepcopy(theirs)
    kind = type(ours.get_submodule(place))
    report = accelerate(ours)
    assert report[place].outcome == "left"
    assert report[place].reason == reason
    assert type(ours.get_submodule(place)) is kind
    args = tuple(_x() for _ in range(inputs))
    assert_same_numbers(ours.train(), theirs.train(), args, {}, grad=True)
    assert_same_numbers(ours.eval(), theirs.eval(), args, {}, grad=False)


class OwnOfOurs(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return input


def test_subclasses_of_ours_that_override() -> None:
    model = torch.nn.Sequential(OwnOfOurs(M), nn.LayerNorm(M), nn.LayerNorm(M))
    model[1].forward = lambda x: x
    report = accelerate(model)
    assert report["0"].reason == "OwnOfOurs has its own forward"
    assert report["1"].reason == "its forward was replaced on the instance"
    assert report["2"].outcome == "already"


class Low(torch.nn.Linear):
    pass


def _hooked(module: torch.nn.Module, path: str) -> None:
    module.get_submodule(path).register_forward_hook(lambda *_: None)


def _replace(layer: Any, what: str) -> None:
    if what == "subclass":
        layer.linear2.__class__ = Low
    elif what == "hook":
        _hooked(layer, "linear1")
    elif what == "forward":
        layer.dropout.forward = lambda x: x
    elif what == "compiled":
        layer.linear1.compile(backend="eager")
    elif what == "norm":
        layer.norm2 = torch.nn.Identity()


@pytest.mark.parametrize(
    ("what", "op", "reason"),
    [
        ("subclass", "feed_forward", "its linear2 is a Low"),
        ("hook", "feed_forward", "its linear1 has hooks"),
        ("forward", "feed_forward", "the forward of its dropout was replaced on the instance"),
        ("compiled", "feed_forward", "its linear1 is compiled on its own"),
        ("function", "feed_forward", "its activation is tanh, which no kernel has"),
        ("module", "feed_forward", "its activation is a Tanh, which no kernel has"),
        ("norm", "add_layer_norm", "its norm2 is an Identity"),
    ],
)
@pytest.mark.parametrize("make", [encoder_layer, decoder_layer])
def test_what_a_swapped_layer_calls_in_parts(make: Any, what: str, op: str, reason: str) -> None:
    activation = {"function": torch.tanh, "module": torch.nn.Tanh()}.get(what, "relu")
    layer = make(dropout=0.0, activation=activation)
    _replace(layer, what)
    entry = accelerate(layer)[""]
    assert entry.outcome == "swapped"
    assert entry.in_parts == {op: reason}
    assert f"{op} in parts: {reason}" in str(entry)


class Double(torch.nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("name", ["linear1", "norm2", "self_attn", "activation", "forward"])
def test_what_torchs_inference_path_skips(name: str) -> None:
    """Torch's layer has other numbers in inference then; so they stay the same in both modes."""
    theirs = encoder_layer(dropout=0.0)
    if name == "linear1":
        theirs.linear1.__class__ = Double
    elif name == "norm2":
        theirs.norm2.__class__ = MixedNorm
    elif name == "self_attn":
        theirs.self_attn.__class__ = OwnAttention
    elif name == "activation":
        theirs.activation = torch.nn.functional.gelu
    else:
        name, forward = "linear2", theirs.linear2.forward
        theirs.linear2.forward = lambda x: 2 * forward(x)
    theirs.eval()
    x = _x()
    with torch.no_grad():
        fast = theirs(x)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert not torch.allclose(theirs(x), fast, atol=1e-2)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        ours = copy.deepcopy(theirs) if name != "linear2" else theirs
        report = accelerate(ours)
        torch.testing.assert_close(ours(x), fast)
    assert f"never calls its {name}" in report[""].reason
    assert "and ours would: the numbers would change" in report[""].reason
    assert report["norm1"].outcome == "swapped"


def test_hooks_on_all_modules() -> None:
    layer = encoder_layer()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        told = accelerate(layer)[""].in_parts
    finally:
        handle.remove()
    assert set(told.values()) == {"there are hooks on all modules of this process"}


class HandWritten(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = torch.nn.Linear(M, M), torch.nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        return self.query(x) + self.key(x)


class Further(HandWritten):
    pass


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = torch.nn.LayerNorm(M), torch.nn.Linear(M, 2)
        self.attentions = torch.nn.ModuleList(HandWritten() for _ in range(3))


def test_modules_of_unknown_classes_are_named() -> None:
    told = str(accelerate(Model()))
    assert "does not know, and as they were: 3 HandWritten. For attention written by hand" in told
    assert "as they were" not in "".join(accelerate(encoder_layer()).notes)
    assert "It is built of HandWritten." in str(accelerate(HandWritten()))


@pytest.fixture
def registry() -> Iterator[None]:
    yield
    register_converter(HandWritten, None)


@pytest.mark.usefixtures("registry")
def test_a_converter_is_for_one_class() -> None:
    class Fast(HandWritten):
        pass

    register_converter(HandWritten, Fast)
    entry = accelerate(torch.nn.Sequential(Further()))["0"]
    assert entry.reason == (
        "a converter is registered for HandWritten, and not for its subclass Further"
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_inside_a_model() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(M), torch.jit.script(torch.nn.LayerNorm(M)))
    report = accelerate(model)
    assert [e.name for e in report.swapped] == ["0"]
    assert "A TorchScript module (1) cannot be changed" in str(report)
