"""Dropout: published Philox words, the counter's layout, statistics, replay."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from transformer_fast import functional
from transformer_fast.reference.dropout import draw_seed, dropout, philox_numbers, threshold


def philox4x32(counter: tuple[int, ...], key: tuple[int, ...], rounds: int = 10) -> tuple[int, ...]:
    """Written from the paper (Salmon et al., SC 2011, section 3.3) on Python's integers."""
    c, k, mask = list(counter), list(key), 0xFFFFFFFF
    for _ in range(rounds):
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [right >> 32 ^ c[1] ^ k[0], right & mask, left >> 32 ^ c[3] ^ k[1], left & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return tuple(c)


# From the known-answer file that the authors publish with Random123.
PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
def test_our_yardstick_gives_the_published_words(counter, key, words):
    assert philox4x32(counter, key) == words


def test_seed_zero_starts_with_the_published_words():
    numbers = philox_numbers(torch.tensor(0), 1, 8)[0]
    assert tuple((numbers[0::2] + (numbers[1::2] << 16)).tolist()) == PUBLISHED[0][2]


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 0x299F31D0A4093822, 2**63 - 1])
def test_numbers_follow_the_counter_layout(seed):
    rows, columns = 37, 23
    numbers = philox_numbers(torch.tensor(seed), rows, columns)
    assert numbers.shape == (rows, columns)
    for row in (0, 1, 5, 36):
        for column in range(columns):
            block = philox4x32((column // 8, row, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
            word = block[column % 8 // 2]
            assert numbers[row, column].item() == word >> 16 * (column % 2) & 0xFFFF


def test_kept_elements_are_those_at_or_above_the_threshold():
    seed, p = torch.tensor(77), 0.3
    numbers = philox_numbers(seed, 50, 41)
    y = dropout(torch.ones(50, 41), p, seed)
    assert torch.equal(y != 0, numbers >= 19661)  # 0.3 * 2^16 = 19660.8
    assert torch.equal(y.unique(), torch.tensor([0.0, 1 / 0.7]))


@pytest.mark.parametrize(
    ("p", "bound"),
    [(1e-300, 1), (2**-16, 1), (0.1, 6554), (0.5, 32768), (1 - 2**-16, 65535), (1 - 2**-53, 65535)],
)
def test_neither_all_nor_nothing_is_dropped_by_rounding(p, bound):
    assert threshold(p) == bound
    numbers = philox_numbers(torch.tensor(0), 1000, 800)
    assert (numbers.min(), numbers.max()) == (0, 65535)  # so both ends are met below
    y = dropout(torch.ones(1000, 800), p, torch.tensor(0))
    assert torch.equal(y == 0, numbers < bound)


def test_leading_dimensions_are_rows():
    seed = torch.tensor(5)
    flat = dropout(torch.ones(24, 10), 0.5, seed)
    assert torch.equal(dropout(torch.ones(2, 3, 4, 10), 0.5, seed).reshape(24, 10), flat)
    assert torch.equal(dropout(torch.ones(10), 0.5, seed), flat[0])


def test_a_shorter_row_has_the_same_beginning():
    seed = torch.tensor(5)
    wide, narrow = (dropout(torch.ones(9, n), 0.5, seed) for n in (17, 6))
    assert torch.equal(wide[:, :6], narrow)


@pytest.mark.parametrize("p", [0.02, 0.1, 0.5, 0.9])
def test_rate(p):
    n = 400 * 250
    y = dropout(torch.ones(400, 250, dtype=torch.float64), p, torch.tensor(123456789))
    dropped = (y == 0).sum().item()
    assert abs(dropped - n * p) < 5 * math.sqrt(n * p * (1 - p))  # five standard deviations
    assert abs(y.mean().item() - 1) < 5 * math.sqrt(p / (1 - p) / n)


def test_neighbours_are_independent():
    kept = dropout(torch.ones(500, 200), 0.5, torch.tensor(3)) != 0
    for one, other in ((kept[:, 1:], kept[:, :-1]), (kept[1:], kept[:-1])):
        n = one.numel()
        assert abs((one == other).sum().item() - n / 2) < 5 * math.sqrt(n) / 2


def test_seeds_differ():
    one, other = (dropout(torch.ones(100, 100), 0.5, torch.tensor(s)) for s in (1, 2))
    assert 4000 < (one != other).sum().item() < 6000


def test_nothing_dropped_is_the_input():
    x = torch.randn(3)
    assert dropout(x, 0.0, None) is x


def test_everything_dropped_is_zero():
    assert torch.equal(dropout(torch.full((3, 4), math.inf), 1.0, None), torch.zeros(3, 4))


@pytest.mark.parametrize("p", [0.4, 1.0])
def test_nan_is_dropped_like_anything(p):
    y = dropout(torch.full((30, 30), math.nan), p, torch.tensor(4))
    assert torch.equal(y == 0, ~y.isnan())
    assert (y == 0).any()


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), ()])
def test_empty_and_scalar(shape):
    assert dropout(torch.ones(shape), 0.5, torch.tensor(1)).shape == shape


def test_seed_comes_from_torchs_generator():
    torch.manual_seed(8)
    first, second = draw_seed(torch.device("cpu")), draw_seed(torch.device("cpu"))
    torch.manual_seed(8)
    assert torch.equal(draw_seed(torch.device("cpu")), first)
    assert first != second
    assert first.dtype == torch.int64
    assert first >= 0


# Through the public functions --------------------------------------------------------------------

DRAWS = {
    "add_layer_norm": lambda x: functional.add_layer_norm(x, x, (16,), dropout_p=0.5)[0],
    "feed_forward": lambda x: functional.feed_forward(
        x, torch.eye(16), None, torch.eye(16), None, dropout_p=0.5
    ),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
}


@pytest.mark.parametrize("op", DRAWS)
def test_manual_seed_replays(op):
    x = torch.randn(12, 16)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(DRAWS[op](x))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert not torch.equal(DRAWS[op](x), DRAWS[op](x))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("op", DRAWS)
def test_checkpointing_replays(op, reentrant):
    gradients = []
    for run in (DRAWS[op], lambda t: checkpoint(DRAWS[op], t, use_reentrant=reentrant)):
        x = torch.linspace(-1, 1, 12 * 16).reshape(12, 16).requires_grad_()
        torch.manual_seed(6)
        run(x).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_without_dropout_no_random_number_is_drawn():
    x = torch.randn(12, 16)
    before = torch.get_rng_state()
    functional.add_layer_norm(x, x, (16,))
    functional.feed_forward(x, torch.eye(16), None, torch.eye(16), None)
    functional.scaled_dot_product_attention(x, x, x)
    assert torch.equal(torch.get_rng_state(), before)
