"""Packed sequences, which the attention kernels read where they lie."""

from __future__ import annotations

import pytest
import torch
from harness import Operators, name_of

from transformer_fast.backends.triton import config, runtime
from transformer_fast.backends.triton.operators import attention

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("small_tiles"),
]


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


def test_nothing_is_padded_or_packed():
    """Forward and backward are three kernels; beside them results are allocated and zeroed."""
    with torch.device("meta"):
        q = torch.empty(30, 4, 64, requires_grad=True).transpose(0, 1)[None]
        starts = torch.empty(5, dtype=torch.int32)
    call = (q, q, q, None, starts, True, None, 0.0, None, False, False, starts, (9, 9))
    launches: list[runtime.Launch] = []
    take = runtime.instead_of_launching(launches.append)
    with config.use_architecture(90), take, Operators() as seen:
        output, _ = attention(*call)
        torch.autograd.grad(output, q, torch.empty_like(output))
    assert [launch.kernel.fn.__name__ for launch in launches] == [
        "attention_forward_kernel", "attention_backward_query_kernel",
        "attention_backward_key_kernel",
    ]  # fmt: skip
    allowed = {"empty", "empty_like", "new_empty", "new_empty_strided", "zero_", "detach", "add"}
    assert {name_of(func) for func in seen.seen} <= allowed
