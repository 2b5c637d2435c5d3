"""The attention of models of transformers, whichever they are, by its registry."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from module_checks import assert_same_numbers
from torch import Tensor

from transformer_fast import accelerate, restore
from transformer_fast.accelerate.hugging_face import attention

pytest.importorskip(
    "transformers", reason="transformers is not installed (pip install transformer_fast[peers])"
)
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen3 import modeling_qwen3 as qwen3

pytestmark = pytest.mark.filterwarnings("ignore")

VOCABULARY, B, T, S = 41, 3, 5, 9
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER = {
    **_TOKENS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "head_dim": 16}
_BOTH = {
    **_TOKENS, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 96,
    "decoder_start_token_id": 1, "init_std": 0.2,
}  # fmt: skip
_VISION = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8, "initializer_range": 0.2,
}  # fmt: skip
_SOUND = {
    **_ENCODER, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}  # fmt: skip

#: Configurations by class; the attention of each has something that others' have not.
MODELS: dict[str, dict[str, Any]] = {
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
GENERATE = [name for name in MODELS if "CausalLM" in name or "LMHead" in name or "Cond" in name]


def _build(name: str, **settings: Any) -> Any:
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return kind(kind.config_class(**{**MODELS.get(name, _DECODER), **settings})).eval()


def _inputs(name: str, padding: str = "right") -> dict[str, Tensor]:
    decoder = {"decoder_input_ids": torch.randint(3, VOCABULARY, (B, T))}
    if MODELS[name].get("image_size"):
        return {"pixel_values": torch.randn(B, 3, 32, 32)}
    if name.startswith("Wav2Vec2"):
        mask = torch.ones(B, 400, dtype=torch.int64)
        mask[1, 300:] = 0
        return {"input_values": torch.randn(B, 400), "attention_mask": mask}
    if name.startswith("Whisper"):
        return {"input_features": torch.randn(B, 8, 32), **decoder}
    mask = torch.ones(B, S, dtype=torch.int64)
    mask[1, 5:], mask[2, 1:] = 0, 0
    mask = mask.flip(1) if padding == "left" else mask
    found = {"input_ids": torch.randint(3, VOCABULARY, (B, S)), "attention_mask": mask}
    if padding == "none":
        del found["attention_mask"]
    return {**found, **decoder} if name.startswith("M2M100") else found


class First(torch.nn.Module):
    """A model's first output at real tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        first: Tensor = self.model(**inputs)[0]
        mask = inputs.get("attention_mask")
        is_theirs = mask is not None and mask.shape == first.shape[:2]
        return first * mask.unsqueeze(-1) if is_theirs else first


def _is_model(module: torch.nn.Module, name: str = "") -> bool:
    return isinstance(module, transformers.PreTrainedModel)


