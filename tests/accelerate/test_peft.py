"""accelerate on models whose layers the library peft has wrapped in low-rank adapters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate_checks import M, T, check_training, decoder_layer, encoder
from module_checks import assert_same_numbers
from torch import Tensor

from transformer_fast import accelerate, nn, restore

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.sampled(25)]
peft = pytest.importorskip(
    "peft", reason="peft is not installed (pip install transformer_fast[test])"
)


class Model(torch.nn.Module):
    """A user's model with a torch.nn.TransformerDecoder."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = torch.nn.Linear(M, M)
        self.decoder = torch.nn.TransformerDecoder(decoder_layer(dropout=0.0), 2)
        self.norm = torch.nn.LayerNorm(M)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.decoder(self.inward(x), x))


def _wrapped(model: Any, targets: Any, **kwargs: Any) -> Any:
    torch.manual_seed(5)
    return peft.get_peft_model(
        model, peft.LoraConfig(target_modules=targets, init_lora_weights=False, **kwargs)
    )


def _pair(model: Any, targets: Any, wrapped_first: bool, **kwargs: Any) -> tuple[Any, Any, Any]:
    """Returns (ours, theirs, report), wrapped and accelerated in either order."""
    ours, theirs = copy.deepcopy(model), _wrapped(model, targets, **kwargs)
    if wrapped_first:
        ours = copy.deepcopy(theirs)
        return ours, theirs, accelerate(ours)
    report = accelerate(ours)
    return _wrapped(ours, targets, **kwargs), theirs, report


TARGETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "feed-forward": (["linear1", "linear2"], {}),
    "attention": (["self_attn", "multihead_attn"], {}),
    "everything": (["inward", "linear1", "linear2", "self_attn"], {"bias": "all"}),
    "a norm that is saved": (["linear1"], {"modules_to_save": ["norm"]}),
    "DoRA": (["linear1", "inward"], {"use_dora": True}),
}


@pytest.mark.parametrize("wrapped_first", [True, False])
@pytest.mark.parametrize("name", TARGETS)
def test_wrapped_layers_match_pytorch(name: str, wrapped_first: bool) -> None:
    targets, kwargs = TARGETS[name]
    ours, theirs, report = _pair(Model(), targets, wrapped_first, **kwargs)
    assert [e.kind for e in report.swapped].count("TransformerDecoderLayer") == 2
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = (torch.randn(2, T, M),)
    assert_same_numbers(ours, theirs, x, {}, grad=True)
    assert_same_numbers(ours.eval(), theirs.eval(), x, {}, grad=False)
    with ours.disable_adapter(), theirs.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(ours(*x), theirs(*x))


def test_merging_and_unloading_adapters_take_effect() -> None:
    """Merging writes the weights without incrementing their version counters."""
    ours, theirs, _ = _pair(Model(), ["linear1", "linear2", "self_attn"], True)
    ours.eval(), theirs.eval()
    x = torch.randn(2, T, M)
    with torch.no_grad():
        adapted = ours(x)
        for model in (ours, theirs):
            model.merge_adapter()
        torch.testing.assert_close(ours(x), adapted, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(ours(x), theirs(x))
        for model in (ours, theirs):
            model.unmerge_adapter()
        torch.testing.assert_close(ours(x), theirs(x))
        bare = ours.merge_and_unload()
        torch.testing.assert_close(bare(x), adapted, rtol=1e-3, atol=1e-4)
        again = accelerate(bare)
        assert not again.left
        assert {e.kind for e in again.swapped} == {"MultiheadAttention"}  # wrapped before
        torch.testing.assert_close(bare(x), adapted, rtol=1e-3, atol=1e-4)
    restore(bare)
    assert not any(isinstance(m, nn.MultiheadAttention) for m in bare.modules())


def test_reasons_against_wrapped_modules() -> None:
    model = _wrapped(Model(), ["linear1", "self_attn"])
    report = accelerate(model)
    layer = report["base_model.model.decoder.layers.0"]
    assert layer.in_parts == {"feed_forward": "its linear1 is a Linear of peft"}
    attention = report["base_model.model.decoder.layers.0.self_attn.base_layer"]
    assert attention.reason == (
        "its out_proj is a Linear of peft; PyTorch never calls it, and the replacement would, "
        "which changes results"
    )
    # PyTorch's encoder layers ignore adapters in inference; the replacement must not apply them.
    theirs = _wrapped(encoder(dropout=0.0), ["linear1", "linear2"])
    ours = copy.deepcopy(theirs)
    reason = accelerate(ours)["base_model.model.layers.0"].reason
    assert "in inference PyTorch never calls its linear1 (a Linear of peft)" in reason
    x = (torch.randn(2, T, M),)
    assert_same_numbers(ours, theirs, x, {}, grad=True)
    assert_same_numbers(ours.eval(), theirs.eval(), x, {}, grad=False)


def test_verify_accepts_wrapped_models() -> None:
    assert accelerate(_wrapped(Model(), ["linear1"]), verify=torch.randn(2, T, M)).verified


def test_training_changes_only_adapters() -> None:
    ours, theirs, _ = _pair(Model(), ["linear1", "linear2"], True)
    x = torch.randn(2, T, M)
    frozen = {n: p.clone() for n, p in ours.named_parameters() if not p.requires_grad}
    assert len(frozen) > 20
    loss = lambda model, step: (model(x) - x.roll(1, 1)).square().mean()  # noqa: E731
    check_training(ours, theirs, loss, steps=5, rate=1e-2)
    assert all(torch.equal(p, frozen[n]) for n, p in ours.named_parameters() if n in frozen)


HUGGING_FACE = [
    ("bert", ["query", "value"]),
    ("bert", "all-linear"),
    ("marian", ["q_proj", "v_proj", "fc1"]),
    ("t5", "all-linear"),
]


@pytest.mark.parametrize("wrapped_first", [True, False])
@pytest.mark.parametrize(("name", "targets"), HUGGING_FACE)
def test_wrapped_models_of_transformers_match(name: str, targets: Any, wrapped_first: bool) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from test_hugging_face import First, build, inputs_of

    ours, theirs, report = _pair(build(name, 0.0).train(), targets, wrapped_first)
    assert {e.kind for e in report.left} <= set()
    inputs = inputs_of(name)
    assert_same_numbers(First(ours), First(theirs), (), inputs, grad=True)
    ours.eval(), theirs.eval()
    with torch.no_grad():
        expected = First(theirs.merge_and_unload())(**inputs)
        torch.testing.assert_close(First(ours)(**inputs), expected, rtol=1e-3, atol=1e-3)
        bare = ours.merge_and_unload()
        torch.testing.assert_close(First(bare)(**inputs), expected, rtol=1e-3, atol=1e-3)
    if name != "bert":
        given = {k: v for k, v in inputs.items() if not k.startswith("decoder")}
        tokens = [m.generate(**given, max_new_tokens=6) for m in (bare, theirs.base_model.model)]
        assert torch.equal(*tokens)
    assert restore(bare)
