"""Loss, schedules, optimiser, clipping: against plain PyTorch and against values by hand."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from training_case import PAD, make_model

from transformer_fast import models, training, use_backend


def by_hand(logits: torch.Tensor, expected: torch.Tensor, smoothing: float) -> torch.Tensor:
    """The paper's: KL to the smoothed distribution, up to a constant, mean over real tokens."""
    total, count = logits.new_zeros(()), 0
    for row, token in zip(logits.flatten(0, -2), expected.flatten().tolist(), strict=True):
        if token != PAD:
            wanted = torch.full_like(row, smoothing / row.numel())
            wanted[token] += 1.0 - smoothing
            total = total - (wanted * row.log_softmax(-1)).sum()
            count += 1
    return total / count


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_loss_is_the_papers_and_torchs(smoothing: float) -> None:
    logits = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    expected = torch.randint(1, 7, (3, 5))
    expected[1, 3:] = expected[2, 1:] = PAD
    loss = training.label_smoothing_loss(logits, expected, pad_token=PAD, smoothing=smoothing)
    torch.testing.assert_close(loss, by_hand(logits, expected, smoothing))
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
    half = training.label_smoothing_loss(logits.bfloat16(), expected)
    assert half.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"expected": [1]}, TypeError, "expected must be a Tensor"),
        ({"expected": torch.zeros(2, 3)}, TypeError, "expected must hold token ids"),
        ({"expected": torch.zeros(3, 2, dtype=torch.int64)}, ValueError, r"\[2, 3\].*\[3, 2\]"),
        ({"logits": torch.zeros(2, 3, 7, dtype=torch.int64)}, TypeError, "logits must be float"),
        ({"smoothing": 1.5}, ValueError, r"smoothing must lie in \[0, 1\], not 1.5"),
        ({"reduction": "all"}, ValueError, "reduction must be .* not 'all'"),
    ],
)
def test_loss_refuses(change: dict, error: type[Exception], words: str) -> None:
    arguments = {"logits": torch.zeros(2, 3, 7), "expected": torch.zeros(2, 3, dtype=torch.int64)}
    arguments |= change
    logits, expected = arguments.pop("logits"), arguments.pop("expected")
    with pytest.raises(error, match=words):
        training.label_smoothing_loss(logits, expected, **arguments)


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


def test_paper_schedule_by_hand() -> None:
    found = rates(lambda o: training.paper_schedule(o, 512, 4000), 4001, 1.0)
    assert found[0] == pytest.approx(512**-0.5 * 4000**-1.5)
    assert found[999] == pytest.approx(1000 * found[0])
    assert found[3999] == pytest.approx(7.0 * 1e-4, rel=2e-3)  # the paper's base model: 7.0e-4
    assert found[3999] == pytest.approx(512**-0.5 * 4000**-0.5)
    assert found[4000] < found[3999] > found[3998]
    peak = rates(lambda o: training.paper_schedule(o, None, 4), 16, 0.5)
    assert peak[:4] == pytest.approx([0.125, 0.25, 0.375, 0.5])
    assert peak[15] == pytest.approx(0.25)


def test_linear_schedule_by_hand() -> None:
    found = rates(lambda o: training.linear_schedule(o, 7, 3), 9, 1.0)
    assert found == pytest.approx([1 / 3, 2 / 3, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0])


def test_schedules_refuse() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    with pytest.raises(ValueError, match="warmup_steps must be at least 1, not 0"):
        training.paper_schedule(optimizer, 8, 0)
    with pytest.raises(ValueError, match="d_model must be at least 1, or None, not 0"):
        training.paper_schedule(optimizer, 0)
    with pytest.raises(ValueError, match="warmup_steps must be at most total_steps, 5, not 6"):
        training.linear_schedule(optimizer, 5, 6)


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
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameters"):
        training.adamw(model)
    with pytest.raises(ValueError, match="weight_decay must be at least 0, not -1"):
        training.parameter_groups(model, -1.0)


