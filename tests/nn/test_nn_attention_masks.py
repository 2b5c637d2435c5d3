"""MultiheadAttention's masks: what is hidden stays hidden, and nothing is expanded in vain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from module_ruler import Recorder, assert_close, attention_pair

B, H, T, S, M = 2, 3, 4, 5, 6


def pair(**kwargs: Any) -> tuple[torch.nn.MultiheadAttention, torch.nn.MultiheadAttention]:
    return attention_pair(M, H, **kwargs)


def test_mixed_mask_types_warn_and_work() -> None:
    theirs, ours = pair()
    query = torch.randn(T, B, M)
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[:, -1] = True
    bias = torch.randn(T, T)
    for attn, pad in (
        (bias, padding),
        (torch.ones(T, T).triu(1).bool(), torch.zeros(B, T).masked_fill(padding, -torch.inf)),
    ):
        kwargs = {"attn_mask": attn, "key_padding_mask": pad}
        with pytest.warns(UserWarning, match="mismatched key_padding_mask and attn_mask") as told:
            ours(query, query, query, **kwargs)
        with pytest.warns(UserWarning, match="mismatched") as theirs_told:
            theirs(query, query, query, **kwargs)
        assert {str(w.message) for w in told} == {str(w.message) for w in theirs_told}
        with pytest.warns(UserWarning, match="mismatched"):
            assert_close(ours, theirs, query, query, query, **kwargs)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("how", ["bool", "float", "padding", "both"])
def test_rows_that_see_nothing_are_zero(need_weights: bool, training: bool, how: str) -> None:
    _, ours = pair(batch_first=True)
    ours.train(training)
    query = torch.randn(B, T, M, requires_grad=True)
    memory = torch.randn(B, S, M, requires_grad=True)
    hidden = torch.zeros(T, S, dtype=torch.bool)
    hidden[1] = True
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[1] = True
    empty = torch.zeros(B, T, dtype=torch.bool)
    kwargs: dict[str, Any] = {}
    if how == "padding":
        kwargs["key_padding_mask"] = padding
        empty[1] = True
    elif how == "float":
        kwargs["attn_mask"] = torch.zeros(T, S).masked_fill(hidden, -torch.inf)
        empty[:, 1] = True
    else:
        kwargs["attn_mask"] = hidden
        empty[:, 1] = True
        if how == "both":
            kwargs["key_padding_mask"] = padding
            empty[1] = True
    output, weights = ours(query, memory, memory, need_weights=need_weights, **kwargs)
    assert torch.equal(output[empty], ours.out_proj.bias.expand_as(output[empty]))
    assert not torch.equal(output[~empty], ours.out_proj.bias.expand_as(output[~empty]))
    if need_weights:
        assert not weights[empty].any()
        torch.testing.assert_close(weights[~empty].sum(-1), torch.ones((~empty).sum()))
    output.sum().backward()
    assert not query.grad[empty].any()
    assert query.grad[~empty].any()
    assert torch.isfinite(memory.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in ours.parameters())


def test_finfo_min_is_finite() -> None:
    """A row of finfo.min hides nothing: its weights are uniform, as in torch."""
    theirs, ours = pair(batch_first=True)
    x = torch.randn(B, T, M)
    mask = torch.full((T, T), torch.finfo(torch.float32).min)
    assert_close(ours, theirs, x, x, x, attn_mask=mask)


def test_garbage_at_padded_keys_stays_there() -> None:
    _, ours = pair(batch_first=True)
    query, memory = torch.randn(B, T, M), torch.randn(B, S, M)
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[:, 3:] = True
    clean = ours(query, memory, memory, padding)
    memory = memory.masked_fill(padding[..., None], torch.nan)
    dirty = ours(query, memory, memory, padding)
    torch.testing.assert_close(dirty[0], clean[0])
    torch.testing.assert_close(dirty[1], clean[1])


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_padding_is_not_expanded(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    theirs, ours = pair(batch_first=True)
    recorder = Recorder(monkeypatch)
    x = torch.randn(B, T, M)
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[1, 2:] = True
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    if kind == "float":
        padding = torch.zeros(B, T).masked_fill(padding, -torch.inf)
        causal = torch.zeros(T, T).masked_fill(causal, -torch.inf)
    calls = (
        ({"key_padding_mask": padding}, (B, 1, 1, T), False),
        ({"attn_mask": causal}, (1, 1, T, T), False),
        ({"attn_mask": causal, "is_causal": True}, None, True),
        ({"attn_mask": causal, "is_causal": True, "key_padding_mask": padding},
         (B, 1, 1, T), True),
        ({"attn_mask": causal, "key_padding_mask": padding}, (B, 1, T, T), False),
        ({"attn_mask": causal, "is_causal": True, "need_weights": True}, (1, 1, T, T), False),
    )  # fmt: skip
    for kwargs, shape, is_causal in calls:
        kwargs = {"need_weights": False, **kwargs}
        assert_close(ours, theirs, x, x, x, **kwargs)
        _, mask, hint = recorder.calls[-1]
        assert (None if mask is None else tuple(mask.shape)) == shape
        assert hint is is_causal


def test_the_hint_is_taken_at_its_word() -> None:
    """A mask that is not causal, said to be causal: the hint wins where torch lets it win."""
    theirs, ours = pair()
    x = torch.randn(T, B, M)
    mask = torch.ones(T, T, dtype=torch.bool).tril(-1)
    for weights in (True, False):
        for training in (True, False):
            theirs.train(training)
            ours.train(training)
            kwargs = {"attn_mask": mask, "is_causal": True, "need_weights": weights}
            assert_close(ours, theirs, x, x, x, **kwargs)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("padded", [True, False])
def test_the_hint_and_appended_keys(options: dict[str, Any], padded: bool) -> None:
    theirs, ours = pair(**options)
    x = torch.randn(T, B, M)
    kwargs: dict[str, Any] = {"attn_mask": torch.ones(T, T, dtype=torch.bool).triu(1)}
    if padded:
        kwargs["key_padding_mask"] = torch.zeros(B, T, dtype=torch.bool)
        kwargs["key_padding_mask"][0, 3:] = True
    assert_close(ours, theirs, x, x, x, need_weights=False, is_causal=True, **kwargs)
