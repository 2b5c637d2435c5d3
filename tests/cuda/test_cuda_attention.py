"""Attention in CUDA C++ beyond the op table's cases: tiles, widths, masks and wrong calls."""

from __future__ import annotations

import math

import pytest
import torch
from test_cuda_operators import DTYPES, SEED, hold, ops, rows_of, the_kernel

from transformer_fast import dispatch
from transformer_fast.specs.attention_cases import arrange
from transformer_fast.testing import call_of, check, nan_memory
from transformer_fast.testing.gradients import gradients, truth_of_gradients
from transformer_fast.testing.parity import GRADIENT_FACTOR, compare


def heads(device, dtype, queries, keys, size, *, batch=1, heads=1, key_heads=None, value_size=None):
    """(query, key, value)."""
    key_heads = heads if key_heads is None else key_heads
    value_size = size if value_size is None else value_size
    return (
        rows_of((batch, heads, queries, size), dtype, device, 1),
        rows_of((batch, key_heads, keys, size), dtype, device, 2),
        rows_of((batch, key_heads, keys, value_size), dtype, device, 3),
    )


# Each tile, one element more, and values wider than keys.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "size", [(8, 8), (32, 32), (33, 40), (64, 64), (65, 5), (128, 128)], ids=str
)
def test_head_sizes(size, dtype, device):
    q, k, v = heads(device, dtype, 18, 35, size[0], value_size=size[1])
    hold("attention", arrange(q, k, v, causal=True))
    hold("attention", arrange(q, k, v, weights=True, dropout_p=0.4, seed=SEED.to(device)))


# Rows and keys at the ends of warps, tiles and blocks.
@pytest.mark.parametrize("lengths", [(1, 1), (16, 64), (17, 65), (64, 128), (65, 129), (2, 192)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles(lengths, dtype, device):
    q, k, v = heads(device, dtype, *lengths, 32)
    hold("attention", arrange(q, k, v))
    hold("attention", arrange(q, k, v, causal=True, dropout_p=0.4, seed=SEED.to(device)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_many_keys_as_it_takes(dtype, device):
    q, k, v = heads(device, dtype, 3, 512, 16, batch=2)
    mask = rows_of((2, 1, 3, 512), dtype, device, 4)
    hold("attention", arrange(q, k, v, mask=mask, weights=True,
                              lengths=torch.tensor([512, 1], device=device)))  # fmt: skip


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_garbage_that_some_queries_see_and_others_do_not(dtype, added, device):
    q, k, v = heads(device, dtype, 20, 150, 16, heads=2)
    mask = rows_of((20, 150), torch.float32, device, 4) > 0
    given = torch.where(mask, 0.5, -math.inf) if added else mask
    truth = truth_of_gradients("attention", arrange(q, k, v, mask=given))
    k[0, 0, 5], v[0, 0, 6], v[0, 1, 77, 3] = math.nan, math.inf, -math.inf
    arguments = arrange(q, k, v, mask=given)
    run = the_kernel("attention").run
    check("attention", run(*arguments), arguments)
    found = gradients("attention", run, arguments)["query"]
    for head, keys in ((0, (5, 6)), (1, (77,))):
        unaware = ~mask[:, list(keys)].any(1)
        assert unaware.any()
        rows = (x[0, head][unaware] for x in (found, truth.expected["query"], truth.true["query"]))
        parity = compare("grad of query", *rows, GRADIENT_FACTOR, truth.units["query"])
        assert parity.ok, parity


# One share, and several; shares of nothing, and lengths that end within one.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [1, 60, 700])
@pytest.mark.parametrize("size", [(24, 24), (33, 40), (128, 64)], ids=str)
def test_one_query(size, keys, dtype, device):
    many = {"batch": 2, "heads": 2, "key_heads": 1} if keys < 700 else {"batch": 3}
    q, k, v = heads(device, dtype, 1, keys, size[0], value_size=size[1], **many)
    lengths = torch.tensor([keys, 0, keys // 2 + 1][: len(q)], device=device)
    mask = rows_of((len(q), 1, 1, keys), torch.float32, device, 4) > -1
    k[-1, :, -1], v[-1, :, -1] = math.nan, math.nan  # beyond the length
    lengths[-1] = min(int(lengths[-1]), keys - 1)
    for given in (None, mask, torch.where(mask, 0.5, -math.inf)):
        arguments = arrange(q, k, v, mask=given, lengths=lengths)
        assert dispatch.why_not(the_kernel("attention"), call_of("attention", arguments)) == []
        with nan_memory():
            found = the_kernel("attention").run(*arguments)
        check("attention", found, arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_one_query(dtype, device):
    q, k, v = heads(device, dtype, 1, 130, 16, heads=2)
    hold("attention", arrange(q, k, v, mask=rows_of((1, 130), dtype, device, 4)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_garbage_in_queries_that_see_nothing(dtype, device):
    q, k, v = heads(device, dtype, 20, 30, 16)
    mask = torch.ones(20, 30, dtype=torch.bool, device=device)
    mask[7] = False
    run = the_kernel("attention").run
    clean = gradients("attention", run, arrange(q, k, v, mask=mask))
    q[0, 0, 7] = math.nan
    found = gradients("attention", run, arrange(q, k, v, mask=mask))
    assert all(torch.equal(found[name], clean[name]) for name in clean)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_rows_in_which_one_key_has_almost_all(dtype, device):
    q, k, v = heads(device, dtype, 20, 150, 32)
    hold("attention", arrange(q * 8, k, v))


@pytest.mark.parametrize("shape", [(70,), (1, 70), (19, 1), (2, 1, 1, 70), (3, 19, 70), (1, 1)])
def test_the_gradient_of_a_mask_is_summed_to_its_shape(shape, device):
    q, k, v = heads(device, torch.bfloat16, 19, 70, 16, batch=2, heads=3)
    hold("attention", arrange(q, k, v, mask=rows_of(shape, torch.float32, device, 4)))


def test_lengths_of_every_type_and_stride(device):
    q, k, v = heads(device, torch.bfloat16, 5, 40, 16, batch=3)
    for kind in (torch.int64, torch.int32, torch.int16, torch.uint8):
        lengths = torch.tensor([40, 99, 7, 99, 0, 99], dtype=kind, device=device)[::2]
        hold("attention", arrange(q, k, v, lengths=lengths))


def test_attention_repeats_to_the_bit(device):
    given = [x.requires_grad_() for x in heads(device, torch.bfloat16, 70, 130, 32)]
    mask = rows_of((1, 130), torch.bfloat16, device, 4).requires_grad_()
    run = the_kernel("attention").run
    found = [
        torch.autograd.grad(run(*arrange(*given, mask=mask))[0].square().sum(), (*given, mask))
        for _ in range(2)
    ]
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [((5, 513, 16, 16), "up to 512 keys"), ((5, 6, 129, 16), "head sizes up to 128"),
     ((5, 6, 16, 129), "head sizes up to 128"), ((5, 512, 128, 128), None), ((1, 513, 16, 16), None)],
)  # fmt: skip
def test_limits(sizes, said, device):
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
def test_wrong_tensors_are_errors(name, device):
    make, words = WRONG[name]
    given = make(*heads(device, torch.float32, 5, 6, 8, heads=2))
    with pytest.raises(RuntimeError, match=words):
        ops.attention_training.cuda(*given, None, None, False, 1.0, 0.0, None, False)


def test_wrong_masks_lengths_and_statistics_are_errors(device):
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
