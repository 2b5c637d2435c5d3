"""Attention, norms and Transformers as users write them, without this library."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, H, T, D, M = 2, 4, 6, 8, 32

#: Arguments: queries, keys, values (B, H, T, D), a mask, and the dropout of the weights.
Attend = Callable[[Tensor, Tensor, Tensor, Any, Callable[[Tensor], Tensor]], Any]


def padding(keep: bool = True) -> Tensor:
    """Key mask (B, 1, 1, T); the second sequence has 4 tokens. ``keep``: True at tokens to attend
    to."""
    mask = torch.ones(B, 1, 1, T, dtype=torch.bool)
    mask[1, ..., 4:] = False
    return mask if keep else ~mask


def causal() -> Tensor:
    return torch.ones(T, T, dtype=torch.bool).tril()


def both() -> Tensor:
    return padding() & causal()


def with_fully_masked_rows() -> Tensor:
    """Mask (B, 1, T, T) in which every key is masked for some queries."""
    mask = both().clone()
    mask[0, 0, 2] = False
    mask[1, 0, :3] = False
    return mask


def divided(q, k, v, mask, drop):
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    weights = drop(scores.softmax(dim=-1))
    return torch.matmul(weights, v), weights


def scaled_first(q, k, v, mask, drop):
    q = q * q.shape[-1] ** -0.25
    k = k / math.sqrt(math.sqrt(k.shape[-1]))
    return torch.softmax(torch.where(mask, q @ k.mT, -1e9), -1) @ v


def einsum(q, k, v, mask, drop):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, T, H, D)
    energy = torch.einsum("nqhd,nkhd->nhqk", [q, k])
    if mask is not None:
        energy = energy.masked_fill(mask == 0, float("-1e20"))
    weights = torch.softmax(energy / (M ** (1 / 2)), dim=3)
    return torch.einsum("nhql,nlhd->nqhd", [weights, v]).transpose(1, 2)


def einsum_in_place(q, k, v, mask, drop):
    dots = torch.einsum("b h i d, b h j d -> b h i j", q, k) * D**-0.5
    dots.masked_fill_(~mask, -torch.finfo(dots.dtype).max)
    return torch.einsum("b h i j, b h j d -> b h i d", dots.softmax(dim=-1), v)


def added_large(q, k, v, mask, drop):
    scores = torch.matmul(q, k.transpose(2, 3)) / torch.sqrt(torch.tensor(float(D)))
    scores += (1.0 - mask.float()) * -10000.0
    weights = nn.Softmax(dim=-1)(scores)
    return torch.matmul(weights, v), weights


def added_infinite(q, k, v, mask, drop):
    hidden = torch.triu(torch.full((T, T), float("-inf")), diagonal=1)
    scores = q.matmul(k.permute(0, 1, 3, 2)).div(math.sqrt(D)).add(hidden)
    return drop(scores.softmax(-1)).matmul(v)


def batched(q, k, v, mask, drop):
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    attn = torch.bmm(q, k.transpose(1, 2)) / D**0.5
    attn = attn.masked_fill(~mask.expand(B, H, T, T).reshape(B * H, T, T), -1e10)
    attn = drop(F.softmax(attn, dim=2))
    return torch.bmm(attn, v).view(B, H, T, D), attn


def added_product(q, k, v, mask, drop):
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    bias = torch.zeros(B * H, T, T, dtype=q.dtype)
    bias = bias.masked_fill(~mask.expand(B, H, T, T).reshape(-1, T, T), -1e4)
    attn = F.softmax(torch.baddbmm(bias, q * D**-0.5, k.transpose(-2, -1)), dim=-1)
    return torch.bmm(attn, v).view(B, H, T, D)


def weights_before_dropout(q, k, v, mask, drop):
    energy = torch.matmul(q, k.permute(0, 1, 3, 2)) / torch.sqrt(torch.FloatTensor([D]))
    attention = torch.softmax(energy.masked_fill(mask == 0, -1e10), dim=-1)
    return torch.matmul(drop(attention), v), attention


def two_fills(q, k, v, mask, drop):
    scores = q @ k.transpose(-1, -2) / math.sqrt(D)
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -1e9)
    return scores.masked_fill(mask.logical_not(), -1e9).softmax(-1) @ v


def in_fp32(q, k, v, mask, drop):
    scores = torch.matmul(q, k.transpose(2, 3)) * D**-0.5
    scores = torch.where(mask.bool(), scores, torch.tensor(-1e9))
    weights = F.softmax(scores.float(), dim=-1, dtype=torch.float32).type_as(scores)
    return torch.matmul(weights, v).contiguous()


def by_rows(q, k, v, mask, drop):
    """Masks the scores in place, in a view with one row per query, by each query's number of keys."""
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(D)
    lengths = mask.expand(B, H, T, T).sum(-1).reshape(-1)  # number of keys of each query
    rows = scores.reshape(-1, T)
    rows[~(torch.arange(T)[None, :] < lengths[:, None])] = -1e6
    weights = F.softmax(rows.reshape(scores.shape), dim=-1)
    return torch.bmm(drop(weights), v).reshape(B, H, T, D)


