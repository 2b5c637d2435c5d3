"""Fusion of inner modules, and reading of Transformer layers, torch.nn's and ours.

A module that is hooked, replaced, parametrised, quantised or compiled on its own is called. A layer is
read only if calling its modules would do nothing else; `Unreadable` gives the reason why not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import _has_any_global_hook

from .. import functional
from .._context import function_mode_is_active, is_observed
from ..recipe import Kind, NormKind
from .drop_in import is_patched, note_methods
from .int8 import INT8, Weight, run_feed_forward, run_linear
from .ops import LayerNorm, Linear

LINEAR = (Linear, torch.nn.Linear, NonDynamicallyQuantizableLinear)
LAYER_NORM = (LayerNorm, torch.nn.LayerNorm)
DROPOUT = (torch.nn.Dropout,)
_DROPOUT = (*DROPOUT, torch.nn.Identity)
_ACTIVATIONS = (torch.nn.ReLU, torch.nn.SiLU, torch.nn.GELU)
for _kind in (*LINEAR[1:], *LAYER_NORM[1:], *_DROPOUT, *_ACTIVATIONS):
    note_methods(_kind)
#: Names of an encoder layer's attentions, norms, dropouts and overridable methods, and a decoder's.
_ENCODER = (
    torch.nn.TransformerEncoderLayer, ("self_attn",), ("norm1", "norm2"), ("dropout1", "dropout2"),
    ("_sa_block",),
)  # fmt: skip
_DECODER = (
    torch.nn.TransformerDecoderLayer, ("self_attn", "multihead_attn"), ("norm1", "norm2", "norm3"),
    ("dropout1", "dropout2", "dropout3"), ("_sa_block", "_mha_block"),
)  # fmt: skip


class Part(NamedTuple):
    """A child module, and the classes whose forward a fused op may replace."""

    name: str
    module: Any
    kinds: tuple[type, ...]

    def why_called(self) -> str | None:
        """Returns the reason why the module must be called and cannot be fused, or None."""
        name, module, kinds = self
        if is_unhooked(module, kinds):
            return None
        if type(module) not in kinds:
            return f"{name} is {a_kind(module)}"
        if _has_any_global_hook():
            return "modules have global hooks"
        if "forward" in module.__dict__:
            return f"{name} has a forward that was replaced on the instance"
        if is_patched(type(module)):
            return f"{name} is {a_kind(module)}, whose forward was replaced on the class"
        if is_observed():
            return "calls are observed by a TorchFunctionMode"
        if module._compiled_call_impl is not None:
            return f"{name} is compiled on its own"
        return f"{name} has hooks"


class Unreadable(Exception):  # noqa: N818 - a reason, not an error
    """Raised with the reason why a layer must be called: "<its part> is ..."."""


class Norm(NamedTuple):
    """A norm; if ``module`` is not None, it must be called instead."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    module: torch.nn.Module | None
    kind: int = NormKind.LAYER


NO_NORM = Norm(None, None, 0.0, None, NormKind.NONE)


class Sublayer(NamedTuple):
    """A sub-layer and the norm before it (pre-norm) or after it.

    Attention: weight1 (3 M, M) projects queries, keys and values, weight2 (M, M) the output. Feed-forward
    network: weight1 (F, M), weight2 (M, F). Queries and keys: weight1 and weight2 (M, M), without a norm.
    """

    kind: Kind
    weight1: Weight
    bias1: Tensor | None
    weight2: Weight
    bias2: Tensor | None
    norm: Norm
    #: Attention only.
    heads: int = 0
    batch_first: bool = False

    def of_query(self) -> tuple[Weight, Tensor | None]:
        """Returns the query's projection, (M, M) and (M,)."""
        width = self.weight1.shape[1]
        return self.weight1[:width], None if self.bias1 is None else self.bias1[:width]


class Layer(NamedTuple):
    """An encoder layer or a decoder layer."""

    module: torch.nn.Module
    #: Self-attention, cross-attention (decoder layers), and the feed-forward network unless left out.
    sublayers: list[Sublayer]
    norm_first: bool
    #: The network's activation, by name if kernels support it.
    activation: str | Callable[[Tensor], Tensor] | None
    #: Largest probability of the dropouts that are active now.
    dropout_p: float


def is_unhooked(module: Any, classes: tuple[type, ...]) -> bool:
    """True if the module is unhooked and unmodified: calling it runs only the ``forward`` of its class,
    and nothing observes the functions that this calls."""
    return type(module) in classes and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or module._compiled_call_impl is not None
        or _has_any_global_hook()
        or is_patched(type(module))
        or (function_mode_is_active() and is_observed())
    )


