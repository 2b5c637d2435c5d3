"""The same training on our kernels and on the reference: the same losses, another time."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import transformer_fast
from transformer_fast import training

from .dictionary import Dictionary
from .setting import Setting, make_model, make_trainer

_CHUNK = 5  # steps in a row; what ran before is no part of the next but its first


def picture(histories: dict[str, training.History], file: Path, **options: Any) -> None:
    """Save the losses' curves, if matplotlib is there."""
    try:
        from transformer_fast import viz
    except ImportError as error:
        print(f"no {file.name}: {error}")
        return
    viz.loss_curves(histories, **options).savefig(file, dpi=120)


class _Runner:
    """A run of its own, with random numbers of its own."""

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
        """Seconds per step of each chunk, but the first, in which memory is found."""
        seconds = self.trainer.history.seconds
        return [
            statistics.median(seconds[i : i + _CHUNK]) for i in range(_CHUNK, len(seconds), _CHUNK)
        ]


def race(
    loader: DataLoader[Any], setting: Setting, dictionary: Dictionary, steps: int, file: Path
) -> str:
    """Both runs, a few steps of one and a few of the other in turn; what they took, in a line.

    In turn, since the speed of a machine drifts, by other work on it and by heat: the ratio is that
    of neighbouring chunks.
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
