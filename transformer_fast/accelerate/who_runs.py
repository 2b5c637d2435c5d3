"""Which backend the ops of a swapped module run on, asked with tensors of the module's kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import nn
from .._explain import explain
from ..dispatch import Explanation
from ..nn import bypass
from ..nn.swapped import Swapped
from .hugging_face import layers, models
from .in_parts import in_parts

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


def _examples(module: Any, like: Tensor, dropout: bool) -> list[_Example]:
    def x(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=like.dtype, device=like.device, requires_grad=dropout)

    if models.is_model(module):
        heads = x(1, 1, 1, 64)
        found: Any = getattr(module.config, "attention_dropout", 0.0)
        return [("attention", (heads,) * 3, {"dropout_p": float(found) if dropout else 0.0})]
    if isinstance(module, Swapped) and type(module).__mro__[1].__module__ == layers.__name__:
        return _of_theirs(module, x, dropout)
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
    found = _add_norm(module.norm1, x, module.dropout1.p if dropout else 0.0)
    name = bypass.activation_name(module.activation)
    p = module.dropout.p if dropout else 0.0
    return found + _feed_forward(module.linear1, module.linear2, name, x, p)


def _of_theirs(module: Any, x: Any, dropout: bool) -> list[_Example]:
    """Of a layer of transformers."""
    theirs = module  # of no class that the type checker knows
    if isinstance(module, layers._PostNorm):
        found = _add_norm(theirs.final_layer_norm, x, theirs.dropout if dropout else 0.0)
        name = layers.activation_name(theirs.activation_fn)
        p = theirs.activation_dropout if dropout else 0.0
        return found + _feed_forward(theirs.fc1, theirs.fc2, name, x, p)
    if isinstance(module, layers.Output):
        return _add_norm(theirs.LayerNorm, x, theirs.dropout.p if dropout else 0.0)
    if isinstance(module, layers.T5DenseActDense):
        p = theirs.dropout.p if dropout else 0.0
        return _feed_forward(theirs.wi, theirs.wo, layers.activation_name(theirs.act), x, p)
    if isinstance(module, layers.BertLayer) and not in_parts(module):
        name = layers.activation_name(theirs.intermediate.intermediate_act_fn)
        return _feed_forward(theirs.intermediate.dense, theirs.output.dense, name, x, 0.0)
    return []


def _add_norm(norm: Any, x: Any, p: float) -> list[_Example]:
    if not bypass.is_plain(norm, bypass.LAYER_NORM):
        return []
    shape, rows = norm.normalized_shape, x(1, *norm.normalized_shape)
    call = (rows, rows, shape, norm.weight, norm.bias)
    return [("add_layer_norm", call, {"dropout_p": p})]


def _feed_forward(first: Any, second: Any, name: str | None, x: Any, p: float) -> list[_Example]:
    if name is None or not all(bypass.is_plain(m, bypass.LINEAR) for m in (first, second)):
        return []
    call = (x(1, first.in_features), first.weight, first.bias, second.weight, second.bias)
    return [("feed_forward", call, {"activation": name, "dropout_p": p})]
