"""Batches by token budget: everything once, within the budget, the same again, shared fairly."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_case import END, PAD, START, make_loader, make_pairs

from transformer_fast import training


@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=3, max_size=60),
    max_tokens=st.integers(120, 400),
    max_sequences=st.none() | st.integers(1, 9),
    shuffle=st.booleans(),
    world_size=st.integers(1, 3),
    epoch=st.integers(0, 3),
)
def test_each_sequence_once_and_in_budget(
    lengths: list, max_tokens: int, max_sequences: int | None, shuffle: bool, world_size: int,
    epoch: int,
) -> None:  # fmt: skip
    ranks = []
    if max_sequences == 1 and len(lengths) % world_size:
        with pytest.raises(ValueError, match="batches of one sequence each cannot be shared"):
            training.TokenBatches(
                lengths, max_tokens, max_sequences=1, rank=0, world_size=world_size
            )
        return
    for rank in range(world_size):
        sampler = training.TokenBatches(
            lengths, max_tokens, max_sequences=max_sequences, shuffle=shuffle, rank=rank,
            world_size=world_size,
        )  # fmt: skip
        sampler.set_epoch(epoch)
        ranks.append(list(sampler))
        assert len(ranks[-1]) == len(sampler)
    assert len({len(batches) for batches in ranks}) == 1
    every = [batch for batches in ranks for batch in batches]
    assert sorted(i for batch in every for i in batch) == list(range(len(lengths)))
    for batch in every:
        longest = [max(lengths[i][side] for i in batch) for side in range(2)]
        assert len(batch) * sum(longest) <= max_tokens
        assert len(batch) <= (max_sequences or len(batch))


def test_little_padding_and_full_batches() -> None:
    chance = random.Random(0)
    lengths = [chance.randint(1, 50) for _ in range(2000)]
    batches = list(training.TokenBatches(lengths, 1000))
    padded = sum(len(b) * max(lengths[i] for i in b) for b in batches)
    assert sum(lengths) / padded > 0.97
    assert padded / len(batches) > 0.95 * 1000


def test_order_follows_from_seed_and_epoch() -> None:
    lengths = [random.Random(1).randint(1, 9) for _ in range(200)]
    state = torch.get_rng_state()

    def epochs(seed: int) -> list[list[list[int]]]:
        sampler = training.TokenBatches(lengths, 60, seed=seed)
        found = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            found.append(list(sampler))
        return found

    first = epochs(7)
    assert first == epochs(7) != epochs(8)
    assert first[0] != first[1] != first[2]
    assert torch.equal(torch.get_rng_state(), state)
    sampler = training.TokenBatches(lengths, 60, seed=7)
    sampler.set_epoch(1, start=4)
    assert list(sampler) == first[1][4:]


def test_steps_of_several_processes_are_alike() -> None:
    lengths = [random.Random(2).randint(1, 60) for _ in range(600)]
    ranks = [list(training.TokenBatches(lengths, 600, rank=r, world_size=2)) for r in range(2)]
    apart = [
        abs(max(lengths[i] for i in a) - max(lengths[i] for i in b))
        for a, b in zip(*ranks, strict=True)
    ]
    assert max(apart) <= 12
    assert sum(apart) / len(apart) < 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lengths": [3, 9, 2], "max_tokens": 8}, r"lengths\[1\] is \[9\], more than max_tokens=8"),
        ({"lengths": [(3, 1), (5, 4)], "max_tokens": 8}, r"lengths\[1\] is \[5, 4\]"),
        ({"lengths": [3, 0], "max_tokens": 8}, r"lengths\[1\] is \[0\]: empty"),
        ({"lengths": [], "max_tokens": 8}, "0 sequences, too few for 1"),
        ({"lengths": [3], "max_tokens": 8, "world_size": 2}, "1 sequences, too few for 2"),
        ({"lengths": [3], "max_tokens": 8, "rank": 1}, r"rank must lie in \[0, 1\), not 1"),
        ({"lengths": [3], "max_tokens": 8, "max_sequences": 0}, "max_sequences must be at least 1"),
    ],
)
def test_batches_refuse(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        training.TokenBatches(**arguments)


def test_collator() -> None:
    batch = training.PairCollator(PAD, START, END)([([5, 6, 7], [8]), ([5], [9, 8])])
    assert batch.source.tolist() == [[5, 6, 7], [5, PAD, PAD]]
    assert batch.target.tolist() == [[START, 8, PAD], [START, 9, 8]]
    assert batch.expected.tolist() == [[8, END, PAD], [9, 8, END]]
    with pytest.raises(ValueError, match=r"sequences\[1\] is empty"):
        training.pad_sequences([[1], []], PAD)
    with pytest.raises(ValueError, match="sequences is empty"):
        training.pad_sequences([], PAD)


def test_loader_gives_all_pairs() -> None:
    pairs = make_pairs()
    rows = [
        tuple(token for token in row if token != PAD)
        for batch in make_loader(pairs)
        for row in batch.source.tolist()
    ]
    assert sorted(rows) == sorted(tuple(source) for source, _ in pairs)
