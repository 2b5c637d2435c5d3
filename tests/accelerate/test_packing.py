"""accelerate on encoders of Hugging Face's transformers: no layer computes padded positions."""

from __future__ import annotations

import contextvars
import copy
import pickle
import subprocess
import sys
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate_checks import form
from harness import spied
from module_checks import assert_same_numbers, check_budget
from torch import Tensor

from transformer_fast import accelerate, restore
from transformer_fast.accelerate import packing
from transformer_fast.accelerate.private_names import CACHES

pytest.importorskip(
    "transformers", reason="transformers is not installed (pip install transformer_fast[test])"
)
import transformers
from transformers.models.bert import modeling_bert as bert
from transformers.models.llama import modeling_llama as llama

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.sampled(20, 50),
    pytest.mark.usefixtures("quiet_transformers"),
]

VOCABULARY, B, T, M = 41, 4, 9, 32
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER = {
    **_TOKENS, "hidden_size": M, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 32, "initializer_range": 0.2,
}  # fmt: skip
_BOTH = {
    **_TOKENS, "d_model": M, "encoder_layers": 3, "decoder_layers": 1, "encoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1, "init_std": 0.2, "max_position_embeddings": 32,
}  # fmt: skip
_T5 = {
    **_TOKENS, "d_model": M, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
    "initializer_factor": 2.0,
}  # fmt: skip
_DEBERTA = {
    **_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4,
    "share_att_key": True, "norm_rel_ebd": "none|layer_norm", "position_biased_input": False,
    "type_vocab_size": 0, "max_relative_positions": -1,
}  # fmt: skip
#: Reason for attention outside the registry of transformers.
NO_REGISTRY = "its attention is not looked up in the registry"
#: Class -> (configuration, why its stack is left unchanged, or "").
ENCODERS: dict[str, tuple[dict[str, Any], str]] = {
    "AlbertModel": ({**_ENCODER, "embedding_size": 16}, ""),
    "BartModel": (_BOTH, ""),
    "BertModel": (_ENCODER, ""),
    "BertForSequenceClassification": (_ENCODER, ""),
    "CamembertModel": (_ENCODER, ""),
    "CLIPTextModel": (_ENCODER, ""),  # causal
    "ConvBertModel": ({**_ENCODER, "embedding_size": M}, NO_REGISTRY),
    "DebertaV2Model": (_DEBERTA, ""),
    "DebertaV2ForSequenceClassification": ({**_DEBERTA, "share_att_key": False}, ""),
    "DistilBertModel": (
        {"vocab_size": VOCABULARY, "dim": M, "hidden_dim": 48, "n_layers": 3, "n_heads": 4}, "",
    ),
    "ElectraModel": ({**_ENCODER, "embedding_size": 16}, ""),
    "EsmModel": (
        {**_ENCODER, "position_embedding_type": "rotary", "mask_token_id": 5}, "",
    ),
    "EuroBertModel": ({**_ENCODER, "num_key_value_heads": 2}, ""),
    "GteModel": (_ENCODER, ""),
    "JinaEmbeddingsV3Model": (_ENCODER, ""),
    "MarianModel": (_BOTH, ""),
    "MBartModel": (_BOTH, ""),
    "ModernBertModel": (
        {**_ENCODER, "local_attention": 4, "global_attn_every_n_layers": 2, "intermediate_size": 64}, "",
    ),
    "MegatronBertModel": (_ENCODER, NO_REGISTRY),
    "MPNetModel": (_ENCODER, ""),
    "NomicBertModel": (_ENCODER, ""),
    "RobertaModel": (_ENCODER, ""),
    "RobertaPreLayerNormModel": (_ENCODER, ""),
    "SiglipTextModel": (_ENCODER, ""),
    "T5EncoderModel": (_T5, ""),
    # With larger weights, rounding errors of the model's gradients grow to 5e-4 of the result.
    "UMT5EncoderModel": ({**_T5, "initializer_factor": 1.0}, "computes a bias from the number of tokens"),
    "XLMRobertaForSequenceClassification": (_ENCODER, ""),
}  # fmt: skip
PACKED = [name for name, (_, reason) in ENCODERS.items() if not reason]


