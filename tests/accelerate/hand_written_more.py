"""More of the ways in which tutorials write Transformers; nothing here is ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hand_written import B, D, H, M, T, causal, padding, with_blind_rows
from torch import Tensor, nn

_A = (Tensor, Tensor, Tensor, Any, float, bool)


def zeros_afterwards(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
    """Hidden weights are set to zero once more: a query that sees nothing gets nothing."""
    hidden = mask.eq(0)
    scores = torch.matmul(q / math.sqrt(D), k.transpose(2, 3))
    scores = scores.masked_fill(hidden, torch.finfo(q.dtype).min)
    weights = torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0)
    return F.dropout(weights, p, training) @ v, weights


def nan_to_num(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
    scores = (q @ k.mT / math.sqrt(D)).masked_fill(~mask, float("-inf"))
    return torch.nan_to_num(torch.softmax(scores, -1), 0.0) @ v


def permuted_for_the_mask(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool
) -> Any:
    """Batch and heads change places, so that a mask of the batch can be added."""
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size()[-1])
    scores = scores.permute(1, 0, 2, 3) + mask
    scores = scores.permute(1, 0, 2, 3)
    return torch.matmul(F.softmax(scores, dim=-1), v)


def dots_for_dimensions(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool
) -> Any:
    weights = torch.softmax(torch.einsum("...qd,...kd->...qk", q, k) * D**-0.5, -1)
    return torch.einsum("...qk,...kd->...qd", weights, v)


def like_the_scores(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
    scores = torch.einsum("bhid,bhjd->bhij", q * D**-0.5, k)
    scores = torch.where(mask, scores, torch.full_like(scores, -1e9))
    return scores.softmax(-1) @ v


def ones_like_the_scores(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool
) -> Any:
    scores = q @ k.transpose(-1, -2) / math.sqrt(D)
    return torch.where(mask > 0, scores, -9e15 * torch.ones_like(scores)).softmax(-1) @ v


def full_numbers(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
    """Scale and fill are tensors of one number, made on the way."""
    weights = torch.matmul(q, k.permute(0, 1, 3, 2))
    weights = weights / torch.full([], v.size(-1) ** 0.5, dtype=weights.dtype)
    lowest = torch.full([], torch.finfo(weights.dtype).min, dtype=weights.dtype)
    weights = torch.where(mask, weights.to(weights.dtype), lowest)
    return torch.matmul(F.softmax(weights, dim=-1).type(v.dtype), v)


def one_key_head(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
    k, v = k[:, :1], v[:, :1]
    return torch.softmax(q @ k.transpose(-1, -2) / D**0.5, -1) @ v


def repeated_key_heads(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
    def repeat(x: Tensor) -> Tensor:
        return x[:, :2, None].expand(B, 2, H // 2, x.shape[2], D).reshape(B, H, x.shape[2], D)

    scores = torch.matmul(q, repeat(k).transpose(2, 3)) / math.sqrt(D)
    scores = scores + torch.triu(torch.full((T, T), float("-inf")), diagonal=1)
    return F.softmax(scores.float(), dim=-1).type_as(q) @ repeat(v)


def softmax_by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
    scores = (q @ k.transpose(-1, -2) / math.sqrt(D)).masked_fill(mask == 0, -1e9)
    powers = torch.exp(scores - scores.max(dim=-1, keepdim=True)[0])
    return powers / powers.sum(dim=-1, keepdim=True) @ v


def two_infinite_masks(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
    """Padding is filled in, causality is added, and the mask is made in between."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(D)
    keep = torch.ones(B, T, dtype=torch.bool)
    keep[1, 4:] = False
    scores = scores + torch.triu(torch.full((T, T), float("-inf")), 1)
    return scores.masked_fill(~keep.view(B, 1, 1, T), float("-inf")).softmax(-1) @ v


def channels_first(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
    q, k, v = (x.permute(0, 1, 3, 2) for x in (q, k, v))
    weights = torch.einsum("bhdi,bhdj->bhij", q * D**-0.25, k * D**-0.25).softmax(dim=-1)
    return torch.einsum("bhij,bhdj->bhid", weights, v)


class Temperatures(nn.Module):
    """A learned factor for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.rand(H, 1, 1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
        scores = (q @ k.transpose(-1, -2)) * self.temperature
        return F.softmax(scores.masked_fill(~mask, -1e9), -1) @ v


def _added() -> Tensor:
    """(B, T, T): 0 or -1e9, after a look at two dimensions fewer than the scores have."""
    return torch.zeros(B, T, T).masked_fill(~(padding() & causal())[:, 0], -1e9)


#: name: (how it is written, a mask for it)
ATTENTIONS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "zeros afterwards": (lambda: zeros_afterwards, with_blind_rows),
    "nan_to_num": (lambda: nan_to_num, with_blind_rows),
    "permuted": (lambda: permuted_for_the_mask, lambda: torch.randn(B, T, T)),
    "permuted, padding": (lambda: permuted_for_the_mask, _added),
    "dots": (lambda: dots_for_dimensions, lambda: None),
    "like the scores": (lambda: like_the_scores, with_blind_rows),
    "ones like the scores": (lambda: ones_like_the_scores, lambda: causal().float()),
    "full numbers": (lambda: full_numbers, with_blind_rows),
    "one key head": (lambda: one_key_head, lambda: None),
    "repeated key heads": (lambda: repeated_key_heads, lambda: None),
    "softmax by hand": (lambda: softmax_by_hand, with_blind_rows),
    "two infinite masks": (lambda: two_infinite_masks, lambda: None),
    "channels first": (lambda: channels_first, lambda: None),
    "temperatures": (Temperatures, with_blind_rows),
}


class OneNumber(nn.Module):
    """A norm whose weight and bias are one number each."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.bias = nn.Parameter(torch.rand(1)), nn.Parameter(torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        mean, std = x.mean(dim=-1, keepdim=True), x.std(dim=-1, keepdim=True)
        return self.alpha * (x - mean) / (std + 10**-6) + self.bias


def var_and_mean(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, dim=-1, keepdim=True, unbiased=False)
    return a * (x - mean) * torch.rsqrt(var + 1e-5) + b


def std_and_mean(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    std, mean = torch.std_mean(x, -1, keepdim=True)
    return a * (x - mean) / (std + 1e-3) + b


def put_back(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return a * (x - x.mean(-1).unsqueeze(-1)) / (x.std(-1)[..., None] + 1e-3) + b


NORMS = {f.__name__: f for f in (var_and_mean, std_and_mean, put_back)}


def gelu_over_x(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * x * (1.0 + 0.044715 * x * x)))


class Convolutions(nn.Module):
    """A feed-forward network of two convolutions over single positions, its sum in place."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.w_1, self.w_2 = nn.Conv1d(M, 2 * M, 1), nn.Conv1d(2 * M, M, 1)
        self.norm, self.activation = nn.LayerNorm(M), activation
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.w_2(self.activation(self.w_1(x.transpose(1, 2))))
        x = self.dropout(x.transpose(1, 2))
        x += residual
        return self.norm(x)


class ConvolutionsAlone(Convolutions):
    """What comes out is looked at as a convolution lays it out."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 1)
        return self.w_2(self.activation(self.w_1(x))).view(B, M * T)
