"""The ops of a replaced module: the backend of each, and the reasons why some are not fused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .. import nn
from .._explain import explain
from ..dispatch import Explanation
from ..nn import fusion
from ..nn.drop_in import DropIn
from ..nn.fusion import Part
from ..nn.int8 import INT8, Int8Weight
from ..ops.layer_norm import NORMS
from .private_names import NAME_OF_ATTENTION
from .report import BATCH, LENGTH

#: Number of rows in the calls for which the report names backends.
ROWS = BATCH * LENGTH


class Op(NamedTuple):
    """A fused op: modules it replaces, dropout, and activation (name, value, lookup)."""

    name: str
    parts: list[Part]
    dropout_p: float
    activation: tuple[str, Any, Callable[[Any], str | None]] | None = None

    def why_not(self) -> str | None:
        """Returns the reason why the op cannot be fused, or None."""
        reason = next((r for part in self.parts if (r := part.why_called())), None)
        if reason is not None or self.activation is None:
            return None if reason is None else f"its {reason}"
        name, value, name_of = self.activation
        if name_of(value) is not None:
            return None
        is_module = isinstance(value, torch.nn.Module)
        kind = fusion.a_kind(value) if is_module else getattr(value, "__name__", repr(value))
        return f"its {name} is {kind}, which no kernel supports"

    def example(self, x: Callable[..., Tensor], training: bool) -> Example:
        p = {"dropout_p": self.dropout_p if training else 0.0}
        if self.activation is None:
            norm = self.parts[0].module
            shape, rows = norm.normalized_shape, x(ROWS, *norm.normalized_shape)
            return self.name, (rows, rows, shape, norm.weight, norm.bias), p
        layers = [fusion.affine(part.module) for part in self.parts if part.kinds is fusion.LINEAR]
        _, value, name_of = self.activation
        options = {"activation": name_of(value), **(p if len(layers) == 2 else {})}
        return example_of(self.name, x, options, *layers)


#: An op and the arguments of an example call.
Example = tuple[str, tuple[Any, ...], dict[str, Any]]


def example_of(
    op: str, x: Callable[..., Tensor], options: dict[str, Any], *layers: tuple[Any, Any]
) -> Example:
    """Returns a call of linear or feed_forward with the weights and biases of these layers."""
    if all(isinstance(weight, Int8Weight) for weight, _ in layers):
        options.pop("dropout_p", None)
        op, layers = f"int8_{op}", tuple((w.values, w.scale, bias) for w, bias in layers)  # type: ignore[misc]
    elif any(isinstance(weight, Int8Weight) for weight, _ in layers):
        return example_of(
            "linear", x, {}, *(each for each in layers if isinstance(each[0], Int8Weight))
        )
    return op, (x(ROWS, layers[0][0].shape[1]), *(t for layer in layers for t in layer)), options


class FusedLayer(DropIn):
    """A layer class that lists its fused ops."""

    def _fused(self) -> list[Op]:
        return []

    def _in_parts(self) -> dict[str, str]:
        return _why_not(self._fused())

    def _examples(self, x: Callable[..., Tensor], training: bool) -> list[Example]:
        return [op.example(x, training) for op in self._fused() if op.why_not() is None]


_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def in_parts(module: torch.nn.Module) -> dict[str, str]:
    """Returns the reason for each op that the module cannot fuse."""
    return module._in_parts() if isinstance(module, FusedLayer) else _why_not(_fused(module))


def _why_not(ops: list[Op]) -> dict[str, str]:
    return {op.name: reason for op in ops if (reason := op.why_not()) is not None}


def explain_parts(module: torch.nn.Module) -> tuple[dict[str, Explanation], dict[str, Explanation]]:
    """Returns, for each op of the module, the backend in inference and the one in training."""
    parameters = torch.nn.Module.parameters(module)
    weight = next((p for p in parameters if is_lazy(p) or p.is_floating_point()), None)
    if weight is None or is_lazy(weight):
        return {}, {}
    found: list[dict[str, Explanation]] = []
    for training in (False, True):
        if training and any(INT8 in m.__dict__ for m in torch.nn.Module.modules(module)):
            found.append({})  # int8 modules raise in training
            continue
        with torch.set_grad_enabled(training):
            examples = _examples(module, weight.detach(), training)
            found.append({example[0]: _explain(*example) for example in examples})
    return found[0], found[1]


def _explain(op: str, args: tuple[Any, ...], options: dict[str, Any]) -> Explanation:
    try:
        return explain(op, *args, **options)
    except Exception as error:  # such as mixed weight dtypes, which need autocast
        return Explanation(op, None, {}, f"this call raises {type(error).__name__} ({error})")


def _examples(module: Any, like: Tensor, training: bool) -> list[Example]:
    def x(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=like.dtype, device=like.device, requires_grad=training)

    def attention(heads: Tensor, p: float) -> Example:
        return "attention", (heads,) * 3, {"dropout_p": p if training else 0.0}

    if is_model(module):
        p = getattr(module.config, "attention_dropout", None)
        return [attention(x(BATCH, 8, LENGTH, 64), float(p or 0.0))]
    for op, norm in NORMS.items():
        if isinstance(module, norm.module):
            shape: Any = module.normalized_shape
            biases = (module.bias,) if norm.has_bias else ()
            return [(op, (x(ROWS, *shape), shape, module.weight, *biases), {})]
    if isinstance(module, torch.nn.Linear):
        return [example_of("linear", x, {}, fusion.affine(module))]
    if isinstance(module, torch.nn.MultiheadAttention):
        width, heads = module.embed_dim, x(BATCH, module.num_heads, LENGTH, module.head_dim)
        weight, bias = (x(width, width), None)
        if INT8 in module.__dict__:
            weight, bias = fusion.affine(module, module.__dict__[INT8].names[0], "in_proj_bias")
            bias = None if bias is None else bias[: weight.shape[0]]
        return [example_of("linear", x, {}, (weight, bias)), attention(heads, module.dropout)]
    if isinstance(module, FusedLayer):
        return module._examples(x, training)
    return [op.example(x, training) for op in _fused(module) if op.why_not() is None]


def _fused(module: Any) -> list[Op]:
    """Returns the fused ops of a layer."""
    if isinstance(module, _LAYERS):
        norms = "norm1 norm2 norm3" if isinstance(module, _LAYERS[1]) else "norm1 norm2"
        linears = parts(module, "linear1 linear2", fusion.LINEAR)
        linears += parts(module, "dropout", fusion.DROPOUT)
        activation = "activation", module.activation, fusion.activation_name
        return [
            Op(
                "add_layer_norm",
                parts(module, norms, fusion.LAYER_NORM),
                dropout_p(module.dropout1),
            ),
            Op("feed_forward", linears, dropout_p(module.dropout), activation),
        ]
    return []


def parts(module: torch.nn.Module, names: str, kinds: tuple[type, ...]) -> list[Part]:
    return [Part(name, getattr(module, name), kinds) for name in names.split()]


def dropout_p(dropout: Any) -> float:
    return float(getattr(dropout, "p", 0.0))


#: Name of our attention in the registries of transformers, which users may name as well.
NAME = "transformer_fast"


def is_ours(config: Any) -> bool:
    """True if the config names our attention, set by `accelerate` or by the user."""
    return bool(getattr(config, NAME_OF_ATTENTION, None) == NAME)


def is_model(module: torch.nn.Module) -> bool:
    """True for a model of transformers, whether the root or nested in another."""
    loaded = sys.modules.get("transformers.modeling_utils")
    return loaded is not None and isinstance(module, loaded.PreTrainedModel)