class Real(torch.nn.Module):
    """Returns an encoder's output at real tokens, or the logits of a classifier."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, attention_mask: Tensor, **inputs: Tensor) -> Tensor:
        first: Tensor = self.model(attention_mask=attention_mask, **inputs)[0]
        return first[attention_mask == 1] if first.dim() == 3 else first


def build(name: str, p: float = 0.0, **settings: Any) -> Any:
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    config = kind.config_class(**{**ENCODERS[name][0], **settings})
    for key, value in list(vars(config).items()):
        if "drop" in key and isinstance(value, float):
            setattr(config, key, p)
    model = kind(config).eval()
    return model.get_encoder() if config.is_encoder_decoder else model


def inputs_of(*real: str, seed: int = 1) -> dict[str, Tensor]:
    """Returns tokens and their mask; in each sequence ``x`` is a token, and ``-`` padding."""
    mask = torch.tensor([[x == "x" for x in one] for one in real]).long()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, mask.shape, generator=generator)
    return {"input_ids": tokens.masked_fill(mask == 0, 0), "attention_mask": mask}


_DECODER = {
    **_ENCODER, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "ffn_dim": 48,
    "word_embed_proj_dim": M, "n_embd": M, "n_layer": 3, "n_head": 4,
}  # fmt: skip
#: Gemma 3 and Mistral have windows of 4 tokens.
DECODERS = (
    "Gemma3ForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "LlamaForCausalLM",
    "MistralForCausalLM", "OPTForCausalLM", "PhiForCausalLM", "Qwen3ForCausalLM",
)  # fmt: skip


def build_decoder(name: str, **settings: Any) -> Any:
    kind = getattr(transformers, name)
    default = kind.config_class().to_dict()
    names = {*default, *kind.config_class.attribute_map, "num_key_value_heads"}
    torch.manual_seed(0)
    known = {key: value for key, value in _DECODER.items() if key in names}
    return kind(kind.config_class(**known, **settings)).eval()


#: Padding at the right and in the middle; the longest sequence has 8 tokens.
MIXED = ("xxxxx----", "xxx--xxxx", "xxxxxxxx-", "x--------")
#: For a model whose own code reads the last position (`SiglipTextModel`).
WITHIN = ("xxxxxxxxx", "xxx--xxxx", "x------xx", "xx-x-xxxx")
LEFT = ("---xxxxxx", "xxxxxxxxx", "--------x", "-xxxxxxxx")
RIGHT = ("xxxxx----", "xxxxxxxxx", "xx-------", "xxxxxxxx-")
_FIVE = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


def stack_of(report: Any) -> Any:
    (entry,) = [entry for entry in report.entries if entry.kind == "ModuleList"]
    return entry


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_run_on_real_tokens(name: str, rows: list[int]) -> None:
    theirs = Real(build(name))
    ours = copy.deepcopy(theirs)
    entry = stack_of(accelerate(ours))
    reason = ENCODERS[name][1]
    assert (entry.outcome, reason in entry.reason) == ("left" if reason else "swapped", True)
    mixed = WITHIN if name == "SiglipTextModel" else MIXED
    for real in (mixed,) if reason or mixed is WITHIN else (mixed, RIGHT):
        inputs = inputs_of(*real)
        tokens = int(inputs["attention_mask"].sum())
        layers = 0 if reason else 3
        assert_same_numbers(ours.eval(), theirs.eval(), (), inputs, grad=False)
        # DeBERTa's attention runs on padded sequences in training, and if padding is between tokens.
        is_padded = name.startswith("Deberta")
        assert rows == [tokens] * (0 if is_padded and real is not RIGHT else layers)
        del rows[:]
        assert_same_numbers(ours.train(), theirs.train(), (), inputs, grad=True)
        assert rows == [tokens] * (0 if is_padded else layers)
        del rows[:]
    for full in (inputs_of("xxxxx", "xxxxx"), inputs_of("xxx")):
        assert_same_numbers(ours.eval(), theirs.eval(), (), full, grad=False)
    assert not rows


@pytest.mark.parametrize("name", ["BertModel", "DistilBertModel", "MPNetModel", "DebertaV2Model"])
def test_padded_positions_are_zero(name: str) -> None:
    """Holds for models whose output is that of the last layer."""
    model = build(name)
    accelerate(model)
    inputs = inputs_of(*MIXED)
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    assert not states[inputs["attention_mask"] == 0].any()
    assert states[inputs["attention_mask"] == 1].any(-1).all()


@pytest.mark.sampled(15, 30)
@pytest.mark.parametrize(
    "name", ["BertModel", "DebertaV2Model", "ModernBertModel", "MPNetModel", "T5EncoderModel"]
)
@pytest.mark.parametrize(
    "real", [("xx-",), ("x--", "xxx"), ("---", "xx-"), ("---", "---"), ("x",), ("---x", "xx--")]
)
def test_few_tokens(name: str, real: tuple[str, ...], rows: list[int]) -> None:
    """One sequence, sequences without any token, and no token at all."""
    theirs = Real(build(name))
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    inputs = inputs_of(*real)
    assert_same_numbers(ours, theirs, (), inputs, grad=False)
    assert bool(rows) == ("-" in "".join(real) and all(one[0] == "x" for one in real))


#: Model -> (heads of its bias or mask, number of the three layers that have one).
WITH_A_TABLE = {
    "DebertaV2Model": (4, 3),
    "MPNetModel": (4, 3),
    "ModernBertModel": (1, 1),
    "T5EncoderModel": (4, 3),
}


@pytest.mark.parametrize("name", WITH_A_TABLE)
def test_each_sequence_has_its_part_of_bias_or_window(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = spied(
        monkeypatch, packing, "attend", lambda _, x: (*x.query.shape[:3], *x.attn_mask.shape)
    )
    # The kernel for layers requires whole panels of gates, and 48 is no multiple of 32.
    theirs = Real(build(name, **({"intermediate_size": 48} if "Modern" in name else {})))
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    heads, layers = WITH_A_TABLE[name]
    del sizes[:]
    for real in (("xxxxx----", "x--------", "xxxxxxxxx"), ("x---", "xx--", "xxx-")):
        assert_same_numbers(ours, theirs, (), inputs_of(*real), grad=False)
        lengths = [n for one in real if (n := one.count("x"))]
        assert sizes == [(1, 4, n, 1, heads, n, n) for n in lengths] * layers
        del sizes[:]
    assert_same_numbers(ours, theirs, (), inputs_of(*MIXED), grad=False)  # padding within
    assert_same_numbers(ours.train(), theirs.train(), (), inputs_of("xx-", "xxx"), grad=True)
    assert not sizes


@pytest.mark.parametrize("name", ["BertModel", "DebertaV2Model", "MPNetModel"])
def test_inference_mode_autocast_and_bfloat16(name: str, rows: list[int]) -> None:
    theirs = Real(build(name))
    inputs = inputs_of(*RIGHT)
    with torch.no_grad():
        exact = copy.deepcopy(theirs).double()(**inputs)
    for dtype, context in (
        (torch.float32, torch.inference_mode()),
        (torch.float32, torch.autocast("cpu", torch.bfloat16)),
        (torch.bfloat16, nullcontext()),
    ):
        ours = copy.deepcopy(theirs).to(dtype)
        accelerate(ours)
        with torch.no_grad(), context:
            got, expected = ours(**inputs), copy.deepcopy(theirs).to(dtype)(**inputs)
        check_budget(got, expected, exact)
    assert len(rows) == 9


@pytest.mark.parametrize(
    "name", ["BertModel", "T5EncoderModel", "BartModel", "DebertaV2Model", "MPNetModel"]
)
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_training_with_dropout(name: str, reentrant: bool | None, rows: list[int]) -> None:
    """Padded positions get no gradient; checkpoints recompute with the same rows and dropout pattern."""
    model = build(name, 0.3).train()
    accelerate(model)
    inputs = inputs_of(*MIXED)
    mask = inputs["attention_mask"]
    runs = []
    if name == "DebertaV2Model" and reentrant:
        pytest.skip("its own code differentiates the positions once a layer, which raises")
    for checkpointing in (False, True):
        if checkpointing and (reentrant is None or not model.supports_gradient_checkpointing):
            continue
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        x = torch.randn(*mask.shape, M, generator=torch.Generator().manual_seed(2)).requires_grad_()
        torch.manual_seed(4)
        output = model(inputs_embeds=x, attention_mask=mask)[0]
        # Not output.square(): behind a norm its gradient is nothing but rounding errors.
        (output * torch.linspace(-1, 1, M)).sum().backward()
        assert x.grad is not None
        assert not x.grad[mask == 0].any()
        assert x.grad[mask == 1].any(-1).all()
        runs.append((output.detach(), x.grad))
    for again, first in zip(runs[-1], runs[0], strict=True):
        torch.testing.assert_close(again, first, rtol=0.0, atol=1e-4 * float(first.abs().max()))
    assert set(rows) == ({int(mask.sum())} if name != "DebertaV2Model" else set())


@pytest.mark.parametrize("name", ["BertModel", "DebertaV2Model", "MPNetModel"])
def test_calls_that_show_layers_are_not_packed(name: str, rows: list[int]) -> None:
    """Users' hooks, and returned hidden states and weights, have the shapes of padded batches."""
    theirs = build(name)
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    inputs = inputs_of(*RIGHT)
    seen: list[torch.Size] = []
    for shown in ({"output_hidden_states": True}, {"output_attentions": True}):
        with torch.no_grad():
            states = (ours(**inputs, **shown), theirs(**inputs, **shown))
        for one, other in zip(*(found[-1] for found in states), strict=True):
            real = inputs["attention_mask"] == 1
            if one.dim() == 4:  # weights of each query
                one, other = one.transpose(1, 2), other.transpose(1, 2)
            torch.testing.assert_close(one[real], other[real], rtol=1e-3, atol=1e-4)
        # The models other than BertModel collect hidden states from the padded outputs.
        assert bool(rows) == (name != "BertModel" and "output_hidden_states" in shown)
        del rows[:]
    hook = ours.encoder.layer[1].intermediate.register_forward_hook(
        lambda module, args, output: seen.append(output.shape)
    )
    ours(**inputs)
    assert (seen, rows) == ([(B, T, 48)], [])
    hook.remove()
    with torch.no_grad():
        ours(**inputs)
    assert rows
    theirs.encoder.layer[0].register_forward_hook(lambda *_: None)
    assert "its layers have hooks" in stack_of(accelerate(theirs)).reason