def a_kind(module: Any) -> str:
    """Returns ``a Linear``, or ``a Linear of peft`` if torch.nn has a class of that name."""
    kind = type(module)
    article = "an" if kind.__name__[:1] in "AEIOU" else "a"
    package = kind.__module__.split(".")[0]
    of = f" of {package}" if package != "torch" and hasattr(torch.nn, kind.__name__) else ""
    return f"{article} {kind.__name__}{of}"


def affine(
    module: torch.nn.Module,
    weight: str = "weight",
    bias: str = "bias",
    later: list[Any] | None = None,
) -> tuple[Any, Tensor | None]:
    """Returns these parameters, a quantised weight as `Int8Weight`; ``later``: see `int8.quantized`.

    Module.__getattr__ takes ten times as long.
    """
    parameters = module._parameters
    record = module.__dict__.get(INT8)
    if record is not None and weight in record.names:
        found = record.of(module, weight, later)
        return found, parameters[bias] if bias in parameters else getattr(module, bias, None)
    if weight in parameters and bias in parameters:
        return parameters[weight], parameters[bias]
    return getattr(module, weight), getattr(module, bias)


def overridden(layer: torch.nn.Module, name: str, base: type) -> bool:
    """True if a subclass, or the instance itself, replaces the method ``name`` of ``base``."""
    return getattr(type(layer), name) is not getattr(base, name) or name in layer.__dict__


def activation_name(activation: Any) -> str | None:
    """Returns the kernels' name of an activation, or None if they do not support it."""
    if activation is torch.nn.functional.relu or activation is torch.relu:
        return "relu"
    if activation is torch.nn.functional.gelu:
        return "gelu"
    if activation is torch.nn.functional.silu:
        return "silu"
    if isinstance(activation, torch.nn.Module):
        if is_unhooked(activation, (torch.nn.ReLU,)):
            return "relu"
        if is_unhooked(activation, (torch.nn.SiLU,)):
            return "silu"
        if is_unhooked(activation, (torch.nn.GELU,)):
            return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    if (
        type(activation) is functools.partial
        and activation.func is torch.nn.functional.gelu
        and not activation.args
        and activation.keywords == {"approximate": "tanh"}
    ):
        return "gelu_tanh"
    return None


def _require_unhooked(parts: Sequence[tuple[str, Any, tuple[type, ...]]]) -> None:
    """Raises `Unreadable` unless all are `is_unhooked`; inlined, since a call for each takes longer."""
    for name, module, kinds in parts:
        if (
            type(module) not in kinds
            or module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            or "forward" in module.__dict__
            or module._compiled_call_impl is not None
        ):
            raise Unreadable(Part(name, module, kinds).why_called())
    if (
        _has_any_global_hook()
        or (function_mode_is_active() and is_observed())
        or is_patched(*{type(module) for _, module, _ in parts})
    ):
        reasons = (Part(*part).why_called() for part in parts)
        raise Unreadable(next(filter(None, reasons)))


def read_norm(module: Any, width: int) -> Norm:
    """Returns the parameters of a layer norm over ``width`` features."""
    if is_unhooked(module, LAYER_NORM) and module.normalized_shape == (width,):
        return Norm(*affine(module), module.eps, None)
    if module is None:
        raise Unreadable("norm is no module")
    return Norm(None, None, 0.0, module)


def read_layer(
    layer: Any,
    attentions: tuple[type, ...],
    network: bool = True,
    later: list[Any] | None = None,
) -> Layer:
    """Returns the parts of an encoder or decoder layer; the caller checks the layer's own class.

    Args:
        attentions: the classes that its attentions may have.
        network: False leaves the last sub-layer out.
        later: see `int8.quantized`.

    Raises:
        Unreadable: no kernel computes what the layer computes.
    """
    crossed = isinstance(layer, torch.nn.TransformerDecoderLayer)
    base, names, norms, dropouts, methods = _DECODER if crossed else _ENCODER
    methods = (*methods, "_ff_block") if network else methods
    dropouts = ("dropout", *dropouts) if network else dropouts[:-1]
    for method in methods:
        if method in layer.__dict__ or getattr(type(layer), method) is not getattr(base, method):
            raise Unreadable(f"{method} is replaced")
    # Module.__getattr__ takes ten times as long, and a dozen modules are read.
    modules: Any = layer._modules
    parts: list[tuple[str, Any, tuple[type, ...]]] = []
    for name in names:
        attention = modules.get(name)
        parts.append((name, attention, attentions))
        if type(attention) in attentions:
            parts.append((f"{name}.out_proj", attention._modules.get("out_proj"), LINEAR))
    for name in dropouts:
        parts.append((name, modules.get(name), _DROPOUT))
    if network:
        one, two = modules.get("linear1"), modules.get("linear2")
        parts += ("linear1", one, LINEAR), ("linear2", two, LINEAR)
    _require_unhooked(parts)
    width, p = modules["self_attn"].embed_dim, 0.0
    for name in dropouts:
        dropout = modules[name]
        if dropout.training and type(dropout) in DROPOUT:
            p = max(p, dropout.p)
    sublayers = []
    for kind, name, norm in zip(Kind, names, norms, strict=False):
        attention = modules[name]
        if not attention._qkv_same_embed_dim or attention.embed_dim != width:
            raise Unreadable(f"{name} has keys or values of another size")
        if attention.bias_k is not None or attention.bias_v is not None or attention.add_zero_attn:
            raise Unreadable(f"{name} appends keys")
        if attention.training:
            p = max(p, attention.dropout)
        first = affine(attention, "in_proj_weight", "in_proj_bias", later)
        last = affine(attention._modules["out_proj"], later=later)
        sublayers.append(
            Sublayer(
                kind, *first, *last, read_norm(modules.get(norm), width), attention.num_heads,  # type: ignore[arg-type]
                attention.batch_first,
            )
        )  # fmt: skip
    activation = None
    if network:
        if not width == one.in_features == two.out_features or one.out_features != two.in_features:
            raise Unreadable("linear1 and linear2 have sizes that do not fit")
        activation = activation_name(layer.activation) or layer.activation
        last_norm = read_norm(modules.get(norms[-1]), width)
        maps = (*affine(one, later=later), *affine(two, later=later))
        sublayers.append(Sublayer(Kind.FEED_FORWARD, *maps, last_norm))  # type: ignore[arg-type]
    return Layer(layer, sublayers, bool(layer.norm_first), activation, p)


