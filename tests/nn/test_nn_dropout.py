"""Dropout in the layers: torch's probabilities and places, our own pattern."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_fast import functional, nn
from transformer_fast.nn import multihead_attention

M, H, HIDDEN = 16, 2, 24


@pytest.fixture
def probabilities(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Which op was asked for which dropout, in order."""
    asked: list[tuple[str, float]] = []

    def spy(module: Any, name: str) -> None:
        right = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            asked.append((name, kwargs["dropout_p"]))
            return right(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    spy(functional, "feed_forward")
    spy(functional, "add_layer_norm")
    spy(multihead_attention, "attend")
    return asked


def test_training_asks_for_every_dropout(probabilities: list[tuple[str, float]]) -> None:
    layer = nn.TransformerDecoderLayer(M, H, HIDDEN, 0.1, batch_first=True)
    layer.dropout.p, layer.dropout1.p, layer.dropout2.p, layer.dropout3.p = 0.2, 0.3, 0.4, 0.5
    x, memory = torch.randn(2, 3, M), torch.randn(2, 4, M)
    layer(x, memory)
    assert probabilities == [
        ("attend", 0.1),
        ("add_layer_norm", 0.3),
        ("attend", 0.1),
        ("add_layer_norm", 0.4),
        ("feed_forward", 0.2),
        ("add_layer_norm", 0.5),
    ]
    probabilities.clear()
    layer.eval()
    layer(x, memory)
    assert {p for _, p in probabilities} == {0.0}


def test_one_dropout_may_stay_on(probabilities: list[tuple[str, float]]) -> None:
    """Each module's own flag counts, as Monte Carlo dropout needs it."""
    layer = nn.TransformerEncoderLayer(M, H, HIDDEN, 0.5, batch_first=True).eval()
    layer.dropout.train()
    x = torch.randn(2, 3, M)
    with torch.no_grad():
        assert not torch.equal(layer(x), layer(x))
    assert probabilities[-3:] == [("add_layer_norm", 0.0), ("feed_forward", 0.5),
                                  ("add_layer_norm", 0.0)]  # fmt: skip


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("where", ["dropout", "dropout1", "dropout2", "self_attn"])
def test_same_distribution_as_torch(where: str, norm_first: bool) -> None:
    """Mean and spread of the output over many draws, for one dropout at a time."""
    torch.manual_seed(0)
    draws = 4000
    x = torch.randn(1, 3, M).expand(draws, -1, -1)
    theirs = torch.nn.TransformerEncoderLayer(
        M, H, HIDDEN, 0.0, norm_first=norm_first, batch_first=True
    )
    ours = nn.TransformerEncoderLayer(M, H, HIDDEN, 0.0, norm_first=norm_first, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    moments = []
    for layer in (theirs, ours):
        module = getattr(layer, where)
        setattr(module, "dropout" if where == "self_attn" else "p", 0.4)
        with torch.no_grad():
            output: Tensor = layer(x)
        moments.append((output.mean(0), output.var(0)))
    (mean, variance), (our_mean, our_variance) = moments
    assert (variance > 0).any()
    # 48 means: one of them lies five standard deviations off in 30,000 runs.
    deviation = ((variance + our_variance) / draws).sqrt()
    assert ((our_mean - mean).abs() <= 5 * deviation + 1e-6).all()
    # The relative deviation of a variance of 4000 draws is about 2%.
    torch.testing.assert_close(our_variance, variance, rtol=0.2, atol=1e-6)


def test_dropout_of_one_drops_all() -> None:
    layer = nn.TransformerEncoderLayer(M, H, HIDDEN, 1.0, norm_first=True)
    x = torch.randn(3, 2, M)
    torch.testing.assert_close(layer(x), x)