def zeroed_weights(q, k, v, mask, drop):
    """Sets the masked weights to zero after the softmax: fully masked queries then return zeros."""
    hidden = mask.eq(0)
    scores = torch.matmul(q / math.sqrt(D), k.transpose(2, 3))
    scores = scores.masked_fill(hidden, torch.finfo(q.dtype).min)
    weights = torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0)
    return drop(weights) @ v, weights


def nan_to_num(q, k, v, mask, drop):
    scores = (q @ k.mT / math.sqrt(D)).masked_fill(~mask, float("-inf"))
    return torch.nan_to_num(torch.softmax(scores, -1), 0.0) @ v


def permuted_for_the_mask(q, k, v, mask, drop):
    """Swaps batch and heads, so that a mask (B, T, T) broadcasts over the heads."""
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size()[-1])
    scores = (scores.permute(1, 0, 2, 3) + mask).permute(1, 0, 2, 3)
    return torch.matmul(F.softmax(scores, dim=-1), v)


def full_like_scores(q, k, v, mask, drop):
    scores = torch.einsum("bhid,bhjd->bhij", q * D**-0.5, k)
    return torch.where(mask, scores, torch.full_like(scores, -1e9)).softmax(-1) @ v


def ones_like_scores(q, k, v, mask, drop):
    scores = q @ k.transpose(-1, -2) / math.sqrt(D)
    return torch.where(mask > 0, scores, -9e15 * torch.ones_like(scores)).softmax(-1) @ v


def scalar_tensors(q, k, v, mask, drop):
    """Scale and fill are one-element tensors, created in the function."""
    weights = torch.matmul(q, k.permute(0, 1, 3, 2))
    weights = weights / torch.full([], v.size(-1) ** 0.5, dtype=weights.dtype)
    lowest = torch.full([], torch.finfo(weights.dtype).min, dtype=weights.dtype)
    weights = torch.where(mask, weights.to(weights.dtype), lowest)
    return torch.matmul(F.softmax(weights, dim=-1).type(v.dtype), v)