@pytest.mark.sampled(10, 25)
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("kind", [torch.nn.Linear, torch.nn.LayerNorm, torch.nn.Dropout])
def test_hooks_see_the_shapes_of_transformers(name: str, kind: type) -> None:
    """DeBERTa's projections are included, which run on content and on positions."""
    theirs = build(name)
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    seen: list[set[Any]] = []
    for model in (theirs, ours):
        found: set[Any] = set()
        for place, module in model.named_modules():

            def hook(_: Any, args: Any, output: Any, place: str = place, into: Any = found) -> None:
                into.add((place, *(x.shape for x in (*args, output))))

            if isinstance(module, kind):
                module.register_forward_hook(hook)
        seen.append(found)
    for real in (RIGHT, ("xxxx", "xxxx")):
        with torch.no_grad():
            theirs(**inputs_of(*real)), ours(**inputs_of(*real))
        assert seen[0] == seen[1]


def test_mpnet_refuses_masks_that_hide_nothing() -> None:
    """MPNet's own code would add a bool mask to the scores."""
    theirs = build("MPNetModel")
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    tokens = inputs_of("xxxxx", "xxxxx")["input_ids"]
    hidden = torch.ones(2, 1, 5, 5)
    hidden[..., 3:] = 0
    with torch.no_grad():
        for mask in (hidden.bool(), hidden.long()):
            assert (theirs(tokens, mask)[0][:, :3] - theirs(tokens[:, :3])[0]).abs().max() > 1e-2
            with pytest.raises(
                TypeError, match=r"attention_mask must be \(B, T\) .*\(2, 1, 5, 5\)"
            ):
                ours(tokens, mask)
        mask = torch.where(hidden == 1, 0.0, torch.finfo(torch.float32).min)
        states = (model(tokens, mask)[0][:, :3] for model in (ours, theirs))
        torch.testing.assert_close(*states, rtol=1e-3, atol=1e-3)


