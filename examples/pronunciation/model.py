"""The model, its batches and trainer, its error rates, and a comparison of two backends."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

import transformer_fast
from transformer_fast import models, training

from .dictionary import END, PAD, START, Dictionary, Entry


@dataclass(frozen=True)
class Setting:
    """Hyperparameters. Two cores take about 15 minutes for the defaults, half a minute for `quick`."""

    d_model: int = 192
    nhead: int = 4
    layers: int = 3
    dim_feedforward: int = 768
    dropout: float = 0.1
    max_tokens: int = 4096
    lr: float = 1.5e-3
    warmup_steps: int = 400
    steps: int = 3600
    seed: int = 0

    @staticmethod
    def quick(seed: int = 0) -> Setting:
        return Setting(
            d_model=64, layers=2, dim_feedforward=256, lr=3e-3, warmup_steps=20, steps=150,
            seed=seed,
        )  # fmt: skip


def make_model(setting: Setting, dictionary: Dictionary) -> models.Transformer:
    """Seeds PyTorch's generator and returns a new model."""
    torch.manual_seed(setting.seed)
    return models.Transformer(
        len(dictionary.letters),
        len(dictionary.phonemes),
        setting.d_model,
        setting.nhead,
        setting.layers,
        setting.layers,
        setting.dim_feedforward,
        setting.dropout,
        norm_first=True,
        max_len=128,
        pad_token=PAD,
        start_token=START,
        end_token=END,
    )


def make_loader(
    entries: Sequence[Entry], dictionary: Dictionary, setting: Setting, shuffle: bool = True
) -> DataLoader[tuple[list[int], list[int]]]:
    """Returns batches of (word, pronunciation), with one pair for each pronunciation."""
    pairs = [
        (dictionary.letters.encode(entry.word), dictionary.phonemes.encode(pronunciation))
        for entry in entries
        for pronunciation in entry.pronunciations
    ]
    sampler = training.TokenBatches(
        [(len(source), len(target) + 1) for source, target in pairs],
        setting.max_tokens,
        shuffle=shuffle,
        seed=setting.seed,
    )
    collate = training.PairCollator(PAD, START, END)
    return DataLoader(pairs, batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]


def make_trainer(
    model: torch.nn.Module, setting: Setting, checkpoint: Path | None = None
) -> training.Trainer:
    optimizer = training.adamw(model, setting.lr, weight_decay=0.01)
    return training.Trainer(
        model,
        optimizer,
        training.NextTokenLoss(PAD, smoothing=0.1),
        schedule=training.linear_schedule(
            optimizer, setting.steps, min(setting.warmup_steps, setting.steps)
        ),
        clip_norm=1.0,
        checkpoint=checkpoint,
        checkpoint_every=200,
    )


class Score(NamedTuple):
    """Error rates on a list of words."""

    phoneme_error_rate: float
    word_error_rate: float
    words: int

    def __str__(self) -> str:
        return (
            f"phoneme error rate {self.phoneme_error_rate:.2%}, word error rate "
            f"{self.word_error_rate:.2%} on {self.words:,} words"
        )


def edit_distance(one: Sequence[str], other: Sequence[str]) -> int:
    """Returns the Levenshtein distance: insertions, deletions and substitutions."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


def score(entries: Sequence[Entry], found: Sequence[tuple[str, ...]]) -> Score:
    """Compares each word's pronunciation with the nearest one of the dictionary."""
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
    """Returns the model's pronunciation of each word; ``beams=1`` decodes greedily."""
    method = models.BeamSearch(beams) if beams > 1 else models.Greedy()
    device = next(model.parameters()).device
    order = sorted(range(len(words)), key=lambda i: len(words[i]))
    found: dict[int, tuple[str, ...]] = {}
    for places in _in_batches(len(words), order, batch):
        tokens = [dictionary.letters.encode(words[i]) for i in places]
        source = training.pad_sequences(tokens, PAD).to(device)
        # Only short words have more than twice as many phonemes as letters.
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


#: Steps that a backend runs before the other one has its turn.
_CHUNK = 5


def picture(histories: dict[str, training.History], file: Path, **options: Any) -> None:
    """Saves the loss curves if matplotlib is installed."""
    try:
        from transformer_fast import viz
    except ImportError as error:
        print(f"no {file.name}: {error}")
        return
    viz.loss_curves(histories, **options).savefig(file, dpi=120)


class _Runner:
    """A training run on one backend, with its own random state."""

    def __init__(self, backend: str | None, setting: Setting, dictionary: Dictionary) -> None:
        self.backend = backend
        self.trainer = make_trainer(make_model(setting, dictionary), setting)
        self.random_state = training.random_state()

    def run(self, loader: DataLoader[Any], steps: int) -> None:
        training.set_random_state(self.random_state)
        with transformer_fast.use_backend(self.backend):
            self.trainer.fit(loader, steps=steps, progress=False)
        self.random_state = training.random_state()

    def chunks(self) -> list[float]:
        """Returns the seconds per step of each chunk but the first, which allocates memory."""
        seconds = self.trainer.history.seconds
        return [
            statistics.median(seconds[i : i + _CHUNK]) for i in range(_CHUNK, len(seconds), _CHUNK)
        ]


def race(
    loader: DataLoader[Any], setting: Setting, dictionary: Dictionary, steps: int, file: Path
) -> str:
    """Runs the same training on our kernels and on the reference, in alternating chunks of steps.

    The speed of a machine drifts, due to other processes and to heat. So the speed-up is the median
    ratio of neighbouring chunks. Returns a line for display.
    """
    before = training.random_state()
    runners = {
        "kernels": _Runner(None, setting, dictionary),
        "reference": _Runner("reference", setting, dictionary),
    }
    steps = max(steps, 2 * _CHUNK)
    for done in range(0, steps, _CHUNK):
        for runner in runners.values():
            runner.run(loader, min(done + _CHUNK, steps))
    training.set_random_state(before)
    ours, theirs = (runner.trainer.history for runner in runners.values())
    kernels, reference = (runner.chunks() for runner in runners.values())
    ratios = sorted(b / a for a, b in zip(kernels, reference, strict=True))
    apart = max(abs(a - b) for a, b in zip(ours.loss, theirs.loss, strict=True))
    line = (
        f"{statistics.median(kernels) * 1e3:.0f} ms per step on kernels, "
        f"{statistics.median(reference) * 1e3:.0f} ms on the reference: "
        f"{statistics.median(ratios):.2f} times as fast "
        f"({ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f} in the middle half "
        f"of {len(ratios)} pairs of {_CHUNK} steps); losses differ by at most {apart:.1e}"
    )
    picture(
        {name: runner.trainer.history for name, runner in runners.items()},
        file,
        window=5,
        title=f"same seed, {torch.get_num_threads()} thread(s)",
    )
    return line
