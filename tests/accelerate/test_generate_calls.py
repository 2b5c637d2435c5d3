"""What `accelerate` does around transformers' search, and the pages examples/translate.py and
examples/transcribe.py."""

from __future__ import annotations

import contextvars
import copy
import functools
import pickle
import re
import wave
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Functions
from test_generation_steps import DECODERS, build, sources, tokens_of
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from transformers.generation import LogitsProcessor, LogitsProcessorList, logits_process
from transformers.generation.streamers import BaseStreamer

from examples import transcribe, translate
from transformer_fast import _native, accelerate, memory, restore
from transformer_fast.accelerate import generate_calls
from transformer_fast.accelerate.steps import Chain

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("quiet_transformers"),
    pytest.mark.skipif(_native.module is None, reason=str(_native.why_not)),
]


def generated(model: Any, *processors: Any, **options: Any) -> Any:
    given = {"logits_processor": LogitsProcessorList(processors)} if processors else {}
    return model.generate(**sources(), max_new_tokens=20, **given, **options)


def test_models_get_their_class_back() -> None:
    model = build("marian")
    kind = type(model)
    accelerate(model)
    assert isinstance(model, generate_calls.GeneratingModel)
    assert isinstance(copy.deepcopy(model), generate_calls.GeneratingModel)
    assert type(pickle.loads(pickle.dumps(model))) is kind
    restore(model)
    assert type(model) is kind


class Plain(LogitsProcessor):
    """Changes nothing, but is code of users."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores


class Streamer(BaseStreamer):
    def put(self, value: Any) -> None:
        """Takes tokens."""

    def end(self) -> None:
        """Ends the stream."""


#: Options of searches that run in our loops, and of those that do not.
OURS: dict[str, dict[str, Any]] = {
    "plain": {},
    "early stopping": {"eos_token_id": [2, *range(30, 40)], "early_stopping": True},
    "never stopping": {
        "eos_token_id": [2, *range(30, 40)], "early_stopping": "never", "length_penalty": 2.0},
    "no end token": {"eos_token_id": None, "pad_token_id": 0},
    "ties": {"suppress_tokens": [*range(5, 96)]},
    "processors": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
}  # fmt: skip
THEIRS: dict[str, dict[str, Any]] = {
    "scores": {"return_dict_in_generate": True, "output_scores": True},
    "sampling": {"do_sample": True},
    "function of users": {"prefix_allowed_tokens_fn": lambda batch, tokens: [*range(4, 40)]},
    "processor of users": {"logits_processor": LogitsProcessorList([Plain()])},
    "criterion": {"max_time": 1000.0},
    "state of rows": {"encoder_no_repeat_ngram_size": 2},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["marian", "t5", "gpt2", "llama"])
def test_searches_in_our_loops(name: str, beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"num_beams": beams, "num_return_sequences": 1 if beams == 1 else 2}
    theirs = {"scores": THEIRS["scores"]} if name != "marian" else THEIRS
    if beams == 1:
        theirs = theirs | {"streamer": {"streamer": Streamer()}}
    model, repeated, searches, left = build(name), [], [], []
    several = tokens_of(model, 4, name)[0, -20:-15].tolist()
    ours = OURS | {"several end tokens": {"eos_token_id": [2, *several]}}
    every = {each: given | more for each, more in (ours | theirs).items()}
    expected = {each: tokens_of(model, 4, name, **more) for each, more in every.items()}
    accelerate(model)
    repeat, run = Chain.repeat, generate_calls._Search.run
    monkeypatch.setattr(Chain, "repeat", lambda *a: repeated.append(len(a[1])) or repeat(*a))
    monkeypatch.setattr(generate_calls._Search, "run", lambda self: searches.append(1) or run(self))
    select = generate_calls._Search._select
    monkeypatch.setattr(
        generate_calls._Search, "_select", lambda self, x: left.append(x) or select(self, x)
    )
    for each, more in every.items():
        found = [tokens_of(model, 4, name, **more), expected[each]]
        found = [getattr(x, "sequences", x) for x in found]
        assert torch.equal(*found), each
        assert len(searches) == int(each in ours), each
        count = found[0].shape[1] - (7 if name in DECODERS else 1)
        # All steps but the first, and the first after sequences left the batch, are repeated.
        assert each not in ours or count - 6 <= len(repeated) < count, each
        if each == "several end tokens" and beams == 1:
            assert left, "ended sequences leave the batch"
        searches.clear()
        repeated.clear()


@pytest.mark.parametrize("reader", ["a hook", "a global hook", "another forward"])
def test_code_of_users_gets_all_beams(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without such code the first tokens of a source's beams are computed once."""
    model, sizes, run = build("marian"), [], generate_calls.keep_shared
    monkeypatch.setattr(
        generate_calls, "keep_shared", lambda *given: sizes.append("one") or run(*given)
    )
    accelerate(model)
    expected = generated(model, num_beams=3)
    assert sizes == ["one"]

    def note(module: Any, _: Any, out: Any) -> None:
        if isinstance(module, torch.nn.Linear) and out.shape[-1] == model.config.vocab_size:
            sizes.append(len(out))

    if reader == "a hook":
        model.lm_head.register_forward_hook(note)
    elif reader == "another forward":
        forward = model.forward
        model.forward = functools.wraps(forward)(
            lambda *args, **kwargs: (
                sizes.append(len(kwargs["decoder_input_ids"])) or forward(*args, **kwargs)
            )
        )
    with ExitStack() as stack:
        if reader == "a global hook":
            stack.callback(register_module_forward_hook(note).remove)
        assert torch.equal(generated(model, num_beams=3), expected)
    assert len(sizes) > 2
    assert {*sizes[1:]} == {3 * len(sources()["input_ids"])}


