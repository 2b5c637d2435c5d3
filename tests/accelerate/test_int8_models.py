"""``accelerate(model, quantize="int8")``: results, reports, restoring, saving, and models left alone."""

from __future__ import annotations

import copy
import io
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate_checks import TextModel, encoder, encoder_layer, form
from harness import same_bits
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from transformer_fast import _native, accelerate, functional, models, restore
from transformer_fast.backends import cpu_packing
from transformer_fast.compile import inner
from transformer_fast.nn import int8

pytestmark = pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))

#: Largest relative error of the small models here: 8 bits are about 1 %.
ERROR = 0.05
#: Largest relative error of the same computation in another order.
ROUNDING = 1e-5


def run(model: nn.Module, *inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(*inputs)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def stack() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), encoder(), nn.Linear(16, 5))


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 7)), 16, generator=torch.Generator().manual_seed(1))


def tokens(length: int) -> Tensor:
    return torch.randint(1, 11, (3, length), generator=torch.Generator().manual_seed(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "stack": (stack, lambda: (x(),)),
    "encoder and decoder": (TextModel, lambda: (tokens(6), tokens(5))),
    "network": (
        lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
        lambda: (x(),),
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", MODELS)
def test_results_are_close_and_restore_gives_the_same_bits(name):
    make, inputs = MODELS[name]
    model = make()
    before, was = run(model, *inputs()), form(model)
    report = accelerate(model, quantize="int8")
    assert not [entry for entry in report.left if entry.name]
    found = run(model, *inputs())
    assert 0.0 < error(found, before) < ERROR
    assert same_bits(run(copy.deepcopy(model), *inputs()), found)
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert all(int8.INT8 in m.__dict__ for m in linears)
    assert restore(model)
    assert form(model) == was
    assert same_bits(run(model, *inputs()), before)


def test_a_linear_layer_computes_the_public_op():
    layer = nn.Linear(16, 24)
    accelerate(layer, quantize="int8")
    expected = functional.int8_linear(
        x(), *functional.quantize_weight(layer.weight.detach()), layer.bias.detach()
    )
    assert same_bits(run(layer, x()), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.neg_(),
        lambda w: w.data.mul_(2.0),
        lambda w: w.numpy().__setitem__(3, 1.0),
        lambda w: setattr(w, "data", torch.ones_like(w)),
    ],
    ids=["in place", "by data", "by numpy", "other memory"],
)
def test_weights_changed_later_are_quantised_again(change):
    layer = nn.Linear(16, 24)
    accelerate(layer, quantize="int8")
    first = run(layer, x())
    record = layer.__dict__[int8.INT8]
    with torch.no_grad():
        kept = record.of(layer, "weight")
        assert record.of(layer, "weight") is kept
        change(layer.weight if change.__code__.co_names[0] != "numpy" else layer.weight.detach())
    found = run(layer, x())
    assert not same_bits(found, first)
    again = nn.Linear(16, 24)
    again.load_state_dict(layer.state_dict())
    accelerate(again, quantize="int8")
    assert same_bits(found, run(again, x()))


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("of", ["torch.nn", "Hugging Face"])
def test_one_changed_value_of_a_stack_is_found(of: str, quantize: str | None) -> None:
    """The weights of fused layers are checked at once, and each call reads a part of each row."""
    if of == "torch.nn":
        layer = nn.TransformerEncoderLayer(64, 4, 512, batch_first=True)
        model: nn.Module = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
        weight = model.get_parameter("layers.1.linear1.weight")
    else:
        transformers = pytest.importorskip("transformers")
        config = transformers.BertConfig(
            hidden_size=64, num_attention_heads=4, intermediate_size=512, num_hidden_layers=3
        )
        model = transformers.BertModel(config).encoder.eval()
        weight = model.get_parameter("layer.1.intermediate.dense.weight")
    accelerate(model, quantize=quantize)
    tokens = torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(0))

    def result() -> Tensor:
        with torch.inference_mode():
            output = model(tokens)
        return output if isinstance(output, Tensor) else output[0]

    before = result()
    lines = 64 * weight.element_size() // 64
    for row in (3, 200):
        assert same_bits(result(), before)
        weight.data[row, row % 64] = 30.0
        found = [result() for _ in range(lines + 1)]
        assert not same_bits(found[-1], before)
        assert same_bits(found[-2], found[-1])
        int8.forget()
        cpu_packing.forget()
        assert same_bits(result(), found[-1])
        before = found[-1]


def _conv1d() -> nn.Module:
    return pytest.importorskip("transformers").pytorch_utils.Conv1D(24, 16)


class _Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize(
    "change",
    [
        lambda module, name: prune.l1_unstructured(module, name, 0.5),
        lambda module, name: parametrize.register_parametrization(module, name, _Double()),
    ],
    ids=["pruned", "parametrised"],
)
@pytest.mark.parametrize("make", [lambda: nn.Linear(16, 24), MODELS["network"][0], _conv1d])
def test_pruned_and_parametrised_tensors_are_read(make, change, name):
    theirs = make()
    nn.init.normal_(next(p for n, p in theirs.named_parameters() if n.endswith("bias")))
    ours = copy.deepcopy(theirs)
    accelerate(ours, quantize="int8")
    for model in (ours, theirs):
        for module in [m for m in model.modules() if "weight" in m._parameters]:
            change(module, name)
    expected = run(theirs, x())
    assert error(run(ours, x()), expected) < ERROR
    accelerate(ours, quantize="int8")
    assert error(run(ours, x()), expected) < ERROR


def test_gradients_raise_and_name_restore():
    model = encoder_layer()
    accelerate(model, quantize="int8")
    with pytest.raises(NotImplementedError, match=r"restore"):
        model(x())
    with pytest.raises(NotImplementedError, match=r"restore"), torch.no_grad():
        torch.func.jvp(model.linear1, (x(),), (x(),))


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Own(nn.Linear):
    """A user's class."""


class OwnLayer(nn.TransformerEncoderLayer):
    """A user's class."""


def own() -> nn.Module:
    layer = OwnLayer(16, 4, 24, batch_first=True)
    return nn.Sequential(Own(16, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


@pytest.mark.parametrize("make", [stack, own])
def test_models_without_float_weights(make):
    """They give the same results, copied, pickled and from their state_dict; restore says why not."""
    model = make()
    floats = {name: value.clone() for name, value in model.state_dict().items()}
    accelerate(model, quantize="int8")
    expected = run(model, x())
    plain = saved(model)
    assert not any(int8.INT8 in module.__dict__ for module in plain.modules())
    report = accelerate(model, quantize="int8", keep_weights=False)
    assert report.int8.bytes_after < 0.4 * report.int8.bytes_before  # scales count in small layers
    state = model.state_dict()
    matrices = {n for n, value in state.items() if value.dim() == 2}
    assert {state[name].dtype for name in matrices} == {torch.int8}
    assert {f"{name}_scale" for name in matrices} <= state.keys()
    for each in (model, copy.deepcopy(model), saved(model)):
        # Norms of a pickle are PyTorch's.
        assert error(run(each, x()), expected) < ROUNDING
        with pytest.raises(RuntimeError, match=r"keep_weights=False"):
            restore(each)
    for given in (state, floats):
        again = make()
        accelerate(again, quantize="int8", keep_weights=False)
        again.load_state_dict(given, strict=given is state)
        assert same_bits(run(again, x()), expected)
    model.to(torch.bfloat16)
    assert model.state_dict()[f"{min(matrices)}_scale"].dtype == torch.float32
    assert error(run(model, x().bfloat16()).float(), expected) < ERROR


@pytest.mark.parametrize("family", ["Bert", "GPT2"])
def test_save_pretrained_stores_floats(family, tmp_path):
    """`from_pretrained` would read 8-bit values as floats. Quantised again, they are the same."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    kind = getattr(transformers, f"{family}Model")
    model = kind(getattr(transformers, f"{family}Config")(**sizes)).eval()
    ids = torch.randint(50, (2, 9))
    accelerate(model, quantize="int8")
    with torch.no_grad():
        expected = model(ids).last_hidden_state
    accelerate(model, quantize="int8", keep_weights=False)
    for index, each in enumerate((model, copy.deepcopy(model), saved(model))):
        each.save_pretrained(tmp_path / str(index))
        again = kind.from_pretrained(tmp_path / str(index)).eval()
        assert again.dtype == torch.float32
        for run_in_8_bits in (False, True):
            if run_in_8_bits:
                accelerate(again, quantize="int8")
            with torch.no_grad():
                found = error(again(ids).last_hidden_state, expected)
            assert found < (ROUNDING if run_in_8_bits else ERROR)


def test_float_weights_are_freed():
    layer = nn.Linear(64, 32)
    weight = weakref.ref(layer.weight)
    accelerate(layer, quantize="int8", keep_weights=False)
    assert weight() is None
    run(layer, torch.randn(3, 64))
    assert sum(p.nbytes for p in layer.parameters()) == 64 * 32 + 4 * 32


def test_a_projection_tied_to_the_embedding_is_quantised_and_the_embedding_is_not():
    for keep in (True, False):
        model = models.Transformer(
            13, d_model=16, nhead=4, num_encoder_layers=1, num_decoder_layers=1,
            dim_feedforward=24, tie_output=True, start_token=1, end_token=2,
        )  # fmt: skip
        source = tokens(6)
        before = run(model, source, source)
        report = accelerate(model, quantize="int8", keep_weights=keep)
        assert report["output"].int8
        assert report.int8.float_bytes["Embedding"] == 13 * 16 * 4
        found = run(model, source, source)
        assert 0.0 < error(found, before) < ERROR
        cached = model.eval().generate(source, max_new_tokens=6)
        with torch.no_grad():
            model.output.weight.neg_()
            model.output.bias.neg_()
        again = model.generate(source, max_new_tokens=6)  # the least likely tokens
        assert not torch.equal(cached.tokens[:, :1], again.tokens[:, :1])


def test_verify_tells_the_error_of_the_model_and_of_its_worst_module():
    model = stack()
    with torch.no_grad():
        model[0].weight[:, 0] = 50.0  # one large column takes the steps of each row
    before = run(model, x())
    found = accelerate(model, quantize="int8", verify=x()).int8
    assert found.error == pytest.approx(error(run(model, x()), before), rel=1e-3)
    assert 0.9 < found.cosine < 1.0
    assert found.worst in dict(model.named_modules())
    assert found.worst_error > 0.001
    assert "relative error" in str(found)
    with torch.no_grad():
        model[0].weight[:, 0] = 3e38
    restore(model)
    with pytest.warns(UserWarning, match="restored the model"):
        accelerate(model, quantize="int8", verify=1e3 * x())
    assert not any(int8.INT8 in module.__dict__ for module in model.modules())


def dynamically_quantised() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16))
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


class ReadsWeight(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def with_nan() -> nn.Module:
    layer = nn.Linear(16, 16)
    nn.init.constant_(layer.weight, math.nan)
    return layer


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "quantised by torch.ao": (dynamically_quantised, "it is quantised"),
    "float64": (lambda: nn.Linear(16, 16).double(), "float64, for which kernels have no"),
    "on meta": (lambda: nn.Linear(16, 16, device="meta"), "is on meta"),
    "lazy": (lambda: nn.LazyLinear(16), "not initialised"),
    "not finite": (with_nan, "NaN or infinity"),
    "its own forward": (lambda: ReadsWeight(16, 16), "has its own forward"),
    "parametrised": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        "parametrised",
    ),
    "read by PyTorch": (
        lambda: nn.utils.parametrizations.weight_norm(
            nn.MultiheadAttention(16, 4), "in_proj_weight"
        ),
        "reads its weight",
    ),
}


@pytest.mark.filterwarnings("ignore:torch.ao.quantization", "ignore:Lazy modules")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:`LazyModuleMixin`")
@pytest.mark.parametrize("name", LEFT)
def test_modules_that_are_left(name):
    make, reason = LEFT[name]
    if "torch.ao" in name and torch.backends.quantized.engine == "none":
        pytest.skip("this build of torch has no quantised kernels")
    model = make()
    report = accelerate(model, quantize="int8")
    assert report.int8.count == 0
    assert any(reason in entry.reason for entry in report.entries), str(report)


def test_filter_fn_excludes_modules():
    model = stack()
    report = accelerate(model, quantize="int8", filter_fn=lambda _, name: "linear2" not in name)
    assert int8.INT8 not in model[1].layers[0].linear2.__dict__
    assert int8.INT8 in model[1].layers[0].linear1.__dict__
    assert "filter_fn" in report["1.layers.0.linear2"].reason
    assert run(model, x()).isfinite().all()


def test_other_dtypes_and_wrong_options():
    layer = nn.Linear(16, 24).bfloat16()
    accelerate(layer, quantize="int8")
    assert run(layer, x().bfloat16()).dtype == torch.bfloat16
    moved = layer.double()
    with torch.no_grad():
        assert same_bits(moved(x().double()), nn.Linear.forward(moved, x().double()))
    for options, message in (
        ({"quantize": "int4"}, "quantize must be None or one of int8, not 'int4'"),
        ({"keep_weights": False}, "needs quantize"),
    ):
        with pytest.raises(ValueError, match=message):
            accelerate(layer, **options)


def test_compiled_models_run_on_8_bits():
    """An int8 model, and the option of the backend on a float model; changed weights are found."""
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)).eval()
    plain = copy.deepcopy(model)
    accelerate(model, quantize="int8")
    reports: list[Any] = []
    options = {"quantize": "int8", "report": reports.append}
    with torch.no_grad():
        for compiled in (
            torch.compile(model, backend="aot_eager", fullgraph=True),
            torch.compile(plain, backend="transformer_fast", options=options, fullgraph=True),
        ):
            assert error(compiled(x()), model(x())) < ROUNDING
            for each in (model, plain):
                each[0].weight.data.mul_(-1.0)
            assert error(compiled(x()), model(x())) < ROUNDING
    assert reports[0].counts["int8_feed_forward"] == 1
    assert str(reports[0]) == "rewritten: 1 feed_forward.\n  in 8 bits: 1 feed_forward."
    torch.compile(plain, backend="transformer_fast", options=options)(x()).sum().backward()
    assert "gradients" in str(reports[-1])
    with pytest.raises(Exception, match="quantize must be None or int8"):
        torch.compile(plain, backend="transformer_fast", options={"quantize": "int4"})(x())


def test_inductor_compiles_layers_with_8_bits(monkeypatch):
    """Its results differ from the eager graph's, whose attention may be in bfloat16."""
    warnings: list[Any] = []
    monkeypatch.setattr(inner._log, "warning", lambda *args: warnings.append(args))
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    given = torch.randn(2, 5, 64)
    options = {"quantize": "int8", "inner": inner.compile_rest}  # tests run without it
    compiled = torch.compile(model, backend="transformer_fast", options=options)
    with torch.no_grad():
        for _ in range(2):
            assert 0.0 < error(compiled(given), model(given)) < ERROR
    assert not warnings


class TestCalibration:
    """Factors of channels with outliers; 1 % of the channels of each norm are 20 times as large."""

    @staticmethod
    def of_outliers(model: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.LayerNorm):
                    size = len(module.weight)
                    module.weight[torch.randperm(size)[: max(1, size // 100)]] *= 20.0
        return model.eval()

    def test_a_norm_and_a_linear_layer(self):
        model = self.of_outliers(nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 256)))
        nn.init.normal_(model[1].weight, std=512**-0.5)
        inputs, calibration = torch.randn(2, 64, 512)
        before, state = run(model, inputs), copy.deepcopy(model.state_dict())
        accelerate(model, quantize="int8")
        without = error(run(model, inputs), before)
        restore(model)
        report = accelerate(model, quantize="int8", calibration=calibration)
        assert report.int8.smoothed == ["0"]
        assert error(run(model, inputs), before) < min(1.2e-2, 0.5 * without)  # the set target
        restore(model)
        assert all(same_bits(state[name], value) for name, value in model.state_dict().items())

    @pytest.mark.parametrize("norm_first", [True, False])
    def test_only_norms_that_feed_nothing_else_get_factors(self, norm_first):
        """A decoder: the second norm is the query of attention to the memory. Post-norm: residuals."""
        layer = nn.TransformerDecoderLayer(32, 4, 48, batch_first=True, norm_first=norm_first)
        model = self.of_outliers(nn.TransformerDecoder(layer, 2))
        inputs = tuple(torch.randn(2, 3, 9, 32))
        before, state = run(model, *inputs), copy.deepcopy(model.state_dict())
        report = accelerate(model, quantize="int8", calibration=[inputs, inputs])
        expected = [f"layers.{i}.norm{n}" for i in range(2) for n in (1, 2, 3)]
        assert report.int8.smoothed == (expected if norm_first else [])
        copied = copy.deepcopy(model)
        for each in (model, copied):
            assert error(run(each, *inputs), before) < ERROR
            restore(each)
            assert all(same_bits(state[name], value) for name, value in each.state_dict().items())
        assert same_bits(run(model, *inputs), before)
