"""Which backend the ops of a swapped module run on, asked with tensors of the module's kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import nn
from .._explain import explain
from ..dispatch import Explanation
from ..nn import bypass
from .hugging_face import models

#: An op and the arguments of a small call of it.
_Example = tuple[str, tuple[Any, ...], dict[str, Any]]


def who_runs(module: torch.nn.Module) -> tuple[dict[str, Explanation], dict[str, Explanation]]:
    """For each op that the module calls: who runs it without gradients, and with them."""
    weight = next(module.parameters(recurse=False), None)
    if weight is None:
        weight = next(module.parameters(), None)
    if weight is None or not weight.is_floating_point():
        return {}, {}
    device = weight.device
    # Explaining a call with dropout draws a seed; the user's random numbers stay as they were.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        with torch.no_grad():
            inference = _explain_all(_examples(module, weight.detach(), dropout=False))
        with torch.enable_grad():
            training = _explain_all(_examples(module, weight.detach(), dropout=True))
    return inference, training


def _explain_all(examples: list[_Example]) -> dict[str, Explanation]:
    return {op: explain(op, *args, **kwargs) for op, args, kwargs in examples}


def _examples(module: torch.nn.Module, like: Tensor, dropout: bool) -> list[_Example]:
    def x(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=like.dtype, device=like.device, requires_grad=dropout)

    if models.is_model(module):
        heads = x(1, 1, 1, 64)
        found: Any = getattr(module.config, "attention_dropout", 0.0)
        return [("attention", (heads,) * 3, {"dropout_p": float(found) if dropout else 0.0})]
    if isinstance(module, torch.nn.LayerNorm):
        shape = module.normalized_shape
        return [("layer_norm", (x(1, *shape), shape, module.weight, module.bias), {})]
    if isinstance(module, torch.nn.MultiheadAttention):
        heads = x(1, module.num_heads, 1, module.head_dim)
        p = {"dropout_p": module.dropout if dropout else 0.0}
        width = module.embed_dim
        return [
            ("linear", (x(1, width), x(width, width)), {}),
            ("attention", (heads, heads, heads), p),
        ]
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return _of_layer(module, x, dropout)
    return []


def _of_layer(module: Any, x: Any, dropout: bool) -> list[_Example]:
    examples: list[_Example] = []
    norm, linear1, linear2 = module.norm1, module.linear1, module.linear2
    if bypass.is_plain(norm, bypass.LAYER_NORM):
        shape = norm.normalized_shape
        p = {"dropout_p": module.dropout1.p if dropout else 0.0}
        rows = x(1, *shape)
        examples.append(("add_layer_norm", (rows, rows, shape, norm.weight, norm.bias), p))
    name = bypass.activation_name(module.activation)
    if name is not None and all(bypass.is_plain(m, bypass.LINEAR) for m in (linear1, linear2)):
        p = {"dropout_p": module.dropout.p if dropout else 0.0}
        weights = (linear1.weight, linear1.bias, linear2.weight, linear2.bias)
        call = (x(1, linear1.in_features), *weights)
        examples.append(("feed_forward", call, {**p, "activation": name}))
    return examples
