"""Greedy decoding, sampling and beam search: the same tokens as recomputing everything at each
step.

Tested with the models of this library and with those of torch.nn modules.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models_checks import (
    END,
    OPTIONS,
    PAD,
    START,
    in_double,
    recomputed,
    small,
    small_language_model,
    tokens,
    varied,
)
from module_checks import check_budget
from torch import Tensor

from transformer_fast import _native, models, nn, use_backend
from transformer_fast.models.generation import search
from transformer_fast.models.generation.decoders import CachedDecoder, RecomputedDecoder, read_stack
from transformer_fast.models.generation.methods import bind_best, sampler, top

LENGTHS = [7, 3, 5, 1, 6]


def plain_greedy(model: models.Transformer, source: Tensor, limit: int) -> list[list[int]]:
    """Greedy decoding of one source at a time, without its padding and without a cache."""
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
    """Returns the tokens without padding; asserts that the rest is padding."""
    for row, length in zip(found.tokens, found.lengths, strict=True):
        assert (row[length:] == PAD).all()
    assert found.tokens.shape[1] == found.lengths.max()
    pairs = zip(found.tokens, found.lengths, strict=True)
    return [row[:length].tolist() for row, length in pairs]


# Not with a shared vocabulary: it can generate a pad token, which recomputing would mask.
@pytest.mark.sampled(30)
@pytest.mark.parametrize("name", [name for name in OPTIONS if "shared" not in name])
def test_greedy_equals_recomputing_everything(name: str) -> None:
    model = varied(small(**OPTIONS[name]))
    source = tokens(23, [7, 3, 1])
    expected = plain_greedy(model, source, 12)
    assert len({token for row in expected for token in row}) > 1
    assert rows(model.generate(source, max_new_tokens=12, use_cache=True)) == expected
    assert rows(model.generate(source, max_new_tokens=12, use_cache=False)) == expected


@pytest.mark.parametrize("holes", [False, True], ids=["padding at the end", "padding anywhere"])
def test_padded_sources(holes: bool) -> None:
    model = varied(small(positions=None))
    source = tokens(23, [7, 3, 5])
    if holes:
        source = torch.stack([row[torch.randperm(7)] for row in source])
    found = model.generate(source, max_new_tokens=9)
    again = model.generate(
        source.masked_fill(source == PAD, 9), max_new_tokens=9, source_padding=source == PAD
    )
    assert rows(found) == plain_greedy(model, source, 9)
    assert torch.equal(found.tokens, again.tokens)


def test_maximum_lengths_and_defaults() -> None:
    model = small(max_len=30)
    source = tokens(23, [4, 4])
    assert model.generate(source, end_token=-1).tokens.shape == (2, 30)  # positions 0 to 29
    assert model.generate(source, max_new_tokens=1).tokens.shape == (2, 1)
    wide = small(max_len=100)
    assert wide.generate(source, end_token=-1).tokens.shape == (2, 54)
    assert wide.generate(source[:0]).tokens.shape == (0, 0)
    assert wide.generate(source[:0], models.BeamSearch(3, n_best=2)).tokens.shape == (0, 2, 0)


def test_prefix() -> None:
    model = varied(small())
    source = tokens(23, LENGTHS)
    free = model.generate(source, max_new_tokens=12, end_token=-1).tokens
    prefix = torch.cat((torch.full((5, 1), START), free[:, :4]), 1)
    for method in (models.Greedy(), models.BeamSearch(1)):
        found = model.generate(source, method, max_new_tokens=8, end_token=-1, prefix=prefix)
        assert torch.equal(found.tokens, free[:, 4:])
    one = model.generate(source, max_new_tokens=12, end_token=-1, prefix=START)
    assert torch.equal(one.tokens, free)
    padded = torch.cat((prefix[:, :3], prefix[:, :2]), 1)
    lengths = torch.full((5,), 3)
    given = {"prefix": padded, "prefix_lengths": lengths}
    cut = model.generate(source, max_new_tokens=8, end_token=-1, **given)
    assert torch.equal(cut.tokens, free[:, 2:10])


def test_streaming_gives_the_same_tokens() -> None:
    model = varied(small(), 1.0)
    source = tokens(23, LENGTHS)
    found = model.generate(source, max_new_tokens=20)
    columns = list(model.stream(source, max_new_tokens=20))
    assert torch.equal(torch.stack(columns, 1), found.tokens)
    iterator = model.stream(source, max_new_tokens=20)
    first = next(iterator)
    assert torch.is_grad_enabled()  # unchanged between the steps
    assert torch.equal(first, found.tokens[:, 0])
    assert list(model.stream(source[:0])) == []


@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}])
@pytest.mark.parametrize("use_cache", [True, False])
def test_decoder_only(options: dict[str, Any], use_cache: bool) -> None:
    """Prompts of different lengths in one batch give the same tokens as each prompt alone."""
    model = varied(small_language_model(**options), 1.0)
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


def test_training_mode_is_ignored_and_kept() -> None:
    model = varied(small(dropout=0.5))
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
def test_reference_backend_and_inference_mode(method: Any) -> None:
    model = varied(small())
    source = tokens(23, LENGTHS)
    expected = model.generate(source, method, max_new_tokens=9)
    with use_backend("reference"):
        assert torch.equal(model.generate(source, method, max_new_tokens=9).tokens, expected.tokens)
    with torch.inference_mode():
        assert torch.equal(model.generate(source, method, max_new_tokens=9).tokens, expected.tokens)


def test_layers_with_hooks_are_called_without_a_cache() -> None:
    """The cached decoder bypasses the layers, so that hooks would not run."""
    model = varied(small())
    source = tokens(23, LENGTHS)
    expected = model.generate(source, max_new_tokens=6)
    with models.attention_weights(model, "decoder.*.multihead_attn") as weights:
        found = model.generate(source, max_new_tokens=6)
        with pytest.raises(ValueError, match=r"no cache: layers\.0\.multihead_attn has hooks"):
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
    """Matrix products run in bfloat16; logits equal those of recomputing up to bfloat16
    rounding."""
    model = small(norm_first=True)
    source, target = tokens(23, LENGTHS), tokens(19, [6] * 5)
    memory, padding = model.encode(source).detach(), source == PAD
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        steps = step_decoder(model, memory, padding)
        logits = [steps.start(target[:, :2])] + [steps.step(t) for t in target[:, 2:].unbind(1)]
        expected = model.output(model.decode(target, memory, padding))[:, 1:]
        assert logits[0].dtype == expected.dtype == torch.bfloat16
        exact = in_double(model)
        with torch.autocast("cpu", enabled=False):
            hidden = exact.decode(target, memory.double(), padding)
            check_budget(torch.stack(logits, 1), expected, exact.output(hidden)[:, 1:])
        assert model.generate(source, method, max_new_tokens=5).tokens.shape[0] == 5


def step_decoder(model: Any, memory: Tensor, padding: Tensor, cached: bool = True) -> Any:
    around = model.decoder.embedding.vectors, model.output, memory, padding
    if not cached:
        return RecomputedDecoder(model.decoder.stack, True, *around)
    return CachedDecoder(read_stack(model.decoder.stack, True), *around, 20)


@pytest.mark.parametrize("cached", [True, False])
def test_step_logits_equal_those_of_forward(cached: bool) -> None:
    """More sensitive than comparing tokens: detects a wrong scale or a lost key."""
    model = small()
    source, target = tokens(23, LENGTHS), tokens(19, [9] * 5)
    memory, padding = model.encode(source), source == PAD
    expected = model(source, target)
    with torch.no_grad():
        steps = step_decoder(model, memory, padding, cached)
        logits = [steps.start(target[:, :3])] + [steps.step(t) for t in target[:, 3:].unbind(1)]
        torch.testing.assert_close(torch.stack(logits, 1), expected[:, 2:])
        # Some rows are removed, the others repeated and reordered.
        steps.keep(torch.tensor([4, 1]))
        steps.spread(2)
        steps.reorder(torch.tensor([1, 1, 2, 3]))
        more = steps.step(torch.tensor([5, 6, 7, 8]))
        longer = torch.cat((target[[4, 4, 1, 1]], torch.tensor([[5], [6], [7], [8]])), 1)
        torch.testing.assert_close(more, model(source[[4, 4, 1, 1]], longer)[:, -1])
        # The sequences differ now: they are reordered, and one source is removed.
        steps.reorder(torch.tensor([1, 0, 3, 3]))
        steps.keep(torch.tensor([1]))
        more = steps.step(torch.tensor([3, 9]))
    longer = torch.cat((longer[[3, 3]], torch.tensor([[3], [9]])), 1)
    torch.testing.assert_close(more, model(source[[1, 1]], longer)[:, -1])


def test_memory_is_not_copied_for_beams() -> None:
    model = small()
    source = tokens(23, LENGTHS)
    with torch.no_grad():
        steps = step_decoder(model, model.encode(source), source == PAD)
        steps.start(torch.full((5, 1), START))
        before = [memory.data_ptr() for memory in steps.memories]
        steps.spread(4)
        steps.step(torch.full((20,), 3))
        steps.reorder(torch.arange(20))
        steps.step(torch.full((20,), 3))
    assert [memory.data_ptr() for memory in steps.memories] == before
    assert all(memory.shape[1] == 5 for memory in steps.memories)


def test_custom_layers_are_recomputed() -> None:
    class Shifted(torch.nn.TransformerDecoderLayer):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(*args, **kwargs) + 0.5

    decoder = torch.nn.TransformerDecoder(Shifted(16, 2, 24, 0.1, batch_first=True), 2)
    table, project = torch.nn.Embedding(19, 16), torch.nn.Linear(16, 19)
    memory = torch.randn(3, 4, 16)
    arguments: dict[str, Any] = {
        "embed": lambda ids, start: table(ids), "project": project, "prefix": START,
        "end_token": END, "max_new_tokens": 6,
    }  # fmt: skip
    found = models.generate(decoder, memory, **arguments)
    decoder.eval()

    def next_logits(target: Tensor) -> Tensor:
        mask = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        return project(decoder(table(target), memory, tgt_mask=mask)[:, -1])

    expected = recomputed(next_logits, torch.full((3, 1), START), 6)
    for row, length, right in zip(found.tokens, found.lengths, expected[:, 1:], strict=True):
        assert torch.equal(row[:length], right[:length])
    with pytest.raises(ValueError, match=r"no cache: layers\.0 is hooked or has a forward of its"):
        models.generate(decoder, memory, use_cache=True, **arguments)


def test_infrequent_end_checks_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the search checks for finished sequences only every few steps."""
    model = varied(small(), 1.0)
    source = tokens(23, LENGTHS)
    methods = (models.Greedy(), models.Sampling(seed=3), models.BeamSearch(3, n_best=2))
    expected = [model.generate(source, method, max_new_tokens=20) for method in methods]
    monkeypatch.setattr(search.Task, "looks", 8)
    for method, right in zip(methods, expected, strict=True):
        found = model.generate(source, method, max_new_tokens=20)
        assert torch.equal(found.tokens, right.tokens)
        assert torch.equal(found.lengths, right.lengths)


