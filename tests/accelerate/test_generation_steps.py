"""Steps of transformers' `generate` after `accelerate`: all layers in one call."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import spied
from module_checks import check_budget
from torch import Tensor

from transformer_fast import _native, accelerate, restore
from transformer_fast.accelerate import generation
from transformer_fast.accelerate import steps as native
from transformer_fast.testing import GRADIENT_FACTOR

pytest.importorskip(
    "transformers", reason="transformers is not installed (pip install transformer_fast[test])"
)
import transformers
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("quiet_transformers"),
    pytest.mark.skipif(_native.module is None, reason=str(_native.why_not)),
]

VOCABULARY, WIDTH, LAYERS, PAD, END = 97, 64, 3, 1, 2
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": END, "bos_token_id": 0}
_BART = {
    "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": LAYERS, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    "max_position_embeddings": 80, "decoder_start_token_id": END, "forced_eos_token_id": None,
    "scale_embedding": True, "tie_word_embeddings": False,
}  # fmt: skip
#: The heads together are narrower than the model.
_T5 = {
    "d_model": WIDTH, "d_kv": 8, "d_ff": 96, "num_layers": LAYERS, "num_heads": 6,
    "decoder_start_token_id": PAD,
}  # fmt: skip
#: Two query heads share a key head.
_LLAMA = {
    "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 80, "tie_word_embeddings": False,
}  # fmt: skip
#: marian: post-norm, scaled embeddings, sinusoidal positions. bart: learned positions, a norm of the
#: embeddings. mbart: pre-norm with a final norm. m2m_100: positions that depend on tokens. pegasus:
#: pre-norm, sinusoidal. t5: biases of relative positions, RMS norms, unscaled scores; flan_t5: gates.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "marian": ("MarianConfig", "MarianMTModel", _BART),
    "bart": ("BartConfig", "BartForConditionalGeneration", _BART),
    "mbart": ("MBartConfig", "MBartForConditionalGeneration", _BART),
    "m2m_100": ("M2M100Config", "M2M100ForConditionalGeneration", _BART),
    "pegasus": ("PegasusConfig", "PegasusForConditionalGeneration", _BART),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", {
        **_BART, "num_mel_bins": 8, "max_source_positions": 7, "max_target_positions": 80}),
    "t5": ("T5Config", "T5ForConditionalGeneration", _T5),
    "flan_t5": ("T5Config", "T5ForConditionalGeneration", {
        **_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5Config", "MT5ForConditionalGeneration", _T5),
}  # fmt: skip
#: Decoders without an encoder. gpt2: weights (inputs, outputs). opt: a network on flattened batches.
#: llama: rotary positions, gates, grouped heads. qwen2: biases. mistral: heads wider than the model.
DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {
        "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 80,
        "tie_word_embeddings": False}),
    "opt": ("OPTConfig", "OPTForCausalLM", {
        "hidden_size": WIDTH, "ffn_dim": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "max_position_embeddings": 80, "word_embed_proj_dim": WIDTH, "tie_word_embeddings": False}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _LLAMA),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _LLAMA),
    "mistral": ("MistralConfig", "MistralForCausalLM", {
        **_LLAMA, "head_dim": 24, "sliding_window": None}),
}  # fmt: skip
ALL = MODELS | DECODERS
#: Parameters of positions. `build` makes them large, so that models do not repeat a token.
_POSITIONS = ("positions", "relative_attention_bias", "wpe")


def build(name: str, **settings: Any) -> Any:
    """Returns a model with random weights that does not repeat one token."""
    config, kind = (getattr(transformers, each) for each in ALL[name][:2])
    torch.manual_seed(0)
    model = kind(config(**{**_TOKENS, **ALL[name][2], **settings}))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if any(each in key for each in _POSITIONS):  # large, so that greedy search does not
                parameter.normal_(0, 3)  # repeat one token
            elif parameter.dim() == 2:
                torch.nn.init.xavier_normal_(parameter)
            elif parameter.dim() == 1 and "norm" not in key and "ln_" not in key:
                parameter.normal_(0, 0.1)
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(torch.randn_like(head.weight))
        head.weight[[PAD, END]] = 0  # a logit that is never the largest
    return model.eval().requires_grad_(False)


def sources(batch: int = 3, name: str = "marian") -> dict[str, Tensor]:
    """Returns sentences of 7, 6, ... tokens, padded; at the left for decoders without an encoder."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (batch, 7), generator=generator)
    mask = torch.arange(7) < 7 - torch.arange(batch)[:, None]
    if name == "whisper":
        return {"input_features": torch.randn(batch, 8, 14, generator=generator)}
    mask = mask.flip(1) if name in DECODERS else mask
    return {"input_ids": tokens.where(mask, PAD), "attention_mask": mask.long()}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the number of sequences in each step that ran as one call."""
    return spied(monkeypatch, native.Chain, "__call__", lambda y, chain, x, *_, **__: len(x))


@pytest.fixture
def marian(steps: list[int]) -> Iterator[Any]:
    model = build("marian")
    accelerate(model)
    steps.clear()
    return model


LENGTH = 24


@torch.no_grad()
def logits_of(model: Any, batch: int = 3, name: str = "marian", **options: Any) -> Tensor:
    """Returns the logits (B, LENGTH, V) of one step after another, with given tokens."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, VOCABULARY, (batch, LENGTH), generator=generator)
    given = sources(batch, name)
    found = []
    if name in DECODERS:
        cache, mask, part = DynamicCache(), given["attention_mask"], given["input_ids"]
        for token in tokens.split(1, 1):
            logits = model(
                input_ids=part, attention_mask=mask, cache=cache, use_cache=True, **options
            ).logits
            found.append(logits[:, -1:])
            part, mask = token, torch.cat([mask, torch.ones_like(token)], 1)
        return torch.cat(found, 1)
    floats = {n: x.to(model.dtype) if x.is_floating_point() else x for n, x in given.items()}
    encoded = model.get_encoder()(**floats)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    for token in tokens.split(1, 1):
        logits = model(
            encoder_outputs=encoded, attention_mask=given.get("attention_mask"),
            decoder_input_ids=token, cache=cache, use_cache=True, **options,
        ).logits  # fmt: skip
        found.append(logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_logits_of_steps(name: str, dtype: torch.dtype, steps: list[int]) -> None:
    model = build(name).to(dtype)
    oracle = logits_of(copy.deepcopy(model).double(), name=name)
    expected = logits_of(model, name=name)
    report = accelerate(model)
    decoder = next(n for n, m in model.named_modules() if isinstance(m, native.StepDecoder))
    assert generation.ONE_CALL in report[decoder].reason
    steps.clear()
    found = logits_of(model, name=name)
    assert steps == [3] * (LENGTH - 1)
    check_budget(found, expected, oracle, GRADIENT_FACTOR)


@pytest.mark.parametrize("name", ALL)
def test_logits_of_steps_in_int8(name: str, steps: list[int]) -> None:
    model = build(name)
    oracle = logits_of(copy.deepcopy(model).double(), name=name)
    accelerate(model, quantize="int8")
    steps.clear()
    found = logits_of(model, name=name)
    assert steps == [3] * (LENGTH - 1)
    expected = logits_of(model, name=name, output_hidden_states=True)  # module by module
    assert steps == [3] * (LENGTH - 1)
    check_budget(found, expected, oracle)


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4, "min_new_tokens": 20},
    "length penalty, early stopping, n-grams": {
        "num_beams": 4, "length_penalty": 0.6, "early_stopping": True, "no_repeat_ngram_size": 2,
        "min_new_tokens": 5,
    },
    "several results": {"num_beams": 3, "num_return_sequences": 3, "early_stopping": "never"},
    "suppressed and forced": {
        "suppress_tokens": [5, 6, 7], "forced_bos_token_id": 9, "bad_words_ids": [[8]],
    },
    "early ends": {"eos_token_id": [*range(2, 9)]},
    "early ends, beams": {"eos_token_id": [*range(2, 9)], "num_beams": 3},
    "sampled": {"do_sample": True, "top_k": 5, "num_return_sequences": 2},
    "prompt": {"decoder_input_ids": torch.tensor([[END, 11, 12]]).repeat(3, 1)},
}  # fmt: skip


