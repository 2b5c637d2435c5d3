"""Attention, norms and Transformers in the ways that people write them; nothing here is ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, H, T, D, M = 2, 4, 6, 8, 32

Attend = Callable[[Tensor, Tensor, Tensor, Any, float, bool], Any]


def padding(keep: bool = True) -> Tensor:
    """(B, 1, 1, T); the second sequence has 4 tokens."""
    mask = torch.ones(B, 1, 1, T, dtype=torch.bool)
    mask[1, ..., 4:] = False
    return mask if keep else ~mask


def causal() -> Tensor:
    return torch.ones(T, T, dtype=torch.bool).tril()


def both() -> Tensor:
    return padding() & causal()


def with_blind_rows() -> Tensor:
    """(B, 1, T, T) in which some queries see nothing."""
    mask = both().clone()
    mask[0, 0, 2] = False
    mask[1, 0, :3] = False
    return mask


def divided(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    weights = F.dropout(scores.softmax(dim=-1), p, training)
    return torch.matmul(weights, v), weights


def multiplied(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(mask[..., :T, :T] == 0, float("-inf"))
    return F.dropout(F.softmax(scores, dim=-1), p, training) @ v


def scaled_first(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
    q = q * q.shape[-1] ** -0.25
    k = k / math.sqrt(math.sqrt(k.shape[-1]))
    scores = torch.where(mask, q @ k.mT, -1e9)
    return torch.softmax(scores, -1) @ v


def einsum(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, T, H, D)
    energy = torch.einsum("nqhd,nkhd->nhqk", [q, k])
    if mask is not None:
        energy = energy.masked_fill(mask == 0, float("-1e20"))
    weights = torch.softmax(energy / (M ** (1 / 2)), dim=3)
    return torch.einsum("nhql,nlhd->nqhd", [weights, v]).transpose(1, 2)


def einsum_in_place(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
    dots = torch.einsum("b h i d, b h j d -> b h i j", q, k) * D**-0.5
    dots.masked_fill_(~mask, -torch.finfo(dots.dtype).max)
    weights = dots.softmax(dim=-1)
    return torch.einsum("b h i j, b h j d -> b h i d", weights, v)


def added_large(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
    scores = torch.matmul(q, k.transpose(2, 3)) / torch.sqrt(torch.tensor(float(D)))
    scores += (1.0 - mask.float()) * -10000.0
    weights = nn.Softmax(dim=-1)(scores)
    return torch.matmul(weights, v), weights


def added_infinite(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
    hidden = torch.triu(torch.full((T, T), float("-inf")), diagonal=1)
    scores = q.matmul(k.permute(0, 1, 3, 2)).div(math.sqrt(D)).add(hidden)
    return F.dropout(scores.softmax(-1), p=p, training=training).matmul(v)


def batched(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    attn = torch.bmm(q, k.transpose(1, 2)) / D**0.5
    attn = attn.masked_fill(~mask.expand(B, H, T, T).reshape(B * H, T, T), -1e10)
    attn = F.dropout(F.softmax(attn, dim=2), p, training)
    return torch.bmm(attn, v).view(B, H, T, D), attn


def added_product(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    bias = torch.zeros(B * H, T, T, dtype=q.dtype)
    bias = bias.masked_fill(~mask.expand(B, H, T, T).reshape(-1, T, T), -1e4)
    attn = F.softmax(torch.baddbmm(bias, q * D**-0.5, k.transpose(-2, -1)), dim=-1)
    return torch.bmm(attn, v).view(B, H, T, D)


def weights_before_dropout(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool
) -> Any:
    scale = torch.sqrt(torch.FloatTensor([D]))
    energy = torch.matmul(q, k.permute(0, 1, 3, 2)) / scale
    energy = energy.masked_fill(mask == 0, -1e10)
    attention = torch.softmax(energy, dim=-1)
    return torch.matmul(F.dropout(attention, p, training), v), attention


def two_fills(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
    scores = q @ k.transpose(-1, -2) / math.sqrt(D)
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -1e9)
    scores = scores.masked_fill(mask.logical_not(), -1e9)
    return scores.softmax(-1) @ v


def in_fp32(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
    scores = torch.matmul(q, k.transpose(2, 3)) * D**-0.5
    scores = torch.where(mask.bool(), scores, torch.tensor(-1e9))
    weights = F.softmax(scores.float(), dim=-1, dtype=torch.float32).type_as(scores)
    return torch.matmul(weights, v).contiguous()


def by_rows(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
    """Masks a matrix of all rows in place, as textbooks with valid lengths do."""
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(D)
    lengths = mask.expand(B, H, T, T).sum(-1).reshape(-1)  # of each query's keys
    rows = scores.reshape(-1, T)
    seen = torch.arange(T)[None, :] < lengths[:, None]
    rows[~seen] = -1e6
    weights = F.softmax(rows.reshape(scores.shape), dim=-1)
    return torch.bmm(F.dropout(weights, p, training), v).reshape(B, H, T, D)


class Biased(nn.Module):
    """Learned relative positions are added before the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, H, T, T))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(D) + self.bias
        return scores.masked_fill(~mask, -1e9).softmax(-1) @ v


