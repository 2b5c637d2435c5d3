"""What the tests of `accelerate` share: models, inputs, and the error budget of two runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

B, T, S, M, H, F = 3, 7, 5, 16, 4, 24


def hidden(batch: int, length: int) -> Tensor:
    """A key padding mask of torch.nn's polarity; every sequence has a first token."""
    mask = torch.zeros(batch, length, dtype=torch.bool)
    mask[1, length - 2 :] = True
    mask[2, 1:] = True
    return mask


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def encoder_layer(**kwargs: Any) -> torch.nn.TransformerEncoderLayer:
    return torch.nn.TransformerEncoderLayer(M, H, F, batch_first=True, **kwargs)


def decoder_layer(**kwargs: Any) -> torch.nn.TransformerDecoderLayer:
    return torch.nn.TransformerDecoderLayer(M, H, F, batch_first=True, **kwargs)


def encoder(**kwargs: Any) -> torch.nn.TransformerEncoder:
    layer = encoder_layer(**kwargs)
    return torch.nn.TransformerEncoder(layer, 2, torch.nn.LayerNorm(M), enable_nested_tensor=False)


class TextModel(torch.nn.Module):
    """A user's model: embeddings, torch.nn.Transformer with all its masks, a head."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, M)
        self.transformer = torch.nn.Transformer(M, H, 2, 2, F, batch_first=True, **kwargs)
        self.head = torch.nn.Sequential(torch.nn.LayerNorm(M), torch.nn.Linear(M, 11))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        decoded = self.transformer(
            self.embedding(source),
            self.embedding(target),
            tgt_mask=causal(length),
            src_key_padding_mask=source == 0,
            tgt_key_padding_mask=target == 0,
            memory_key_padding_mask=source == 0,
            tgt_is_causal=True,
        )
        # What stands at padded places is nobody's business, and differs by mode in torch itself.
        return self.head(decoded) * (target != 0).unsqueeze(-1)


def tokens() -> tuple[Tensor, Tensor]:
    source, target = torch.randint(1, 11, (B, S)), torch.randint(1, 11, (B, T))
    source[1, 3:], source[2, 1:], target[0, 4:], target[2, 2:] = 0, 0, 0, 0
    return source, target


#: Modules as users have them, and inputs for them.
MODELS: dict[str, Callable[[], tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]]] = {
    "LayerNorm": lambda: (torch.nn.LayerNorm((T, M), bias=False), (torch.randn(B, T, M),), {}),
    "MultiheadAttention": lambda: (
        torch.nn.MultiheadAttention(M, H, batch_first=True),
        (torch.randn(B, T, M), torch.randn(B, S, M), torch.randn(B, S, M)),
        {"key_padding_mask": hidden(B, S)},
    ),
    "attention, biases": lambda: (
        torch.nn.MultiheadAttention(M, H, kdim=6, vdim=8, add_bias_kv=True, add_zero_attn=True),
        (torch.randn(T, B, M), torch.randn(S, B, 6), torch.randn(S, B, 8)),
        {"need_weights": False},
    ),
    "encoder layer": lambda: (
        encoder_layer(dropout=0.0),
        (torch.randn(B, T, M),),
        {"src_key_padding_mask": hidden(B, T)},
    ),
    "encoder layer, norm first": lambda: (
        encoder_layer(dropout=0.0, norm_first=True, activation="gelu"),
        (torch.randn(B, T, M),),
        {"src_mask": causal(T), "is_causal": True},
    ),
    "decoder layer": lambda: (
        decoder_layer(dropout=0.0),
        (torch.randn(B, T, M), torch.randn(B, S, M)),
        {"tgt_mask": causal(T), "memory_key_padding_mask": hidden(B, S)},
    ),
    "encoder": lambda: (encoder(dropout=0.0), (torch.randn(B, T, M),), {"mask": causal(T)}),
    "transformer": lambda: (
        torch.nn.Transformer(M, H, 1, 1, F, dropout=0.0, norm_first=True),
        (torch.randn(S, B, M), torch.randn(T, B, M)),
        {"tgt_mask": torch.nn.Transformer.generate_square_subsequent_mask(T)},
    ),
    "text model": lambda: (TextModel(dropout=0.0), tokens(), {}),
}


def _run(model: torch.nn.Module, args: Any, kwargs: Any, grad: bool) -> list[Tensor]:
    """Outputs, and behind them (if wanted) the gradients of all parameters."""
    with torch.set_grad_enabled(grad):
        outputs = [x for x in tree_leaves(model(*args, **kwargs)) if isinstance(x, Tensor)]
    if not grad:
        return outputs
    weights = [torch.linspace(0.5, 1.5, x.numel()).view(x.shape) for x in outputs]
    total = sum(((x * w).sum() for x, w in zip(outputs, weights, strict=True)), torch.zeros(()))
    wanted = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(total, wanted, allow_unused=True)
    return [x.detach() for x in outputs] + [
        torch.zeros_like(p) if g is None else g for g, p in zip(grads, wanted, strict=True)
    ]


def _error(got: list[Tensor], oracle: list[Tensor]) -> float:
    assert [x.shape for x in got] == [x.shape for x in oracle]
    largest = max(x.abs().max().item() for x in oracle)
    return max((x - y).abs().max().item() for x, y in zip(got, oracle, strict=True)) / largest


def assert_same_numbers(
    ours: torch.nn.Module, theirs: torch.nn.Module, args: Any, kwargs: Any, grad: bool
) -> None:
    """Ours is at most three times as far from fp64 as theirs, plus one rounding."""

    def double(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    oracle = _run(copy.deepcopy(theirs).double(), *tree_map(double, (args, kwargs)), grad)
    got, expected = _run(ours, args, kwargs, grad), _run(theirs, args, kwargs, grad)
    assert all(torch.isfinite(x).all() for x in got)
    allowed = 3 * _error(expected, oracle) + torch.finfo(torch.float32).eps
    assert _error(got, oracle) <= allowed