def tokens_of(model: Any, batch: int = 3, name: str = "marian", **options: Any) -> Tensor:
    if "decoder_input_ids" in options:
        options["decoder_input_ids"] = options["decoder_input_ids"][:batch]
    torch.manual_seed(3)
    given = sources(batch, name)
    # Whisper's own `generate` splits recordings.
    method = GenerationMixin.generate if name == "whisper" else type(model).generate
    return method(model, **given, max_new_tokens=36, **options)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("marian", 3), ("marian", 1), ("m2m_100", 3), ("bart", 1), ("mbart", 3), ("t5", 3),
        ("flan_t5", 1), ("pegasus", 1), ("whisper", 3), ("gpt2", 3), ("gpt2", 1), ("opt", 3),
        ("llama", 3), ("mistral", 1),
    ],
)  # fmt: skip
def test_tokens_are_those_of_transformers(name: str, batch: int, steps: list[int]) -> None:
    model = build(name)
    options = OPTIONS
    if name in DECODERS:
        without = {"prompt", "suppressed and forced"}
        options = {each: given for each, given in OPTIONS.items() if each not in without}
    expected = {each: tokens_of(model, batch, name, **given) for each, given in options.items()}
    assert all(len(x.unique()) > 5 for each, x in expected.items() if each != "early ends")
    accelerate(model)
    prompt = 7 if name in DECODERS else 0
    for option, tokens in expected.items():
        steps.clear()
        assert torch.equal(tokens_of(model, batch, name, **options[option]), tokens), option
        assert len(steps) >= tokens.shape[1] - prompt - 5, option
    restore(model)
    assert not any(isinstance(m, native.StepDecoder) for m in model.modules())
    steps.clear()
    assert torch.equal(tokens_of(model, batch, name, **options["beams"]), expected["beams"])
    assert not steps