def test_other_masks_and_decoders_are_left(rows: list[int]) -> None:
    theirs = build("BertModel")
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    inputs = inputs_of(*MIXED)
    mask = torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(3)) < 0.8
    with torch.no_grad():
        for given in (mask, torch.where(mask, 0.0, -1e4)):
            states = [m(inputs["input_ids"], given).last_hidden_state for m in (ours, theirs)]
            torch.testing.assert_close(*states, rtol=1e-3, atol=1e-4)
    decoder = build("BertModel", is_decoder=True)
    assert all(entry.kind != "ModuleList" for entry in accelerate(decoder).entries)
    decoder(**inputs)
    assert not rows
    chunked = build("BertModel", chunk_size_feed_forward=3)
    assert "chunk_size_feed_forward" in stack_of(accelerate(chunked)).reason
    meta = build("BertModel").to("meta")
    assert "not all plain tensors in CPU memory" in stack_of(accelerate(meta)).reason


def test_attention_outside_the_registry(rows: list[int]) -> None:
    """Only our attention supports rows; the padding is derived from the values of the mask."""
    theirs, layers = Real(build("MPNetModel")), "model.encoder.layer"
    inputs = inputs_of(*MIXED)
    excluded = copy.deepcopy(theirs)
    report = accelerate(excluded, filter_fn=lambda _, name: not name.endswith("1.attention.attn"))
    assert "1.attention.attn is left: filter_fn excludes it" in stack_of(report).reason
    assert_same_numbers(excluded, theirs, (), inputs, grad=False)
    hooked = copy.deepcopy(theirs)
    hooked.get_submodule(f"{layers}.0.attention.attn.dropout").register_forward_hook(
        lambda *_: None
    )
    accelerate(hooked)
    assert_same_numbers(hooked, theirs, (), inputs, grad=False)
    restored = copy.deepcopy(theirs)
    accelerate(restored)
    restore(restored.get_submodule(f"{layers}.2.attention.attn"))
    assert_same_numbers(restored, theirs, (), inputs, grad=False)
    assert not rows
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    real = inputs["attention_mask"] == 1
    each = torch.eye(T, dtype=torch.bool) | (torch.rand(B, 1, T, T) < 0.8)
    only = real[:, None, None].expand(B, 1, T, T)
    lowest = torch.finfo(torch.float32).min
    for mask in (
        torch.where(each, 0.0, lowest), torch.where(only, 0.0, -1e4), torch.where(only, 0.5, lowest),
    ):  # fmt: skip
        with torch.no_grad():
            states = [m.model(inputs["input_ids"], mask)[0][real] for m in (ours, theirs)]
        torch.testing.assert_close(*states, rtol=1e-3, atol=1e-4)
    assert not rows
    with torch.no_grad():
        mask = torch.where(only, 0.0, lowest)
        states = [m.model(inputs["input_ids"], mask)[0][real] for m in (ours, theirs)]
    torch.testing.assert_close(*states, rtol=1e-3, atol=1e-4)
    assert rows == [int(real.sum())] * 3


