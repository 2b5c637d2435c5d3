"""Checkpoints: an interrupted and resumed run ends bitwise equal to an uninterrupted one."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from training_case import PAD, make_loader, make_model, make_pairs, make_trainer

from transformer_fast import training
from transformer_fast.training import checkpoint


def result(trainer: training.Trainer) -> dict[str, Any]:
    optimizer = trainer.optimizer.state_dict()["state"]
    history = trainer.history.state_dict()
    del history["seconds"]
    return {
        "model": trainer.model.state_dict(),
        "optimizer": {f"{i}.{n}": v for i, s in optimizer.items() for n, v in s.items()},
        "history": history,
        "random": torch.get_rng_state(),
        "python": random.getstate(),
        "rates": [group["lr"] for group in trainer.optimizer.param_groups],
    }


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same(one[name], other[name])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def shuffled_by_torch(pairs: list) -> DataLoader:
    collate = training.PairCollator(0, 1, 2)
    return DataLoader(pairs, batch_size=9, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]


def plain_list(pairs: list) -> list:
    return list(make_loader(pairs))


LOADERS = (make_loader, shuffled_by_torch, plain_list)


def start(path: Path | None, **options: Any) -> training.Trainer:
    random.seed(3)
    trainer = make_trainer(make_model(), path, **options)
    torch.manual_seed(4)
    return trainer


@pytest.mark.sampled(20, 60)
@pytest.mark.parametrize("make", LOADERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_resume_equals_an_uninterrupted_run(make: Any, accumulate: int, tmp_path: Path) -> None:
    pairs = make_pairs()
    valid = make_loader(make_pairs(20, seed=1))
    per_epoch = -(-len(make(pairs)) // accumulate)
    # Stops within the first epoch, at its end, and within the third epoch.
    stops = [2, per_epoch, 2 * per_epoch + 1]
    last = 3 * per_epoch + 2
    whole = start(None, accumulate=accumulate)
    whole.fit(make(pairs), steps=last, validation=valid, validate_every=3)
    expected = result(whole)
    for stop in stops:
        path = tmp_path / f"{stop}.pt"
        first = start(path, accumulate=accumulate)
        first.fit(make(pairs), steps=stop)
        torch.manual_seed(99)  # a new process would have another random state
        random.seed(99)
        second = make_trainer(make_model(seed=98), path, accumulate=accumulate)
        assert second.resume()
        assert second.step == stop
        second.fit(make(pairs), steps=last, validation=valid, validate_every=3)
        found = result(second)
        found["history"]["validation"] = [
            *(v for v in expected["history"]["validation"] if v[0] <= stop),
            *found["history"]["validation"],
        ]
        assert_same(found, expected)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_signal_saves_and_stops(number, error, tmp_path):
    path = tmp_path / "run.pt"
    expected = start(None)
    expected.fit(make_loader(make_pairs()), steps=8)
    trainer = start(path)
    objective = trainer.objective
    handler = signal.getsignal(number)

    def interrupted(model: torch.nn.Module, batch: Any) -> Any:
        if trainer.step == 4:
            os.kill(os.getpid(), number)
        return objective(model, batch)

    trainer.objective = interrupted
    with pytest.raises(error):
        trainer.fit(make_loader(make_pairs()), steps=8)
    assert signal.getsignal(number) is handler
    assert trainer.step == 5
    again = make_trainer(make_model(seed=5), path)
    again.resume()
    again.fit(make_loader(make_pairs()), steps=8)
    assert_same(result(again), result(expected))


def test_signal_during_the_last_validation(tmp_path: Path) -> None:
    trainer = start(tmp_path / "run.pt")

    def validation(model: torch.nn.Module) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGINT)
        return {"error": 0.5}

    with pytest.raises(KeyboardInterrupt):
        trainer.fit(make_loader(make_pairs()), steps=2, validation=validation)
    history = training.read_checkpoint(tmp_path / "run.pt")["history"]
    assert history["validation"] == [(2, {"error": 0.5})]
    trainer.fit(make_loader(make_pairs()), steps=2, validation=validation)  # no steps are left
    assert len(trainer.history.validation) == 1


def test_failed_write_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    training.write_checkpoint(path, {"value": torch.ones(3)})

    def broken(state: Any, file: Any) -> None:
        file.write(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(OSError, match="disk full"):
        training.write_checkpoint(path, {"value": torch.zeros(3)})
    assert training.read_checkpoint(path)["value"].tolist() == [1.0, 1.0, 1.0]
    assert os.listdir(tmp_path) == ["run.pt"]


@pytest.mark.skipif(os.name != "posix", reason="needs links and permissions of POSIX")
def test_write_does_not_follow_symbolic_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "run.pt"
    victim.write_text("mine")
    # Fixed here: the real name is random for each write, so that an attacker cannot know it.
    monkeypatch.setattr(checkpoint.secrets, "token_hex", lambda _: "known")
    (tmp_path / ".run.pt.known.part").symlink_to(victim)
    with pytest.raises(FileExistsError):
        training.write_checkpoint(path, {"value": 1})
    assert victim.read_text() == "mine"
    monkeypatch.undo()
    training.write_checkpoint(path, {"value": 1})
    assert victim.read_text() == "mine"
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_other_files_raise(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        training.read_checkpoint(tmp_path / "none.pt")
    path = tmp_path / "run.pt"
    training.write_checkpoint(path, {"value": torch.ones(3000)})
    whole = path.read_bytes()
    for content in (b"", b"no checkpoint", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(training.CheckpointError, match="damaged or no checkpoint"):
            training.read_checkpoint(path)
    torch.save({"model": 1}, path)
    with pytest.raises(training.CheckpointError, match="no checkpoint of format 1, but of None"):
        training.read_checkpoint(path)
    torch.save(make_model(), path)  # contains a pickled class, which could run code
    with pytest.raises(training.CheckpointError, match="damaged or no checkpoint"):
        training.read_checkpoint(path)


def test_mismatched_checkpoints_raise(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    pairs = make_pairs()
    start(path).fit(make_loader(pairs), steps=2)
    torch.load(path, weights_only=True)

    other = make_trainer(make_model(), path)
    other.resume()
    with pytest.raises(training.CheckpointError, match=r"'seed': 0.*'seed': 1"):
        other.fit(make_loader(pairs, seed=1), steps=4)

    model = make_model()
    bare = training.Trainer(model, training.adamw(model), training.NextTokenLoss(PAD))
    with pytest.raises(training.CheckpointError, match="was saved with a schedule"):
        bare.load(path)

    state = training.read_checkpoint(path)
    training.write_checkpoint(path, {**state, "random": state["random"] * 2})
    with pytest.raises(training.CheckpointError, match=r"saved by 2 process\(es\)"):
        other.load(path)
    assert not make_trainer(make_model(), tmp_path / "none.pt").resume()


def test_random_state_includes_all_generators() -> None:
    numpy = pytest.importorskip("numpy")
    state = training.random_state()
    draw = [torch.rand(3).tolist(), random.random(), numpy.random.rand(3).tolist()]
    training.set_random_state(state)
    assert [torch.rand(3).tolist(), random.random(), numpy.random.rand(3).tolist()] == draw