def linear(module: torch.nn.Module, input: Tensor) -> Tensor:
    """Returns ``module(input)``."""
    if is_unhooked(module, LINEAR):
        return run_linear(input, *affine(module))
    return module(input)


def feed_forward(
    input: Tensor,
    linear1: torch.nn.Module,
    activation: Callable[[Tensor], Tensor],
    dropout: torch.nn.Module,
    linear2: torch.nn.Module,
) -> Tensor:
    """Returns ``linear2(dropout(activation(linear1(input))))``."""
    name = activation_name(activation)
    if (
        name is not None
        and is_unhooked(linear1, LINEAR)
        and is_unhooked(dropout, DROPOUT)
        and is_unhooked(linear2, LINEAR)
    ):
        p: Any = dropout.p if dropout.training else 0.0
        return run_feed_forward(input, *affine(linear1), *affine(linear2), name, p)
    return linear(linear2, dropout(activation(linear(linear1, input))))


def add_norm(
    input: Tensor, dropout: torch.nn.Module | None, residual: Tensor, norm: torch.nn.Module
) -> tuple[Tensor, Tensor]:
    """Returns ``(norm(sum), sum)`` with ``sum = residual + dropout(input)``; no dropout if None."""
    if (
        is_unhooked(norm, LAYER_NORM)
        and (dropout is None or is_unhooked(dropout, DROPOUT))
        and input.shape == residual.shape
    ):
        return functional.add_layer_norm(
            input,
            residual,
            norm.normalized_shape,  # type: ignore[arg-type]
            *affine(norm),
            norm.eps,  # type: ignore[arg-type]
            dropout_p=dropout.p if dropout is not None and dropout.training else 0.0,  # type: ignore[arg-type]
        )
    total = residual + (input if dropout is None else dropout(input))
    return norm(total), total


def compose(
    layer: Any,
    x: Tensor,
    attentions: Sequence[Callable[[Tensor], tuple[Tensor, torch.nn.Module | None]]],
) -> Tensor:
    """Returns the output of an encoder or decoder layer, composed of ops.

    ``attentions``: the last ones of the layer, for input x of the first. Each returns its output, and the
    dropout that must still be applied to it.
    """
    crossed = isinstance(layer, torch.nn.TransformerDecoderLayer)
    base, _, names, dropouts, _ = _DECODER if crossed else _ENCODER
    norms = names[-1 - len(attentions) :]

    def network(x: Tensor) -> tuple[Tensor, torch.nn.Module | None]:
        if overridden(layer, "_ff_block", base):
            return layer._ff_block(x), None
        y = feed_forward(x, layer.linear1, layer.activation, layer.dropout, layer.linear2)
        return y, getattr(layer, dropouts[-1])

    if layer.norm_first:
        y = getattr(layer, norms[0])(x)
        for attend, norm in zip(attentions, norms[1:], strict=True):
            y, x = add_norm(*attend(y), x, getattr(layer, norm))
        y, dropout = network(y)
        return x + (y if dropout is None else dropout(y))
    for attend, norm in zip(attentions, norms, strict=False):
        x, _ = add_norm(*attend(x), x, getattr(layer, norm))
    return add_norm(*network(x), x, getattr(layer, norms[-1]))[0]
