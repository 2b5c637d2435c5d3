"""Losses, schedules, batches and the training loop."""

from __future__ import annotations

import math
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Watch
from hypothesis import given
from hypothesis import strategies as st
from training_case import END, PAD, START, make_loader, make_model, make_pairs, make_trainer

import transformer_fast
from transformer_fast import models, training, use_backend

pytestmark = pytest.mark.sampled(30, 60)


def plain_loss(logits: torch.Tensor, expected: torch.Tensor, smoothing: float) -> torch.Tensor:
    """The loss of the Transformer paper: mean over real tokens of the KL divergence, up to a
    constant.

    The divergence is that of the prediction from the smoothed distribution.
    """
    total, count = logits.new_zeros(()), 0
    for row, token in zip(logits.flatten(0, -2), expected.flatten().tolist(), strict=True):
        if token != PAD:
            wanted = torch.full_like(row, smoothing / row.numel())
            wanted[token] += 1.0 - smoothing
            total = total - (wanted * row.log_softmax(-1)).sum()
            count += 1
    return total / count


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_loss_equals_the_papers_and_pytorchs(smoothing: float) -> None:
    logits = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    expected = torch.randint(1, 7, (3, 5))
    expected[1, 3:] = expected[2, 1:] = PAD
    loss = training.label_smoothing_loss(logits, expected, pad_token=PAD, smoothing=smoothing)
    torch.testing.assert_close(loss, plain_loss(logits, expected, smoothing))
    theirs = F.cross_entropy(
        logits.flatten(0, 1), expected.flatten(), ignore_index=PAD, label_smoothing=smoothing
    )
    (ours,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(ours, torch.autograd.grad(theirs, logits)[0])
    assert not ours[1, 3:].any()
    each = training.label_smoothing_loss(
        logits, expected, pad_token=PAD, smoothing=smoothing, reduction="none"
    )
    assert each.shape == expected.shape
    torch.testing.assert_close(each.sum() / 9, loss)


def test_loss_without_padding_and_without_tokens() -> None:
    logits = torch.randn(2, 3, 7)
    expected = torch.zeros(2, 3, dtype=torch.int32)
    torch.testing.assert_close(
        training.label_smoothing_loss(logits, expected, smoothing=0.0),
        -logits.log_softmax(-1)[..., 0].mean(),
    )
    assert training.label_smoothing_loss(logits, expected, pad_token=0) == 0.0
    lowp = training.label_smoothing_loss(logits.bfloat16(), expected)
    assert lowp.dtype == torch.float32


def rates(make: object, steps: int, lr: float) -> list[float]:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr)
    schedule = make(optimizer)  # type: ignore[operator]
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_paper_schedule_values() -> None:
    found = rates(lambda o: training.paper_schedule(o, 512, 4000), 4001, 1.0)
    assert found[0] == pytest.approx(512**-0.5 * 4000**-1.5)
    assert found[999] == pytest.approx(1000 * found[0])
    assert found[3999] == pytest.approx(7.0 * 1e-4, rel=2e-3)  # 7.0e-4 for the paper's base model
    assert found[3999] == pytest.approx(512**-0.5 * 4000**-0.5)
    assert found[4000] < found[3999] > found[3998]
    peak = rates(lambda o: training.paper_schedule(o, None, 4), 16, 0.5)
    assert peak[:4] == pytest.approx([0.125, 0.25, 0.375, 0.5])
    assert peak[15] == pytest.approx(0.25)


def test_linear_schedule_values() -> None:
    found = rates(lambda o: training.linear_schedule(o, 7, 3), 9, 1.0)
    assert found == pytest.approx([1 / 3, 2 / 3, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0])


def test_adamw_groups() -> None:
    model = models.Transformer(9, 9, 16, 2, 1, 1, 32, tie_output=True)
    optimizer = training.adamw(model, weight_decay=0.1)
    decayed, others = optimizer.param_groups
    assert (decayed["betas"], decayed["eps"], decayed["lr"]) == ((0.9, 0.98), 1e-9, 1.0)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() > 1 for p in decayed["params"])
    table = model.output.weight
    assert any(p is table for p in others["params"])
    every = [*decayed["params"], *others["params"]]
    assert len(every) == len(list(model.parameters())) == len({id(p) for p in every})


def test_gradient_clipping() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))]
    parameters[0].grad = torch.tensor([3.0, 0.0, 0.0])
    assert training.clip_gradients(parameters, None) == 3.0
    parameters[1].grad = torch.tensor([0.0, 4.0])
    assert training.clip_gradients(parameters, 2.5) == 5.0
    torch.testing.assert_close(parameters[0].grad, torch.tensor([1.5, 0.0, 0.0]))
    assert math.isclose(training.clip_gradients(parameters, None).item(), 2.5, rel_tol=1e-5)