def repeated_key_heads(q, k, v, mask, drop):
    k, v = (x[:, :2, None].expand(B, 2, H // 2, -1, D).reshape(B, H, -1, D) for x in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(D)
    scores = scores + torch.triu(torch.full((T, T), float("-inf")), diagonal=1)
    return F.softmax(scores.float(), dim=-1).type_as(q) @ v


def softmax_by_hand(q, k, v, mask, drop):
    scores = (q @ k.transpose(-1, -2) / math.sqrt(D)).masked_fill(mask == 0, -1e9)
    powers = torch.exp(scores - scores.max(dim=-1, keepdim=True)[0])
    return powers / powers.sum(dim=-1, keepdim=True) @ v


def two_infinite_masks(q, k, v, mask, drop):
    """Padding is filled, causality is added, and the mask is created between the ops."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(D)
    keep = torch.ones(B, T, dtype=torch.bool)
    keep[1, 4:] = False
    scores = scores + torch.triu(torch.full((T, T), float("-inf")), 1)
    return scores.masked_fill(~keep.view(B, 1, 1, T), float("-inf")).softmax(-1) @ v


def channels_first(q, k, v, mask, drop):
    q, k, v = (x.permute(0, 1, 3, 2) for x in (q, k, v))
    weights = torch.einsum("bhdi,bhdj->bhij", q * D**-0.25, k * D**-0.25).softmax(dim=-1)
    return torch.einsum("bhij,bhdj->bhid", weights, v)


class Single(nn.Module):
    """Attention with a single head, without a head dimension; scaled by the width, with a mask
    buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tril", torch.tril(torch.ones(16, 16)))

    def forward(self, q, k, v, mask, drop):
        q, k, v = (x.transpose(1, 2).reshape(B, T, H * D) for x in (q, k, v))
        wei = q @ k.transpose(-2, -1) * M**-0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        return (drop(F.softmax(wei, dim=-1)) @ v).reshape(B, T, H, D).transpose(1, 2)


class Learned(nn.Module):
    """Attention with a learned relative position bias, or a learned factor for each head.

    Both are applied before the mask.
    """

    def __init__(self, *size: int, factor: bool) -> None:
        super().__init__()
        self.learned, self.factor = nn.Parameter(torch.rand(size)), factor

    def forward(self, q, k, v, mask, drop):
        scores = q @ k.transpose(-1, -2)
        scores = scores * self.learned if self.factor else scores / math.sqrt(D) + self.learned
        return F.softmax(scores.masked_fill(~mask, -1e9), -1) @ v


class Attention(nn.Module):
    """Input and output projections around an attention function."""

    def __init__(self, attend: Attend, p: float = 0.0) -> None:
        super().__init__()
        self.attend, self.p = attend, p
        self.query, self.key, self.value, self.out = (nn.Linear(M, M) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, mask: Any) -> Any:
        def heads(y: Tensor) -> Tensor:
            return y.view(y.shape[0], -1, H, D).transpose(1, 2)

        def drop(weights: Tensor) -> Tensor:
            return F.dropout(weights, self.p, self.training)

        q, k, v = heads(self.query(x)), heads(self.key(memory)), heads(self.value(memory))
        found = self.attend(q, k, v, mask, drop)
        context, weights = found if isinstance(found, tuple) else (found, None)
        context = context.transpose(1, 2).contiguous().view(x.shape[0], -1, M)
        return (self.out(context), weights) if weights is not None else self.out(context)


def _multiplied(q, k, v, mask, drop):
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(mask[..., :T, :T] == 0, float("-inf"))
    return drop(F.softmax(scores, dim=-1)) @ v


def _dots(q, k, v, mask, drop):
    weights = torch.softmax(torch.einsum("...qd,...kd->...qk", q, k) * D**-0.5, -1)
    return torch.einsum("...qk,...kd->...qd", weights, v)


def _one_key_head(q, k, v, mask, drop):
    return torch.softmax(q @ k[:, :1].transpose(-1, -2) / D**0.5, -1) @ v[:, :1]


def _added() -> Tensor:
    """Additive mask (B, T, T) of 0 and -1e9, created from a mask (B, 1, T, T)."""
    return torch.zeros(B, T, T).masked_fill(~(padding() & causal())[:, 0], -1e9)


#: name: (attention function, a mask for it)
ATTENTIONS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "no mask": (lambda: divided, lambda: None),
    "divided, (B, 1, 1, T)": (lambda: divided, padding),
    "divided, (T, T)": (lambda: divided, lambda: causal().int()),
    "divided, (B, 1, T, T)": (lambda: divided, lambda: both().float()),
    "divided, fully masked rows": (lambda: divided, with_fully_masked_rows),
    "multiplied": (lambda: _multiplied, lambda: causal()[None, None]),
    "scaled first": (lambda: scaled_first, with_fully_masked_rows),
    "einsum": (lambda: einsum, with_fully_masked_rows),
    "einsum in place": (lambda: einsum_in_place, both),
    "added, large": (lambda: added_large, with_fully_masked_rows),
    "added, infinite": (lambda: added_infinite, lambda: None),
    "bmm": (lambda: batched, with_fully_masked_rows),
    "baddbmm": (lambda: added_product, with_fully_masked_rows),
    "weights before dropout": (lambda: weights_before_dropout, padding),
    "two fills": (lambda: two_fills, padding),
    "in fp32": (lambda: in_fp32, lambda: both().int()),
    "rows of a matrix": (lambda: by_rows, both),
    "learned bias": (lambda: Learned(1, H, T, T, factor=False), with_fully_masked_rows),
    "one head": (Single, lambda: None),
    "zeroed weights": (lambda: zeroed_weights, with_fully_masked_rows),
    "nan_to_num": (lambda: nan_to_num, with_fully_masked_rows),
    "permuted": (lambda: permuted_for_the_mask, lambda: torch.randn(B, T, T)),
    "permuted, padding": (lambda: permuted_for_the_mask, _added),
    "dots": (lambda: _dots, lambda: None),
    "full_like scores": (lambda: full_like_scores, with_fully_masked_rows),
    "ones_like scores": (lambda: ones_like_scores, lambda: causal().float()),
    "scalar tensors": (lambda: scalar_tensors, with_fully_masked_rows),
    "one key head": (lambda: _one_key_head, lambda: None),
    "repeated key heads": (lambda: repeated_key_heads, lambda: None),
    "softmax by hand": (lambda: softmax_by_hand, with_fully_masked_rows),
    "two infinite masks": (lambda: two_infinite_masks, lambda: None),
    "channels first": (lambda: channels_first, lambda: None),
    "temperatures": (lambda: Learned(H, 1, 1, factor=True), with_fully_masked_rows),
}


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def annotated_norm(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    std = x.std(-1, keepdim=True)
    return a * (x - mean) / (std + 1e-6) + b


def rms_norm(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * a


def _mean_of_squares(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    u = x.mean(-1, keepdim=True)
    s = (x - u).pow(2).mean(-1, keepdim=True)
    return a * (x - u) * torch.rsqrt(s + 1e-5) + b


def _var_and_mean(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, dim=-1, keepdim=True, unbiased=False)
    return a * (x - mean) * torch.rsqrt(var + 1e-5) + b


def _std_and_mean(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    std, mean = torch.std_mean(x, -1, keepdim=True)
    return a * (x - mean) / (std + 1e-3) + b


NORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "annotated": annotated_norm,
    "biased std": lambda x, a, b: (
        (x - x.mean(dim=-1, keepdim=True))
        / (torch.std(x, dim=-1, unbiased=False, keepdim=True) + 1e-3) * a + b
    ),
    "root outside": lambda x, a, b: (
        b + a * ((x - x.mean(2, keepdim=True)) / (x.var(-1, keepdim=True).sqrt() + 1e-5))
    ),
    "variance": lambda x, a, b: (
        a * ((x - _mean(x)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-12)) + b
    ),
    "mean of squares": _mean_of_squares,
    "unbiased variance": lambda x, a, b: (
        (x - _mean(x)) / (x.var(-1, keepdim=True) + 1e-1) ** 0.5 * a + b
    ),
    "without affine": lambda x, a, b: (
        (x - _mean(x)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-2)
    ),
    "reciprocal of a root": lambda x, a, b: (
        (x - _mean(x)) * (1 / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)) * a + b
    ),
    "var and mean": _var_and_mean,
    "std and mean": _std_and_mean,
    "dimension restored": lambda x, a, b: (
        a * (x - x.mean(-1).unsqueeze(-1)) / (x.std(-1)[..., None] + 1e-3) + b
    ),
}  # fmt: skip


class Norm(nn.Module):
    def __init__(self, norm: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = norm
        self.gain, self.shift = nn.Parameter(torch.randn(M)), nn.Parameter(torch.randn(M))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.gain, self.shift)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "relu method": lambda x: x.relu(),
    "clamped": lambda x: x.clamp(min=0),
    "relu in place": nn.ReLU(inplace=True),
    "gelu": F.gelu,
    "gelu tanh": nn.GELU("tanh"),
    "silu": F.silu,
    "swish": lambda x: x * torch.sigmoid(x),
    "gelu by hand": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "gelu tanh by hand": lambda x: (
        0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))
    ),
    "gelu over x": lambda x: (
        0.5 * x * (1.0 + torch.tanh(0.7978845608 * x * (1.0 + 0.044715 * x * x)))
    ),
    "gelu of scalar tensors": lambda x: x / 2 * (1 + torch.erf(x / torch.sqrt(torch.tensor(2.0)))),
}


