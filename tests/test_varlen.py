"""Packed sequences on every backend: each as if it were alone, and as if all were padded."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import CPU, CUDA, TRITON, OnDevice, on
from torch import Tensor

from transformer_fast import functional as F

pytestmark = [
    pytest.mark.usefixtures("small_tiles"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
EVERY = pytest.mark.parametrize("backend", [CPU, TRITON, CUDA], indirect=True, ids=str)

QUERIES, KEYS = [5, 0, 17, 3, 1, 9], [7, 4, 20, 0, 1, 9]


def starts_of(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def drawn(behind: int = 2, heads: int = 4, key_heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with some rows behind the last sequence, which are NaN."""
    torch.manual_seed(0)
    q = torch.randn(sum(QUERIES) + behind, heads, 8)
    k = torch.randn(sum(KEYS) + behind, key_heads, 8)
    v = torch.randn(sum(KEYS) + behind, key_heads, 12)
    for x, n in ((q, sum(QUERIES)), (k, sum(KEYS)), (v, sum(KEYS))):
        x[n:] = math.nan
    return q, k, v


def one_by_one(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    found, at, key_at = [], 0, 0
    for queries, keys in zip(QUERIES, KEYS, strict=True):
        own = (
            x[None].transpose(1, 2) for x in (k[key_at : key_at + keys], v[key_at : key_at + keys])
        )
        query = q[at : at + queries][None].transpose(1, 2)
        alone = F.scaled_dot_product_attention(query, *own, backend="reference", **how)
        found.append(alone[0].transpose(0, 1))
        at, key_at = at + queries, key_at + keys
    return torch.cat([*found, q.new_zeros(q.shape[0] - at, q.shape[1], v.shape[2])])


@EVERY
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("more", [0, 6])
@pytest.mark.parametrize(
    "how", [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}], ids=str
)
def test_each_sequence_is_alone(how, more, dtype, backend):
    target = backend.of("attention")
    tensors = on(target, drawn(key_heads=2 if "enable_gqa" in how else 4))
    starts, key_starts = on(target, (starts_of(QUERIES, dtype), starts_of(KEYS, dtype)))
    strided = starts.repeat_interleave(2)[::2]
    leaves = [x.clone().requires_grad_() for x in tensors]
    rest = (strided, key_starts, 17 + more, 20 + more)
    found = F.varlen_attn(*leaves, *rest, **how, backend=backend.name)
    expected = one_by_one(*(alone := [x.clone().requires_grad_() for x in tensors]), **how)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(found)
    upstream[sum(QUERIES) :] = math.nan
    grads = torch.autograd.grad(found, leaves, upstream)
    wanted = torch.autograd.grad(expected[: sum(QUERIES)], alone, upstream[: sum(QUERIES)])
    torch.testing.assert_close(grads, wanted)


@EVERY
def test_dropout_is_that_of_padded_sequences(backend):
    tensors = on(backend.of("attention"), drawn(behind=0))
    starts = on(backend.of("attention"), (starts_of(QUERIES), starts_of(KEYS)))
    leaves, padded = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
    how = {"dropout_p": 0.4, "backend": backend.name}
    torch.manual_seed(7)
    packed = F.varlen_attn(*leaves, *starts, 17, 20, **how)

    def pad(x: Tensor, lengths: list[int]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2)

    torch.manual_seed(7)
    lengths = on(backend.of("attention"), (torch.tensor(KEYS), torch.tensor(QUERIES)))
    plain = F.scaled_dot_product_attention(
        *map(pad, padded, (QUERIES, KEYS, KEYS)), key_lengths=lengths[0], query_lengths=lengths[1],
        **how,
    )  # fmt: skip
    rows = torch.cat([x[:, :n].transpose(0, 1) for x, n in zip(plain, QUERIES, strict=True)])
    torch.testing.assert_close(packed, rows)
    found = (torch.autograd.grad(y.sin().sum(), x) for y, x in ((packed, leaves), (rows, padded)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_queries_or_no_keys(lengths):
    some = starts_of([2] * len(lengths))
    none, rows = starts_of(lengths), torch.randn(2 * len(lengths), 2, 8)
    empty = torch.empty(0, 2, 8)
    assert F.varlen_attn(empty, rows, rows, none, some, 2, 2).shape == (0, 2, 8)
    assert not F.varlen_attn(rows, empty, empty, some, none, 2, 2).any()
    assert not F.varlen_attn(rows, rows, rows, some, some, 0, 2).any()


@EVERY
def test_compiled_in_one_graph(backend):
    """The same offsets for queries and keys, too."""
    target = backend.of("attention")
    starts = on(target, (starts_of(QUERIES),))[0]

    def total(rows: Tensor) -> Tensor:
        given = (rows, rows, rows, starts, starts, 17, 17)
        return F.varlen_attn(*given, is_causal=True, backend=backend.name).square().sum()

    found = []
    for function in (total, torch.compile(total, fullgraph=True, backend="aot_eager")):
        (rows,) = on(target, drawn(behind=0)[:1])
        value = function(rows.requires_grad_())
        found.append((value.detach(), *torch.autograd.grad(value, rows)))
    torch.testing.assert_close(*found)


def test_nothing_waits_for_the_device():
    with torch.device("meta"):
        q = torch.empty(30, 4, 8, requires_grad=True)
        starts = torch.empty(5, dtype=torch.int32)
        with OnDevice():
            found = F.varlen_attn(q, q, q, starts, starts, 9, 9, is_causal=True, dropout_p=0.1)
            found.sum().backward()
    assert found.shape == (30, 4, 8)


def test_errors():
    rows, starts = torch.randn(4, 2, 8), torch.tensor([0, 4])
    call = F.varlen_attn
    with pytest.raises(TypeError, match=r"cu_seq_q must be int32 or int64, not torch\.float32"):
        call(rows, rows, rows, starts.float(), starts, 4, 4)
    with pytest.raises(ValueError, match=r"cu_seq_k must have shape \[sequences \+ 1\], not \[0\]"):
        call(rows, rows, rows, starts, starts[:0], 4, 4)
    with pytest.raises(ValueError, match="same sequences, but there are 1 and 0"):
        call(rows, rows, rows, starts, starts[:1], 4, 4)
    with pytest.raises(ValueError, match="key must have shape"):
        call(rows, rows[None], rows, starts, starts, 4, 4)
    with pytest.raises(TypeError, match="argument 'cu_seq_k'"):
        call(rows, rows, rows, starts, [0, 4], 4, 4)  # type: ignore[arg-type]


@EVERY
def test_what_is_beyond_the_longest_is_left_out(backend):
    given = on(backend.of("attention"), (*drawn(behind=0), starts_of(QUERIES), starts_of(KEYS)))
    whole = F.varlen_attn(*given, 17, 20, backend=backend.name)
    part = F.varlen_attn(*given, 4, 20, backend=backend.name)
    kept = torch.cat([torch.arange(n) < 4 for n in QUERIES]).to(whole.device)
    torch.testing.assert_close(part, whole.masked_fill(~kept[:, None, None], 0.0))
    assert whole[~kept].any()
