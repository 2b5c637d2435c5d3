"""Choosing tokens: the best, the k best, random ones."""

from __future__ import annotations

import pytest
import torch
from models_ruler import lively, small, tokens
from torch import Tensor

from transformer_fast import _native, models
from transformer_fast.models.generation.choose import best, sampler, top

SIZES = [1, 7, 1023, 1024, 1025, 1087, 2048, 5003]


HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
@pytest.mark.parametrize("size", SIZES)
def test_best_is_argmax(size: int, dtype: torch.dtype) -> None:
    check_best(size, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("size", [7, 1087])
def test_best_by_every_kernel(size: int, dtype: torch.dtype, float_isa: str) -> None:
    check_best(size, dtype)


def check_best(size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(9, size).to(dtype)
    logits[0, -1] = logits[1, 0] = 100.0
    logits[2] = 1.0  # of equals the first
    logits[3, size // 2 :] = logits[3].max() + 1
    logits[4] = -torch.inf
    logits[5, -1] = torch.inf
    logits[6, size // 3 :: 5] = torch.nan
    logits[7] = -torch.inf
    logits[7, -1] = torch.nan
    for rows in (
        logits,
        logits[:0],
        logits[::2],
        logits[:, size // 2 :],
        logits.t().contiguous().t(),
    ):
        assert torch.equal(best(rows), rows.argmax(-1))


def test_best_opcheck_and_errors() -> None:
    if _native.module is None:
        pytest.skip(_native.why_not or "needs the native module")
    op = torch.ops.transformer_fast.cpu_argmax
    torch.library.opcheck(op.default, (torch.randn(3, 70),))
    for wrong in (torch.ones(3), torch.ones(3, 0), torch.ones(3, 4, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match="argmax: input must be"):
            op(wrong)


@pytest.mark.parametrize(("size", "k"), [(n, k) for n in SIZES for k in (1, 2, 4, 8) if k <= n])
def test_top_is_topk(size: int, k: int) -> None:
    logits = torch.randn(9, size)
    logits[0, -1] = logits[1, 0] = 100.0
    logits[2, -k:] = torch.arange(k) + 50.0
    logits[3, :k] = torch.arange(k) + 50.0
    values, indices = top(logits, k)
    assert torch.equal(values, logits.topk(k).values)
    assert torch.equal(logits.gather(1, indices), values)
    assert all(len(set(row)) == k for row in indices.tolist())


def distribution(method: models.Sampling, logits: Tensor, count: int = 20_000) -> Tensor:
    """How often each token is drawn, for evenly spread draws: exact to 1 / count."""
    draws = (torch.arange(count) + 0.5) / count
    found = sampler(method, logits.shape[0])(logits.expand(count, -1), draws)
    return torch.bincount(found, minlength=logits.shape[0]) / count


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_sampling_follows_the_softmax(temperature: float) -> None:
    logits = torch.randn(12)
    expected = (logits / temperature).softmax(-1)
    found = distribution(models.Sampling(temperature), logits)
    assert (found - expected).abs().max() < 2e-4


def test_top_k() -> None:
    logits = torch.randn(12)
    kept = logits >= logits.topk(3).values[-1]
    expected = logits.masked_fill(~kept, -torch.inf).div(0.7).softmax(-1)
    found = distribution(models.Sampling(0.7, top_k=3), logits)
    assert (found - expected).abs().max() < 2e-4
    assert torch.equal(found > 0, kept)
    all_of_them = distribution(models.Sampling(top_k=99), logits)
    assert (all_of_them - logits.softmax(-1)).abs().max() < 2e-4


@pytest.mark.parametrize("size", [12, 700])  # of 700 the most probable 256 are not enough
@pytest.mark.parametrize("top_k", [None, 9])
def test_top_p(size: int, top_k: int | None) -> None:
    logits = torch.randn(size) * 0.3
    values = logits.softmax(-1)
    if top_k is not None:
        values = values.masked_fill(logits < logits.topk(top_k).values[-1], 0.0)
        values = values / values.sum()
    ordered, order = values.sort(descending=True)
    count = int((ordered.cumsum(-1) < 0.8).sum()) + 1  # the first that reach 0.8
    expected = torch.zeros(size)
    expected[order[:count]] = ordered[:count] / ordered[:count].sum()
    found = distribution(models.Sampling(top_k=top_k, top_p=0.8), logits)
    assert (found - expected).abs().max() < 3e-4
    assert torch.equal(found > 0, expected > 0)


def test_the_limits_of_sampling_are_greedy() -> None:
    model = small()
    source = tokens(23, [7, 3, 5])
    greedy = model.generate(source, max_new_tokens=10)
    for method in (
        models.Sampling(1e-6, seed=1),
        models.Sampling(top_k=1, seed=2),
        models.Sampling(top_p=1e-9, seed=3),
    ):
        assert torch.equal(model.generate(source, method, max_new_tokens=10).tokens, greedy.tokens)


@pytest.mark.parametrize("logits", [[0.0, -torch.inf], [-torch.inf, 0.0], [-200.0, 0.0]])
def test_impossible_tokens_are_never_drawn(logits: list[float]) -> None:
    row = torch.tensor([logits])
    right = int(row.argmax())
    for method in (models.Sampling(), models.Sampling(top_k=2), models.Sampling(top_p=1.0)):
        for draw in (0.0, 0.5, 1.0 - 2.0**-24):
            assert int(sampler(method, 2)(row, torch.tensor([draw]))) == right


def test_seeds() -> None:
    model = small()
    source = tokens(23, [7, 3, 5])

    def draw(seed: int | None) -> list[list[int]]:
        method = models.Sampling(seed=seed)
        return model.generate(source, method, max_new_tokens=20, end_token=-1).tokens.tolist()

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    torch.manual_seed(5)
    one, two = draw(None), draw(None)
    torch.manual_seed(5)
    assert draw(None) == one != two
    state = torch.get_rng_state()
    draw(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_samples_do_not_depend_on_who_leaves_the_batch() -> None:
    model = lively(small(), 2.0)
    source = tokens(23, [7, 3, 5, 2, 6, 7, 1])
    method = models.Sampling(seed=4)
    found = model.generate(source, method, max_new_tokens=20)
    assert len(set(found.lengths.tolist())) > 2
    free = model.generate(source, method, max_new_tokens=20, end_token=-1)
    for row, length, all_of_it in zip(found.tokens, found.lengths, free.tokens, strict=True):
        assert torch.equal(row[:length], all_of_it[:length])
