"""accelerate and restore: the same numbers, the same parameters, and back again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate_ruler import (
    MODELS,
    M,
    TextModel,
    encoder,
    encoder_layer,
    tokens,
)
from module_ruler import assert_same_numbers

import transformer_fast
from transformer_fast import accelerate, accelerated, nn, restore
from transformer_fast.nn import multihead_attention
from transformer_fast.nn.swapped import RECORD

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


def _types(model: torch.nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


@pytest.mark.parametrize("mode", ["inference", "evaluation", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_numbers(name: str, mode: str) -> None:
    theirs, args, kwargs = MODELS[name]()
    theirs.train(mode == "training")
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    assert report.swapped
    assert not report.left
    assert_same_numbers(ours, theirs, args, kwargs, grad=mode != "inference")


@pytest.mark.parametrize("name", MODELS)
def test_restore_leaves_nothing_behind(name: str) -> None:
    model, args, kwargs = MODELS[name]()
    model.eval()
    types, names = _types(model), [set(m.__dict__) for m in model.modules()]
    parameters = list(model.parameters())
    with torch.no_grad():
        before = model(*args, **kwargs)
    report = accelerate(model)
    assert _types(model) != types
    assert restore(model) == [entry.name for entry in report.swapped]
    assert _types(model) == types
    assert [set(m.__dict__) for m in model.modules()] == names
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    with torch.no_grad():
        after = model(*args, **kwargs)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert restore(model) == []


def test_everything_but_the_class_stays() -> None:
    model = TextModel()
    parameters, state = list(model.parameters()), list(model.state_dict())
    names, shown = [n for n, _ in model.named_modules()], repr(model)
    calls: list[str] = []
    layer = model.transformer.encoder.layers[0]
    layer.register_forward_hook(lambda *_: calls.append("layer"))
    layer.linear1.register_forward_hook(lambda *_: calls.append("linear1"))
    layer.norm2.register_full_backward_hook(lambda *_: calls.append("norm2 backward"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    accelerate(model)
    assert type(layer) is nn.TransformerEncoderLayer
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == state
    assert [n for n, _ in model.named_modules()] == names
    assert repr(model) == shown
    before = [p.detach().clone() for p in model.parameters()]
    model(*tokens()).square().sum().backward()
    optimizer.step()
    assert calls == ["linear1", "layer", "norm2 backward"]
    moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    assert sum(moved) == len(moved)
    accelerate(model)
    TextModel().load_state_dict(model.state_dict(), strict=True)


def test_training_goes_the_same_way() -> None:
    torch.manual_seed(0)
    theirs = TextModel(dropout=0.0)
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    source, target = tokens()
    losses = []
    for model in (theirs, ours):
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        losses.append([])
        for step in range(6):
            if step == 3 and model is ours:  # in the middle of training, there and back
                restore(model)
                accelerate(model)
            logits = model(source, target)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_twice_is_once() -> None:
    model = TextModel()
    first = accelerate(model)
    types = _types(model)
    second = accelerate(model)
    assert _types(model) == types
    assert not second.swapped
    assert [e.name for e in second.already] == [e.name for e in first.swapped]
    assert len(restore(model)) == len(first.swapped)
    assert not any(isinstance(m, (nn.LayerNorm, nn.Transformer)) for m in model.modules())


def test_modules_built_as_ours_are_not_restored() -> None:
    model = torch.nn.Sequential(nn.LayerNorm(M), torch.nn.LayerNorm(M))
    report = accelerate(model)
    assert [e.name for e in report.already] == ["0"]
    assert restore(model) == ["1"]
    assert _types(model)[1:] == [nn.LayerNorm, torch.nn.LayerNorm]


def test_a_layer_given_by_the_user_and_shared_modules() -> None:
    norm = torch.nn.LayerNorm(M)
    model = torch.nn.Sequential(norm, torch.nn.ReLU(), norm)
    assert len(accelerate(model).swapped) == 1
    assert len(restore(model)) == 1
    assert type(norm) is torch.nn.LayerNorm


def test_filter() -> None:
    model = TextModel()
    seen: dict[str, torch.nn.Module] = {}

    def choose(module: torch.nn.Module, name: str) -> bool:
        seen[name] = module
        return name.startswith("transformer.decoder")

    report = accelerate(model, filter_fn=choose)
    assert seen["transformer.encoder"] is model.transformer.encoder
    assert {e.name.split(".")[1] for e in report.swapped} == {"decoder"}
    assert {e.reason for e in report.left} == {"filter_fn said no"}
    assert type(model.transformer.encoder) is torch.nn.TransformerEncoder
    assert isinstance(model.transformer.decoder, nn.TransformerDecoder)


def test_accelerated_is_a_block() -> None:
    model = encoder()
    types = _types(model)
    with accelerated(model) as report:
        assert report.swapped
        assert isinstance(model, nn.TransformerEncoder)
    assert _types(model) == types
    with pytest.raises(TypeError, match="forward"), accelerated(model):
        model()
    assert _types(model) == types
    accelerate(model, filter_fn=lambda module, name: name == "norm")
    with accelerated(model):
        assert isinstance(model, nn.TransformerEncoder)
    assert type(model) is torch.nn.TransformerEncoder
    assert type(model.norm) is nn.LayerNorm  # it was ours before the block


class Counter:
    """Counts the calls of the attention op behind the modules."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        right = multihead_attention.attend

        def attend(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return right(*args, **kwargs)

        monkeypatch.setattr(multihead_attention, "attend", attend)


def test_torchs_inference_path_does_not_go_past_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """In inference torch's layers never call their attention: they have to be swapped too."""
    counter = Counter(monkeypatch)
    x = torch.randn(2, 5, M)
    with torch.no_grad(), transformer_fast.use_backend("reference"):
        layer = encoder_layer().eval()
        expected = layer(x)
        report = accelerate(layer, filter_fn=lambda module, name: name == "self_attn")
        assert "does not call self_attn" in str(report)
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
        assert counter.calls == 0
        accelerate(layer)
        torch.testing.assert_close(layer(x), expected)
        assert counter.calls == 1


def test_the_report() -> None:
    model = encoder()
    report = accelerate(model)
    entry = report["layers.0"]
    assert (entry.kind, entry.outcome) == ("TransformerEncoderLayer", "swapped")
    assert entry.now == "transformer_fast.nn.TransformerEncoderLayer"
    q = torch.empty(1, 4, 1, 4)
    found = report["layers.0.self_attn"]
    assert found.inference["attention"] == transformer_fast.explain("attention", q, q, q)
    assert set(entry.inference) == set(entry.training) == {"add_layer_norm", "feed_forward"}
    for op, training in entry.training.items():
        if training.backend == "reference":
            assert "not 'cpu'" in entry.why_not()[f"{op}, training"]
    assert "layers.0 and 1 more: TransformerEncoderLayer runs as" in str(report)
    with pytest.raises(KeyError, match="no module 'x'"):
        report["x"]


def test_the_report_does_not_draw_random_numbers() -> None:
    model = encoder(dropout=0.3)
    state = torch.get_rng_state()
    accelerate(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_to_do_is_told() -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.zeros(2))

    report = accelerate(torch.nn.Sequential(Own(), torch.nn.ReLU()))
    assert not report.entries
    assert "It is built of Own" in str(report)
    assert 'backend="transformer_fast"' in str(report)


def test_import_is_light_and_the_name_is_the_function() -> None:
    import subprocess
    import sys

    code = (
        "import sys, transformer_fast, transformer_fast.accelerate.report\n"
        "assert callable(transformer_fast.accelerate)\n"
        "from transformer_fast.accelerate import Report\n"
        "assert callable(transformer_fast.accelerate)\n"
        "assert not {'transformer_fast.nn', 'transformers', 'torch._dynamo'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("wrong", [None, {}, torch.nn.LayerNorm, torch.zeros(2)])
def test_not_a_module(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not"):
        accelerate(wrong)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not"):
        restore(wrong)


def test_a_record_is_no_state() -> None:
    model = encoder()
    accelerate(model)
    assert not any(RECORD in key for key in model.state_dict())