class Single(nn.Module):
    """One head, no head dimension; scaled by the width, a mask kept as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tril", torch.tril(torch.ones(16, 16)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, training: bool) -> Any:
        q, k, v = (x.transpose(1, 2).reshape(B, T, H * D) for x in (q, k, v))
        wei = q @ k.transpose(-2, -1) * M**-0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = F.dropout(F.softmax(wei, dim=-1), p, training)
        return (wei @ v).reshape(B, T, H, D).transpose(1, 2)


class Attention(nn.Module):
    """Projections around one of the ways to attend."""

    def __init__(self, attend: Attend, p: float = 0.0) -> None:
        super().__init__()
        self.attend = attend
        self.query, self.key, self.value, self.out = (nn.Linear(M, M) for _ in range(4))
        self.p = p

    def forward(self, x: Tensor, memory: Tensor, mask: Any) -> Any:
        def heads(y: Tensor) -> Tensor:
            return y.view(B, -1, H, D).transpose(1, 2)

        q, k, v = heads(self.query(x)), heads(self.key(memory)), heads(self.value(memory))
        found = self.attend(q, k, v, mask, self.p, self.training)
        context, weights = found if isinstance(found, tuple) else (found, None)
        context = context.transpose(1, 2).contiguous().view(B, -1, M)
        return (self.out(context), weights) if weights is not None else self.out(context)


def annotated_norm(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    std = x.std(-1, keepdim=True)
    return a * (x - mean) / (std + 1e-6) + b


def biased_std(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    mean, std = x.mean(dim=-1, keepdim=True), torch.std(x, dim=-1, unbiased=False, keepdim=True)
    return (x - mean) / (std + 1e-3) * a + b


def root_outside(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    centred = x - x.mean(2, keepdim=True)
    return b + a * (centred / (x.var(-1, keepdim=True).sqrt() + 1e-5))


def variance(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    mean, var = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
    return a * ((x - mean) / torch.sqrt(var + 1e-12)) + b


def mean_of_squares(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    u = x.mean(-1, keepdim=True)
    s = (x - u).pow(2).mean(-1, keepdim=True)
    return a * (x - u) * torch.rsqrt(s + 1e-5) + b


def unbiased_variance(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True)
    return (x - mean) / (var + 1e-1) ** 0.5 * a + b


def without_affine(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-2)


class Norm(nn.Module):
    def __init__(self, norm: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = norm
        self.gain, self.shift = nn.Parameter(torch.randn(M)), nn.Parameter(torch.randn(M))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.gain, self.shift)


def new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


def exact_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def gelu_over_x(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * x * (1.0 + 0.044715 * x * x)))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "relu method": lambda x: x.relu(),
    "clamped": lambda x: x.clamp(min=0),
    "relu in place": nn.ReLU(inplace=True),
    "gelu": F.gelu,
    "gelu tanh": nn.GELU("tanh"),
    "silu": F.silu,
    "swish": lambda x: x * torch.sigmoid(x),
    "gelu by hand": exact_gelu,
    "gelu tanh by hand": new_gelu,
    "gelu over x": gelu_over_x,
}


class FeedForward(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor] = F.relu, p: float = 0.0) -> None:
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(M, 2 * M), nn.Linear(2 * M, M)
        self.dropout, self.activation = nn.Dropout(p), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(self.dropout(self.activation(self.w_1(x))))


class Block(nn.Module):
    """An encoder or decoder layer, norms behind or in front."""

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
    """An encoder-decoder, the Annotated Transformer's way: tokens, masks, everything."""

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
    "no mask": (lambda: divided, lambda: None),
    "divided, (B, 1, 1, T)": (lambda: divided, padding),
    "divided, (T, T)": (lambda: divided, lambda: causal().int()),
    "divided, (B, 1, T, T)": (lambda: divided, lambda: both().float()),
    "divided, rows that see nothing": (lambda: divided, with_blind_rows),
    "multiplied": (lambda: multiplied, lambda: causal()[None, None]),
    "scaled first": (lambda: scaled_first, with_blind_rows),
    "einsum": (lambda: einsum, with_blind_rows),
    "einsum in place": (lambda: einsum_in_place, both),
    "added, large": (lambda: added_large, with_blind_rows),
    "added, infinite": (lambda: added_infinite, lambda: None),
    "bmm": (lambda: batched, with_blind_rows),
    "baddbmm": (lambda: added_product, with_blind_rows),
    "weights before dropout": (lambda: weights_before_dropout, padding),
    "two fills": (lambda: two_fills, padding),
    "in fp32": (lambda: in_fp32, lambda: both().int()),
    "rows of a matrix": (lambda: by_rows, both),
    "learned bias": (Biased, with_blind_rows),
    "one head": (Single, lambda: None),
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


NORMS = {
    f.__name__: f
    for f in (
        annotated_norm, biased_std, root_outside, variance, mean_of_squares, unbiased_variance,
        without_affine, var_and_mean, std_and_mean, put_back,
    )
}  # fmt: skip


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
