"""Features of Triton's attention alone: tile lists and their cache, split decoding, large strides,
and packed sequences, which the kernels read in place.
"""

from __future__ import annotations

import math

import pytest
import torch
import triton.language as tl
from interpreted import jit

from transformer_fast.backends.triton import config, operators
from transformer_fast.backends.triton.attention import attention_forward
from transformer_fast.backends.triton.attention_bwd import attention_backward
from transformer_fast.backends.triton.tiles import power
from transformer_fast.ops.arguments import AttentionArguments
from transformer_fast.testing import check, check_gradients

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("small_tiles"),
]


def drawn(device, b=1, h=2, t=37, s=53, d=16, dv=None, key_heads=None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    sizes = ((b, h, t, d), (b, key_heads or h, s, d), (b, key_heads or h, s, dv or d))
    return [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]


def attention(*given):
    return operators.attention(AttentionArguments(*given))


def arguments(q, k, v, mask=None, lengths=None, causal=False, p=0.0, weights=False):
    seed = torch.tensor(0x7123456789ABCDEF, device=q.device) if p else None
    return q, k, v, mask, lengths, causal, None, p, seed, True, weights


def patchy_mask(t, s, device):
    """Returns a mask with fully masked, fully visible and mixed tiles, and a fully masked query."""
    mask = torch.rand(t, s, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[:16, 16:32] = False
    mask[16:32] = True
    mask[-3] = False
    return mask.to(device)


# Tile lists ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("listed", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_masks_match_with_and_without_tile_lists(device, listed, dtype, monkeypatch):
    monkeypatch.setattr(config, "use_block_lists", lambda *sizes: listed)
    q, k, v = drawn(device, b=2, h=2, key_heads=1, t=40, s=42, dv=8, dtype=dtype)
    lengths = torch.tensor([42, 21], device=device)
    call = arguments(q, k, v, patchy_mask(40, 42, device), lengths, causal=True, p=0.2)
    check_gradients("attention", attention, call)
    check("attention", attention(*call), call)


@pytest.fixture
def listed(monkeypatch):
    """Builds tile lists for every mask. By default such small masks have none, on a GPU either."""
    monkeypatch.setattr(config, "use_block_lists", lambda *sizes: True)


def test_tile_lists_follow_in_place_changes_of_the_mask(device, listed):
    """Holds for writes that do not increment the mask's version counter, too."""
    q, k, v = drawn(device, t=40, s=40)
    mask = torch.zeros(1, 1, 40, 40, dtype=torch.bool, device=device)
    mask[..., :16] = True
    call = arguments(q, k, v, mask)
    for first in (0, 16, 8):
        mask.data.fill_(False)
        mask.data[..., first : first + 16] = True
        assert mask._version == 1
        check("attention", attention(*call), call)


def test_views_of_one_mask_have_separate_tile_lists(device, listed):
    q, k, v = drawn(device, t=32, s=40)
    base = patchy_mask(64, 40, device)
    for start in (0, 16, 32):
        call = arguments(q, k, v, base[start : start + 32])
        check("attention", attention(*call), call)
    with torch.inference_mode():
        mask = patchy_mask(32, 40, device)
        check("attention", attention(*arguments(q, k, v, mask)), arguments(q, k, v, mask))


# Additive masks -----------------------------------------------------------------------------------


def test_an_expanded_mask_has_a_gradient_per_element(device):
    q, k, v = drawn(device, b=2, h=2, t=20, s=20)
    mask = torch.randn(20, 20, generator=torch.Generator().manual_seed(5)).to(device)
    expanded = mask.expand(2, 2, 20, 20)
    check_gradients("attention", attention, arguments(q, k, v, expanded))


# Strides -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("far", ["mask", "key"])
def test_offsets_beyond_32_bits(device, far):
    """Rows are 2^31 elements apart. The memory between them is never accessed."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("12 GiB of free memory are needed")
    apart = 2**31 + 16
    q, k, v = drawn(device, h=1, t=3, s=3, dtype=torch.float16)
    mask = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0]], dtype=torch.bool, device=device)
    near = arguments(q, k, v, mask)
    if far == "mask":
        place = torch.empty(2 * apart + 3, dtype=torch.bool, device=device)
        mask = place.as_strided((3, 3), (apart, 1)).copy_(mask)
    else:
        place = torch.empty(2 * apart + 16, dtype=torch.float16, device=device)
        k = place.as_strided((1, 1, 3, 16), (0, 0, apart, 1)).copy_(k)
    for ours, theirs in zip(
        attention(*arguments(q, k, v, mask))[:1], attention(*near)[:1], strict=True
    ):
        assert torch.equal(ours, theirs)


def test_strides_of_results_and_gradients(device):
    """Heads that a view split off are merged by a view; gradients have the strides of their tensors."""
    q, k, v = drawn(device, b=2, h=3, dv=8)
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    forward = (q, k, v, None, None, False, 0.25, 0.0, None)
    output, _, shift, norm = attention_forward(*forward, False)
    kept = output, None, shift, norm, True, True, True, False
    found = attention_backward(output, None, *forward, *kept)
    assert output.transpose(1, 2).is_contiguous()
    for gradient, tensor in zip(found, (q, k, v), strict=False):
        assert gradient.stride() == tensor.stride()


@jit
def power_kernel(score_ptr, base_ptr, to_ptr, natural: tl.constexpr):
    at = tl.arange(0, 8)
    found = power(tl.load(score_ptr + at), tl.load(base_ptr + at), 1.0, natural)
    tl.store(to_ptr + at, found)


@pytest.mark.parametrize("natural", [False, True])
def test_scores_above_the_saved_maximum_are_clamped(natural, device):
    """Compiled code scales a score and subtracts its base with one rounding, but rounds the base
    twice.
    """
    nan, inf = math.nan, math.inf
    scores = torch.tensor([2.0**33 + 1024, 5.0, -inf, nan, -1.0, 0.0, -200.0, inf], device=device)
    bases = torch.tensor([2.0**33, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, inf], device=device)
    found = torch.full((8,), nan, device=device)
    power_kernel[(1,)](scores, bases, found, natural=natural)
    below = math.exp(-1.0) if natural else 0.5
    expected = torch.tensor([1.0, 1.0, 0.0, nan, below, 1.0, 0.0, nan], device=device)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-37, equal_nan=True)


# Packed sequences ---------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("starts", "within"), [((0, 6, 14), (0, 6, 10)), ((-3, 4, 9), (0, 4, 9)), ((0, 12, 15), (0, 10, 10))]
)  # fmt: skip
def test_sequence_offsets_out_of_range_are_clamped(device, starts, within, causal):
    """The ten rows are surrounded by NaN; memory around the gradients stays unchanged."""
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
