"""Pictures of masks show what attention does with them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from viz_ruler import assert_legible, labels, legend, maps, shown

from transformer_fast import functional, viz

T, S = 5, 6


def visible(panel: Any) -> torch.Tensor:
    data, hidden = shown(panel)
    return ~hidden & (data > 0.5)


def attended(**options: Any) -> torch.Tensor:
    """Where the op itself looks, (B, H, T, S): keys that move the result."""
    q, k = torch.randn(2, 2, T, 8), torch.randn(2, 2, S, 8)
    # With the identity as values, the output is the weights.
    v = torch.eye(S).expand(2, 2, S, S)
    return functional.scaled_dot_product_attention(q, k, v, **options) > 0


def test_all_together_is_what_attention_does() -> None:
    mask = torch.rand(2, 2, T, S) > 0.3
    lengths = torch.tensor([6, 3])
    figure = viz.masks(T, S, attn_mask=mask, key_lengths=lengths, is_causal=True, index=1, head=1)
    panels = maps(figure)
    assert [panel.get_title().split("\n")[0] for panel in panels] == [
        "attn_mask", "key_lengths", "is_causal", "all together"
    ]  # fmt: skip
    past = torch.ones(T, S, dtype=torch.bool).tril()
    expected = attended(attn_mask=mask & past, key_lengths=lengths)
    assert torch.equal(visible(panels[-1]), expected[1, 1])
    assert torch.equal(visible(panels[0]), mask[1, 1])
    assert torch.equal(visible(panels[1]), (torch.arange(S) < 3).expand(T, S))
    assert torch.equal(visible(panels[2]), torch.ones(T, S, dtype=torch.bool).tril())
    assert_legible(figure)


def test_polarity() -> None:
    mask = torch.rand(T, S) > 0.5
    here = viz.masks(T, S, attn_mask=mask)
    theirs = viz.masks(T, S, attn_mask=mask, true_means="hidden")
    assert torch.equal(visible(maps(here)[0]), mask)
    assert torch.equal(visible(maps(theirs)[0]), ~mask)
    assert maps(here)[0].get_title() == "attn_mask\nbool: True = may attend"
    assert maps(theirs)[0].get_title() == "attn_mask\nbool: True = hidden (torch.nn)"
    assert len(maps(here)) == 1  # one mask is all there is


def test_padding() -> None:
    padding = torch.tensor([[False] * S, [False, False, True, True, True, True]])
    figure = viz.masks(T, S, key_padding=padding, index=1)
    assert torch.equal(visible(maps(figure)[0]), ~padding[1].expand(T, S))
    assert "True = padding" in maps(figure)[0].get_title()


def test_float_masks() -> None:
    mask = torch.randn(T, S)
    mask[:, 2] = -math.inf
    figure = viz.masks(T, S, attn_mask=mask, is_causal=True)
    first, _, last = maps(figure)
    data, hidden = shown(first)
    assert torch.equal(hidden, mask == -math.inf)
    torch.testing.assert_close(data.float()[~hidden], mask[~hidden])
    low, high = first.images[0].get_clim()
    assert low == -high == -float(mask[mask != -math.inf].abs().max())
    data, hidden = shown(last)
    past = torch.zeros(T, S).masked_fill(torch.ones(T, S).triu(1) > 0, -math.inf)
    assert torch.equal(~hidden, attended(attn_mask=mask + past)[0, 0])
    torch.testing.assert_close(data.float()[~hidden], mask[~hidden])
    bars = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    assert [bar.get_ylabel() for bar in bars] == ["added to the score"]
    # One that only hides needs no scale.
    only = torch.zeros(T, S).masked_fill(torch.ones(T, S).triu(1) > 0, -math.inf)
    figure = viz.masks(T, S, attn_mask=only)
    assert len(figure.axes) == 1
    assert torch.equal(visible(maps(figure)[0]), only == 0)


def test_queries_that_see_nothing_are_outlined() -> None:
    mask = torch.ones(T, S, dtype=torch.bool)
    mask[2] = False
    figure = viz.masks(T, S, attn_mask=mask, key_lengths=torch.tensor([4]))
    (outline,) = maps(figure)[-1].patches
    assert (outline.get_x(), outline.get_y(), outline.get_width()) == (-0.5, 1.5, S)
    assert "sees nothing: output 0" in legend(figure)
    assert not maps(figure)[0].patches
    figure = viz.masks(T, S, is_causal=True)
    assert legend(figure) == ["may attend", "hidden"]


def test_tokens_and_no_mask() -> None:
    figure = viz.masks(3, query_tokens=["a", "b", "c"], title="None")
    (panel,) = maps(figure)
    assert panel.get_title() == "no mask\nevery query sees every key"
    assert visible(panel).all()
    assert labels(panel.xaxis) == labels(panel.yaxis) == ["a", "b", "c"]
    assert_legible(figure)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"query_length": 0}, ValueError, "query_length must be at least 1, not 0"),
        ({"query_length": 2.0}, TypeError, "query_length must be an int, not float"),
        (
            {"true_means": "yes"},
            ValueError,
            'true_means must be "visible" or "hidden", not \'yes\'',
        ),
        ({"attn_mask": torch.ones(T, S).int()}, TypeError, "bool or floating point, not torch.int"),
        ({"attn_mask": torch.ones(T, S + 1)}, ValueError, r"\(B, H, 5, 6\), not \[5, 7\]"),
        ({"attn_mask": torch.full((T, S), math.nan)}, ValueError, "must not hold NaN"),
        ({"attn_mask": torch.ones(2, 1, T, S), "index": 2}, IndexError, "index must be in"),
        ({"attn_mask": torch.ones(2, 2, T, S), "head": 2}, IndexError, "head must be in"),
        ({"key_padding": torch.zeros(2, S)}, TypeError, "key_padding must be a bool Tensor"),
        ({"key_lengths": torch.tensor([7])}, ValueError, r"key_lengths must be in \[0, 6\], not 7"),
        ({"key_lengths": torch.tensor([1.0])}, TypeError, "key_lengths must be int32 or int64"),
        ({"key_lengths": torch.tensor(3)}, ValueError, r"key_lengths must have shape \(B,\)"),
        ({"key_tokens": ["a"]}, ValueError, "key_tokens must name 6 tokens, not 1"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        viz.masks(**({"query_length": T, "key_length": S} | options))