@pytest.mark.parametrize("name", DECODERS)
def test_prefill_of_decoders_skips_padding(name: str, rows: list[int]) -> None:
    """The cache keeps its padded layout, so that later tokens are the same."""
    theirs = build_decoder(name)
    ours = copy.deepcopy(theirs)
    assert stack_of(accelerate(ours)).outcome == "swapped"
    inputs = inputs_of(*LEFT)
    real = inputs["attention_mask"] == 1
    with torch.no_grad():
        right, found = theirs(**inputs), ours(**inputs)
        exact = copy.deepcopy(theirs).double()(**inputs)
        check_budget(found.logits[real], right.logits[real], exact.logits[real])
        for layers in zip(*(x.past_key_values.layers for x in (found, right, exact)), strict=True):
            for kind in ("keys", "values"):
                got, *others = (getattr(layer, kind) for layer in layers)
                at = real[:, None, -got.shape[2] :, None].expand_as(got)  # windows: last positions
                check_budget(got[at], *(x[at] for x in others))
                assert not got[~at].any()
        assert rows == [int(real.sum())] * 3
        del rows[:]
        for options in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
            made = [m.generate(**inputs, **_FIVE, **options) for m in (ours, theirs)]
            assert torch.equal(*made)
        assert len(rows) == 6  # not with a static cache, which is larger than the prompt


