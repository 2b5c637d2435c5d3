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
from harness import same_bits, since_torch
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
    """One check covers all weights of fused layers; in each call it reads a part of each row."""
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
    """Copies, pickles and models from the state_dict have the same results; restore raises."""
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
        # A pickle has PyTorch's norms, whose rounding differs.
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
    """`from_pretrained` would read 8-bit values as floats. The floats quantise to the same values."""
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


@pytest.mark.parametrize("written", [False, True])
def test_tied_heads_are_tied_after_save_pretrained(written, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    accelerate(model, quantize="int8", keep_weights=False)
    if written:
        with torch.no_grad():
            model.lm_head.weight.neg_()
    model.save_pretrained(tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert torch.equal(again.transformer.wte.weight, model.transformer.wte.weight)
    assert (again.lm_head.weight is again.transformer.wte.weight) is not written


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
        again = model.generate(source, max_new_tokens=6)  # the least likely tokens so far
        assert not torch.equal(cached.tokens[:, :1], again.tokens[:, :1])


def test_verify_tells_the_error_of_the_model_and_of_its_worst_module():
    model = stack()
    with torch.no_grad():
        model[0].weight[:, 0] = 50.0  # one large column makes the steps of each row coarse
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
    """Compiles an int8 model, and a float model with the option ``quantize``; then changes weights."""
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


@pytest.mark.thorough
def test_inductor_compiles_layers_with_8_bits(monkeypatch):
    """Results differ from eager ones, whose attention may be in bfloat16."""
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
        before, normed = run(model, inputs), run(model[0], inputs)
        state = copy.deepcopy(model.state_dict())
        accelerate(model, quantize="int8")
        without = error(run(model, inputs), before)
        restore(model)
        report = accelerate(model, quantize="int8", calibration=calibration)
        assert report.int8.smoothed == ["1"]
        assert "rescaled the inputs of 1 modules (1, ...)" in str(report)
        found = run(model, inputs)
        assert error(found, before) < min(1.2e-2, 0.5 * without)  # the target of calibration
        assert error(run(model[0], inputs), normed) < ROUNDING
        assert all(same_bits(state[name], value) for name, value in model.state_dict().items())
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert error(run(compiled, inputs), found) < ROUNDING
        model[1].weight.data.neg_()  # the weight is quantised again, with the same factors
        bias = model[1].bias.detach()
        assert error(run(model, inputs) - bias, bias - found) < ROUNDING
        model[1].weight.data.neg_()
        assert restore(model)
        assert all(same_bits(state[name], value) for name, value in model.state_dict().items())
        assert error(run(model, inputs), before) < ROUNDING

    @pytest.mark.parametrize("norm_first", [True, False])
    def test_no_value_that_a_module_returns_changes(self, norm_first):
        """Covers a decoder, whose attention reads the memory beside the second norm, and its copy."""
        layer = nn.TransformerDecoderLayer(64, 4, 48, batch_first=True, norm_first=norm_first)
        model = self.of_outliers(nn.TransformerDecoder(layer, 2))
        inputs = tuple(torch.randn(2, 3, 9, 64))
        before, state = run(model, *inputs), copy.deepcopy(model.state_dict())
        accelerate(model, quantize="int8")
        without = self.outputs(model, inputs)
        restore(model)
        report = accelerate(model, quantize="int8", calibration=[inputs, inputs])
        expected = {f"layers.{i}.{n}" for i in range(2) for n in ("self_attn", "linear1")}
        assert set(report.int8.smoothed) >= (expected if norm_first else set())
        copied = copy.deepcopy(model)
        for each in (model, copied):
            found = self.outputs(each, inputs)
            assert found.keys() == without.keys()
            assert all(error(found[name], without[name]) < ERROR for name in found)
            assert error(run(each, *inputs), before) < ERROR  # each layer in one call
            assert all(same_bits(state[name], value) for name, value in each.state_dict().items())
            restore(each)
        assert same_bits(run(model, *inputs), before)

    @staticmethod
    def outputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Returns the first result of each module that is called."""
        found: dict[str, Tensor] = {}
        hooks = [
            module.register_forward_hook(
                lambda *given, name=name: found.__setitem__(
                    name, given[2][0] if isinstance(given[2], tuple) else given[2]
                )
            )
            for name, module in model.named_modules()
        ]
        run(model, *inputs)
        for hook in hooks:
            hook.remove()
        return found

    @pytest.mark.parametrize("family", ["Llama", "Bert", "GPT2"])
    def test_hidden_states_and_heads_of_other_models(self, family):
        """In the calibration call only the output projection reads the final norm."""
        transformers = pytest.importorskip("transformers")
        sizes = {
            "vocab_size": 99,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        own = {} if family == "GPT2" else {"intermediate_size": 128}
        kinds = {"Llama": "LlamaForCausalLM", "Bert": "BertForMaskedLM", "GPT2": "GPT2LMHeadModel"}
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**sizes, **own)
        model = getattr(transformers, kinds[family])(config).eval()
        for module in model.modules():
            if "norm" in type(module).__name__.lower():
                module.weight.data[::16] = 20.0
        ids = torch.randint(99, (2, 12))

        def states() -> list[Tensor]:
            with torch.no_grad():
                return [*model(ids, output_hidden_states=True).hidden_states, model(ids).logits]

        expected = states()
        accelerate(model, quantize="int8")
        without = max(map(error, states(), expected))
        restore(model)
        report = accelerate(model, quantize="int8", calibration={"input_ids": ids})
        assert len(report.int8.smoothed) > 3
        found = states()
        errors = list(map(error, found, expected))
        assert max(errors) < min(ERROR, 0.8 * without), errors
        for module in model.modules():
            if int8.INT8 in module.__dict__:  # weights with the same input, but different factors
                factors = module.__dict__[int8.INT8].factors
                for name in factors:
                    factors[name] = factors[name] * torch.randint(-1, 1, factors[name].shape).exp2()
        assert max(map(error, states(), expected)) < 2.0 * without

    @pytest.mark.parametrize("keep", [True, False])
    def test_factors_are_saved_and_loaded(self, keep):
        model = self.of_outliers(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 32)))
        again, plain = copy.deepcopy(model), copy.deepcopy(model)
        inputs = torch.randn(9, 64)
        before = run(model, inputs)
        accelerate(model, quantize="int8", keep_weights=keep, calibration=inputs)
        expected, state = run(model, inputs), model.state_dict()
        assert ("1.weight_factors" in state) != keep
        for each in (model, copy.deepcopy(model), saved(model)):
            if each is model or not keep:
                accelerate(each, quantize="int8", keep_weights=keep)
                assert same_bits(run(each, inputs), expected)
        for given in (again, plain):
            accelerate(given, quantize="int8", keep_weights=given is plain)
            given.load_state_dict(state)
            assert error(run(given, inputs), before) < ERROR
        assert keep or same_bits(run(again, inputs), expected)
        model.bfloat16().float()
        assert error(run(model, inputs), before) < ERROR

    def test_factors_that_do_not_pay_are_left_out(self):
        model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 32)).eval()
        report = accelerate(model, quantize="int8", calibration=torch.randn(50, 64))
        assert report.int8.smoothed == []
        restore(model)
        with torch.no_grad():
            model[0].weight[3], model[1].weight[:, 3] = 1e-3, 1e38  # 1e38 / factor overflows
        report = accelerate(model, quantize="int8", calibration=torch.randn(50, 64))
        assert run(model, torch.randn(50, 64)).isfinite().all()


READS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "linear": lambda layer, x: nn.functional.linear(x, layer.weight, layer.bias),
    "product": lambda layer, x: layer.weight @ x.t(),
    "part": lambda layer, x: x @ layer.weight[3:7, :].t(),
    "cast to its dtype": lambda layer, x: layer(x.to(layer.weight.dtype)),
    "data": lambda layer, x: layer.weight.data.clone(),
    "norm": lambda layer, x: layer.weight.norm(dim=1),
    "concatenation": lambda layer, x: torch.cat((layer.weight, layer.weight)),
    "named parameters": lambda layer, x: dict(layer.named_parameters())["weight"] * 2.0,
    "other dtype": lambda layer, x: layer.weight.to(torch.bfloat16).float(),
    "functional_call": lambda layer, x: torch.func.functional_call(
        layer, dict(layer.named_parameters()), (x,)
    ),
}

WRITES: dict[str, Callable[[nn.Linear], Any]] = {
    "in place": lambda layer: layer.weight.neg_(),
    "by data": lambda layer: layer.weight.data.mul_(3.0),
    "merged": lambda layer: layer.weight.data.__iadd__(torch.ones(32, 64)),
    "assigned to data": lambda layer: setattr(layer.weight, "data", torch.ones(32, 64)),
    "copied": lambda layer: layer.weight.copy_(torch.eye(32, 64)),
    "initialised": lambda layer: nn.init.constant_(layer.weight, 0.25),
    "a new parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.eye(32, 64))),
    "loaded": lambda layer: layer.load_state_dict(
        {"weight": torch.eye(32, 64), "bias": torch.ones(32)}
    ),
    "loaded by assignment": lambda layer: layer.load_state_dict(
        {"weight": torch.eye(32, 64), "bias": torch.ones(32)}, assign=True
    ),
}


class TestFreedWeights:
    """``keep_weights=False``: code that reads, writes or replaces a weight."""

    @staticmethod
    def freed(layer: nn.Module | None = None) -> tuple[Any, Any]:
        """Returns a layer with freed weights, and a copy with the float weights."""
        torch.manual_seed(0)
        layer = nn.Linear(64, 32) if layer is None else layer
        before = copy.deepcopy(layer)
        accelerate(layer, quantize="int8", keep_weights=False)
        return layer, before

    @pytest.mark.parametrize("name", READS)
    def test_reads_give_the_floats_of_the_8_bits(self, name):
        layer, before = self.freed()
        given = torch.randn(5, 64)
        with torch.no_grad():
            assert error(READS[name](layer, given), READS[name](before, given)) < ERROR
        layer.half()
        assert layer.weight.dtype is torch.float16
        assert run(layer, given.half()).dtype is torch.float16

    @pytest.mark.parametrize("name", WRITES)
    def test_writes_are_quantised(self, name):
        layer, before = self.freed()
        given = torch.randn(5, 64)
        run(layer, given)  # packs the weight
        with torch.no_grad():
            for each in (layer, before):
                WRITES[name](each)
        assert error(run(layer, given), run(before, given)) < ERROR

    def test_writes_to_views_raise(self):
        layer, _ = self.freed()
        with torch.no_grad():
            for write in (
                lambda: layer.weight[3].zero_(),
                lambda: layer.weight.__setitem__(3, 1.0),
                lambda: layer.weight.data.t().mul_(2.0),
            ):
                with pytest.raises(RuntimeError, match="keep_weights"):
                    write()

    def test_a_weight_with_gradients_raises(self):
        layer, _ = self.freed()
        layer.weight.requires_grad_()
        with pytest.raises(NotImplementedError, match="no gradients"):
            layer(torch.randn(5, 64))

    @pytest.mark.parametrize("change", ["tie_weights", "resize", "resize untied"])
    def test_embeddings_of_transformers_are_tied_and_resized(self, change):
        transformers = pytest.importorskip("transformers")
        sizes = {"vocab_size": 99, "n_embd": 64, "n_layer": 2, "n_head": 4}
        config = transformers.GPT2Config(**sizes, tie_word_embeddings="untied" not in change)
        model, before = self.freed(transformers.GPT2LMHeadModel(config).eval())
        for each in (model, before):
            torch.manual_seed(0)
            if change == "tie_weights":
                each.tie_weights()
            else:
                each.resize_token_embeddings(110)
        ids = torch.randint(99, (2, 9))
        with torch.no_grad():
            found, expected = model(ids).logits[..., :99], before(ids).logits[..., :99]
        assert error(found, expected) < ERROR
        assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 12)

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_nested_tensors(self):
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
        layer, before = self.freed(layer)
        parts = torch.randn(5, 64), torch.randn(3, 64)
        with torch.no_grad():
            for each in (layer, saved(layer), copy.deepcopy(layer)):
                found = each(torch.nested.nested_tensor(list(parts)))
                for one, part in zip(found.unbind(), parts, strict=True):
                    assert error(one, before(part[None])[0]) < ERROR

    def test_a_shared_weight_stays_shared(self):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval()
        model[1].weight = model[0].weight
        model, _ = self.freed(model)
        assert model[1].weight is model[0].weight
        copied = copy.deepcopy(model)
        assert copied[1].weight is copied[0].weight is not model[0].weight

    @since_torch(2, 13, why="with PyTorch 2.10 compiled programs multiply in floats")
    def test_compiled_and_exported(self):
        model, before = self.freed(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)))
        given = torch.randn(5, 64)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            assert error(run(compiled, given), run(model, given)) < ROUNDING
        assert error(run(compiled, given), run(before, given)) < ERROR
        with torch.no_grad():
            program = torch.export.export(model, (given,)).module()
            assert error(program(given), run(before, given)) < ERROR

    def test_a_module_with_float_weights_loads_8_bits(self):
        layer, before = self.freed()
        other = nn.Linear(64, 32)
        accelerate(other, quantize="int8")
        other.load_state_dict(layer.state_dict())
        assert error(other.weight.detach(), before.weight.detach()) < ERROR