SIZES = [1, 7, 1023, 1024, 1025, 1087, 2048, 5003]


LOW_PRECISION = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *LOW_PRECISION])
@pytest.mark.parametrize("size", SIZES)
def test_best_is_argmax(size: int, dtype: torch.dtype, float_isa: str) -> None:
    logits = torch.randn(9, size).to(dtype)
    logits[0, -1] = logits[1, 0] = 100.0
    logits[2] = 1.0  # the first of equal values
    logits[3, size // 2 :] = logits[3].max() + 1
    logits[4] = -torch.inf
    logits[5, -1] = torch.inf
    logits[6, size // 3 :: 5] = torch.nan
    logits[7] = -torch.inf
    logits[7, -1] = torch.nan
    for rows in (
        logits,
        logits[:0],
        logits[::2],
        logits[:, size // 2 :],
        logits.t().contiguous().t(),
    ):
        assert torch.equal(bind_best(rows)(rows), rows.argmax(-1))


@pytest.mark.thorough
def test_best_opcheck_and_errors() -> None:
    if _native.module is None:
        pytest.skip(_native.why_not or "needs the native module")
    op = torch.ops.transformer_fast.argmax.cpu
    torch.library.opcheck(op, (torch.randn(3, 70),))
    for wrong in (torch.ones(3), torch.ones(3, 0), torch.ones(3, 4, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match="argmax: input must be"):
            op(wrong)


@pytest.mark.parametrize(("size", "k"), [(n, k) for n in SIZES for k in (1, 2, 4, 8) if k <= n])
def test_top_equals_topk(size: int, k: int) -> None:
    logits = torch.randn(9, size)
    logits[0, -1] = logits[1, 0] = 100.0
    logits[2, -k:] = torch.arange(k) + 50.0
    logits[3, :k] = torch.arange(k) + 50.0
    values, indices = top(logits, k)
    assert torch.equal(values, logits.topk(k).values)
    assert torch.equal(logits.gather(1, indices), values)
    assert all(len(set(row)) == k for row in indices.tolist())


def distribution(method: models.Sampling, logits: Tensor, count: int = 20_000) -> Tensor:
    """Returns the frequency of each token for evenly spaced draws: exact to 1 / count."""
    draws = (torch.arange(count) + 0.5) / count
    found = sampler(method, logits.shape[0])(logits.expand(count, -1), draws)
    return torch.bincount(found, minlength=logits.shape[0]) / count


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_sampling_follows_the_softmax(temperature: float) -> None:
    logits = torch.randn(12)
    expected = (logits / temperature).softmax(-1)
    found = distribution(models.Sampling(temperature), logits)
    assert (found - expected).abs().max() < 2e-4


# With 700 tokens, more than the 256 most probable ones are needed.
@pytest.mark.sampled(30)
@pytest.mark.parametrize("size", [12, 700])
@pytest.mark.parametrize("top_k", [None, 9])
def test_top_p(size: int, top_k: int | None) -> None:
    logits = torch.randn(size) * 0.3
    values = logits.softmax(-1)
    if top_k is not None:
        values = values.masked_fill(logits < logits.topk(top_k).values[-1], 0.0)
        values = values / values.sum()
    ordered, order = values.sort(descending=True)
    # The fewest tokens that reach probability 0.8.
    count = int((ordered.cumsum(-1) < 0.8).sum()) + 1
    expected = torch.zeros(size)
    expected[order[:count]] = ordered[:count] / ordered[:count].sum()
    found = distribution(models.Sampling(top_k=top_k, top_p=0.8), logits)
    assert (found - expected).abs().max() < 3e-4
    assert torch.equal(found > 0, expected > 0)


def test_sampling_in_the_limit_is_greedy() -> None:
    model = small()
    source = tokens(23, [7, 3, 5])
    greedy = model.generate(source, max_new_tokens=10)
    for method in (
        models.Sampling(1e-6, seed=1),
        models.Sampling(top_k=1, seed=2),
        models.Sampling(top_p=1e-9, seed=3),
    ):
        assert torch.equal(model.generate(source, method, max_new_tokens=10).tokens, greedy.tokens)


@pytest.mark.parametrize("logits", [[0.0, -torch.inf], [-torch.inf, 0.0], [-200.0, 0.0]])
def test_impossible_tokens_are_never_drawn(logits: list[float]) -> None:
    row = torch.tensor([logits])
    right = int(row.argmax())
    for method in (models.Sampling(), models.Sampling(top_k=2), models.Sampling(top_p=1.0)):
        for draw in (0.0, 0.5, 1.0 - 2.0**-24):
            assert int(sampler(method, 2)(row, torch.tensor([draw]))) == right


def test_seed_determines_the_samples() -> None:
    model = small()
    source = tokens(23, [7, 3, 5])

    def draw(seed: int | None) -> list[list[int]]:
        method = models.Sampling(seed=seed)
        return model.generate(source, method, max_new_tokens=20, end_token=-1).tokens.tolist()

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    torch.manual_seed(5)
    one, two = draw(None), draw(None)
    torch.manual_seed(5)
    assert draw(None) == one != two
    state = torch.get_rng_state()
    draw(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_samples_do_not_depend_on_finished_sequences() -> None:
    model = varied(small(), 2.0)
    source = tokens(23, [7, 3, 5, 2, 6, 7, 1])
    method = models.Sampling(seed=4)
    found = model.generate(source, method, max_new_tokens=20)
    assert len(set(found.lengths.tolist())) > 2
    free = model.generate(source, method, max_new_tokens=20, end_token=-1)
    for row, length, all_of_it in zip(found.tokens, found.lengths, free.tokens, strict=True):
        assert torch.equal(row[:length], all_of_it[:length])


Score = Callable[[list[int]], list[float]]


def next_scores(model: models.Transformer, source: list[int]) -> Score:
    """Returns a function: log-probabilities of the next token, without a cache."""

    @functools.cache
    def scores(so_far: tuple[int, ...]) -> list[float]:
        target = torch.tensor([[START, *so_far]])
        with torch.no_grad():
            return model.log_probabilities(torch.tensor([source]), target)[0, -1].tolist()

    return lambda so_far: scores(tuple(so_far))


def normalised(score: float, length: int, power: float) -> float:
    return score / ((5 + length) / 6) ** power


def plain_beam(
    scores: Score, beams: int, limit: int, power: float, early_stop: bool
) -> list[tuple[float, list[int]]]:
    """Beam search of one source with lists.

    It has no bound on the scores: it stops when no hypothesis can be extended.
    """
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for length in range(1, limit + 1):
        extended = [
            (score + more, [*so_far, token])
            for score, so_far in live
            for token, more in enumerate(scores(so_far))
        ]
        extended.sort(key=lambda x: -x[0])
        for score, so_far in extended[:beams]:
            if so_far[-1] == END:
                finished.append((normalised(score, length, power), so_far))
        live = [x for x in extended if x[1][-1] != END][:beams]
        if early_stop and len(finished) >= beams:
            live = []
            break
    finished += [(normalised(score, limit, power), so_far) for score, so_far in live]
    return sorted(finished, key=lambda x: -x[0])[:beams]


def check(model: models.Transformer, method: models.BeamSearch, limit: int, **options: Any) -> None:
    source = tokens(23, [7, 3, 5, 1])
    found = model.generate(source, method, max_new_tokens=limit, **options)
    assert found.scores is not None
    wanted = method.n_best or 1
    for i, row in enumerate(source):
        expected = plain_beam(
            next_scores(model, row[row != PAD].tolist()),
            method.beams,
            limit,
            method.length_penalty,
            method.early_stop,
        )[:wanted]
        got = found.tokens[i].view(wanted, -1)
        lengths = found.lengths[i].view(wanted).tolist()
        got_scores = found.scores[i].view(wanted).tolist()
        for place, (score, right) in enumerate(expected):
            assert got[place, : lengths[place]].tolist() == right
            assert (got[place, lengths[place] :] == PAD).all()
            assert got_scores[place] == pytest.approx(score, rel=1e-4)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("beams", [1, 2, 5])
@pytest.mark.parametrize("power", [0.6, 0.0, 2.0, -0.7])
@pytest.mark.parametrize("early_stop", [False, True])
def test_beam_search_equals_the_plain_one(beams: int, power: float, early_stop: bool) -> None:
    model = varied(small(), 1.5)
    check(model, models.BeamSearch(beams, power, early_stop, n_best=beams), 7)


def test_beam_search_with_pre_norm_and_without_cache() -> None:
    method = models.BeamSearch(4, n_best=3)
    check(varied(small(norm_first=True), 1.0), method, 7)
    check(varied(small(), 1.0), method, 7, use_cache=False)


def test_beam_search_with_a_large_vocabulary() -> None:
    """The search finds the best extensions block by block if there are many tokens."""
    check(varied(small(target_vocab_size=1500), 3.0), models.BeamSearch(3, n_best=3), 5)


def test_more_beams_than_extensions_in_the_first_step() -> None:
    """With a vocabulary of 3, the first step has fewer extensions than beams."""
    model = small(target_vocab_size=3)
    source = tokens(23, [6, 2])
    found = model.generate(source, models.BeamSearch(3, n_best=3), max_new_tokens=1)
    assert found.scores is not None
    assert found.tokens.sort(1).values.squeeze(-1).tolist() == [[0, 1, 2]] * 2
    alone = small(target_vocab_size=4)
    with torch.no_grad():
        alone.output.bias.copy_(torch.tensor([-1e9, -1e9, 0.0, -1e9]))
        alone.output.weight.zero_()
    only = alone.generate(source, models.BeamSearch(2, early_stop=True), max_new_tokens=5)
    assert only.tokens.tolist() == [[END], [END]]
    assert only.scores is not None
    assert only.scores.tolist() == [0.0, 0.0]


def test_missing_hypotheses_are_empty() -> None:
    model = small(target_vocab_size=4)
    with torch.no_grad():
        model.output.weight.zero_()
        model.output.bias.copy_(torch.tensor([-math.inf, -math.inf, 1.0, -math.inf]))
    source = tokens(23, [6, 2])
    found = model.generate(source, models.BeamSearch(2, n_best=2), max_new_tokens=5)
    assert found.scores is not None
    assert found.tokens[:, 0, 0].tolist() == [END, END]
    assert found.lengths.tolist() == [[1, 0], [1, 0]]
    assert found.scores.tolist() == [[0.0, -math.inf]] * 2


V, M = 19, 16


class User(torch.nn.Module):
    """A user's model: torch.nn.Transformer between embeddings and a Linear."""

    def __init__(self, transformer: type[torch.nn.Module], **options: Any) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(V, M)
        self.position = torch.nn.Parameter(torch.randn(40, M) * 0.3)
        self.transformer: Any = transformer(M, 2, 2, 2, 24, **options)
        self.out = torch.nn.Linear(M, V)
        self.batch_first = options.get("batch_first", False)

    def embed(self, ids: Tensor, start: int = 0) -> Tensor:
        return self.table(ids) * 4 + self.position[start : start + ids.shape[1]]

    def swap(self, x: Tensor) -> Tensor:
        return x if self.batch_first else x.transpose(0, 1)

    def encode(self, source: Tensor, padding: Tensor | None) -> Tensor:
        return self.transformer.encoder(self.swap(self.embed(source)), src_key_padding_mask=padding)

    def next_logits(self, memory: Tensor, padding: Tensor | None, target: Tensor) -> Tensor:
        mask = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        hidden = self.transformer.decoder(
            self.swap(self.embed(target)),
            memory,
            tgt_mask=mask,
            memory_key_padding_mask=padding,
        )
        return self.out(self.swap(hidden)[:, -1])

    def arguments(self) -> dict[str, Any]:
        return {
            "embed": self.embed,
            "project": self.out,
            "prefix": START,
            "end_token": END,
            "pad_token": 0,
        }


def random_user(transformer: type[torch.nn.Module], **options: Any) -> User:
    user = User(transformer, **options).eval()
    with torch.no_grad():
        for parameter in user.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return user


@pytest.mark.parametrize("transformer", [torch.nn.Transformer, nn.Transformer])
@pytest.mark.parametrize(
    "options",
    [
        {"batch_first": True},
        {"batch_first": False},
        {"batch_first": True, "norm_first": True},
        {"batch_first": False, "norm_first": True, "activation": "gelu"},
        {"activation": torch.nn.functional.softplus, "bias": False},
    ],
    ids=lambda options: ", ".join(options),
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested")
def test_greedy_decoding_of_torch_nn_modules(transformer: Any, options: dict[str, Any]) -> None:
    user = random_user(transformer, **options)
    source = torch.randint(3, V, (4, 6))
    padding = torch.arange(6) >= torch.tensor([6, 2, 5, 1])[:, None]
    with torch.no_grad():
        memory = user.encode(source, padding)
    start = torch.full((4, 1), START)
    target = recomputed(lambda target: user.next_logits(memory, padding, target), start, 12)
    user.train()  # generate disables dropout
    found = models.generate(
        user.transformer,
        memory,
        max_new_tokens=12,
        memory_key_padding_mask=padding,
        use_cache=True,
        **user.arguments(),
    )
    for row, length, right in zip(found.tokens, found.lengths, target[:, 1:], strict=True):
        ends = (right == END).nonzero()
        assert int(length) == (int(ends[0]) + 1 if len(ends) else 12)
        assert torch.equal(row[:length], right[:length])
    streamed = models.stream(
        user.transformer.decoder,
        memory,
        max_new_tokens=12,
        memory_key_padding_mask=padding,
        **user.arguments(),
    )
    assert torch.equal(torch.stack(list(streamed), 1), found.tokens)


def test_torch_nn_encoder_as_a_decoder_only_model() -> None:
    user = random_user(torch.nn.Transformer, batch_first=True)
    stack = user.transformer.encoder
    arguments = user.arguments() | {"prefix": torch.tensor([[1, 5, 3], [1, 9, 4]])}
    found = models.generate(stack, None, max_new_tokens=9, use_cache=True, **arguments)
    again = models.generate(stack, None, max_new_tokens=9, use_cache=False, **arguments)
    assert torch.equal(found.tokens, again.tokens)
    beams = models.generate(stack, None, models.BeamSearch(3), max_new_tokens=9, **arguments)
    assert beams.scores is not None
    assert (beams.scores < 0).all()


def _appending(layers: Any) -> None:
    for layer in layers:
        layer.self_attn.add_zero_attn = True


def _block(layers: Any) -> None:
    block = layers[0]._ff_block
    layers[0]._ff_block = lambda x: block(x) + 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_appending, r"layers\.0\.self_attn appends keys"),
        (
            lambda layers: layers[1].linear1.register_forward_hook(lambda *_: None),
            r"layers\.1\.linear1 has hooks",
        ),
        (
            lambda layers: setattr(layers[1], "dropout2", torch.nn.AlphaDropout(0.1)),
            r"layers\.1\.dropout2 is an AlphaDropout",
        ),
        (
            lambda layers: setattr(layers[1], "norm_first", True),
            "the layers differ in norm_first",
        ),
        (
            lambda layers: torch.nn.utils.parametrizations.weight_norm(layers[0].linear2),
            r"layers\.0\.linear2 is a ParametrizedLinear",
        ),
        (_block, r"layers\.0\._ff_block is replaced"),
    ],
)
def test_unsupported_layers_are_recomputed(change: Any, reason: str) -> None:
    user = random_user(torch.nn.Transformer, batch_first=True)
    change(user.transformer.decoder.layers)
    memory = torch.randn(2, 5, M)
    arguments = user.arguments() | {"end_token": -1, "max_new_tokens": 5}
    with pytest.raises(ValueError, match=f"there can be no cache: {reason}"):
        models.generate(user.transformer, memory, use_cache=True, **arguments)
    found = models.generate(user.transformer, memory, **arguments)
    start = torch.full((2, 1), START)
    target = recomputed(lambda target: user.next_logits(memory, None, target), start, 5)
    assert torch.equal(found.tokens, target[:, 1:])


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"decoder": torch.nn.Linear(2, 2)}, TypeError, r"decoder must be .* not Linear"),
        ({"memory": torch.randn(2, M)}, ValueError, r"memory must have shape \(batch, length, d_m"),
        ({"memory": torch.randn(2, 0, M)}, ValueError, "memory is empty: each source"),
        ({"memory": None}, ValueError, "prefix must be a Tensor .* where there is no memory"),
        ({"prefix": torch.ones(3, 1).long()}, ValueError, "a row for each of the 2 sources, not 3"),
        ({"prefix": [1]}, TypeError, "prefix must be a Tensor of token ids, not list"),
        ({"end_token": None}, ValueError, "end_token must be a token id, or -1"),
        ({"end_token": V}, ValueError, r"end_token must be a token id in \[0, 19\)"),
        (
            {"memory_key_padding_mask": torch.zeros(2, 4, dtype=torch.bool)},
            ValueError,
            r"memory_key_padding_mask must have the shape of memory, \[2, 5\], not \[2, 4\]",
        ),
        (
            {"memory_key_padding_mask": torch.ones(2, 5, dtype=torch.bool)},
            ValueError,
            "memory is empty: row 0 has nothing but padding",
        ),
        ({"prefix": V}, IndexError, "index out of range in self"),
    ],
)
def test_wrong_arguments_raise(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    user = random_user(torch.nn.Transformer, batch_first=True)
    arguments: dict[str, Any] = {
        "decoder": user.transformer,
        "memory": torch.randn(2, 5, M),
        "max_new_tokens": 4,
        **user.arguments(),
        **changes,
    }
    with pytest.raises(error, match=words):
        models.generate(**arguments)
