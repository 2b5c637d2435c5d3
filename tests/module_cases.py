"""Modules that torch.nn and ours have, and example calls, for tests that hold for every module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

B, T, S, M, H, F = 3, 7, 5, 32, 4, 48


class Case(NamedTuple):
    """``make`` takes torch.nn or ours, and returns the module."""

    make: Callable[[Any], torch.nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    masks: Mapping[str, Any] = MappingProxyType({})


def hidden(batch: int, length: int) -> Tensor:
    """A key padding mask with torch.nn's polarity; every sequence has at least one token."""
    mask = torch.zeros(batch, length, dtype=torch.bool)
    mask[1, length - 2 :] = True
    mask[2, 1:] = True
    return mask


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def x(length: int = T, size: int = M) -> Tensor:
    return torch.randn(B, length, size)


def _alone() -> tuple[Tensor, ...]:
    return (x(),)


def _thrice() -> tuple[Tensor, ...]:
    return (x(),) * 3


def _with_memory() -> tuple[Tensor, ...]:
    return x(), x(S)


def _attention(heads: int = H, **options: Any) -> Callable[[Any], torch.nn.Module]:
    options = {"batch_first": True, **options}
    return lambda nn: nn.MultiheadAttention(M, heads, **options)  # type: ignore[no-any-return]


def _layer(kind: str, **options: Any) -> Callable[[Any], torch.nn.Module]:
    options = {"dropout": 0.0, "batch_first": True, **options}
    return lambda nn: getattr(nn, f"Transformer{kind}Layer")(M, H, F, **options)  # type: ignore[no-any-return]


def _stack(kind: str, norm: bool = False, **options: Any) -> Callable[[Any], torch.nn.Module]:
    layer = _layer(kind, **options)
    return lambda nn: getattr(nn, f"Transformer{kind}")(  # type: ignore[no-any-return]
        layer(nn), 2, nn.LayerNorm(M) if norm else None
    )


def _transformer(**options: Any) -> Callable[[Any], torch.nn.Module]:
    options = {"dropout": 0.0, "batch_first": True, **options}
    return lambda nn: nn.Transformer(M, H, 1, 1, F, **options)  # type: ignore[no-any-return]


_OF_SOURCE = ("src_key_padding_mask", "memory_key_padding_mask")
_FUTURE = {"tgt_mask": causal(T), "tgt_is_causal": True}
CASES: dict[str, Case] = {
    "Linear": Case(lambda nn: nn.Linear(M, F), _alone),
    "Linear, no bias": Case(lambda nn: nn.Linear(M, F, bias=False), _alone),
    "LayerNorm": Case(lambda nn: nn.LayerNorm(M), _alone),
    "LayerNorm, two dimensions": Case(lambda nn: nn.LayerNorm((T, M), bias=False), _alone),
    "LayerNorm, no parameters": Case(lambda nn: nn.LayerNorm(M, elementwise_affine=False), _alone),
    "RMSNorm": Case(lambda nn: nn.RMSNorm((T, M), 1e-4), _alone),
    "RMSNorm, no parameters": Case(lambda nn: nn.RMSNorm(M, elementwise_affine=False), _alone),
    "attention": Case(_attention(), _thrice),
    "attention, length first": Case(_attention(batch_first=False), _thrice),
    "attention, no bias": Case(_attention(bias=False), _thrice),
    "attention, one head": Case(_attention(1), _thrice),
    "attention, keys added": Case(_attention(add_bias_kv=True, add_zero_attn=True), _thrice),
    "attention, other sizes": Case(
        _attention(kdim=6, vdim=8, add_bias_kv=True, add_zero_attn=True),
        lambda: (x(), x(S, 6), x(S, 8)), {"need_weights": False},
    ),
    "attention, padding": Case(
        _attention(), lambda: (x(), x(S), x(S)), {"key_padding_mask": hidden(B, S)}
    ),
    "encoder layer": Case(_layer("Encoder"), _alone),
    "encoder layer, pre-norm": Case(_layer("Encoder", norm_first=True, activation="gelu"), _alone),
    "encoder layer, length first": Case(_layer("Encoder", batch_first=False), _alone),
    "encoder layer, SiLU": Case(_layer("Encoder", activation=torch.nn.functional.silu), _alone),
    "encoder layer, no bias": Case(_layer("Encoder", bias=False), _alone),
    "encoder layer, padding": Case(
        _layer("Encoder"), _alone, {"src_key_padding_mask": hidden(B, T)}
    ),
    "encoder layer, causal": Case(
        _layer("Encoder", norm_first=True), _alone, {"src_mask": causal(T), "is_causal": True}
    ),
    "decoder layer": Case(_layer("Decoder"), _with_memory),
    "decoder layer, pre-norm": Case(
        _layer("Decoder", norm_first=True, activation="gelu"), _with_memory
    ),
    "decoder layer, masks": Case(
        _layer("Decoder"), _with_memory, {**_FUTURE, "memory_key_padding_mask": hidden(B, S)}
    ),
    "encoder": Case(_stack("Encoder"), _alone),
    "encoder, length first": Case(_stack("Encoder", batch_first=False), _alone),
    "encoder, pre-norm": Case(_stack("Encoder", norm_first=True), _alone),
    "encoder, norm, causal": Case(_stack("Encoder", norm=True), _alone, {"mask": causal(T)}),
    "decoder": Case(_stack("Decoder"), _with_memory),
    "Transformer": Case(_transformer(), _with_memory),
    "Transformer, masks": Case(
        _transformer(norm_first=True), lambda: (x(S), x()),
        {**_FUTURE, **dict.fromkeys(_OF_SOURCE, hidden(B, S))},
    ),
}  # fmt: skip
#: Cases without masks; PyTorch's RMSNorm has other code paths.
PLAIN = [name for name, case in CASES.items() if not case.masks and "RMS" not in name]