class FeedForward(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor] = F.relu, p: float = 0.0) -> None:
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(M, 2 * M), nn.Linear(2 * M, M)
        self.dropout, self.activation = nn.Dropout(p), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(self.dropout(self.activation(self.w_1(x))))


class Block(nn.Module):
    """An encoder or decoder layer, post-norm or pre-norm."""

    def __init__(
        self, cross: bool, norm_first: bool, norm: Any = None, attend: Any = divided, p: float = 0.0
    ) -> None:
        super().__init__()
        make = (lambda: Norm(norm)) if norm is not None else (lambda: nn.LayerNorm(M))
        self.attentions = nn.ModuleList(Attention(attend, p) for _ in range(1 + cross))
        self.norms = nn.ModuleList(make() for _ in range(2 + cross))
        self.feed_forward, self.dropout = FeedForward(p=p), nn.Dropout(p)
        self.norm_first = norm_first

    def _residual(self, x: Tensor, norm: nn.Module, sublayer: Any) -> Tensor:
        if self.norm_first:
            return x + self.dropout(sublayer(norm(x)))
        return norm(x + self.dropout(sublayer(x)))

    def forward(self, x: Tensor, memory: Any, own_mask: Any, memory_mask: Any) -> Tensor:
        own, *cross = self.attentions
        x = self._residual(x, self.norms[0], lambda y: own(y, y, own_mask)[0])
        for attend in cross:
            x = self._residual(x, self.norms[1], lambda y, f=attend: f(y, memory, memory_mask)[0])
        return self._residual(x, self.norms[-1], self.feed_forward)


