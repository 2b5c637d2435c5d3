"""Subclasses of transformers' layers and attention: what they override stays theirs, and is told."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from module_ruler import assert_same_numbers
from test_hugging_face import MODELS, Logits, _inputs, transformers
from torch import Tensor

from transformer_fast import accelerate, restore

pytestmark = pytest.mark.filterwarnings("ignore")

from transformers.models.bert import modeling_bert as bert  # noqa: E402
from transformers.models.marian import modeling_marian as marian  # noqa: E402


class Further(marian.MarianEncoderLayer):
    """Overrides nothing."""

    def width(self) -> int:
        return self.embed_dim


class OwnLayer(marian.MarianEncoderLayer):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(hidden_states, *args, **kwargs) * 2


class OwnChunk(bert.BertLayer):
    def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
        return super().feed_forward_chunk(attention_output) * 2


class Sealed(bert.BertOutput):
    def __init_subclass__(cls) -> None:
        raise RuntimeError("sealed")


class OwnAttention(marian.MarianAttention):
    """Adds its mask to the scores by hand, as it gets it."""

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        shape = (*hidden_states.shape[:-1], self.num_heads, self.head_dim)
        q, k, v = (
            project(hidden_states).view(shape).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = q @ k.transpose(2, 3) * self.scaling
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, -1e9)
        elif attention_mask is not None:
            scores = scores + attention_mask
        attended = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.out_proj(attended), None


class NotTheirs(torch.nn.Module):
    """In an attention's place, around the attention that was there or instead of it."""

    def __init__(self, inner: Any, keeps: bool) -> None:
        super().__init__()
        self.project = torch.nn.Linear(32, 32)
        self.inner = inner if keeps else None

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        if self.inner is not None:
            return self.inner(hidden_states, **kwargs)
        return self.project(hidden_states), None


def _same(ours: torch.nn.Module, theirs: torch.nn.Module, name: str) -> None:
    inputs = _inputs(name)
    assert_same_numbers(ours.eval(), theirs.eval(), (), inputs, grad=False)
    assert_same_numbers(ours.train(), theirs.train(), (), inputs, grad=True)


def _with(name: str, place: str, kind: type, eager: bool = False) -> Logits:
    model = Logits(MODELS[name](0.0))
    if eager:
        model.model.set_attn_implementation("eager")
    model.get_submodule(place).__class__ = kind
    return model


LAYER = "model.model.encoder.layers.1"
BERT_LAYER = "model.bert.encoder.layer.0"


@pytest.mark.parametrize(
    ("name", "place", "kind", "reason"),
    [
        ("marian", LAYER, OwnLayer, "OwnLayer has its own forward"),
        ("bert", BERT_LAYER, OwnChunk, "OwnChunk has its own feed_forward_chunk"),
        ("bert", f"{BERT_LAYER}.output", Sealed, "does not let itself be subclassed: sealed"),
    ],
)
def test_layers_that_override(name: str, place: str, kind: type, reason: str) -> None:
    theirs = _with(name, place, kind)
    ours = copy.deepcopy(theirs)
    entry = accelerate(ours)[place]
    assert entry.outcome == "left"
    assert reason in entry.reason
    assert type(ours.get_submodule(place)) is kind
    _same(ours, theirs, name)


def test_layers_that_override_nothing() -> None:
    theirs = _with("marian", LAYER, Further)
    ours = copy.deepcopy(theirs)
    entry = accelerate(ours)[LAYER]
    assert entry.now == "transformer_fast.accelerate.hugging_face.EncoderLayer"
    layer = ours.get_submodule(LAYER)
    assert isinstance(layer, Further)
    assert layer.width() == 32
    _same(ours, theirs, "marian")
    restore(ours)
    assert type(layer) is Further


def test_methods_replaced_on_the_instance() -> None:
    model = MODELS["bert"](0.0)
    layer = model.bert.encoder.layer[0]
    layer.feed_forward_chunk = lambda x: x
    entry = accelerate(model)["bert.encoder.layer.0"]
    assert entry.reason == "its feed_forward_chunk was replaced on the instance"


@pytest.mark.parametrize("eager", [False, True])
def test_attention_that_overrides(eager: bool) -> None:
    """With 'eager' its masks would change their form, so the whole model's attention stays."""
    place = f"{LAYER}.self_attn"
    theirs = _with("marian", place, OwnAttention, eager)
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    assert report[place].reason == (
        "OwnAttention has its own forward; only what that hands on to MarianAttention.forward "
        "runs on transformer_fast"
    )
    whole = report["model"]
    if eager:
        assert whole.outcome == "left"
        assert f"the attention {place} inside is not transformers' own" in whole.reason
        assert report["model.model.decoder"].outcome == "left"  # shares the config
        assert ours.model.config._attn_implementation == "eager"
    else:
        assert whole.outcome == "swapped"
    assert report[LAYER].outcome == "swapped"
    _same(ours, theirs, "marian")


@pytest.mark.parametrize("keeps", [False, True])
def test_modules_in_an_attentions_place(keeps: bool) -> None:
    theirs = Logits(MODELS["marian"](0.0))
    layer = theirs.get_submodule(LAYER)
    layer.self_attn = NotTheirs(layer.self_attn, keeps)
    theirs.model.set_attn_implementation("eager")
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    if keeps:
        assert report["model"].outcome == "swapped"
    else:
        assert "NotTheirs is no attention of transformers" in report["model"].reason
        assert "NotTheirs is no attention" in report[f"{LAYER}.self_attn"].reason
    _same(ours, theirs, "marian")


def test_forward_of_an_attention_replaced_on_the_instance() -> None:
    model = MODELS["t5"](0.0)
    attention = model.encoder.block[0].layer[0].SelfAttention
    attention.forward = attention.forward
    report = accelerate(model)
    place = "encoder.block.0.layer.0.SelfAttention"
    assert report[place].reason.startswith("its forward was replaced on the instance")


def test_other_configs_are_not_concerned() -> None:
    """T5's encoder and decoder have configs of their own: one can stay 'eager' alone."""
    theirs = MODELS["t5"](0.0)
    theirs.set_attn_implementation("eager")
    attention = theirs.encoder.block[0].layer[0].SelfAttention
    kind = type(attention)
    own = {"forward": lambda self, *args, **kwargs: kind.forward(self, *args, **kwargs)}
    attention.__class__ = type("Own", (kind,), own)
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    assert report["encoder"].outcome == "left"
    assert report["decoder"].outcome == "swapped"
    _same(Logits(ours), Logits(theirs), "t5")


def test_what_the_layers_run_on_is_told() -> None:
    for name, ops in (
        ("marian", {"add_layer_norm", "feed_forward"}),
        ("bert", {"add_layer_norm", "feed_forward", "attention", "layer_norm"}),
        ("t5", {"feed_forward", "attention"}),
    ):
        entries = accelerate(MODELS[name](0.1)).swapped
        layers = [e for e in entries if "hugging_face" in e.now]
        if name == "marian":
            assert all(set(e.inference) == set(e.training) == ops for e in layers)
        assert {op for e in entries for op in e.training} == ops | (
            {"attention", "layer_norm"} if name == "marian" else set()
        )


def test_kernels_that_do_not_exist_are_told() -> None:
    report = accelerate(MODELS["t5, gated"](0.0))
    assert "no kernel for gated feed-forward networks" in str(report)
    assert "no kernel for norms without a mean" in str(report)
    assert transformers.T5ForConditionalGeneration.__name__ == report[""].kind