def test_scores_are_capped_without_padding(rows: list[int]) -> None:
    theirs = build_decoder("Gemma2ForCausalLM", attn_logit_softcapping=0.5)
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation("transformer_fast")
    accelerate(ours)
    for real in (LEFT, ("--xxx",)):
        inputs = inputs_of(*real)
        with torch.no_grad():
            states = [
                model(**inputs).logits[inputs["attention_mask"] == 1] for model in (ours, theirs)
            ]
        torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)
    assert len(rows) == 6


def test_decoders_with_gradients_or_earlier_tokens_get_padded_batches(rows: list[int]) -> None:
    theirs = build_decoder("LlamaForCausalLM")
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    assert_same_numbers(ours, theirs, (), {**inputs_of(*LEFT), "use_cache": False}, grad=True)
    assert not rows
    start, more = inputs_of(*LEFT), inputs_of("xxx", "xxx", "xx-", "xxx", seed=2)
    both = {name: torch.cat((start[name], more[name]), 1) for name in start}
    with torch.no_grad():
        caches = [m(**start).past_key_values for m in (ours, theirs)]
        assert len(rows) == 3
        tokens = {**both, "input_ids": more["input_ids"]}
        found, right = (
            m(**tokens, past_key_values=cache).logits
            for m, cache in zip((ours, theirs), caches, strict=True)
        )
    torch.testing.assert_close(found[:, :2], right[:, :2], rtol=1e-4, atol=1e-5)
    assert len(rows) == 3


class Measured(llama.LlamaAttention):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        next(kwargs[name] for name in CACHES if name in kwargs).get_seq_length()
        return super().forward(hidden_states, *args, **kwargs)


def test_decoders_that_read_the_cache_otherwise_are_left() -> None:
    model = build_decoder("LlamaForCausalLM")
    model.model.layers[2].self_attn.__class__ = Measured
    assert "has no attribute 'get_seq_length'" in stack_of(accelerate(model)).reason
    assert NO_REGISTRY in stack_of(accelerate(build_decoder("BloomForCausalLM"))).reason


class Shifted(bert.BertLayer):
    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, memory: Any = None, **kwargs: Any
    ) -> Tensor:
        found: Tensor = super().forward(hidden_states, attention_mask, **kwargs)
        return found + 1e-9 * hidden_states.roll(1, 1)


class Positioned(bert.BertSelfAttention):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        positions = torch.arange(hidden_states.shape[1]).view(1, -1, 1)
        return super().forward(hidden_states + 1e-3 * positions, *args, **kwargs)


class Unregistered(bert.BertLayer):
    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, memory: Any = None, **kwargs: Any
    ) -> Tensor:
        heads = hidden_states[:, None]
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)[:, 0]


class Reading(bert.BertLayer):
    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, memory: Any = None, **kwargs: Any
    ) -> Tensor:
        return super().forward(hidden_states, attention_mask[:, :, :, :], **kwargs)


def test_layers_of_different_signatures_are_left() -> None:
    model = build("BertModel")
    model.encoder.layer[1].__class__ = Shifted
    assert stack_of(accelerate(model)).reason == "its layers take different arguments"


@pytest.mark.parametrize(
    ("place", "kind", "reason"),
    [
        ("", Shifted, "it has operations between tokens besides attention"),
        ("attention.self", Positioned, "its results depend on the position of a token"),
        ("", Unregistered, "its attention is not looked up in the registry"),
        ("", Reading, "a trial call failed (TypeError"),
    ],
)
def test_layers_that_mix_tokens_are_left(place: str, kind: type, reason: str) -> None:
    theirs = Real(build("BertModel"))
    for layer in theirs.model.encoder.layer[: None if place == "" else 1]:
        layer.get_submodule(place).__class__ = kind
    ours = copy.deepcopy(theirs)
    state = torch.random.get_rng_state()
    assert reason in stack_of(accelerate(ours)).reason
    assert torch.equal(torch.random.get_rng_state(), state)
    assert_same_numbers(ours, theirs, (), inputs_of(*MIXED), grad=False)


class Watched(bert.BertEncoder):
    """Reads the hidden states between layers, skips one and stops early."""

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        total = torch.zeros_like(hidden_states)
        for index, layer in enumerate(self.layer):
            if index == 0:
                continue
            hidden_states = layer(hidden_states, attention_mask)
            total = total + hidden_states
            if index == 1:
                break
        return transformers.modeling_outputs.BaseModelOutputWithPastAndCrossAttentions(total)