class Translator(nn.Module):
    """An encoder-decoder from tokens to log-probabilities, with masks, as in the Annotated
    Transformer."""

    def __init__(self, norm_first: bool = True, norm: Any = annotated_norm, p: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, M)
        self.encoder = nn.ModuleList(Block(False, norm_first, norm, p=p) for _ in range(2))
        self.decoder = nn.ModuleList(Block(True, norm_first, norm, p=p) for _ in range(2))
        self.head = nn.Linear(M, 17)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        source_mask = (source != 0).unsqueeze(1).unsqueeze(2)
        length = target.size(1)
        target_mask = (target != 0).unsqueeze(1).unsqueeze(2) & torch.tril(
            torch.ones(1, 1, length, length, dtype=torch.bool)
        )
        memory, x = self.embedding(source), self.embedding(target)
        for block in self.encoder:
            memory = block(memory, None, source_mask, None)
        for block in self.decoder:
            x = block(x, memory, target_mask, source_mask)
        return F.log_softmax(self.head(x), dim=-1)


def sentences() -> tuple[Tensor, Tensor]:
    source, target = torch.randint(1, 17, (B, T)), torch.randint(1, 17, (B, T))
    source[1, 4:], target[0, 3:] = 0, 0
    return source, target


class Convolutions(nn.Module):
    """A feed-forward network of two convolutions with kernel size 1 and a residual sum in place."""

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
    """Views the result, which requires the memory layout of a convolution's output."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 1)
        return self.w_2(self.activation(self.w_1(x))).view(B, M * T)