def test_clipping() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))]
    parameters[0].grad = torch.tensor([3.0, 0.0, 0.0])
    assert training.clip_gradients(parameters, None) == 3.0
    parameters[1].grad = torch.tensor([0.0, 4.0])
    assert training.clip_gradients(parameters, 2.5) == 5.0
    torch.testing.assert_close(parameters[0].grad, torch.tensor([1.5, 0.0, 0.0]))
    assert math.isclose(training.clip_gradients(parameters, None).item(), 2.5, rel_tol=1e-5)
    with pytest.raises(ValueError, match="max_norm must be above 0, or None, not 0"):
        training.clip_gradients(parameters, 0)


def test_activation_checkpointing_changes_no_number() -> None:
    from training_case import make_loader, make_pairs

    batch = next(iter(make_loader(make_pairs())))
    found = []
    for wanted in (False, True):
        model = make_model(dropout=0.3)
        if wanted:
            names = list(model.state_dict())
            assert training.checkpoint_activations(model) == 2
            assert training.checkpoint_activations(model) == 0  # they are already
            assert list(model.state_dict()) == names
        torch.manual_seed(5)
        total, _ = training.NextTokenLoss(PAD)(model, batch)
        total.backward()
        found.append([total.detach(), *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(ValueError, match="no Transformer encoder or decoder layers"):
        training.checkpoint_activations(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="every must be at least 1, not 0"):
        training.checkpoint_activations(model, 0)


def test_activation_checkpointing_keeps_less() -> None:
    kept = []
    for wanted in (False, True):
        model = models.Transformer(9, 9, 32, 2, 2, 2, 64, 0.1)
        if wanted:
            training.checkpoint_activations(model)
        sizes: list[int] = []

        def pack(x: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(x.numel())
            return x

        tokens = torch.randint(0, 9, (8, 12))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(tokens, tokens)
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 3


class _LogitsOnly(torch.nn.Module):
    """A model that `NextTokenLoss` does not know."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(*inputs)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("embedding_size", [None, 24])
@pytest.mark.parametrize("how", ["plain", "compiled", "autocast", "bfloat16", "reference"])
def test_losses_without_logits(tied: bool, embedding_size: int | None, how: str) -> None:
    """The same sum and gradients as from logits, from models that give losses themselves."""
    torch.manual_seed(0)
    options = {"tie_output": tied, "embedding_size": embedding_size, "dropout": 0.0}
    model = models.LanguageModel(50, 16, 2, 1, 32, pad_token=PAD, **options)
    tokens, expected = torch.randint(1, 50, (3, 7)), torch.randint(1, 50, (3, 7))
    tokens[1, 5:] = expected[1, 5:] = PAD
    if how == "bfloat16":
        model = model.bfloat16()
    called = torch.compile(model, backend="aot_eager") if how == "compiled" else model
    found = []
    for way in (called, _LogitsOnly(model)):
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
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **limits)


def test_losses_never_hold_all_logits() -> None:
    class Watch(torch.overrides.TorchFunctionMode):
        largest = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                Watch.largest = max(Watch.largest, result.numel())
            return result

    model = models.Transformer(9000, 9000, 16, 2, 1, 1, 32)
    source, target = torch.randint(0, 9000, (2, 8, 16))
    parameters = max(p.numel() for p in model.parameters())
    with Watch():
        training.NextTokenLoss(None)(model, (source, target, target))
    assert Watch.largest <= parameters < 8 * 16 * 9000


def test_subclasses_with_a_forward_of_their_own_give_logits() -> None:
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


def test_wrong_expected_tokens_name_themselves() -> None:
    model = models.LanguageModel(20, 16, 2, 1, 32)
    tokens = torch.randint(0, 20, (2, 5))
    with pytest.raises(ValueError, match="expected must have the shape of the tokens before it"):
        model(tokens, expected=tokens[:, 1:])
    with pytest.raises(TypeError, match="expected must hold token ids"):
        model(tokens, expected=tokens.float())
    with pytest.raises(TypeError, match="expected must be a Tensor"):
        model(tokens, expected=[1, 2])
    with pytest.raises(IndexError, match="Target 20 is out of bounds"):
        model(tokens, expected=torch.full((2, 5), 20))