def test_models_may_share_layers(rows: list[int]) -> None:
    """A shared layer looks its attention up in the config of the model that it was built for."""
    one, two = (Real(build("BertModel")) for _ in range(2))
    two.model.encoder.layer[0] = one.model.encoder.layer[0]
    expected = copy.deepcopy(two)
    for shared in (False, True):
        accelerate(one)
        accelerate(two)
        if shared:
            restore(one)
        assert_same_numbers(two, expected, (), inputs_of(*MIXED), grad=False)
        assert bool(rows) is not shared
        restore(two)
        del rows[:]


def test_loops_that_are_no_chain_get_padded_states(rows: list[int]) -> None:
    theirs = Real(build("BertModel"))
    theirs.model.encoder.__class__ = Watched
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    assert_same_numbers(ours, theirs, (), inputs_of(*MIXED), grad=False)
    assert len(rows) == 1


def test_copies_pickles_and_restore(rows: list[int]) -> None:
    theirs = Real(build("BertModel"))
    ours = copy.deepcopy(theirs)
    as_it_was = form(ours)
    accelerate(ours)
    inputs = inputs_of(*MIXED)
    assert not accelerate(ours).swapped
    assert_same_numbers(copy.deepcopy(ours), theirs, (), inputs, grad=False)
    assert len(rows) == 3
    assert type(pickle.loads(pickle.dumps(ours)).model.encoder.layer) is torch.nn.ModuleList
    restore(ours)
    assert form(ours) == as_it_was
    assert_same_numbers(ours, theirs, (), inputs, grad=False)
    assert len(rows) == 3


def test_verify_compares_real_positions() -> None:
    for name in ("BertModel", "DebertaV2Model", "ModernBertModel", "MPNetModel"):
        report = accelerate(build(name), verify=inputs_of(*MIXED))
        assert report.verified, str(report)


def test_threads_and_exceptions_share_no_state(rows: list[int]) -> None:
    model = build("BertModel")
    accelerate(model)
    batches = [inputs_of(*MIXED[: 1 + i % 4], seed=i) for i in range(8)]
    with torch.no_grad():
        expected = [model(**inputs)[0] for inputs in batches]
        got: dict[int, Tensor] = {}

        def run(index: int) -> None:
            with torch.no_grad():
                got[index] = model(**batches[index])[0]

        # Runs in copies of this context, because new threads do not have its settings.
        contexts = [contextvars.copy_context() for _ in range(8)]
        threads = [threading.Thread(target=c.run, args=(run, i)) for i, c in enumerate(contexts)]
        [thread.start() for thread in threads], [thread.join() for thread in threads]
        assert all(torch.equal(got[index], expected[index]) for index in range(8))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(model.encoder.layer[1]), "forward", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(**batches[0])
        assert torch.equal(model(**batches[1])[0], expected[1])


@pytest.mark.thorough
def test_compiled_models_match() -> None:
    theirs = Real(build("BertModel", num_hidden_layers=1))
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    inputs = inputs_of(*MIXED)
    with torch.no_grad():
        got = torch.compile(ours.model, backend="eager", fullgraph=True)(**inputs)[0]
        real = inputs["attention_mask"] == 1
        check_budget(got[real], theirs(**inputs), copy.deepcopy(theirs).double()(**inputs))


_NAMED = """
import torch, transformer_fast
from transformers import BertConfig, BertModel
config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
models = [BertModel._from_config(config, attn_implementation="transformer_fast")]
models.append(BertModel(config))
models[1].load_state_dict(models[0].state_dict())
mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
x, y = (m.eval()(torch.ones_like(mask), mask)[0][mask == 1] for m in models)
torch.testing.assert_close(x, y)
models[1].set_attn_implementation("transformer_fast")
report = transformer_fast.accelerate(models[1])
assert report[""].outcome == "already" and report["encoder.layer"].outcome == "swapped", report
transformer_fast.restore(models[1])
assert models[1].config._attn_implementation == "transformer_fast"
"""


@pytest.mark.thorough
def test_the_attention_has_a_name_after_one_import() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", _NAMED], check=True)
