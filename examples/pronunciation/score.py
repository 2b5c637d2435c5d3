"""Pronouncing words with a model, and how wrong it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from transformer_fast import models, training

from .dictionary import PAD, Dictionary, Entry


class Score(NamedTuple):
    """Errors on a list of words."""

    phoneme_error_rate: float
    word_error_rate: float
    words: int

    def __str__(self) -> str:
        return (
            f"phoneme error rate {self.phoneme_error_rate:.2%}, word error rate "
            f"{self.word_error_rate:.2%} on {self.words:,} words"
        )


def edit_distance(one: Sequence[str], other: Sequence[str]) -> int:
    """The least number of insertions, deletions and substitutions that make one the other."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


def score(entries: Sequence[Entry], found: Sequence[tuple[str, ...]]) -> Score:
    """Each word against that of its pronunciations which is nearest."""
    errors = phonemes = wrong = 0
    for entry, ours in zip(entries, found, strict=True):
        best, length = min((edit_distance(ours, p), len(p)) for p in entry.pronunciations)
        errors, phonemes, wrong = errors + best, phonemes + length, wrong + (best > 0)
    return Score(errors / phonemes, wrong / len(entries), len(entries))


def _in_batches(count: int, order: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, count, size):
        yield order[start : start + size]


def pronounce(
    model: models.Transformer,
    words: Sequence[str],
    dictionary: Dictionary,
    beams: int = 1,
    batch: int = 256,
) -> list[tuple[str, ...]]:
    """The model's pronunciation of each word, by beam search, or greedily for one beam."""
    method = models.BeamSearch(beams) if beams > 1 else models.Greedy()
    device = next(model.parameters()).device
    order = sorted(range(len(words)), key=lambda i: len(words[i]))
    found: dict[int, tuple[str, ...]] = {}
    for places in _in_batches(len(words), order, batch):
        tokens = [dictionary.letters.encode(words[i]) for i in places]
        source = training.pad_sequences(tokens, PAD).to(device)
        # No word of the dictionary has twice as many phonemes as letters, but for short ones.
        most = min(2 * source.shape[1] + 8, model.max_len)
        result = model.generate(source, method, max_new_tokens=most)
        for place, row in zip(places, result.tokens.tolist(), strict=True):
            found[place] = dictionary.phonemes.decode(t for t in row if t != PAD)
    return [found[i] for i in range(len(words))]


def evaluate(
    model: models.Transformer, entries: Sequence[Entry], dictionary: Dictionary, beams: int = 1
) -> Score:
    with torch.inference_mode():
        found = pronounce(model, [entry.word for entry in entries], dictionary, beams)
    return score(entries, found)