def test_beams_have_caches_of_their_own() -> None:
    model, given = build("marian"), {name: x[:1] for name, x in sources().items()}
    accelerate(model)
    found = model.generate(**given, num_beams=3, return_dict_in_generate=True)
    keys = found.past_key_values.cross_attention_cache.layers[0].keys
    before = keys.clone()
    keys[0].neg_()
    assert torch.equal(keys[1:], before[1:])


class Negating(LogitsProcessorList):
    """A list with state, which its constructor requires."""

    def __init__(self, items: Any, sign: int) -> None:
        super().__init__(items)
        self.sign = sign

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return super().__call__(input_ids, scores, **kwargs) * self.sign


@pytest.mark.parametrize("beams", [1, 2])
def test_lists_of_processors_keep_their_state(beams: int) -> None:
    model = build("marian")
    kind = type(model)

    def processors(self: Any, *args: Any, **kwargs: Any) -> Any:
        return Negating(kind._get_logits_processor(self, *args, **kwargs), -1)

    model.__class__ = type("Mine", (kind,), {"_get_logits_processor": processors})
    expected = generated(model, num_beams=beams, suppress_tokens=[5])
    accelerate(model)
    assert torch.equal(generated(model, num_beams=beams, suppress_tokens=[5]), expected)


def test_comparisons_end_with_their_search() -> None:
    with memory.compared_once():
        outer, context = memory.compared.get(), contextvars.copy_context()
        with memory.compared_once():
            assert memory.compared.get() is not outer
        assert outer is not None
        assert context.run(memory.compared.get) is outer is memory.compared.get()
        assert outer.is_valid
    assert not outer.is_valid


