"""accelerate, restore and accelerated: replaced modules, equal results, the report, and verify."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate_checks import (
    MODELS,
    B,
    M,
    T,
    TextModel,
    check_training,
    check_without_this_library,
    encoder,
    encoder_layer,
    form,
    tokens,
)
from harness import python, spied
from module_checks import assert_same_numbers, check_budget
from torch import Tensor

import transformer_fast
from transformer_fast import accelerate, accelerated, nn, restore
from transformer_fast.accelerate import register_converter
from transformer_fast.nn import multihead_attention
from transformer_fast.nn.drop_in import RECORD
from transformer_fast.testing import GRADIENT_FACTOR

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


def _types(model: torch.nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


@pytest.mark.parametrize("mode", ["inference", "evaluation", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_match_pytorch(name: str, mode: str) -> None:
    theirs, args, kwargs = MODELS[name]()
    theirs.train(mode == "training")
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    assert report.swapped
    assert not report.left
    assert_same_numbers(ours, theirs, args, kwargs, grad=mode != "inference")


@pytest.mark.parametrize("name", MODELS)
def test_restore_undoes_every_change(name: str) -> None:
    model, args, kwargs = MODELS[name]()
    model.eval()
    before_all, parameters = form(model), list(model.parameters())
    with torch.no_grad():
        before = model(*args, **kwargs)
    report = accelerate(model)
    assert form(model) != before_all
    assert restore(model) == [entry.name for entry in report.swapped]
    assert form(model) == before_all
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    with torch.no_grad():
        after = model(*args, **kwargs)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert restore(model) == []


def test_parameters_hooks_and_names_are_preserved() -> None:
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


def test_training_losses_match_pytorch() -> None:
    torch.manual_seed(0)
    theirs = TextModel(dropout=0.0)
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    source, target = tokens()

    def loss(model: torch.nn.Module, step: int) -> Tensor:
        if step == 3 and model is ours:  # restore and accelerate again in the middle of training
            restore(model)
            accelerate(model)
        logits = model(source, target)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    check_training(ours, theirs, loss)


def test_accelerating_twice_changes_nothing() -> None:
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


def _written_layers() -> torch.nn.Module:
    """Returns two layers of new classes."""

    class Norm(torch.nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    class Projection(torch.nn.Linear):
        pass

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Projection(M, 48), Projection(48, M)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x)))  # type: ignore[no-any-return]

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = torch.nn.Linear(M, 3 * M)
            self.out, self.network = torch.nn.Linear(M, M), Network()
            self.norm1, self.norm2 = Norm(M), torch.nn.LayerNorm(M)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(self.norm1(x)).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + self.out(y)
            return x + self.network(self.norm2(x))  # type: ignore[no-any-return]

    return torch.nn.Sequential(Layer(), Layer())


def test_classes_are_deleted_after_restore() -> None:
    """No cache holds a user's class, or a class that `accelerate` made from it."""
    model, x = _written_layers(), torch.randn(2, T, M)
    classes = [weakref.ref(type(m)) for m in model.modules() if type(m).__module__ == __name__]
    assert len(accelerate(model).swapped) > 6
    classes += [weakref.ref(type(m)) for m in model.modules() if RECORD in vars(type(m))]
    with torch.no_grad():
        for _ in range(4):
            model(x)
    model(x).sum().backward()
    restore(model)
    assert len(classes) > 12
    del model
    for _ in range(3):  # a class is deleted after its subclasses
        gc.collect()
    assert [kind() for kind in classes] == [None] * len(classes)


def test_shared_modules_are_replaced_once() -> None:
    norm = torch.nn.LayerNorm(M)
    model = torch.nn.Sequential(norm, torch.nn.ReLU(), norm)
    assert len(accelerate(model).swapped) == 1
    assert len(restore(model)) == 1
    assert type(norm) is torch.nn.LayerNorm


def test_filter_fn_selects_modules() -> None:
    model = TextModel()
    seen: dict[str, torch.nn.Module] = {}

    def choose(module: torch.nn.Module, name: str) -> bool:
        seen[name] = module
        return name.startswith("transformer.decoder")

    report = accelerate(model, filter_fn=choose)
    assert seen["transformer.encoder"] is model.transformer.encoder
    assert {e.name.split(".")[1] for e in report.swapped} == {"decoder"}
    assert {e.reason for e in report.left} == {"filter_fn excludes it"}
    assert type(model.transformer.encoder) is torch.nn.TransformerEncoder
    assert isinstance(model.transformer.decoder, nn.TransformerDecoder)


