"""Batches of sequences of similar length, with little padding, and their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Sampler

from . import processes

__all__ = ["PairBatch", "PairCollator", "TokenBatches", "pad_sequences"]


class TokenBatches(Sampler[list[int]]):
    """A batch sampler: lists of indices whose padded size is at most ``max_tokens`` tokens.

    Sequences are shuffled, sorted by length and cut into batches; then the batches are shuffled. The
    order depends only on ``seed`` and the epoch. With several processes each gets its own batches, all
    get the same number, and the batches of one step have similar lengths. Large batches are halved to
    make the numbers equal, so that every sequence occurs exactly once in each epoch.

        DataLoader(pairs, batch_sampler=TokenBatches(lengths, 4096), collate_fn=...)

    Args:
        lengths: length of each sequence, or (source, target) lengths of each pair, whose sizes are
            added. Include start and end tokens that are added later.
        max_tokens: maximum number of tokens in a batch, padding included: sequences * the longest.
        max_sequences: maximum number of sequences in a batch; None: no limit.
        shuffle: True: random order; False: short sequences first.
        seed: seed of the shuffling.
        rank, world_size: number of this process, and of processes; None: torch.distributed's.

    Raises:
        ValueError: a sequence is empty or longer than max_tokens, the sequences cannot be distributed
            evenly, or an argument is out of range.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Sequence[tuple[int, ...]],
        max_tokens: int,
        *,
        max_sequences: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.rank = processes.rank() if rank is None else rank
        self.world_size = processes.world_size() if world_size is None else world_size
        self.max_tokens, self.max_sequences = max_tokens, max_sequences
        self.shuffle, self.seed = shuffle, seed
        self.epoch = self.start = 0
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must lie in [0, {self.world_size}), not {self.rank}")
        if max_sequences is not None and max_sequences < 1:
            raise ValueError(f"max_sequences must be at least 1, or None, not {max_sequences}")
        if len(lengths) < self.world_size:
            raise ValueError(
                f"lengths has {len(lengths)} sequences, too few for {self.world_size} process(es)"
            )
        table = torch.as_tensor(lengths, dtype=torch.int64)
        self._lengths = table if table.dim() == 2 else table[:, None]
        self._check_lengths()
        self._planned = self.epoch, self._make_plan()

    def _check_lengths(self) -> None:
        sizes = self._lengths.sum(1)
        shortest, longest = int(self._lengths.amin(1).argmin()), int(sizes.argmax())
        if self._lengths[shortest].min() < 1:
            raise ValueError(f"lengths[{shortest}] is {self._lengths[shortest].tolist()}: empty")
        if sizes[longest] > self.max_tokens:
            raise ValueError(
                f"lengths[{longest}] is {self._lengths[longest].tolist()}, more than "
                f"max_tokens={self.max_tokens}"
            )

    @property
    def config(self) -> dict[str, Any]:
        """Returns the values that determine the order, for checkpoints."""
        weights = torch.arange(1, self._lengths.numel() + 1)
        return {
            "sequences": len(self._lengths),
            "lengths": int((self._lengths.flatten() * weights).sum()),
            "max_tokens": self.max_tokens,
            "max_sequences": self.max_sequences,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "world_size": self.world_size,
        }

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Sets the next epoch, and how many of its batches (per process) to skip."""
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        """Returns the number of batches of a whole epoch, for this process."""
        return len(self._plan()) // self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        plan = self._plan()
        first = self.start * self.world_size + self.rank
        return iter(plan[first :: self.world_size])

    def _plan(self) -> list[list[int]]:
        """Returns the epoch's batches of all processes, step by step."""
        if self._planned[0] != self.epoch:
            self._planned = self.epoch, self._make_plan()
        return self._planned[1]

    def _make_plan(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        count = len(self._lengths)
        order = torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)
        # Stable sorts: by the first length, then by the second; equal ones stay in random order.
        for column in reversed(range(self._lengths.shape[1])):
            keys = self._lengths[order, column]
            order = order[keys.argsort(stable=True)]
        batches = self._cut(order.tolist())
        self._even_out(batches)
        steps = [batches[i : i + self.world_size] for i in range(0, len(batches), self.world_size)]
        if self.shuffle:
            places = torch.randperm(len(steps), generator=generator).tolist()
            steps = [steps[i] for i in places]
        return [batch for step in steps for batch in step]

    def _cut(self, order: list[int]) -> list[list[int]]:
        lengths = self._lengths.tolist()
        batches: list[list[int]] = []
        batch: list[int] = []
        longest = [0] * self._lengths.shape[1]
        for index in order:
            grown = [max(a, b) for a, b in zip(longest, lengths[index], strict=True)]
            full = (len(batch) + 1) * sum(grown) > self.max_tokens
            if batch and (full or len(batch) == self.max_sequences):
                batches.append(batch)
                batch, grown = [], lengths[index]
            batch.append(index)
            longest = grown
        batches.append(batch)
        return batches

    def _even_out(self, batches: list[list[int]]) -> None:
        while len(batches) % self.world_size:
            place = max(range(len(batches)), key=lambda i: len(batches[i]))
            batch = batches[place]
            if len(batch) == 1:
                raise ValueError(
                    f"{len(batches)} batches of one sequence each cannot be shared evenly by "
                    f"{self.world_size} processes"
                )
            batches[place : place + 1] = [batch[: len(batch) // 2], batch[len(batch) // 2 :]]


class PairBatch(NamedTuple):
    """A batch for `models.Transformer` and `NextTokenLoss`."""

    source: Tensor  #: int64 (B, S)
    target: Tensor  #: int64 (B, T): the start token, then the tokens
    expected: Tensor  #: int64 (B, T): the tokens, then the end token


def pad_sequences(sequences: Sequence[Sequence[int]], pad_token: int) -> Tensor:
    """Returns token lists as one int64 tensor (B, longest), with pad_token after each.

    Raises:
        ValueError: there are no sequences, or one is empty.
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
