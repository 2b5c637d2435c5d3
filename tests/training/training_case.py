"""A small task, reversing a sequence, which the training tests use in one or several processes."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from transformer_fast import models, training

PAD, START, END = 0, 1, 2
WORDS = 12
Pairs = list[tuple[list[int], list[int]]]


def make_pairs(count: int = 60, seed: int = 0) -> Pairs:
    chance = random.Random(seed)
    sources = [
        [chance.randrange(3, WORDS) for _ in range(chance.randint(2, 7))] for _ in range(count)
    ]
    return [(s, s[::-1]) for s in sources]


def make_model(dropout: float = 0.1, seed: int = 0) -> models.Transformer:
    torch.manual_seed(seed)
    return models.Transformer(
        WORDS, WORDS, 16, 2, 1, 1, 32, dropout,
        pad_token=PAD, start_token=START, end_token=END, max_len=16,
    )  # fmt: skip


def make_loader(pairs: Pairs, max_tokens: int = 120, **options: Any) -> DataLoader:
    lengths = [(len(source), len(target) + 1) for source, target in pairs]
    sampler = training.TokenBatches(lengths, max_tokens, **options)
    collate = training.PairCollator(PAD, START, END)
    return DataLoader(pairs, batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]


def make_trainer(
    model: torch.nn.Module, checkpoint: Path | None = None, **options: Any
) -> training.Trainer:
    optimizer = training.adamw(model, lr=3e-3, weight_decay=0.01)
    schedule = training.paper_schedule(optimizer, None, 10)
    objective = training.NextTokenLoss(PAD)
    return training.Trainer(
        model, optimizer, objective, schedule=schedule, checkpoint=checkpoint, **options
    )


def torchrun(script: Path, arguments: list[str]) -> None:
    """Runs the script in two processes, with the environment variables of torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = script.resolve()
    folders = here.parents[2], here.parent, here.parents[1] / "cuda"
    paths = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    processes = [
        subprocess.Popen(
            [sys.executable, str(here), *arguments],
            env={
                **os.environ, "PYTHONPATH": paths, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
            },
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
