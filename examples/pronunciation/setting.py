"""What is trained, and on what: model, batches, optimiser and schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from transformer_fast import models, training

from .dictionary import END, PAD, START, Dictionary, Entry


@dataclass(frozen=True)
class Setting:
    """The defaults suit some 15 minutes of two cores; ``quick`` ones half a minute."""

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
    """The model as the seed gives it; what follows draws from the same seed."""
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
    """Batches of (word, pronunciation); a word with two pronunciations counts as two."""
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