def test_beams_share_the_keys_of_their_source(
    marian: Any, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = spied(monkeypatch, native._Memory, "__init__", lambda _, memory, *args: memory.beams)
    allocated = spied(monkeypatch, native._Past, "_allocate", lambda _, past, *args: past.length)
    tokens_of(marian, num_beams=4)
    assert steps[:1] == [12]
    assert made == [4]
    assert allocated == [1, 34]  # it grows once in 35 steps


@torch.no_grad()
def test_caches_are_transformers_own(marian: Any, steps: list[int]) -> None:
    """A cache can be read, cropped, copied, reordered and passed on, as in transformers."""
    theirs = build("marian")
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, VOCABULARY, (3, 17), generator=generator)

    def run(model: Any) -> Iterator[Any]:
        given = sources()
        encoded = model.get_encoder()(**given)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        done = 0

        def call(count: int, cache: Any) -> Tensor:
            nonlocal done
            part = tokens[:, done : done + count]
            done += count
            return model(  # type: ignore[no-any-return]
                encoder_outputs=encoded, attention_mask=given["attention_mask"],
                decoder_input_ids=part, cache=cache, use_cache=True,
            ).logits  # fmt: skip

        yield call(2, cache)
        yield call(1, cache)
        yield call(1, cache)
        yield [(x.keys, x.values) for x in cache.self_attention_cache.layers]
        assert cache.get_seq_length() == 4
        yield call(3, cache)  # several tokens: module by module
        yield call(1, cache)
        kept = [x.keys for x in cache.self_attention_cache.layers]
        cache.crop(-3)
        assert cache.get_seq_length() == 5
        yield call(1, cache)
        yield [(x,) for x in kept]  # steps after the crop do not overwrite their last positions
        given["attention_mask"].numpy()[:, 1] = 0
        yield call(1, cache)
        cache.reorder_cache(torch.tensor([0, 0, 1]))  # mixes the sources; masks hide no less
        yield call(1, cache)
        yield call(1, cache)
        copied = copy.deepcopy(cache)
        assert type(copied.self_attention_cache) is DynamicCache
        yield call(1, cache)
        done -= 1
        yield call(1, copied)
        for layer in cache.self_attention_cache.layers:
            layer.keys, layer.values = layer.keys * 1.5, layer.values - 1
        for layer in cache.cross_attention_cache.layers:
            layer.values.mul_(2)
        yield call(1, cache)
        kept = pickle.loads(pickle.dumps(cache))
        assert type(kept.cross_attention_cache) is DynamicCache
        yield call(1, kept)
        with torch.inference_mode():
            inside = call(1, cache)
        yield inside.clone()
        yield call(1, cache)

    for found, expected in zip(run(marian), run(theirs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len(steps) == 13


def test_a_cache_is_handed_on_to_a_second_call(marian: Any, steps: list[int]) -> None:
    theirs = build("marian")

    def run(model: Any) -> Tensor:
        given = sources()
        encoded = model.get_encoder()(**given)
        given = {"attention_mask": given["attention_mask"], "encoder_outputs": encoded}
        first = model.generate(**given, max_new_tokens=9, return_dict_in_generate=True)
        second = model.generate(
            **given, cache=first.cache, decoder_input_ids=first.sequences, max_new_tokens=9
        )
        return second  # type: ignore[no-any-return]

    expected = run(theirs)
    assert torch.equal(run(marian), expected)
    assert len(steps) == 8 + 8  # transformers computes the prompt again, at later positions


def _hooked(model: Any) -> None:
    model.model.decoder.layers[1].fc1.register_forward_hook(lambda *_: None)


def _patched(model: Any) -> None:
    layer = model.model.decoder.layers[1]
    layer.forward = layer.forward


def _with_eager_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


@pytest.mark.parametrize(
    "change",
    [
        {"output_attentions": True, "return_dict_in_generate": True},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"decoder_attention_mask": torch.tensor([[1, 1], [0, 1], [1, 1]]),
         "decoder_input_ids": torch.tensor([[END, 9], [PAD, END], [END, 11]])},
        _hooked, _patched, _with_eager_attention,
    ],
    ids=lambda change: change.__name__ if callable(change) else ", ".join(change),
)  # fmt: skip
def test_other_calls_run_module_by_module(change: Any, steps: list[int]) -> None:
    model = build("marian")
    options = change if isinstance(change, dict) else {}

    def tokens() -> Any:
        found = model.generate(**sources(), max_new_tokens=8, **options)
        return found.sequences if hasattr(found, "sequences") else found

    expected = tokens()
    accelerate(model)
    if not options:
        change(model)
    steps.clear()
    assert torch.equal(tokens(), expected)
    assert not steps


def test_steps_with_gradients_or_in_training_run_module_by_module(
    marian: Any, steps: list[int]
) -> None:
    given = sources()
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    token = torch.full((3, 1), END)
    for _ in range(2):
        marian(**given, decoder_input_ids=token, cache=cache)
    marian.train()
    with torch.no_grad():
        marian(**given, decoder_input_ids=token, cache=cache)
    assert not steps


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_changed_weights_take_effect(quantize: str | None, steps: list[int]) -> None:
    model = build("marian")
    accelerate(model, quantize=quantize)
    before = tokens_of(model)
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            layer.fc2.weight.neg_()
            layer.encoder_attn.q_proj.bias.add_(1)
    fresh = build("marian")
    fresh.load_state_dict(model.state_dict())
    accelerate(fresh, quantize=quantize)
    steps.clear()
    found = tokens_of(model)
    assert len(steps) == 35
    assert not torch.equal(found, before)
    assert torch.equal(found, tokens_of(fresh))
    model.resize_token_embeddings(VOCABULARY + 3)
    model.model.decoder.layers = model.model.decoder.layers[:2]
    model.config.decoder_layers = 2
    steps.clear()
    tokens_of(model)
    assert not steps  # the model has changed


def test_accelerate_is_idempotent_and_copies_keep_their_steps(
    marian: Any, steps: list[int]
) -> None:
    expected = tokens_of(marian)
    report = accelerate(marian)
    assert not report.swapped
    assert generation.ONE_CALL + generation.LOOPS in report["model.decoder"].reason
    copied = copy.deepcopy(marian)
    steps.clear()
    assert torch.equal(tokens_of(copied), expected)
    assert len(steps) == 35
    theirs = pickle.loads(pickle.dumps(marian))
    assert not any(isinstance(m, native.StepDecoder) for m in theirs.modules())


def test_filter_and_other_decoders_are_reported() -> None:
    model = build("marian")
    report = accelerate(model, filter_fn=lambda module, name: "decoder.layers.1.fc" not in name)
    assert "module by module: filter_fn excludes" in report["model.decoder"].reason
    restore(model)
    layer = model.model.decoder.layers[2]
    layer.extra = torch.nn.Parameter(torch.zeros(3), False)
    report = accelerate(model)
    assert "parameters or buffers besides" in report["model.decoder"].reason


class Doubled(transformers.models.marian.modeling_marian.MarianDecoder):
    """A decoder that computes more than its layers, one after another."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        if len(self.layers) > 1:
            found.last_hidden_state = found.last_hidden_state * 2
        return found


def test_decoders_with_other_code_keep_it() -> None:
    model = build("marian")
    model.model.decoder.__class__ = Doubled
    report = accelerate(model)
    assert not any(isinstance(m, native.StepDecoder) for m in model.modules())
    assert "module by module" in report["model.decoder"].reason


def test_verify_covers_steps(steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("marian")
    given = {**sources(), "decoder_input_ids": torch.tensor([[END, 9, 8]] * 3), "use_cache": True}
    assert accelerate(model, verify=given).verified
    assert steps[-1] == 3
    restore(model)
    monkeypatch.setattr(generation, "_difference", lambda *_: None)
    run = native._Past.bind
    monkeypatch.setattr(
        native._Past,
        "bind",
        lambda *a: lambda *b: run(*a)(*b).mul_(1.01),  # type: ignore[misc]
    )
    report = accelerate(model, verify=given)
    assert report.verified is False
    assert not any(isinstance(m, native.StepDecoder) for m in model.modules())


@torch.no_grad()
def test_changed_biases_of_positions_take_effect_amid_a_cache(steps: list[int]) -> None:
    theirs, ours = build("t5"), build("t5")
    accelerate(ours)
    steps.clear()

    def run(model: Any) -> Tensor:
        source = sources()
        encoded = model.get_encoder()(**source)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        mask, found = source["attention_mask"], []
        for token in range(3, 43):
            if token == 30:
                block: Any = model.decoder.block[0]
                block.layer[0].SelfAttention.relative_attention_bias.weight.neg_()
            given = {"decoder_input_ids": torch.full((3, 1), token), "cache": cache}
            y = model(encoder_outputs=encoded, attention_mask=mask, use_cache=True, **given)
            found.append(y.logits)
        return torch.cat(found, 1)

    oracle = run(copy.deepcopy(theirs).double())
    check_budget(run(ours), run(theirs), oracle, GRADIENT_FACTOR)
    assert len(steps) == 39


@pytest.mark.parametrize(
    ("name", "options", "uses_steps"),
    [
        ("gpt2", {"prompt_lookup_num_tokens": 3}, True),
        ("gpt2", {"output_hidden_states": True}, False),
        ("gpt2", {"use_cache": False}, False),
        ("llama", {"cache_implementation": "static"}, False),
        ("llama", {"do_sample": True, "repetition_penalty": 1.3}, True),
        ("t5", {"cache_implementation": "static"}, False),
    ],
    ids=str,
)
def test_other_options(
    name: str, options: dict[str, Any], uses_steps: bool, steps: list[int]
) -> None:
    model = build(name)
    expected = tokens_of(model, 1, name, **options)
    accelerate(model)
    steps.clear()
    assert torch.equal(tokens_of(model, 1, name, **options), expected)
    assert bool(steps) is uses_steps


@torch.no_grad()
def test_a_decoder_that_runs_fewer_layers_runs_module_by_module(steps: list[int]) -> None:
    theirs, ours = build("llama"), build("llama")
    accelerate(ours)
    steps.clear()

    def run(model: Any) -> Tensor:
        cache = DynamicCache()
        model(torch.tensor([[3, 4]]), cache=cache)
        model.config.num_hidden_layers = 2
        return model(torch.tensor([[5]]), cache=cache).logits  # type: ignore[no-any-return]

    oracle = run(copy.deepcopy(theirs).double())
    check_budget(run(ours), run(theirs), oracle)
    assert not steps


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_prompts_padded_at_the_right_continue_from_the_last_position(name: str) -> None:
    theirs, ours = build(name), build(name)
    accelerate(ours)
    prompt = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, PAD, PAD]])
    given = {"attention_mask": (prompt != PAD).long(), "max_new_tokens": 3, "do_sample": False}
    made = [
        torch.stack(
            model.generate(prompt, output_logits=True, return_dict_in_generate=True, **given).logits
        )
        for model in (ours, theirs)
    ]
    torch.testing.assert_close(*made, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_others_write_to_a_cache_stays_when_beams_are_reordered(
    mode: Any, steps: list[int]
) -> None:
    theirs, ours = build("gpt2"), build("gpt2")
    accelerate(ours)
    steps.clear()

    def run(model: Any) -> Tensor:
        cache = DynamicCache()
        model(torch.tensor([[3, 4, 5, 6]] * 2), cache=cache)
        for t in range(6):
            logits = model(torch.tensor([[7 + t]] * 2), cache=cache).logits
            cache.reorder_cache(torch.tensor([0, 0]))
            if t == 3:
                cache.layers[0].values[:, :, 1] = 1.0
        return logits  # type: ignore[no-any-return]

    with mode():
        check_budget(run(ours), run(theirs), run(copy.deepcopy(theirs).double()))
    assert len(steps) == 6


def test_settings_that_layers_read_in_each_call_take_effect(steps: list[int]) -> None:
    config = transformers.OlmoConfig(**{**_TOKENS, **_LLAMA, "clip_qkv": None})
    theirs = transformers.OlmoForCausalLM(config).eval()
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    prompt = torch.tensor([[3, 4, 5]])
    steps.clear()
    ours.generate(prompt, max_new_tokens=3)
    assert steps
    steps.clear()
    for model in (ours, theirs):
        model.config.clip_qkv = 0.02
    made = [
        torch.stack(
            model.generate(
                prompt, max_new_tokens=4, output_logits=True, return_dict_in_generate=True
            ).logits
        )
        for model in (ours, theirs)
    ]
    torch.testing.assert_close(*made, rtol=1e-3, atol=1e-4)
    assert not steps


def test_caches_of_a_window_and_other_layers_are_reported() -> None:
    for name, settings, reason in (
        ("mistral", {"sliding_window": 16}, "supports its sizes, or its cache"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "supports its sizes"),
    ):
        report = accelerate(build(name, **settings))
        found = [e.reason for e in report.entries if "generate: module by module" in e.reason]
        assert [reason in each for each in found] == [True], found
