"""CUDA C++ attention beyond the op table's cases: tiles, head sizes, masks and invalid calls."""

from __future__ import annotations

import pytest
import torch
from test_cuda_operators import DTYPES, SEED, hold, ops, rows_of, the_kernel

from transformer_fast import dispatch
from transformer_fast.specs.attention import arrange
from transformer_fast.testing import call_of

pytestmark = pytest.mark.sampled(10)


def heads(device, dtype, queries, keys, size, *, batch=1, heads=1, key_heads=None, value_size=None):
    """Returns (query, key, value)."""
    key_heads = heads if key_heads is None else key_heads
    value_size = size if value_size is None else value_size
    return (
        rows_of((batch, heads, queries, size), dtype, device, 1),
        rows_of((batch, key_heads, keys, size), dtype, device, 2),
        rows_of((batch, key_heads, keys, value_size), dtype, device, 3),
    )


# Each tile size, one element more, and values wider than keys.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "size", [(8, 8), (32, 32), (33, 40), (64, 64), (65, 5), (128, 128)], ids=str
)
def test_head_sizes_at_tile_edges(size, dtype, device):
    q, k, v = heads(device, dtype, 18, 35, size[0], value_size=size[1])
    hold("attention", arrange(q, k, v, causal=True))
    hold("attention", arrange(q, k, v, weights=True, dropout_p=0.4, seed=SEED.to(device)))


# Numbers of queries and keys at the ends of warps, tiles and blocks.
@pytest.mark.parametrize("lengths", [(1, 1), (16, 64), (17, 65), (64, 128), (65, 129), (2, 192)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths_at_tile_edges(lengths, dtype, device):
    q, k, v = heads(device, dtype, *lengths, 32)
    hold("attention", arrange(q, k, v))
    hold("attention", arrange(q, k, v, causal=True, dropout_p=0.4, seed=SEED.to(device)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_maximum_number_of_keys(dtype, device):
    q, k, v = heads(device, dtype, 3, 512, 16, batch=2)
    mask = rows_of((2, 1, 3, 512), dtype, device, 4)
    hold("attention", arrange(q, k, v, mask=mask, weights=True,
                              lengths=torch.tensor([512, 1], device=device)))  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_if_one_key_has_almost_all_of_a_row(dtype, device):
    q, k, v = heads(device, dtype, 20, 150, 32)
    hold("attention", arrange(q * 8, k, v))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [((5, 513, 16, 16), "up to 512 keys"), ((5, 6, 129, 16), "head sizes up to 128"),
     ((5, 6, 16, 129), "head sizes up to 128"), ((5, 512, 128, 128), None), ((1, 513, 16, 16), None)],
)  # fmt: skip
def test_sizes_beyond_the_limits_are_refused(sizes, said, device):
    queries, keys, size, value_size = sizes
    call = arrange(*heads(device, torch.float32, queries, keys, size, value_size=value_size))
    reasons = dispatch.why_not(the_kernel("attention"), call_of("attention", call))
    assert reasons == [] if said is None else said in reasons[0]


WRONG = {
    "key's size": (lambda q, k, v: (q, k[..., :4], v), "query must be"),
    "value's length": (lambda q, k, v: (q, k, v[:, :, :3]), "query must be"),
    "heads": (lambda q, k, v: (q[:, :1], k, v), "query must be"),
    "dtype": (lambda q, k, v: (q, k.half(), v), "key must have the dtype"),
    "float64": (lambda q, k, v: (q.double(), k.double(), v.double()), "the dtype must be"),
    "wide heads": (lambda q, k, v: [x.repeat(1, 1, 1, 17) for x in (q, k, v)], "go up to 128"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_tensors_raise(name, device):
    make, words = WRONG[name]
    given = make(*heads(device, torch.float32, 5, 6, 8, heads=2))
    with pytest.raises(RuntimeError, match=words):
        ops.attention_training.cuda(*given, None, None, False, 1.0, 0.0, None, False)


def test_invalid_masks_lengths_and_statistics_raise(device):
    q, k, v = heads(device, torch.float32, 5, 6, 8)
    ones, rest = torch.ones(1, 1, 5, device=device), (False, 1.0, 0.0, None)
    for mask, lengths, words in (
        (ones[..., :4], None, "4 elements where 6"),
        (ones[..., :1].half(), None, "attn_mask must be"),
        (None, torch.ones(2, device=device).long(), "key_lengths must be"),
        (None, torch.ones(1, device=device), "key_lengths must be"),
    ):
        with pytest.raises(RuntimeError, match=words):
            ops.attention_training.cuda(q, k, v, mask, lengths, *rest, False)
    call, wants = (q, None, q, k, v, None, None, *rest), (True, True, True)
    with pytest.raises(RuntimeError, match="row_sum must be"):
        ops.attention_backward.cuda(*call, q, None, ones, ones[..., :4], *wants, False)
    with pytest.raises(RuntimeError, match="a bool mask has no gradient"):
        ops.attention_backward.cuda(*call, q, None, ones, ones, *wants, True)
