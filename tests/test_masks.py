"""Masks that users make, and those that they give by mistake."""

from __future__ import annotations

import pytest
import torch

from transformer_fast import functional, nn

TOKENS = torch.tensor([[5, 6, 7, 8], [5, 0, 7, 0]])


def test_causal_mask() -> None:
    lower = [[True, False, False], [True, True, False], [True, True, True]]
    assert functional.causal_mask(3).tolist() == lower
    hidden = functional.causal_mask(3, true_means="hidden")
    assert torch.equal(hidden, ~torch.tensor(lower))
    assert functional.causal_mask(0).shape == (0, 0)
    assert functional.causal_mask(2, device="meta").is_meta


def test_padding_mask() -> None:
    real = torch.tensor([[True, True, True, True], [True, False, True, False]])
    assert torch.equal(functional.padding_mask(TOKENS, 0), real[:, None, None])
    assert torch.equal(functional.padding_mask(TOKENS, 0, true_means="hidden"), ~real)


def test_made_masks_mean_the_same_to_both() -> None:
    """One attention, called in SDPA's convention and in torch.nn's."""
    layer = nn.MultiheadAttention(16, 2, batch_first=True)
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.eye(16).repeat(3, 1))
        layer.out_proj.weight.copy_(torch.eye(16))
    x = torch.randn(2, 4, 16)
    theirs = layer(
        x, x, x, need_weights=False,
        attn_mask=functional.causal_mask(4, true_means="hidden"),
        key_padding_mask=functional.padding_mask(TOKENS, 0, true_means="hidden"),
    )[0]  # fmt: skip
    heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
    visible = functional.padding_mask(TOKENS, 0) & functional.causal_mask(4)
    ours = functional.scaled_dot_product_attention(heads, heads, heads, visible)
    torch.testing.assert_close(ours.transpose(1, 2).flatten(2), theirs)


def test_masks_that_cannot_be_made() -> None:
    with pytest.raises(ValueError, match=r'true_means must be "visible" or "hidden", not .keep.'):
        functional.causal_mask(3, true_means="keep")
    with pytest.raises(ValueError, match="true_means"):
        functional.padding_mask(TOKENS, 0, true_means="True")
    with pytest.raises(ValueError, match=r"tokens must have shape \(batch, length\), not \[4\]"):
        functional.padding_mask(TOKENS[0], 0)