def test_accelerated_restores_after_the_block() -> None:
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
    assert type(model.norm) is nn.LayerNorm  # replaced before the block


def test_replaced_layers_call_our_attention_in_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    """In inference PyTorch's layers never call their attention, so the layers have to be replaced
    too.
    """
    calls = spied(monkeypatch, multihead_attention, "attend", lambda *args, **_: args)
    x = torch.randn(2, 5, M)
    with torch.no_grad(), transformer_fast.use_backend("reference"):
        layer = encoder_layer().eval()
        expected = layer(x)
        report = accelerate(layer, filter_fn=lambda module, name: name == "self_attn")
        assert "does not call self_attn" in str(report)
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
        assert not calls
        accelerate(layer)
        torch.testing.assert_close(layer(x), expected)
        assert len(calls) == 1


def test_the_report_names_classes_and_backends() -> None:
    model = encoder()
    report = accelerate(model)
    entry = report["layers.0"]
    assert (entry.kind, entry.outcome) == ("TransformerEncoderLayer", "swapped")
    assert entry.now == "transformer_fast.nn.TransformerEncoderLayer"
    q = torch.empty(8, 4, 512, 4)
    assert "Backends are for 8 sequences of 512 tokens" in str(report)
    found = report["layers.0.self_attn"]
    assert found.inference["attention"] == transformer_fast.explain("attention", q, q, q)
    assert set(entry.inference) == set(entry.training) == {"add_layer_norm", "feed_forward"}
    for op, training in entry.training.items():
        if training.backend == "reference":
            assert "not 'cpu'" in entry.why_not()[f"{op}, training"]
    assert "layers.0 and 1 more: TransformerEncoderLayer replaced by" in str(report)
    with pytest.raises(KeyError, match="no module 'x'"):
        report["x"]


def test_the_report_gives_the_share_of_replaced_weights() -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(100, 64)
            self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64, bias=False)
            self.second.weight = self.first.weight
            self.position = torch.nn.Parameter(torch.zeros(1, 50, 64))
            self.project = torch.nn.Parameter(torch.zeros(64, 192))
            self.encoder = encoder()

    model = Own()
    inside = sum(p.numel() for p in model.encoder.parameters() if p.dim() > 1)
    report = accelerate(model)
    assert (report.weights_swapped, report.weights_left) == (64 * 64 + inside, {"Own": 64 * 192})
    assert f"Own holds {64 * 192 / (64 * 256 + inside):.0%}." in str(report)
    restore(model)
    report = accelerate(model, filter_fn=lambda _, name: name in ("encoder", "encoder.layers.0"))
    assert report.weights_swapped == 2 * model.encoder.layers[0].linear1.weight.numel()
    assert "Most of the model's matrix multiplications are unchanged" in str(report)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_weights_and_failing_parameters_are_not_counted() -> None:
    class Own(torch.nn.TransformerEncoderLayer):
        def parameters(self) -> Any:  # type: ignore[override]
            raise NotImplementedError

    class Wide(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    layer = Own(8, 2, 16)
    layer.linear1 = Wide(8, 16)
    Wide.__module__ = "somewhere"
    report = accelerate(torch.nn.Sequential(torch.nn.LazyLinear(8), layer))
    assert report.weights_left == {"Wide": 8 * 16}


def test_unrecognised_models_are_reported() -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.zeros(2))

    report = accelerate(torch.nn.Sequential(Own(), torch.nn.ReLU()))
    assert not report.entries
    assert "It consists of Own" in str(report)
    assert 'backend="transformer_fast"' in str(report)


def test_import_loads_no_modules_and_accelerate_is_a_function() -> None:
    python(
        "-c",
        "import sys, transformer_fast, transformer_fast.accelerate.report\n"
        "assert callable(transformer_fast.accelerate)\n"
        "from transformer_fast.accelerate import Report\n"
        "assert callable(transformer_fast.accelerate)\n"
        "assert transformer_fast.accelerate.Report is Report\n"
        "assert not {'transformer_fast.nn', 'transformers', 'torch._dynamo'} & set(sys.modules)\n"
        "from torch.nn import attention\n"  # enable_sdpa has not run
        "assert attention.current_flash_attention_impl() is None\n"
        "assert 'transformer_fast' not in attention.list_flash_attention_impls()\n",
    )


