"""Greedy decoding and sampling: token for token what recomputing everything gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models_ruler import END, PAD, START, in_double, lively, small, small_language_model, tokens
from module_ruler import check_budget
from torch import Tensor

from transformer_fast import models, use_backend
from transformer_fast.models.generation import one_by_one
from transformer_fast.models.generation.cached import CachedDecoder
from transformer_fast.models.generation.recomputed import RecomputedDecoder

LENGTHS = [7, 3, 5, 1, 6]


def plain_greedy(model: models.Transformer, source: Tensor, limit: int) -> list[list[int]]:
    """One source at a time, without its padding, everything computed again at each step."""
    found = []
    for row in source:
        alone = row[row != PAD][None]
        target = [START]
        while len(target) <= limit:
            logits = model(alone, torch.tensor([target]))
            target.append(int(logits[0, -1].argmax()))
            if target[-1] == END:
                break
        found.append(target[1:])
    return found


def rows(found: models.Generated) -> list[list[int]]:
    """The tokens without padding, which is checked to be padding."""
    for row, length in zip(found.tokens, found.lengths, strict=True):
        assert (row[length:] == PAD).all()
    assert found.tokens.shape[1] == found.lengths.max()
    pairs = zip(found.tokens, found.lengths, strict=True)
    return [row[:length].tolist() for row, length in pairs]


OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {},
    "pre-norm": {"norm_first": True},
    "pre-norm without final norm": {"norm_first": True, "final_norm": False},
    "final norm": {"final_norm": True},
    "gelu": {"activation": "gelu"},
    "any activation": {"activation": torch.nn.functional.softplus},
    "annotated": {"norm": "annotated", "norm_first": True},
    "annotated post-norm": {"norm": "annotated", "final_norm": True},
    "projected and tied": {"embedding_size": 10, "tie_output": True},
    "no biases": {"bias": False},
    "learned positions": {"positions": "learned"},
    "one head, four layers": {"nhead": 1, "num_decoder_layers": 4},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_greedy_is_recomputing_everything(options: dict[str, Any]) -> None:
    model = lively(small(**options))
    source = tokens(23, [7, 3, 1])
    expected = plain_greedy(model, source, 12)
    assert len({token for row in expected for token in row}) > 1
    assert rows(model.generate(source, max_new_tokens=12, use_cache=True)) == expected
    assert rows(model.generate(source, max_new_tokens=12, use_cache=False)) == expected


def test_sequences_end_at_different_lengths_and_leave_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[int] = []
    right = CachedDecoder.keep

    def keep(self: CachedDecoder, sources: Tensor) -> None:
        kept.append(sources.shape[0])
        right(self, sources)

    monkeypatch.setattr(CachedDecoder, "keep", keep)
    model = lively(small(norm_first=True), 0.5)
    source = tokens(23, [7, 3, 5, 1, 6, 2, 4, 7, 7, 3])
    found = model.generate(source, max_new_tokens=15)
    assert rows(found) == plain_greedy(model, source, 15)
    assert len(set(found.lengths.tolist())) >= 3
    assert len(kept) >= 2
    assert kept == sorted(kept, reverse=True)


@pytest.mark.parametrize("holes", [False, True], ids=["padding behind", "padding anywhere"])
def test_padding_of_the_source(holes: bool) -> None:
    model = lively(small(positions=None))
    source = tokens(23, [7, 3, 5])
    if holes:
        source = torch.stack([row[torch.randperm(7)] for row in source])
    found = model.generate(source, max_new_tokens=9)
    again = model.generate(
        source.masked_fill(source == PAD, 9), max_new_tokens=9, source_padding=source == PAD
    )
    assert rows(found) == plain_greedy(model, source, 9)
    assert torch.equal(found.tokens, again.tokens)


def test_limits_and_defaults() -> None:
    model = small(max_len=30)
    source = tokens(23, [4, 4])
    assert model.generate(source, end_token=-1).tokens.shape == (2, 30)  # positions 0 ... 29
    assert model.generate(source, max_new_tokens=1).tokens.shape == (2, 1)
    wide = small(max_len=100)
    assert wide.generate(source, end_token=-1).tokens.shape == (2, 54)
    assert wide.generate(source[:0]).tokens.shape == (0, 0)
    assert wide.generate(source[:0], models.BeamSearch(3, n_best=2)).tokens.shape == (0, 2, 0)


def test_another_end_token() -> None:
    model = lively(small())
    source = tokens(23, LENGTHS)
    free = model.generate(source, max_new_tokens=12, end_token=-1)
    end = int(free.tokens[0, 3])
    found = model.generate(source, max_new_tokens=12, end_token=end)
    for row, length, all_of_it in zip(found.tokens, found.lengths, free.tokens, strict=True):
        assert torch.equal(row[:length], all_of_it[:length])
        assert int(length) == 12 or row[length - 1] == end
        assert (row[: length - 1] != end).all()


def test_prefix() -> None:
    model = lively(small())
    source = tokens(23, LENGTHS)
    free = model.generate(source, max_new_tokens=12, end_token=-1).tokens
    prefix = torch.cat((torch.full((5, 1), START), free[:, :4]), 1)
    for method in (models.Greedy(), models.BeamSearch(1)):
        found = model.generate(source, method, max_new_tokens=8, end_token=-1, prefix=prefix)
        assert torch.equal(found.tokens, free[:, 4:])


def test_streaming_gives_the_same_tokens() -> None:
    model = lively(small(), 1.0)
    source = tokens(23, LENGTHS)
    found = model.generate(source, max_new_tokens=20)
    columns = list(model.stream(source, max_new_tokens=20))
    assert torch.equal(torch.stack(columns, 1), found.tokens)
    iterator = model.stream(source, max_new_tokens=20)
    first = next(iterator)
    assert torch.is_grad_enabled()  # not switched off between the steps
    assert torch.equal(first, found.tokens[:, 0])
    assert list(model.stream(source[:0])) == []


@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}])
@pytest.mark.parametrize("use_cache", [True, False])
def test_decoder_only(options: dict[str, Any], use_cache: bool) -> None:
    """Prompts of different lengths in one batch, each as if it were alone."""
    model = lively(small_language_model(**options), 1.0)
    lengths = torch.tensor([4, 1, 6, 3, 6])
    prompts = tokens(19, lengths.tolist(), 8)
    expected = []
    for prompt, length in zip(prompts, lengths.tolist(), strict=True):
        so_far = prompt[:length].tolist()
        while len(so_far) - length < 9:
            so_far.append(int(model(torch.tensor([so_far]))[0, -1].argmax()))
            if so_far[-1] == END:
                break
        expected.append(so_far[length:])
    found = model.generate(prompts, max_new_tokens=9, prompt_lengths=lengths, use_cache=use_cache)
    pairs = zip(found.tokens, found.lengths, strict=True)
    assert [row[:length].tolist() for row, length in pairs] == expected
    streamed = model.stream(prompts, max_new_tokens=9, prompt_lengths=lengths, use_cache=use_cache)
    columns = torch.stack(list(streamed), 1)
    for row, tokens_of_row, length in zip(columns, expected, lengths.tolist(), strict=True):
        shown = row[length - 1 :]
        assert shown[: len(tokens_of_row)].tolist() == tokens_of_row


def test_training_mode_is_left_alone_and_has_no_part() -> None:
    model = lively(small(dropout=0.5))
    source = tokens(23, LENGTHS)
    expected = model.generate(source, max_new_tokens=9)
    model.train()
    model.decoder.eval()
    modes = [part.training for part in model.modules()]
    for use_cache in (True, False):
        found = model.generate(source, max_new_tokens=9, use_cache=use_cache)
        assert torch.equal(found.tokens, expected.tokens)
        assert [part.training for part in model.modules()] == modes
    assert not found.tokens.is_inference()


def test_source_and_weights_are_not_modified() -> None:
    model = small()
    source = tokens(23, LENGTHS)
    before = source.clone(), copy.deepcopy(model.state_dict())
    model.generate(source, max_new_tokens=5)
    model.generate(source, models.BeamSearch(2), max_new_tokens=5)
    assert torch.equal(source, before[0])
    assert all(torch.equal(x, before[1][name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("method", [models.Greedy(), models.BeamSearch(3)])
def test_on_the_reference_and_in_inference_mode(method: Any) -> None:
    model = lively(small())
    source = tokens(23, LENGTHS)
    expected = model.generate(source, method, max_new_tokens=9)
    with use_backend("reference"):
        assert torch.equal(model.generate(source, method, max_new_tokens=9).tokens, expected.tokens)
    with torch.inference_mode():
        assert torch.equal(model.generate(source, method, max_new_tokens=9).tokens, expected.tokens)


def test_hooked_layers_are_called() -> None:
    """A hook must see what it asked for, so there is no cache then."""
    model = lively(small())
    source = tokens(23, LENGTHS)
    expected = model.generate(source, max_new_tokens=6)
    with models.attention_weights(model, "decoder.*.multihead_attn") as weights:
        found = model.generate(source, max_new_tokens=6)
        with pytest.raises(ValueError, match=r"no cache: layers\.0\.multihead_attn is hooked"):
            model.generate(source, use_cache=True)
    assert torch.equal(found.tokens, expected.tokens)
    assert weights["decoder.stack.layers.1.multihead_attn"].shape[-2:] == (6, 7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = small().to(dtype)
    source = tokens(23, LENGTHS)
    found = model.generate(source, max_new_tokens=9)
    if dtype == torch.float64:
        assert rows(found) == plain_greedy(model, source, 9)
    assert found.tokens.dtype == torch.int64
    assert ((found.tokens >= 0) & (found.tokens < 19)).all()


@pytest.mark.parametrize("method", [models.Greedy(), models.BeamSearch(3)])
def test_autocast(method: Any) -> None:
    """Matrix products in bf16, as recomputing has them; logits agree as far as bf16 does."""
    model = small(norm_first=True)
    source, target = tokens(23, LENGTHS), tokens(19, [6] * 5)
    memory, padding = model.encode(source).detach(), source == PAD
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        steps = one_by_one_decoder(model, memory, padding)
        logits = [steps.start(target[:, :2])] + [steps.step(t) for t in target[:, 2:].unbind(1)]
        expected = model.output(model.decode(target, memory, padding))[:, 1:]
        assert logits[0].dtype == expected.dtype == torch.bfloat16
        exact = in_double(model)
        with torch.autocast("cpu", enabled=False):
            hidden = exact.decode(target, memory.double(), padding)
            check_budget(torch.stack(logits, 1), expected, exact.output(hidden)[:, 1:])
        assert model.generate(source, method, max_new_tokens=5).tokens.shape[0] == 5


def one_by_one_decoder(model: Any, memory: Tensor, padding: Tensor) -> CachedDecoder:
    from transformer_fast.models.generation.layers import read_stack

    stack, embed = read_stack(model.decoder.stack, True), model.decoder.embedding.vectors
    return CachedDecoder(stack, embed, model.output, memory, padding, 20)


def test_cached_logits_are_those_of_forward() -> None:
    """Closer than tokens can tell: a wrong scale or a lost key would show."""
    model = small()
    source, target = tokens(23, LENGTHS), tokens(19, [9] * 5)
    memory, padding = model.encode(source), source == PAD
    expected = model(source, target)
    with torch.no_grad():
        steps = one_by_one_decoder(model, memory, padding)
        logits = [steps.start(target[:, :3])] + [steps.step(t) for t in target[:, 3:].unbind(1)]
        torch.testing.assert_close(torch.stack(logits, 1), expected[:, 2:])
        # Rows that leave, and rows that change places.
        steps.keep(torch.tensor([4, 1]))
        steps.spread(2)
        steps.reorder(torch.tensor([1, 1, 2, 3]))
        more = steps.step(torch.tensor([5, 6, 7, 8]))
    longer = torch.cat((target[[4, 4, 1, 1]], torch.tensor([[5], [6], [7], [8]])), 1)
    torch.testing.assert_close(more, model(source[[4, 4, 1, 1]], longer)[:, -1])


def test_memory_is_not_copied_for_beams() -> None:
    model = small()
    source = tokens(23, LENGTHS)
    with torch.no_grad():
        steps = one_by_one_decoder(model, model.encode(source), source == PAD)
        steps.start(torch.full((5, 1), START))
        before = [cross.memory.data_ptr() for _, cross, _ in steps.layers if cross is not None]
        steps.spread(4)
        steps.step(torch.full((20,), 3))
        steps.reorder(torch.arange(20))
        steps.step(torch.full((20,), 3))
    after = [cross.memory for _, cross, _ in steps.layers if cross is not None]
    assert [x.data_ptr() for x in after] == before
    assert all(x.shape[1] == 5 for x in after)


def test_recomputing_needs_no_layer_of_ours() -> None:
    class Shifted(torch.nn.TransformerDecoderLayer):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(*args, **kwargs) + 0.5

    decoder = torch.nn.TransformerDecoder(Shifted(16, 2, 24, 0.1, batch_first=True), 2)
    table, project = torch.nn.Embedding(19, 16), torch.nn.Linear(16, 19)
    memory = torch.randn(3, 4, 16)
    arguments: dict[str, Any] = {
        "embed": lambda ids, start: table(ids),
        "project": project,
        "prefix": START,
        "end_token": END,
        "max_new_tokens": 6,
    }
    found = models.generate(decoder, memory, **arguments)
    decoder.eval()
    expected = torch.full((3, 1), START)
    for _ in range(6):
        mask = torch.ones(expected.shape[1], expected.shape[1], dtype=torch.bool).triu(1)
        hidden = decoder(table(expected), memory, tgt_mask=mask)
        expected = torch.cat((expected, project(hidden[:, -1:]).argmax(-1)), 1)
    for row, length, right in zip(found.tokens, found.lengths, expected[:, 1:], strict=True):
        assert torch.equal(row[:length], right[:length])
    with pytest.raises(ValueError, match=r"no cache: layers\.0 is hooked or has a forward of its"):
        models.generate(decoder, memory, use_cache=True, **arguments)


def test_no_look_between_steps_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU ended sequences are looked for every few steps only."""
    model = lively(small(), 1.0)
    source = tokens(23, LENGTHS)
    methods = (models.Greedy(), models.Sampling(seed=3), models.BeamSearch(3, n_best=2))
    expected = [model.generate(source, method, max_new_tokens=20) for method in methods]
    monkeypatch.setattr(one_by_one.Task, "looks", 8)
    for method, right in zip(methods, expected, strict=True):
        found = model.generate(source, method, max_new_tokens=20)
        assert torch.equal(found.tokens, right.tokens)
        assert torch.equal(found.lengths, right.lengths)


def test_both_decoders_are_interchangeable() -> None:
    model = small()
    source = tokens(23, LENGTHS)
    memory, padding = model.encode(source).detach(), source == PAD
    ids = tokens(19, [4] * 5)
    with torch.no_grad():
        one = one_by_one_decoder(model, memory, padding)
        two = RecomputedDecoder(
            model.decoder.stack,
            True,
            model.decoder.embedding.vectors,
            model.output,
            memory,
            padding,
        )
        for decoder in (one, two):
            decoder.start(ids[:, :2])
            decoder.spread(3)
            decoder.step(ids[:, 2].repeat_interleave(3) + torch.arange(3).repeat(5))
            decoder.reorder(torch.arange(15).view(5, 3)[:, [2, 0, 0]].flatten())
            decoder.keep(torch.tensor([0, 3]))
        token = torch.arange(3, 9)
        torch.testing.assert_close(one.step(token), two.step(token))
