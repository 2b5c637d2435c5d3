"""torch.compile(backend="transformer_fast") where code writes in place: nothing moves past a write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from module_checks import assert_same_numbers
from torch import Tensor, nn

from transformer_fast import compile_backend

M, T = 8, 6


def _scores(x: Tensor) -> Tensor:
    return x.sin() @ x.cos().mT


def slices_of_a_mask(x: Tensor) -> Tensor:
    mask = torch.zeros(T, T, dtype=torch.bool)
    mask[:, 3:] = True
    return _scores(x).masked_fill(mask, -1e9).softmax(-1) @ x


def slices_of_a_bias(x: Tensor) -> Tensor:
    bias = torch.zeros(T, T)
    bias[:, 3:] = -1e9
    return (_scores(x) + bias).softmax(-1) @ x


def through_a_view_of_the_mask(x: Tensor) -> Tensor:
    mask = torch.zeros(T, T, dtype=torch.bool)
    seen = mask[None]
    mask.fill_diagonal_(True)
    return _scores(x).masked_fill(seen, -1e9).softmax(-1) @ x


def row_by_row(x: Tensor) -> Tensor:
    mask = torch.zeros(2, T, dtype=torch.bool)
    for i, length in enumerate((4, 2)):
        mask[i, length:] = True
    return _scores(x).masked_fill(mask[:, None, :], -1e9).softmax(-1) @ x


def one_mask_in_two_states(x: Tensor) -> Tensor:
    mask = torch.zeros(T, T, dtype=torch.bool)
    first = _scores(x).masked_fill(mask, -1e9).softmax(-1) @ x
    mask[:, 3:] = True
    return first + _scores(first).masked_fill(mask, -1e9).softmax(-1) @ x


def a_mask_made_in_between(x: Tensor) -> Tensor:
    """What is written has nothing to do with the attention's own tensors."""
    scores = _scores(x) / 3
    mask = torch.ones(2, 1, T, dtype=torch.bool)
    mask[1, :, 4:] = False
    return scores.masked_fill(~mask, -1e9).softmax(-1) @ x


def values_written(x: Tensor) -> Tensor:
    value = x.sin()
    scores = _scores(x)
    value[:, 0] = 5.0
    return scores.softmax(-1) @ value


def keys_written(x: Tensor) -> Tensor:
    key = x.cos()
    scores = x @ key.mT
    key.mul_(3.0)
    return scores.softmax(-1) @ x + key


def weights_written(x: Tensor) -> Tensor:
    weights = _scores(x).softmax(-1)
    weights[..., 0] = 0
    return weights @ x


def weights_written_afterwards(x: Tensor) -> Tensor:
    weights = _scores(x).softmax(-1)
    output = weights @ x
    weights[..., 0] = 0
    return output + weights.sum()


def queries_written_after_scaling(x: Tensor) -> Tensor:
    query = x.sin()
    scaled = query / 3
    query.zero_()
    return (scaled @ x.mT).softmax(-1) @ x + query


def _norm(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return (x - mean) / (std + 1e-6)


def norm_in_place(x: Tensor) -> Tensor:
    x = 2 * x
    mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
    x -= mean
    x /= std + 1e-6
    return x


def norms_input_written(x: Tensor) -> Tensor:
    x = 2 * x
    mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
    centred = x - mean
    x.zero_()
    return centred / (std + 1e-6) + x


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(M, 9), nn.Linear(9, M), nn.LayerNorm(M)


class InputWritten(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = 2 * x
        hidden = self.first(x)
        x += 1
        return self.second(torch.relu(hidden)) + x


class ViewOfTheHidden(Layers):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        view = hidden.view(-1, 9)
        return self.second(F.relu_(hidden)) + view.sum()


class DroppedInputWritten(Layers):
    def forward(self, x: Tensor) -> Tensor:
        inner = 2 * x
        dropped = F.dropout(inner, 1e-12, True)
        inner.zero_()
        return self.norm(3 * x + dropped) + inner


class SumWritten(Layers):
    def forward(self, x: Tensor) -> Tensor:
        total = 2 * x + x.sin()
        view = total.view(-1, M)
        view.mul_(x.view(-1, M))
        return self.norm(total) + total


class ResidualInPlace(Layers):
    """The residual added in place, as many write it: nobody else sees the sum's memory."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.relu(self.first(x)))
        y += x
        return self.norm(y)


class ResidualInPlaceSeen(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.relu(self.first(x)))
        before = y.view(-1, M)
        y += x
        return self.norm(y) + before.sum()


def gelu_input_written(x: Tensor) -> Tensor:
    hidden = x.sin()
    inner = torch.tanh(0.7978845608 * (hidden + 0.044715 * hidden**3))
    half = 0.5 * hidden
    hidden.zero_()
    return half * (1 + inner) + hidden


#: What is written and what is found of it: (how, counts).
CASES: list[tuple[Callable[..., Any], dict[str, int]]] = [
    (slices_of_a_mask, {"attention": 1}),
    (slices_of_a_bias, {"attention": 1}),
    (through_a_view_of_the_mask, {"attention": 1}),
    (row_by_row, {"attention": 1}),
    (one_mask_in_two_states, {"attention": 2}),
    (a_mask_made_in_between, {"attention": 1}),
    (values_written, {}),
    (keys_written, {}),
    (weights_written, {}),
    (weights_written_afterwards, {"attention": 1}),
    (queries_written_after_scaling, {"attention": 1}),
    (norm_in_place, {}),
    (norms_input_written, {}),
    (gelu_input_written, {}),
    (InputWritten, {"linear": 2}),
    (ViewOfTheHidden, {"linear": 2}),
    (DroppedInputWritten, {"layer_norm": 1}),
    (SumWritten, {"layer_norm": 1}),
    (ResidualInPlace, {"feed_forward": 1, "add_layer_norm": 1}),
    (ResidualInPlaceSeen, {"feed_forward": 1, "layer_norm": 1}),
]


LEFT = (
    values_written, keys_written, weights_written, norms_input_written, norm_in_place, InputWritten
)  # fmt: skip


@pytest.mark.parametrize(("code", "counts"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_the_same_numbers(code: Any, counts: dict[str, int]) -> None:
    torch.compiler.reset()
    theirs = code() if isinstance(code, type) else code
    reports: list[Any] = []
    ours = torch.compile(
        theirs, backend=compile_backend, options={"report": reports.append}, fullgraph=True
    )
    x = torch.randn(2, T, M).requires_grad_()
    assert_same_numbers(ours, theirs, (x,), {}, grad=False)
    try:
        assert_same_numbers(ours, theirs, (x,), {}, grad=True)
    except RuntimeError as error:  # what was written was needed in backward
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    assert reports[0].counts == counts
    told = "written in place between its parts" in str(reports[0])
    assert told == (code in LEFT)