@pytest.mark.parametrize("wrong", [None, {}, torch.nn.LayerNorm, torch.zeros(2)])
def test_other_types_than_modules_raise(wrong: Any) -> None:
    with pytest.raises(
        TypeError, match=r"filter_fn must be a function of \(module, name\), not str"
    ):
        accelerate(nn.Linear(2, 2), filter_fn="layers")
    with pytest.raises(TypeError, match=r"calibration must be a tuple"):
        accelerate(nn.Linear(2, 2), quantize="int8", calibration="text")
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not"):
        accelerate(wrong)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not"):
        restore(wrong)


@pytest.mark.parametrize("name", MODELS)
def test_verify_accepts_our_modules(name: str) -> None:
    model, args, kwargs = MODELS[name]()
    wrapped = Wrapped(model)
    report = accelerate(wrapped, verify={"args": args, "kwargs": kwargs})
    assert report.verified
    assert not report.notes
    assert report.swapped


class Wrapped(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, args: Any, kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def _flipped_padding(self: Any, src: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
    if src_key_padding_mask is not None:
        src_key_padding_mask = src_key_padding_mask.logical_not()
    theirs = torch.nn.TransformerEncoderLayer.forward
    return theirs(self, src, src_key_padding_mask=src_key_padding_mask)


_norm = torch.nn.LayerNorm.forward
#: Wrong forwards, and the start of the report's sentence about each.
WRONG: dict[str, tuple[Callable[..., Tensor], str]] = {
    "numbers": (lambda self, input: _norm(self, input) * (1 + 1e-4), "in inference, the output"),
    "gradients": (
        lambda self, input: (
            _norm(self, input) + (_norm(self, 2 * input) - _norm(self, 2 * input).detach())
        ),
        "in evaluation, the gradient of",
    ),
    "training": (
        lambda self, input: _norm(self, -input if self.training else input),
        "in training, the output",
    ),
    "inference": (
        lambda self, input: _norm(self, input if torch.is_grad_enabled() else -input),
        "in inference, the output",
    ),
    "padding": (_flipped_padding, "with padding added to a call of layer, the output"),
}


@pytest.mark.parametrize("name", WRONG)
def test_verify_restores_after_wrong_conversions(name: str) -> None:
    forward, expected = WRONG[name]
    base = torch.nn.TransformerEncoderLayer if name == "padding" else torch.nn.LayerNorm
    model = torch.nn.Sequential()
    model.layer = encoder_layer(dropout=0.1)
    before = form(model)
    register_converter(base, type("Wrong", (base,), {"forward": forward}))
    with pytest.warns(UserWarning, match="restored the model: .* leave modules out") as warned:
        report = accelerate(model, verify=torch.randn(B, T, M))
    with pytest.warns(UserWarning, match="restored") as more:
        accelerated(model, verify=torch.randn(B, T, M)).__enter__()
    assert {warning.filename for warning in (*warned, *more)} == {__file__}
    assert report.verified is False
    assert f"{expected} " in str(report)
    assert "differs from the original's by" in str(report)
    assert "more than the" in str(report)
    assert "compile" not in str(report)  # advice for unrecognised modules
    assert not report.swapped
    assert "the model was restored" in report["layer.norm1"].reason
    assert form(model) == before


class Summed(torch.nn.Module):
    """The gradient of its LayerNorm's bias is a long sum of equal numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(M)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).sum()


@pytest.mark.parametrize(
    ("model", "rows", "dtype"),
    [
        (torch.nn.Sequential(torch.nn.Linear(M, M), torch.nn.LayerNorm(M)), 2048, torch.float32),
        (Summed(), 8192, torch.bfloat16),  # PyTorch's bfloat16 sum stops growing
    ],
)
def test_verify_accepts_more_exact_sums(
    model: torch.nn.Module, rows: int, dtype: torch.dtype
) -> None:
    report = accelerate(copy.deepcopy(model).to(dtype), verify=torch.randn(rows, M).to(dtype))
    assert report.verified, str(report)


class Nearby(torch.nn.Linear):
    """Its sums differ by a rounding step."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + torch.finfo(input.dtype).eps


def test_verify_accepts_units_that_round_to_the_other_side_of_0() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.ReLU())
    torch.nn.init.ones_(model[0].weight)
    register_converter(torch.nn.Linear, Nearby)
    report = accelerate(model, verify=torch.tensor([[1.0, -1.0], [1.0, 2.0]]))
    assert report.verified, str(report)


class Eventful(torch.nn.Module):
    """Has state that verify must not change: buffers that every call updates, dropout, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.text = TextModel(dropout=0.3)
        self.batch_norm = torch.nn.BatchNorm1d(11)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.batch_norm(self.text(source, target).flatten(0, 1))


def test_verify_leaves_no_trace() -> None:
    model = Eventful()
    model.batch_norm.eval()
    for p in model.text.head.parameters():
        p.grad = torch.ones_like(p)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    training = [m.training for m in model.modules()]
    source, target = tokens()
    random = torch.get_rng_state()
    given = source.clone(), target.clone()
    report = accelerate(model, verify=(source, target))
    assert report.verified
    assert torch.equal(torch.get_rng_state(), random)
    assert [m.training for m in model.modules()] == training
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.text.head.parameters())
    assert all(p.grad is None for p in model.text.transformer.parameters())
    assert torch.equal(source, given[0])
    assert torch.equal(target, given[1])
    assert model.text.transformer.encoder.layers[0].dropout.p == 0.3
    assert model.text.transformer.encoder.layers[0].self_attn.dropout == 0.3
    assert torch.backends.mha.get_fastpath_enabled()


def test_verify_skips_train_mode_of_random_models() -> None:
    class Noisy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(M)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + torch.randn_like(x)) if self.training else self.norm(x)

    report = accelerate(Noisy(), verify=torch.randn(2, M))
    assert report.verified
    assert "random numbers in train mode" in report.notes[0]


def test_verify_ignores_fully_masked_rows() -> None:
    attention = torch.nn.MultiheadAttention(M, 4, batch_first=True)
    mask = torch.zeros(B, T, dtype=torch.bool)
    mask[1] = True
    x = torch.randn(B, T, M)
    example = {"query": x, "key": x, "value": x, "key_padding_mask": mask}
    assert attention(**example)[0].isnan().any()
    assert accelerate(attention, verify=example).verified
    assert not attention(**example)[0].isnan().any()


def test_verify_rejects_inputs_that_give_only_nan() -> None:
    norm = torch.nn.LayerNorm(M)
    with pytest.warns(UserWarning, match="NaN or infinite everywhere.* Pass inputs"):
        report = accelerate(norm, verify=torch.full((2, M), torch.nan))
    assert report.verified is False


def test_errors_in_verify_propagate_and_restore_the_model() -> None:
    model = TextModel()
    with pytest.raises(IndexError):
        accelerate(model, verify=tuple(torch.full((1, 3), 99) for _ in range(2)))
    with pytest.raises(TypeError, match="verify must be a tuple of positional arguments"):
        accelerate(model, verify=3)
    assert not any(isinstance(m, (nn.LayerNorm, nn.Transformer)) for m in model.modules())
    assert all(m.training for m in model.modules())


def test_verify_in_bfloat16_and_under_autocast() -> None:
    layer = encoder_layer(dropout=0.0).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert accelerate(layer, verify=torch.randn(2, 5, M, dtype=torch.bfloat16)).verified
        with torch.autocast("cpu", torch.bfloat16):
            assert accelerate(encoder_layer(), verify=torch.randn(2, 5, M)).verified


class Sub(torch.nn.LayerNorm):
    """A user's subclass; its replacement is a class made at run time."""


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy])
def test_copies_are_accelerated(how: Any) -> None:
    model = torch.nn.Sequential(encoder_layer(), Sub(M))
    accelerate(model)
    again = how(model)
    assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
    if how is copy.deepcopy:
        assert all(p is not q for p, q in zip(again.parameters(), model.parameters(), strict=True))
        assert restore(again) == ["0", "0.self_attn", "0.norm1", "0.norm2", "1"]
        assert type(again[1]) is Sub
        # the original is independent of the copy
        assert type(model[0]) is nn.TransformerEncoderLayer
    one = how(model[0])
    assert type(one) is nn.TransformerEncoderLayer
    assert one.__dict__[RECORD] == model[0].__dict__[RECORD]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_hold_the_original_model(protocol: int) -> None:
    model = torch.nn.Sequential(encoder_layer(), Sub(M)).eval()
    types = [type(m) for m in model.modules()]
    accelerate(model)
    again = pickle.loads(pickle.dumps(model, protocol))
    assert [type(m) for m in again.modules()] == types
    assert not any(RECORD in m.__dict__ for m in again.modules())
    assert restore(again) == []
    assert not again[0].training
    assert_same_numbers(again, model, (torch.randn(2, 3, M),), {}, grad=False)
    accelerate(again)
    assert type(again[0]) is nn.TransformerEncoderLayer