def _names(model: torch.nn.Module) -> set[str]:
    return {module.config._attn_implementation for module in model.modules() if _is_model(module)}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of our function whether it had a mask."""
    found: list[bool] = []
    ours = attention.attention

    def counted(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *a: Any, **k_: Any) -> Any:
        found.append(mask is not None)
        return ours(module, q, k, v, mask, *a, **k_)

    monkeypatch.setattr(attention, "attention", counted)
    return found


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_numbers(name: str, padding: str, calls: list[bool]) -> None:
    theirs = First(_build(name))
    ours = copy.deepcopy(theirs)
    report = accelerate(ours, filter_fn=_is_model)
    assert all(_is_model(ours.get_submodule(entry.name)) for entry in report.swapped)
    assert _names(ours) == {attention.NAME}
    inputs = _inputs(name, padding)
    assert_same_numbers(ours, theirs, (), inputs, grad=False)
    assert_same_numbers(ours, theirs, (), inputs, grad=True)
    assert len(calls) >= 2
    restore(ours)
    assert _names(ours) == {"sdpa"}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", GENERATE)
def test_generate_gives_the_same_tokens(name: str, cache: str, calls: list[bool]) -> None:
    model = _build(name)
    inputs = {k: v for k, v in _inputs(name, "left").items() if not k.startswith("decoder")}
    settings = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    expected = model.generate(**inputs, **settings)
    accelerate(model)
    assert torch.equal(model.generate(**inputs, **settings), expected)
    assert calls
    assert len(expected.unique()) > 2


def test_dropout_of_weights() -> None:
    model = _build("GPT2LMHeadModel", attn_pdrop=0.4, embd_pdrop=0.0, resid_pdrop=0.0)
    inputs = _inputs("GPT2LMHeadModel")
    accelerate(model)
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)
    model.train()
    assert not torch.equal(model(**inputs).logits, model(**inputs).logits)


def test_weights_are_given() -> None:
    """Only 'eager' has them in transformers."""
    model = _build("Qwen3ForCausalLM")
    inputs = _inputs("Qwen3ForCausalLM")
    accelerate(model)
    with torch.no_grad():
        got = model(**inputs, output_attentions=True).attentions
        restore(model)
        model.set_attn_implementation("eager")
        expected = model(**inputs, output_attentions=True).attentions
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_unknown_arguments_go_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may change the numbers, in this version or the next."""
    model = _build("Qwen3ForCausalLM")
    inputs = _inputs("Qwen3ForCausalLM")
    with torch.no_grad():
        expected = model(**inputs).logits
        accelerate(model, filter_fn=_is_model)
        monkeypatch.setattr(attention.functional, "scaled_dot_product_attention", None)
        with pytest.raises(TypeError):
            model(**inputs)
        assert torch.equal(model(**inputs, s_aux=torch.ones(4)).logits, expected)
        with pytest.raises(ValueError, match="softcap"):
            model(**inputs, softcap=2.0)


def test_queries_that_see_nothing_and_batches_of_one() -> None:
    module = torch.nn.Module()
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 6)
    seen = torch.rand(2, 1, 3, 7) < 0.7
    seen[1, :, 1] = False
    for mask in (seen, seen.float().masked_fill(~seen, torch.finfo(torch.float32).min)):
        expected, _ = sdpa_attention_forward(module, q, k, v, mask)
        output, weights = attention.attention(module, q, k, v, mask)
        torch.testing.assert_close(output, expected)
        assert weights is None


class Asking(qwen3.Qwen3ForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.config._attn_implementation in ("eager", "sdpa"):
            return super().forward(*args, **kwargs)
        raise AssertionError


def test_models_that_ask_for_their_attention_by_name() -> None:
    model = Asking(transformers.Qwen3Config(**_DECODER))
    report = accelerate(model)
    for place in ("", "model"):  # the two share a config
        assert report[place].reason == "Asking does something else for 'sdpa' than for other names"
    assert _names(model) == {"sdpa"}
    assert report["lm_head"].outcome == "swapped"

    gemma = _build(
        "Gemma4ForCausalLM", hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY,
        num_kv_shared_layers=0,
    )  # fmt: skip
    assert accelerate(gemma)["model"].reason.startswith("Gemma4TextModel does something else")
    assert _names(gemma) == {"sdpa"}


def test_attention_that_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _build("Gemma2ForCausalLM")
    assert "its attention is 'eager'" in accelerate(model)[""].reason  # for its soft cap
    sizes = {"embedding_size": 8, "hidden_sizes": [8], "depths": [1]}
    model = transformers.ResNetModel(transformers.ResNetConfig(**sizes))
    assert "ResNetModel does not look" in accelerate(model)[""].reason
    model = transformers.FalconModel(transformers.FalconConfig(**_ENCODER, alibi=False))
    assert "FalconModel does not look" in accelerate(model)[""].reason

    model = _build("Qwen3ForCausalLM")
    local = transformers.AttentionInterface()
    local["sdpa"] = lambda *args, **kwargs: None
    monkeypatch.setattr(qwen3, "ALL_ATTENTION_FUNCTIONS", local)
    assert "is not transformers' own" in accelerate(model)[""].reason
    assert _names(model) == {"sdpa"}