def test_activation_checkpointing_keeps_losses_and_gradients() -> None:
    batch = next(iter(make_loader(make_pairs())))
    found = []
    for wanted in (False, True):
        model = make_model(dropout=0.3)
        if wanted:
            names = list(model.state_dict())
            assert training.checkpoint_activations(model) == 2
            assert training.checkpoint_activations(model) == 0  # already checkpointed
            assert list(model.state_dict()) == names
        torch.manual_seed(5)
        total, _ = training.NextTokenLoss(PAD)(model, batch)
        total.backward()
        found.append([total.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found)


class _LogitsOnly(torch.nn.Module):
    """A model that returns logits only: `NextTokenLoss` does not recognise its class."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(*inputs)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("embedding_size", [None, 24])
@pytest.mark.parametrize("how", ["plain", "autocast", "bfloat16", "reference"])
def test_losses_of_models_equal_those_of_logits(
    tied: bool, embedding_size: int | None, how: str
) -> None:
    """Models that compute losses themselves give the same sum and gradients as their logits."""
    torch.manual_seed(0)
    options = {"tie_output": tied, "embedding_size": embedding_size, "dropout": 0.0}
    model = models.LanguageModel(50, 16, 2, 1, 32, pad_token=PAD, **options)
    tokens, expected = torch.randint(1, 50, (3, 7)), torch.randint(1, 50, (3, 7))
    tokens[1, 5:] = expected[1, 5:] = PAD
    if how == "bfloat16":
        model = model.bfloat16()
    found = []
    for way in (model, _LogitsOnly(model)):
        model.zero_grad()
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"),
            use_backend("reference") if how == "reference" else nullcontext(),
        ):
            total, count = training.NextTokenLoss(PAD, 0.1)(way, (tokens, expected))
        total.backward()
        assert count == 19
        assert total.dtype == torch.float32
        found.append([total.detach(), *(p.grad for p in model.parameters())])
    limits = {"rtol": 2e-2, "atol": 2e-2} if how in ("autocast", "bfloat16") else {}
    torch.testing.assert_close(*found, **limits)


def test_losses_never_materialize_all_logits() -> None:
    class Largest(Watch):
        elements = 0

        def see(self, func, arguments, result):
            if isinstance(result, torch.Tensor):
                self.elements = max(self.elements, result.numel())

    model = models.Transformer(9000, 9000, 16, 2, 1, 1, 32)
    source, target = torch.randint(0, 9000, (2, 8, 16))
    parameters = max(p.numel() for p in model.parameters())
    with Largest() as largest:
        training.NextTokenLoss(None)(model, (source, target, target))
    assert largest.elements <= parameters < 8 * 16 * 9000


def test_subclasses_with_a_custom_forward_use_logits() -> None:
    class Scaled(models.LanguageModel):
        def forward(self, tokens):
            return 2.0 * super().forward(tokens)

    model = Scaled(20, 16, 2, 1, 32, dropout=0.0)
    tokens = torch.randint(0, 20, (2, 5))
    total, _ = training.NextTokenLoss(None, 0.0)(model, (tokens, tokens))
    expected = torch.nn.functional.cross_entropy(
        model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum"
    )
    torch.testing.assert_close(total, expected)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=3, max_size=60),
    max_tokens=st.integers(120, 400),
    max_sequences=st.none() | st.integers(1, 9),
    shuffle=st.booleans(),
    world_size=st.integers(1, 3),
    epoch=st.integers(0, 3),
)
def test_batches_contain_each_sequence_once_within_the_budget(
    lengths: list, max_tokens: int, max_sequences: int | None, shuffle: bool, world_size: int,
    epoch: int,
) -> None:  # fmt: skip
    ranks = []
    if max_sequences == 1 and len(lengths) % world_size:
        with pytest.raises(ValueError, match="batches of one sequence each cannot be shared"):
            training.TokenBatches(
                lengths, max_tokens, max_sequences=1, rank=0, world_size=world_size
            )
        return
    for rank in range(world_size):
        sampler = training.TokenBatches(
            lengths, max_tokens, max_sequences=max_sequences, shuffle=shuffle, rank=rank,
            world_size=world_size,
        )  # fmt: skip
        sampler.set_epoch(epoch)
        ranks.append(list(sampler))
        assert len(ranks[-1]) == len(sampler)
    assert len({len(batches) for batches in ranks}) == 1
    every = [batch for batches in ranks for batch in batches]
    assert sorted(i for batch in every for i in batch) == list(range(len(lengths)))
    for batch in every:
        longest = [max(lengths[i][side] for i in batch) for side in range(2)]
        assert len(batch) * sum(longest) <= max_tokens
        assert len(batch) <= (max_sequences or len(batch))


def test_seed_and_epoch_determine_the_order() -> None:
    lengths = [random.Random(1).randint(1, 9) for _ in range(200)]
    state = torch.get_rng_state()

    def epochs(seed: int) -> list[list[list[int]]]:
        sampler = training.TokenBatches(lengths, 60, seed=seed)
        found = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            found.append(list(sampler))
        return found

    first = epochs(7)
    assert first == epochs(7) != epochs(8)
    assert first[0] != first[1] != first[2]
    assert torch.equal(torch.get_rng_state(), state)
    sampler = training.TokenBatches(lengths, 60, seed=7)
    sampler.set_epoch(1, start=4)
    assert list(sampler) == first[1][4:]


def test_collator() -> None:
    batch = training.PairCollator(PAD, START, END)([([5, 6, 7], [8]), ([5], [9, 8])])
    assert batch.source.tolist() == [[5, 6, 7], [5, PAD, PAD]]
    assert batch.target.tolist() == [[START, 8, PAD], [START, 9, 8]]
    assert batch.expected.tolist() == [[8, END, PAD], [9, 8, END]]


def test_training_learns_with_kernels_only() -> None:
    if transformer_fast._native.module is None:
        pytest.skip(str(transformer_fast._native.why_not))
    pairs = make_pairs(200)
    trainer = make_trainer(make_model(0.0))
    with transformer_fast.strict():
        history = trainer.fit(make_loader(pairs, 400), steps=120)
    assert history.steps == trainer.step == 120
    assert sum(history.loss[-10:]) < 0.75 * sum(history.loss[:10])
    assert history.learning_rate[9] == max(history.learning_rate)


def test_fit_stops_at_each_limit(capsys: pytest.CaptureFixture[str]) -> None:
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


def of_loss(**changed: Any) -> Any:
    given = {"logits": torch.zeros(2, 3, 7), "expected": torch.zeros(2, 3).long()} | changed
    return training.label_smoothing_loss(given.pop("logits"), given.pop("expected"), **given)


def of_expected(expected: Any) -> Any:
    """Calls a model's losses for 2 x 5 tokens with these expected tokens."""
    return models.LanguageModel(20, 16, 2, 1, 32)(torch.ones(2, 5).long(), expected=expected)


def fit(batches: Any = None, **limits: Any) -> Any:
    return make_trainer(make_model()).fit(
        make_loader(make_pairs()) if batches is None else batches, **limits
    )


SGD = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
BATCHES, LINEAR = training.TokenBatches, torch.nn.Linear(2, 2)
#: Exception type: [(call, part of the message)]
WRONG: dict[type[Exception], list[tuple[Any, str]]] = {
    TypeError: [
        (lambda: of_loss(expected=[1]), "expected must be a Tensor"),
        (lambda: of_loss(expected=torch.zeros(2, 3)), "expected must hold token ids"),
        (lambda: of_loss(logits=torch.zeros(2, 3, 7).long()), "logits must be float"),
        (lambda: of_expected(torch.ones(2, 5)), "expected must hold token ids"),
        (lambda: of_expected([1, 2]), "expected must be a Tensor"),
    ],
    IndexError: [(lambda: of_expected(torch.full((2, 5), 20)), "Target 20 is out of bounds")],
    ValueError: [
        (lambda: of_loss(expected=torch.zeros(3, 2).long()), r"\[2, 3\].*\[3, 2\]"),
        (lambda: of_loss(smoothing=1.5), r"smoothing must lie in \[0, 1\], not 1.5"),
        (lambda: of_loss(reduction="all"), "reduction must be .* not 'all'"),
        (lambda: of_expected(torch.ones(2, 4).long()), "must have the shape of the tokens before"),
        (lambda: training.paper_schedule(SGD, 8, 0), "warmup_steps must be at least 1, not 0"),
        (lambda: training.paper_schedule(SGD, 0), "d_model must be at least 1, or None, not 0"),
        (lambda: training.linear_schedule(SGD, 5, 6), "must be at most total_steps, 5, not 6"),
        (lambda: training.adamw(torch.nn.ReLU()), "no trainable parameters"),
        (
            lambda: training.adamw(torch.nn.Linear(2, 2).requires_grad_(False)),
            "no trainable parameters",
        ),
        (
            lambda: training.parameter_groups(LINEAR, -1.0),
            "weight_decay must be at least 0, not -1",
        ),
        (lambda: training.clip_gradients([], 0), "max_norm must be above 0, or None, not 0"),
        (lambda: training.checkpoint_activations(LINEAR), "no Transformer encoder or decoder lay"),
        (
            lambda: training.checkpoint_activations(make_model(), 0),
            "every must be at least 1, not 0",
        ),
        (lambda: BATCHES([3, 9, 2], 8), r"lengths\[1\] is \[9\], more than max_tokens=8"),
        (lambda: BATCHES([(3, 1), (5, 4)], 8), r"lengths\[1\] is \[5, 4\]"),
        (lambda: BATCHES([3, 0], 8), r"lengths\[1\] is \[0\]: empty"),
        (lambda: BATCHES([], 8), "0 sequences, too few for 1"),
        (lambda: BATCHES([3], 8, world_size=2), "1 sequences, too few for 2"),
        (lambda: BATCHES([3], 8, rank=1), r"rank must lie in \[0, 1\), not 1"),
        (lambda: BATCHES([3], 8, max_sequences=0), "max_sequences must be at least 1"),
        (lambda: training.pad_sequences([[1], []], PAD), r"sequences\[1\] is empty"),
        (lambda: training.pad_sequences([], PAD), "sequences is empty"),
        (lambda: fit(), "one of steps, epochs and minutes must be given"),
        (lambda: fit(steps=0), "steps must be above 0, not 0"),
        (lambda: fit(epochs=-1), "epochs must be above 0, not -1"),
        (lambda: fit(minutes=0.0), "minutes must be above 0, not 0"),
        (lambda: fit([], steps=1), "batches is empty"),
        (lambda: make_trainer(LINEAR, accumulate=0), "accumulate must be at least 1, not 0"),
        (lambda: make_trainer(LINEAR, checkpoint_every=0), "every must be at least 1, not 0"),
        (
            lambda: make_trainer(LINEAR, clip_norm=-1.0),
            "clip_norm must be above 0, or None, not -1",
        ),
        (lambda: make_trainer(LINEAR, autocast=torch.half), r"must be torch\.bfloat16 or None"),
        (lambda: training.parallelise(LINEAR, "zero"), "must be one of ddp, fsdp, not 'zero'"),
        (lambda: training.evaluate(LINEAR, training.NextTokenLoss(PAD), []), "has no tokens to"),
    ],
}


@pytest.mark.parametrize(
    ("error", "call", "words"), [(kind, *one) for kind, found in WRONG.items() for one in found]
)
def test_wrong_arguments_raise(error: type[Exception], call: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_nan_gradient_raises_before_the_step() -> None:
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


def test_accumulated_batches_equal_one_large_batch() -> None:
    pairs = make_pairs(40)
    found = []
    for max_tokens, accumulate in ((100_000, 1), (130, 50)):
        model = make_model(0.0)
        # Not Adam: for zero gradients, its steps depend on rounding errors.
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        trainer = training.Trainer(
            model, optimizer, training.NextTokenLoss(PAD), accumulate=accumulate, clip_norm=0.1
        )
        trainer.fit(make_loader(pairs, max_tokens), steps=1)
        found.append((trainer.history.loss, trainer.history.gradient_norm, trainer.history.tokens))
        found[-1] = (*found[-1], *trainer.model.state_dict().values())  # type: ignore[assignment]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_evaluate_keeps_mode_and_random_state() -> None:
    model = make_model(0.5)
    model.encoder.eval()
    loader = make_loader(make_pairs())
    state = torch.get_rng_state()
    loss = training.evaluate(model, training.NextTokenLoss(PAD), loader)
    assert model.training
    assert not model.encoder.training
    assert torch.equal(torch.get_rng_state(), state)
    model.eval()
    logits = [model(source, target) for source, target, _ in loader]
    sums = [
        training.label_smoothing_loss(x, batch.expected, pad_token=PAD, reduction="sum").item()
        for x, batch in zip(logits, loader, strict=True)
    ]
    tokens = sum(len(target) + 1 for _, target in make_pairs())
    assert loss == pytest.approx(sum(sums) / tokens, rel=1e-5)


@pytest.mark.parametrize(
    "how", ["bf16", "checkpointed", pytest.param("compiled", marks=pytest.mark.thorough)]
)
def test_other_modes_give_the_same_losses(how: str, tmp_path: Path) -> None:
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
    # The checkpoint has the parameter names of the plain model in every mode.
    make_model().load_state_dict(training.read_checkpoint(tmp_path / "run.pt")["model"])
    torch._dynamo.reset()