@pytest.mark.thorough
def test_pickles_load_without_this_library(tmp_path: Path) -> None:
    model = torch.nn.Sequential(encoder_layer(), torch.nn.LayerNorm(M)).eval()
    accelerate(model)
    check_without_this_library([(model, {"input": torch.randn(2, 3, M)})], tmp_path)


@pytest.mark.parametrize("compiled_first", [True, False])
def test_compiled_models(compiled_first: bool) -> None:
    torch.compiler.reset()
    theirs = encoder_layer(dropout=0.0)
    ours = copy.deepcopy(theirs)
    x = torch.randn(2, 5, M)
    compiled = torch.compile(ours, backend="eager")
    if compiled_first:
        compiled(x)
    report = accelerate(compiled if compiled_first else ours)
    assert report.swapped
    assert type(ours) is nn.TransformerEncoderLayer
    assert_same_numbers(compiled, theirs, (x,), {}, grad=True)
    restore(compiled)
    assert type(ours) is torch.nn.TransformerEncoderLayer
    assert_same_numbers(compiled, theirs, (x,), {}, grad=True)


def test_models_traced_by_fx() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = encoder_layer(dropout=0.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * 2

    theirs = Model()
    traced = torch.fx.symbolic_trace(theirs)
    report = accelerate(traced)
    assert report["layer"].outcome == "swapped"
    assert_same_numbers(traced, copy.deepcopy(theirs), (torch.randn(2, 3, M),), {}, grad=True)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A process group of one process; the wrappers take the same code paths as in larger groups."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("this build of torch has no gloo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrapped_first", [True, False])
def test_distributed_data_parallel(wrapped_first: bool) -> None:
    theirs = TextModel(dropout=0.0)
    ours = copy.deepcopy(theirs)
    if not wrapped_first:
        accelerate(ours)
    model = torch.nn.parallel.DistributedDataParallel(ours)
    if wrapped_first:
        report = accelerate(model, verify=tokens())
        assert report.verified
        assert report["module.transformer"].outcome == "swapped"
    source, target = tokens()
    exact = copy.deepcopy(theirs).double()
    for one in (theirs, model, exact):
        one(source, target).square().mean().backward()
    grads = [[p.grad for p in one.parameters()] for one in (ours, theirs, exact)]
    check_budget(*grads, GRADIENT_FACTOR)
    assert len(restore(model)) == len([m for m in theirs.modules() if "norm" in repr(type(m))]) + 14


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore")
def test_fully_shard() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    theirs = encoder(dropout=0.0)
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    for layer in ours.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(ours, mesh=mesh)
    x = torch.randn(2, 5, M)
    exact = copy.deepcopy(theirs).double()
    for model, given in ((theirs, x), (ours, x), (exact, x.double())):
        model(given).square().mean().backward()
    grads = [[p.grad for p in one.parameters()] for one in (theirs, exact)]
    check_budget([p.grad.full_tensor() for p in ours.parameters()], *grads, GRADIENT_FACTOR)
    with pytest.raises(RuntimeError, match="its class was changed again, to FSDP"):
        restore(ours)

    late = encoder()
    fully_shard(late, mesh=mesh)
    report = accelerate(late)
    assert report[""].reason == "it is sharded by fully_shard; call accelerate before fully_shard"
    assert "is a DTensor" in report["layers.0"].reason
    assert not report.swapped
