"""Packed sequences, which the attention kernels read where they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_fast import functional, use_backend
from transformer_fast.backends.triton import config, runtime
from transformer_fast.backends.triton.operators import attention
from transformer_fast.testing import check, check_gradients, nan_memory

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("small_tiles"),
]

QUERIES, KEYS = (5, 0, 19, 1), (7, 4, 0, 20)


def starts_of(lengths: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, dtype)


def arguments(
    device: str, dtype: torch.dtype, offsets: torch.dtype, causal: bool = False, p: float = 0.0
) -> tuple[Any, ...]:
    """Strided rows, strided offsets, and rows behind the last sequence, which are NaN."""
    generator = torch.Generator().manual_seed(0)
    rows, key_rows = sum(QUERIES) + 2, sum(KEYS) + 2

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    q = normal(rows, 2, 16).transpose(0, 1)[None]
    k, v = (x.transpose(0, 1)[None] for x in normal(key_rows, 2, 1, 16).unbind(1))
    for x, n in ((q, sum(QUERIES)), (k, sum(KEYS)), (v, sum(KEYS))):
        x[:, :, n:] = torch.nan
    seed = torch.tensor(0x7123456789ABCDEF, device=device) if p else None
    starts = starts_of(QUERIES, offsets, device).repeat_interleave(2)[::2]
    key_starts = starts_of(KEYS, offsets, device)
    longest = (max(QUERIES), max(KEYS) + 3)
    return q, k, v, None, key_starts, causal, None, p, seed, True, False, starts, longest


@pytest.mark.parametrize(
    ("dtype", "offsets", "causal", "p"),
    [(torch.float32, torch.int64, False, 0.3), (torch.bfloat16, torch.int32, True, 0.0)],
)
def test_outputs_and_gradients(device, dtype, offsets, causal, p):
    call = arguments(device, dtype, offsets, causal, p)
    with nan_memory():
        check("attention", attention(*call), call)
        check_gradients("attention", attention, call)


def test_what_is_beyond_the_longest_is_left_out(device):
    call = (*arguments(device, torch.float32, torch.int64)[:12], (9, 6))
    check("attention", attention(*call), call)
    check_gradients("attention", attention, call)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("starts", "within"), [((0, 6, 14), (0, 6, 10)), ((-3, 4, 9), (0, 4, 9)), ((0, 12, 15), (0, 10, 10))]
)  # fmt: skip
def test_offsets_outside_of_the_tensors_reach_nothing(device, starts, within, causal):
    """Around the ten rows stand NaN in the same memory, and what is around gradients is kept."""
    around = torch.full((3, 30, 2, 16), torch.nan, device=device)
    around[:, 10:20] = torch.randn(3, 10, 2, 16, generator=torch.Generator().manual_seed(0))
    wrong, right = (torch.tensor(x, device=device) for x in (starts, within))
    found = []
    for q_starts, k_starts in ((wrong, wrong), (right, wrong), (wrong, right), (right, right)):
        q, k, v = (x.transpose(0, 1)[None].detach().requires_grad_() for x in around[:, 10:20])
        output, _ = attention(
            q, k, v, None, k_starts, causal, None, 0.0, None, False, False, q_starts, (9, 9)
        )
        found.append((output, *torch.autograd.grad(output.sum(), (q, k, v))))
    for one in found[:3]:
        torch.testing.assert_close(one, found[3], rtol=0, atol=0)


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.add(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def test_nothing_is_padded_or_packed():
    """Forward and backward are three kernels; beside them results are allocated and zeroed."""
    with torch.device("meta"):
        q = torch.empty(30, 4, 64, requires_grad=True).transpose(0, 1)[None]
        starts = torch.empty(5, dtype=torch.int32)
    call = (q, q, q, None, starts, True, None, 0.0, None, False, False, starts, (9, 9))
    with config.use_architecture(90), runtime.record_launches() as launches, Names() as names:
        output, _ = attention(*call)
        torch.autograd.grad(output, q, torch.empty_like(output))
    assert [launch.kernel.fn.__name__ for launch in launches] == [
        "attention_forward_kernel", "attention_backward_query_kernel",
        "attention_backward_key_kernel",
    ]  # fmt: skip
    allowed = {"empty", "empty_like", "new_empty", "new_empty_strided", "zero_", "detach", "add"}
    assert names.found <= allowed, names.found


def test_the_public_function_goes_there(device, monkeypatch):
    from transformer_fast.backends.triton import attention as launchers

    made: list[dict[str, Any]] = []
    launch = launchers.launch
    monkeypatch.setattr(launchers, "launch", lambda *a, **k: (made.append(k), launch(*a, **k))[1])
    rows, starts = torch.randn(7, 2, 16, device=device), torch.tensor([0, 5, 7], device=device)
    with use_backend("triton"):
        found = functional.varlen_attn(rows, rows, rows, starts, starts, 5, 5)
    assert [constants["PACKED"] for constants in made] == [True]
    wanted = functional.varlen_attn(rows, rows, rows, starts, starts, 5, 5, backend="reference")
    torch.testing.assert_close(found, wanted)


def test_compiled_in_one_graph(device):
    """The same offsets for queries and keys, too."""
    starts = torch.tensor([0, 4, 4, 9], device=device)

    def total(rows: Tensor, longest: int) -> Tensor:
        given = (rows, rows, rows, starts, starts, longest, longest)
        return functional.varlen_attn(*given, backend="triton").square().sum()

    found = []
    for function in (total, torch.compile(total, fullgraph=True, backend="aot_eager")):
        rows = torch.randn(9, 1, 16, generator=torch.Generator().manual_seed(0))
        rows = rows.to(device).requires_grad_()
        value = function(rows, 5)
        found.append((value.detach(), *torch.autograd.grad(value, rows)))
    torch.testing.assert_close(*found)
