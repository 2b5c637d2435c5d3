"""Beam search against plain search: lists of hypotheses, and all sequences there are."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models_ruler import END, PAD, START, lively, small, tokens
from torch import Tensor

from transformer_fast import models
from transformer_fast.models.generation import reordering

Score = Callable[[list[int]], list[float]]


def next_scores(model: models.Transformer, source: list[int]) -> Score:
    """Log-probabilities of the next token after some tokens, everything computed again."""

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
    """Beam search with lists, one source, no bound: it stops where nothing is left to extend."""
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


@pytest.mark.parametrize("beams", [1, 2, 5])
@pytest.mark.parametrize("power", [0.6, 0.0, 2.0, -0.7])
@pytest.mark.parametrize("early_stop", [False, True])
def test_beam_search_is_the_plain_one(beams: int, power: float, early_stop: bool) -> None:
    model = lively(small(), 1.5)
    check(model, models.BeamSearch(beams, power, early_stop, n_best=beams), 7)


def test_with_norms_first_and_all_recomputed() -> None:
    method = models.BeamSearch(4, n_best=3)
    check(lively(small(norm_first=True), 1.0), method, 7)
    check(lively(small(), 1.0), method, 7, use_cache=False)


def test_large_vocabulary() -> None:
    """Where the best extensions are found block by block."""
    check(lively(small(target_vocab_size=1500), 3.0), models.BeamSearch(3, n_best=3), 5)


def test_one_beam_is_greedy() -> None:
    model = lively(small(), 1.0)
    source = tokens(23, [7, 3, 5, 1])
    greedy = model.generate(source, max_new_tokens=12)
    beam = model.generate(source, models.BeamSearch(1, early_stop=True), max_new_tokens=12)
    assert torch.equal(greedy.tokens, beam.tokens)
    assert torch.equal(greedy.lengths, beam.lengths)


@pytest.mark.parametrize("power", [0.0, 0.6, 1.5])
def test_wide_enough_it_finds_the_best_of_all_sequences(power: float) -> None:
    """4 tokens have any probability, the end among them: 27 sequences of 3 go on to length 4."""
    limit, possible = 4, [END, 5, 6, 7]
    model = small(target_vocab_size=40)
    with torch.no_grad():
        impossible = torch.ones(40, dtype=torch.bool)
        impossible[possible] = False
        model.output.bias.masked_fill_(impossible, -1e4)
    source = tokens(23, [6, 2])
    method = models.BeamSearch(39, power, n_best=10)
    found = model.generate(source, method, max_new_tokens=limit)
    assert found.scores is not None
    for i, row in enumerate(source):
        scores = next_scores(model, row[row != PAD].tolist())
        everything = []
        going = possible[1:]
        for length in range(1, limit + 1):
            for start in itertools.product(going, repeat=length - 1):
                for last in possible if length == limit else [END]:
                    sequence = [*start, last]
                    total = sum(scores(sequence[:k])[sequence[k]] for k in range(length))
                    everything.append((normalised(total, length, power), sequence))
        everything.sort(key=lambda x: -x[0])
        assert len(everything) == 1 + 3 + 9 + 27 * 4
        for place, (score, sequence) in enumerate(everything[:10]):
            length = int(found.lengths[i, place])
            assert found.tokens[i, place, :length].tolist() == sequence
            assert float(found.scores[i, place]) == pytest.approx(score, rel=1e-4)


def test_beams_as_many_as_tokens_and_more_than_sequences() -> None:
    """A vocabulary of 3: at the first step there are fewer extensions than beams."""
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


def test_early_stop_stops_earlier() -> None:
    calls = []
    model = lively(small(), 2.0)
    model.decoder.embedding.table.register_forward_hook(lambda *_: calls.append(1))
    source = tokens(23, [7, 3, 5, 1])
    for early_stop in (True, False):
        model.generate(source, models.BeamSearch(3, 1.0, early_stop, n_best=3), max_new_tokens=40)
        calls.append(0)
    early = calls.index(0)
    assert 0 < early < len(calls) - early - 2 < 40


def test_beams_move_what_they_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, and once all beams descend from one hypothesis only what is behind it is copied."""
    moved: list[tuple[int, int]] = []
    right = reordering.select_rows

    def select_rows(cache: Tensor, rows: Tensor, start: int, end: int, out: Tensor) -> None:
        moved.append((start, end))
        right(cache, rows, start, end, out)

    monkeypatch.setattr(reordering, "select_rows", select_rows)
    beams, places = 3, 6
    cache = torch.full((2, 2, 6, 1, places, 1), torch.nan)
    cache[:, :, :, :, 0] = torch.arange(2).repeat_interleave(beams)[:, None, None].float()
    moves = reordering.Reordering(cache, beams)
    expected = [[float(row // beams)] for row in range(6)]
    for place, order in enumerate(
        ([0, 0, 0, 4, 4, 4], [1, 1, 0, 5, 3, 3], [0, 0, 1, 4, 4, 5], [2, 1, 0, 3, 3, 3]), 1
    ):
        cache[:, :, :, :, place] = torch.arange(6)[:, None, None] + 10.0 * place
        expected = [[*row, i + 10.0 * place] for i, row in enumerate(expected)]
        moves.wrote(place)
        cache = moves.apply(cache, torch.tensor(order), place + 1)
        expected = [expected[i] for i in order]
        for layer in cache.flatten(0, 1):
            assert layer[:, 0, : place + 1, 0].tolist() == expected
    # The first move makes all beams of each source share places 0 and 1, the second copies those to
    # the other buffer too, and from then on they stay where they are.
    assert moved == [(0, 2), (0, 3), (2, 4), (2, 5)]
