"""Pairs of token lists, and the tensors that teacher forcing needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PairBatch(NamedTuple):
    """A batch for `models.Transformer` and `NextTokenLoss`."""

    source: Tensor  #: int64 (B, S)
    target: Tensor  #: int64 (B, T): the start token, then the tokens
    expected: Tensor  #: int64 (B, T): the tokens, then the end token


def pad_sequences(sequences: Sequence[Sequence[int]], pad_token: int) -> Tensor:
    """Token lists as one int64 tensor (B, longest), pad_token behind each.

    Raises:
        ValueError: no sequences, or an empty one.
    """
    if not sequences:
        raise ValueError("sequences is empty: there must be at least one")
    for place, sequence in enumerate(sequences):
        if len(sequence) == 0:
            raise ValueError(f"sequences[{place}] is empty: it must have at least one token")
    longest = max(map(len, sequences))
    return torch.tensor([[*s, *[pad_token] * (longest - len(s))] for s in sequences])


class PairCollator:
    """``collate_fn`` of a DataLoader over pairs (source tokens, target tokens).

    Args:
        pad_token, start_token, end_token: as in `models.Transformer`.
    """

    def __init__(self, pad_token: int, start_token: int, end_token: int) -> None:
        self.pad_token, self.start_token, self.end_token = pad_token, start_token, end_token

    def __call__(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> PairBatch:
        return PairBatch(
            pad_sequences([source for source, _ in pairs], self.pad_token),
            pad_sequences([[self.start_token, *target] for _, target in pairs], self.pad_token),
            pad_sequences([[*target, self.end_token] for _, target in pairs], self.pad_token),
        )
