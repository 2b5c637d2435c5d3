"""Real input: English text that every Python installation carries.

The paragraphs of Python's own language reference (`pydoc_data.topics`), as bytes, in the order in
which they stand there. Their lengths vary as lengths of paragraphs do, so batches of them have the
padding that real batches have. What is shorter than a sentence (headings, lines of grammar) is left
out.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

#: Tokens are bytes; these two come after them.
PADDING = 256
BEGIN = 257
VOCABULARY = 258

_SHORTEST = 80


@functools.cache
def paragraphs() -> tuple[bytes, ...]:
    """About 1,700 paragraphs, 400 kB."""
    from pydoc_data.topics import topics

    found = []
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            text = " ".join(paragraph.split()).encode()
            if len(text) >= _SHORTEST:
                found.append(text)
    return tuple(found)


@dataclass(frozen=True)
class Batch:
    """Paragraphs side by side."""

    #: (B, T) int64, PADDING behind the end.
    tokens: Tensor
    #: (B,) int64.
    lengths: Tensor

    @property
    def real(self) -> Tensor:
        """(B, T) bool: True where there is text."""
        return self.tokens != PADDING

    @property
    def full(self) -> bool:
        """Whether there is no padding."""
        return bool((self.lengths == self.tokens.shape[1]).all())

    def to(self, device: torch.device | str) -> Batch:
        return Batch(self.tokens.to(device), self.lengths.to(device))


def batch(texts: list[bytes], longest: int, begin: bool = False) -> Batch:
    """One batch of ``texts``, each cut after ``longest`` tokens, with BEGIN in front if asked."""
    rows = [torch.tensor([BEGIN] * begin + list(text))[:longest] for text in texts]
    lengths = torch.tensor([len(row) for row in rows])
    return Batch(pad_sequence(rows, batch_first=True, padding_value=PADDING), lengths)


def _take(count: int, size: int, after: int = 0) -> list[list[bytes]]:
    texts = paragraphs()
    if count < 1 or size < 1 or after + count * size > len(texts):
        raise ValueError(
            f"there are {len(texts)} paragraphs, which is not enough for {count} batches of {size}"
        )
    starts = range(after, after + count * size, size)
    return [list(texts[start : start + size]) for start in starts]


def batches(count: int, size: int, longest: int = 512) -> list[Batch]:
    """``count`` batches of ``size`` consecutive paragraphs."""
    return [batch(texts, longest) for texts in _take(count, size)]


def pairs(count: int, size: int, longest: int = 256) -> list[tuple[Batch, Batch]]:
    """(source, target) batches for teacher forcing: each paragraph's target is the next one."""
    targets = [batch(texts, longest, begin=True) for texts in _take(count, size, 1)]
    return list(zip(batches(count, size, longest), targets, strict=True))
