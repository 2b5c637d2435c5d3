"""Two gloo processes on one machine: the numbers of one process with the whole batch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from training_case import make_loader, make_model, make_pairs, make_trainer, torchrun

from transformer_fast import training

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="needs torch.distributed with gloo",
)
STEPS = 6


def worker(strategy: str, folder: Path) -> None:
    """What each process runs, as a user's script would."""
    torch.set_num_threads(1)
    with training.process_group("cpu") as device:
        model = make_model(0.0).to(device)
        if strategy == "fsdp":
            training.checkpoint_activations(model)  # which changes no number
        model = training.parallelise(model, strategy)
        trainer = make_trainer(model, folder / "run.pt")
        trainer.fit(make_loader(make_pairs()), steps=STEPS // 2)
        again = training.parallelise(make_model(0.0, seed=7).to(device), strategy)
        trainer = make_trainer(again, folder / "run.pt")
        assert trainer.resume()
        valid = make_loader(make_pairs(20, seed=1))
        history = trainer.fit(make_loader(make_pairs()), steps=STEPS, validation=valid)
        name = f"history{torch.distributed.get_rank()}.json"
        (folder / name).write_text(json.dumps(history.state_dict()))
        unequal = make_loader(make_pairs(), 60 if torch.distributed.get_rank() else 120)
        try:
            trainer.position.epoch, trainer.position.batch = 9, 0
            trainer.fit(unequal, steps=STEPS + 1)
        except ValueError as error:
            assert "as many in each process" in str(error)  # noqa: PT017
        else:
            raise AssertionError("unequal numbers of batches went unnoticed")


class BothRanks:
    """The batches that two processes have together, each step's as a pair."""

    def __init__(self) -> None:
        self.loaders = [make_loader(make_pairs(), rank=r, world_size=2) for r in range(2)]

    def set_epoch(self, epoch: int) -> None:
        for loader in self.loaders:
            loader.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]

    def __iter__(self) -> Any:
        for pair in zip(*self.loaders, strict=True):
            yield from pair


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_are_one_with_the_whole_batch(strategy: str, tmp_path: Path) -> None:
    torchrun(Path(__file__), [strategy, str(tmp_path)])
    alone = make_trainer(make_model(0.0), accumulate=2)
    expected = alone.fit(BothRanks(), steps=STEPS)
    histories = [json.loads((tmp_path / f"history{r}.json").read_text()) for r in range(2)]
    for found in histories:
        assert found["tokens"] == expected.tokens
        assert found["loss"] == pytest.approx(expected.loss, rel=1e-5)
        assert found["gradient_norm"] == pytest.approx(expected.gradient_norm, rel=1e-4)
    valid = training.evaluate(alone.model, alone.objective, make_loader(make_pairs(20, seed=1)))
    assert histories[0]["validation"][-1][1]["loss"] == pytest.approx(valid, rel=1e-4)
    # What two processes saved is a plain model, whose weights are those of one process.
    saved = training.read_checkpoint(tmp_path / "run.pt")
    assert len(saved["random"]) == 2
    for name, value in alone.model.state_dict().items():
        if name.endswith("in_proj_bias"):
            continue  # a key's bias has gradient zero, and Adam makes steps of rounding errors
        torch.testing.assert_close(saved["model"][name], value, rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    worker(sys.argv[1], Path(sys.argv[2]))
