"""torch.compile(backend="transformer_fast") on more of what tutorials write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate_checks import check, compiled
from hand_written import (
    MORE_ATTENTIONS,
    MORE_NORMS,
    Attention,
    B,
    Convolutions,
    ConvolutionsAlone,
    FeedForward,
    M,
    Norm,
    OneNumber,
    T,
    divided,
    gelu_over_x,
    nan_to_num,
    with_blind_rows,
    zeros_afterwards,
)
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _x() -> Tensor:
    return torch.randn(B, T, M)


@pytest.mark.parametrize("name", MORE_ATTENTIONS)
def test_attention(name: str) -> None:
    attend, mask = MORE_ATTENTIONS[name]
    [report] = check(Attention(attend()), _x(), _x(), mask(), attention=1, linear=4)
    assert not report.left
    assert not {"softmax", "matmul", "einsum", "exp"} & set(report.others)


@pytest.mark.parametrize("name", ["like the scores", "permuted", "one key head", "temperatures"])
def test_lengths_may_vary(name: str) -> None:
    model = Attention(MORE_ATTENTIONS[name][0]()).eval()
    ours, reports = compiled(model)
    with torch.no_grad():
        for length in (5, 6, 9):
            x, mask = torch.randn(B, length, M), torch.ones(length, length).tril() > 0
            if name == "permuted":
                mask = torch.randn(B, length, length)
            torch.testing.assert_close(ours(x, x, mask), model(x, x, mask))
    assert [report.counts["attention"] for report in reports] == [1, 1]


@pytest.mark.parametrize("attend", [zeros_afterwards, nan_to_num])
def test_what_sees_nothing_gets_nothing_where_the_user_says_so(attend: Any) -> None:
    mask = with_blind_rows()
    model = Attention(attend).eval()
    ours, _ = compiled(model)
    with torch.no_grad():
        got = ours(_x(), _x(), mask)
    output = got[0] if isinstance(got, tuple) else got
    blind = ~mask.any(-1)[:, 0]
    torch.testing.assert_close(output[blind], model.out.bias.expand_as(output[blind]))
    if isinstance(got, tuple):
        assert (got[1].transpose(1, 2)[blind] == 0).all()


def test_zeros_elsewhere_than_the_fills_stay_the_users() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
        scores = (q @ k.mT).masked_fill(~mask, -1e9)
        return scores.softmax(-1).masked_fill(mask, 0.0) @ v

    [report] = check(Attention(attend), _x(), _x(), with_blind_rows(), attention=0)
    assert "its weights are filled where its scores are not" in str(report)


def test_permuted_products_stay_the_users() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
        return (q @ k.mT).transpose(0, 1).softmax(-1).transpose(0, 1) @ v

    [report] = check(Attention(attend), _x(), _x(), None, attention=0)
    assert "its scores are permuted" in str(report)


@pytest.mark.parametrize("name", MORE_NORMS)
def test_norms(name: str) -> None:
    [report] = check(nn.Sequential(nn.Linear(M, M), Norm(MORE_NORMS[name])), _x(), layer_norm=1)
    assert not {"mean", "std", "var", "var_mean", "std_mean", "sub"} & set(report.others)


def test_a_norm_with_one_number_for_all() -> None:
    [report] = check(nn.Sequential(nn.Linear(M, M), OneNumber()), _x(), layer_norm=1)
    assert set(report.others) <= {"expand"}


def test_another_form_of_gelu() -> None:
    [report] = check(FeedForward(gelu_over_x), _x(), feed_forward=1, linear=0)
    assert not report.others


@pytest.mark.parametrize("activation", [torch.relu, nn.ReLU(inplace=True), nn.GELU("tanh")])
def test_convolutions_over_single_positions(activation: Any) -> None:
    [report] = check(Convolutions(activation), _x(), feed_forward=1, add_layer_norm=1)
    assert set(report.others) == {"squeeze", "getitem"}
    [report] = check(ConvolutionsAlone(activation), _x(), feed_forward=1)
    assert set(report.others) == {"squeeze", "transpose", "contiguous", "view"}


def test_convolutions_over_several_positions_stay() -> None:
    model = Convolutions()
    model.w_1 = nn.Conv1d(M, 2 * M, 3, padding=1)
    [report] = check(model, _x(), feed_forward=0, add_layer_norm=1)
    assert report.others["conv1d"] == 2


class InPlace(nn.Module):
    """Activation and dropouts write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.w_1, self.w_2, self.norm = nn.Linear(M, 2 * M), nn.Linear(2 * M, M), nn.LayerNorm(M)
        self.activation, self.dropout = nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.w_2(self.dropout(self.activation(self.w_1(x))))
        return self.norm(x + self.dropout(y))


def test_what_wrote_in_place_is_taken_out() -> None:
    ours, reports = compiled(InPlace())
    ours(_x()).sum().backward()
    assert reports[0].counts == {"feed_forward": 1, "add_layer_norm": 1}
    assert set(reports[0].others) <= {"getitem"}


class Decoding(nn.Module):
    """One query to a growing cache."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(divided)

    def forward(self, x: Tensor, past: Tensor) -> Tensor:
        return self.attention(x, torch.cat([past, x], dim=1), None)[0]


def test_a_cache() -> None:
    check(Decoding(), torch.randn(B, 1, M), torch.randn(B, 9, M), attention=1, linear=4)


class OfTorch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(M, 4, 64, 0.0, batch_first=True)
        self.weight = nn.Parameter(torch.randn(M, M))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(
            torch.addmm(x.sum(), x.flatten(0, 1), self.weight).view_as(x) @ self.weight
        )


def test_what_stays_and_could_be_faster_is_told() -> None:
    [report] = check(OfTorch(), _x(), attention=0)
    told = str(report)
    assert "a module of torch.nn, which transformer_fast.accelerate(model) swaps" in told
    assert told.count("it is a product with a (in, out) matrix") == 2