@pytest.mark.parametrize("kind", ["random", "ties", "NaN", "infinite"])
def test_extensions_are_those_of_pytorch(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, scores = (
        torch.randn(6, 20_011, generator=generator),
        torch.tensor([[0.0, -1, -2], [3, 2, 1]]),
    )
    if kind == "ties":
        x = (9 * x).round()
    elif kind != "random":
        x[1, 7::500] = torch.nan if kind == "NaN" else -torch.inf
        x[0, 11:] = -torch.inf if kind == "infinite" else x[0, 11:]
    every = (x.view(2, 3, -1) + scores[:, :, None]).flatten(1)
    for count in (1, 6, 9):
        best, parents, tokens = generate_calls._Rules(False, 3).extensions(x, scores, count)
        expected = every.topk(count)
        assert torch.equal(parents * x.shape[1] + tokens, expected.indices)
        torch.testing.assert_close(best, expected.values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("beams", [2, 3, 4])
def test_equal_scores_are_taken_as_by_transformers(
    beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    head = model.get_output_embeddings().weight.data
    head[: len(head) // 2] = head[-(len(head) // 2) :]
    given = {"num_beams": beams, "num_return_sequences": beams, "eos_token_id": [2, 7]}
    accelerate(model)
    found = tokens_of(model, 4, "llama", **given)
    monkeypatch.setattr(generate_calls._Search, "of", lambda *args, **kwargs: None)
    assert torch.equal(found, tokens_of(model, 4, "llama", **given))


def test_processors_search_the_vocabulary_once() -> None:
    theirs = [
        logits_process.SuppressTokensLogitsProcessor([3, 4, 400]),
        logits_process.SuppressTokensAtBeginLogitsProcessor([3, 5], 2),
        logits_process.MinLengthLogitsProcessor(5, [2]),
        logits_process.MinNewTokensLengthLogitsProcessor(1, 2, [2, 7]),
    ]
    for one in theirs:
        ours = generate_calls._searching_once(one)
        assert type(pickle.loads(pickle.dumps(ours))) is type(one)
        assert isinstance(ours, type(one))
        assert ours is not one
        for size, length in ((90, 2), (90, 3), (80, 9), (90, 2)):
            ids, scores = torch.zeros(2, length, dtype=torch.long), torch.randn(2, size)
            before = scores.clone()
            assert torch.equal(ours(ids, scores), one(ids, scores))
            assert torch.equal(scores, before)
        (tokens,) = (value for value in vars(one).values() if isinstance(value, Tensor))
        tokens.data += 1
        assert torch.equal(ours(ids, scores), one(ids, scores))
        with Functions() as called:
            one(ids, scores)
            assert called.seen.count("isin") == 1
            ours(ids, scores[:, :70]), ours(ids, scores[:, :70])
            assert called.seen.count("isin") == 2
    assert generate_calls._searching_once(generate_calls) is generate_calls


class Changing(LogitsProcessor):
    """Changes a weight amid a call."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] == 9:
            self.weight.neg_()
        return scores


@torch.no_grad()
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_changes_of_weights_are_found(quantize: Any) -> None:
    model, other = build("marian"), build("marian")
    for each in (model, other):
        accelerate(each, quantize=quantize)
    weight = model.model.decoder.layers[1].fc1.weight
    before = generated(model)
    found = generated(model, Changing(weight))  # tracked
    assert torch.equal(found[:, :10], before[:, :10])
    assert not torch.equal(found, before)
    assert memory.compared.get() is None
    weight.data.neg_()  # not tracked
    assert torch.equal(generated(model), before)
    weight.data[3] = 1.0
    other.model.decoder.layers[1].fc1.weight.data[3] = 1.0
    restore(other)
    accelerate(other, quantize=quantize)
    assert torch.equal(generated(model), generated(other))


@pytest.mark.thorough
def test_the_pages_translate_and_transcribe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["One line of text.", "", "A longer one, with some more words.", "Short."]
    (tmp_path / "in.txt").write_text("\n".join(lines), "utf-8")
    given = ["--text", str(tmp_path / "in.txt"), "--out", str(tmp_path / "out.txt")]
    translate.main([*given, "--make", "--tokens", "9", "--float32"])
    found = (tmp_path / "out.txt").read_text("utf-8").split("\n")
    assert len(found) == 5
    assert [bool(each) for each in found] == [True, False, True, True, False]
    printed = capsys.readouterr()
    assert "3 of 3 translations are the same" in printed.out
    assert "generate: one call a step" in printed.out
    assert "3 lines" in printed.err

    samples = (3000 * torch.randn(16_000 * 33)).short().numpy().tobytes()
    for path, rate in ((tmp_path / "talk.wav", 16_000), (tmp_path / "other.wav", 8_000)):
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, rate, 0, "NONE", ""))
            file.writeframes(samples)
    given = ["--make", "--out", str(tmp_path / "out.txt")]
    transcribe.main([*given, str(tmp_path / "talk.wav")])
    path, *segments = (tmp_path / "out.txt").read_text("utf-8").splitlines()
    assert path.endswith("talk.wav")
    times = [re.match(r"\[(\d+\.\d\d) - (\d+\.\d\d)\]", each) for each in segments]
    assert {each and float(each[1]) <= float(each[2]) for each in times} == {True}
    assert any(each and float(each[1]) > 30 for each in times)  # of the second window
    assert "33 of 33 s" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="16 bits at 8000 Hz, not 16 bits at 16000 Hz"):
        transcribe.main([*given, str(tmp_path / "other.wav")])
