"""The loop: it learns, stops when it should, validates, plots, and says what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training_case import PAD, make_loader, make_model, make_pairs, make_trainer

import transformer_fast
from transformer_fast import models, training


def test_it_learns_on_kernels() -> None:
    if transformer_fast._native.module is None:
        pytest.skip(str(transformer_fast._native.why_not))
    pairs = make_pairs(200)
    trainer = make_trainer(make_model(0.0))
    with transformer_fast.strict():
        history = trainer.fit(make_loader(pairs, 400), steps=120)
    assert history.steps == trainer.step == 120
    assert sum(history.loss[-10:]) < 0.75 * sum(history.loss[:10])
    assert history.learning_rate[9] == max(history.learning_rate)


def test_limits(capsys: pytest.CaptureFixture[str]) -> None:
    loader = make_loader(make_pairs())
    trainer = make_trainer(make_model())
    assert trainer.fit(loader, epochs=1, validation=loader).steps == len(loader)
    assert [step for step, _ in trainer.history.validation] == [len(loader)]
    trainer.fit(loader, epochs=2, steps=len(loader) + 2)
    assert trainer.step == len(loader) + 2
    trainer.fit(loader, minutes=1e-9)
    assert trainer.step == len(loader) + 3
    trainer.fit(loader, epochs=2, validation=lambda model: {"error": 0.5}, validate_every=3)
    assert trainer.history.validation[-1] == (trainer.step, {"error": 0.5})
    assert sum(trainer.history.tokens[: len(loader)]) == sum(len(t) + 1 for _, t in make_pairs())
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("arguments", [{}, {"steps": 0}, {"epochs": -1}, {"minutes": 0.0}])
def test_limits_that_are_none(arguments: Any) -> None:
    with pytest.raises(ValueError, match=r"must be (given|above 0, not)"):
        make_trainer(make_model()).fit(make_loader(make_pairs()), **arguments)


def test_arguments_that_are_wrong() -> None:
    model = make_model()
    for name in ("accumulate", "checkpoint_every"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
            make_trainer(model, **{name: 0})
    with pytest.raises(ValueError, match="clip_norm must be above 0, or None, not -1"):
        make_trainer(model, clip_norm=-1.0)
    with pytest.raises(ValueError, match=r"autocast must be torch\.bfloat16 or None"):
        make_trainer(model, autocast=torch.float16)
    with pytest.raises(ValueError, match="batches is empty"):
        make_trainer(model).fit([], steps=1)
    with pytest.raises(ValueError, match="strategy must be one of ddp, fsdp, not 'zero'"):
        training.parallelise(model, "zero")
    with pytest.raises(ValueError, match="has no tokens to evaluate"):
        training.evaluate(model, training.NextTokenLoss(PAD), [])


def test_a_gradient_that_is_nan_stops_before_the_step() -> None:
    trainer = make_trainer(make_model())
    loader = make_loader(make_pairs())
    trainer.fit(loader, steps=2)
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    objective = trainer.objective

    def broken(model: torch.nn.Module, batch: Any) -> Any:
        total, tokens = objective(model, batch)
        return total * float("nan"), tokens

    trainer.objective = broken
    with pytest.raises(FloatingPointError, match="gradient of step 3 has norm nan"):
        trainer.fit(loader, steps=4)
    assert trainer.step == 2
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, weights[name])


def test_accumulated_batches_are_one_large_batch() -> None:
    pairs = make_pairs(40)
    found = []
    for max_tokens, accumulate in ((100_000, 1), (130, 50)):
        model = make_model(0.0)
        # Not Adam, which makes steps of the rounding errors of gradients that are zero.
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        trainer = training.Trainer(
            model, optimizer, training.NextTokenLoss(PAD), accumulate=accumulate, clip_norm=0.1
        )
        trainer.fit(make_loader(pairs, max_tokens), steps=1)
        found.append((trainer.history.loss, trainer.history.gradient_norm, trainer.history.tokens))
        found[-1] = (*found[-1], *trainer.model.state_dict().values())  # type: ignore[assignment]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_evaluate_changes_nothing() -> None:
    model = make_model(0.5)
    loader = make_loader(make_pairs())
    state = torch.get_rng_state()
    loss = training.evaluate(model, training.NextTokenLoss(PAD), loader)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    model.eval()
    logits = [model(source, target) for source, target, _ in loader]
    sums = [
        training.label_smoothing_loss(x, batch.expected, pad_token=PAD, reduction="sum").item()
        for x, batch in zip(logits, loader, strict=True)
    ]
    tokens = sum(len(target) + 1 for _, target in make_pairs())
    assert loss == pytest.approx(sum(sums) / tokens, rel=1e-5)


def test_language_model_trains() -> None:
    torch.manual_seed(0)
    model = models.LanguageModel(12, 16, 2, 1, 32, 0.0, max_len=16)
    tokens = torch.arange(9).expand(4, 9) + 2
    optimizer = training.adamw(model, 1e-2)
    trainer = training.Trainer(model, optimizer, training.NextTokenLoss(None, 0.0))
    history = trainer.fit([(tokens[:, :-1], tokens[:, 1:])], steps=60)
    assert history.loss[-1] < 0.1 < history.loss[0]


@pytest.mark.parametrize("how", ["bf16", "checkpointed", "compiled"])
def test_other_ways_to_run(how: str, tmp_path: Path) -> None:
    plain = make_trainer(make_model(0.0))
    expected = plain.fit(make_loader(make_pairs()), steps=3).loss
    model: Any = make_model(0.0)
    if how == "checkpointed":
        training.checkpoint_activations(model, 2)
    if how == "compiled":
        model = torch.compile(model, backend="eager", dynamic=True)
    options = {"autocast": torch.bfloat16} if how == "bf16" else {}
    trainer = make_trainer(model, tmp_path / "run.pt", **options)
    history = trainer.fit(make_loader(make_pairs()), steps=3)
    assert history.loss == pytest.approx(expected, rel=2e-2 if how == "bf16" else 1e-4)
    # The checkpoint has the plain model's names, however the model ran.
    make_model().load_state_dict(training.read_checkpoint(tmp_path / "run.pt")["model"])
    torch._dynamo.reset()
