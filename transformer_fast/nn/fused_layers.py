"""Runs layers and stacks in one call each, if the result is that of their modules.

`find` returns None if a layer must be composed of ops or modules, and `explain` gives the reason:
gradients, active dropout, hooks, replaced modules, dtypes or devices that no kernel for layers supports.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from .._context import is_traced, is_transformed
from ..dispatch import Call, Explanation, Kernel
from ..ops.arguments import LayerArguments
from ..ops.autograd import wants_grad
from ..recipe import Kind
from . import masks
from .drop_in import DropIn
from .fusion import Layer, Unreadable, is_unhooked, read_layer
from .int8 import Int8Weight, unchanged
from .multihead_attention import MultiheadAttention

#: torch.nn's attention gives other results for queries that may attend to nothing.
_OURS = (MultiheadAttention,)
_KINDS: dict[str, Any] = {
    "encoder_layer": torch.nn.TransformerEncoderLayer,
    "decoder_layer": torch.nn.TransformerDecoderLayer,
}


class Masks(NamedTuple):
    """The masks of one attention, in torch.nn's polarity."""

    attention: Tensor | None = None
    key_padding: Tensor | None = None
    is_causal: bool = False


class Fused(NamedTuple):
    """A call of one or several layers, or of part of one, and the kernel that runs it."""

    kernel: Kernel
    #: The kernel's arguments that describe the layers.
    layers: tuple[Any, ...]
    #: (mask, is_causal) of self-attention and of attention to the memory; the masks in SDPA's
    #: polarity, broadcastable to (B, H, T, S).
    own: tuple[Tensor | None, bool]
    cross: tuple[Tensor | None, bool]
    #: Cosines and sines of rotary position embeddings; empty: none.
    rotation: tuple[Tensor, ...] = ()


class Parameters(NamedTuple):
    """The parameters of sub-layers, as kernels for whole layers take them."""

    #: For each sub-layer weight1, bias1, weight2, bias2, and the norm's weight and bias. Quantised
    #: weights are given by their int8 values.
    tensors: list[Any]
    #: For each sub-layer the scales of its two weights, None if not quantised, and the factors of their
    #: inputs, or None. Empty: no weight of all is quantised.
    scales: list[Tensor | None]
    #: The floating-point tensors, and those of the quantised weights.
    floats: list[Any]
    quantized: list[Any]

    @staticmethod
    def of(given: list[Any]) -> Parameters:
        """``given``: as ``tensors``, with `Int8Weight`s. Raises `Unreadable`."""
        if Int8Weight not in map(type, given):
            return Parameters(given, [], given, [])
        weights = [given[i + j] for i in range(0, len(given), 6) for j in (0, 2)]
        found = [isinstance(weight, Int8Weight) for weight in weights]
        if found[0::2] != found[1::2]:
            raise Unreadable("weights are int8 in part")
        tensors = [p.values if isinstance(p, Int8Weight) else p for p in given]
        scales = [
            getattr(weight, name, None)
            for pair in zip(weights[0::2], weights[1::2], strict=True)
            for name in ("scale", "factors")
            for weight in pair
        ]
        floats = [p for p in given if not isinstance(p, Int8Weight)]
        int8 = [w for w in weights if isinstance(w, Int8Weight)]
        return Parameters(tensors, scales, floats, [t for w in int8 for t in (w.values, w.scale)])


def _options(layer: Layer) -> tuple[Any, ...]:
    """Returns the options that layers of one call must share."""
    kinds, norms = [], []
    heads, batch_first = layer.sublayers[0][-2:]
    for one in layer.sublayers:
        kinds.append(int(one.kind))  # a comprehension would be a function call
        norms.append(one.norm.kind)
        if one.kind is Kind.CROSS_ATTENTION and one[-2:] != (heads, batch_first):
            raise Unreadable("attentions differ in heads or in batch_first")
    return kinds, layer.norm_first, norms, heads, batch_first, layer.activation


def _to_sdpa(
    given: Masks, source: Tensor, x: Tensor, layers: tuple[Any, ...]
) -> tuple[Tensor | None, bool]:
    """Returns the mask in SDPA's polarity, and whether it is causal."""
    mask, padding, is_causal = given
    _, _, _, _, heads, batch_first, *_ = layers
    if mask is None and padding is None and not is_causal:
        return None, False
    if is_causal and mask is None:
        raise Unreadable("is_causal comes without a mask")
    if mask is not None and padding is not None and mask.dtype != padding.dtype:
        raise Unreadable("masks differ in dtype")
    mask = masks.to_attention_mask(
        None if is_causal else mask, padding, x, source, 1 if batch_first else 0, heads
    )
    return mask, is_causal


def _prepare(
    read: Iterable[Layer], x: Tensor, own: Masks, memory: Tensor | None, cross: Masks
) -> list[tuple[Call, tuple[Any, ...]]]:
    """Returns the fewest calls that run all layers, each with the arguments of its kernel.

    Raises `Unreadable`.
    """
    if x.dim() != 3:
        raise Unreadable(f"input has {x.dim()} dimensions and not 3")
    groups: list[tuple[tuple[Any, ...], list[Layer]]] = []
    for layer in read:
        options = _options(layer)
        if groups and groups[-1][0] == options:
            groups[-1][1].append(layer)
        else:
            groups.append((options, [layer]))
    calls = []
    for options, layers in groups:
        parameters: list[Any] = []
        eps: list[float] = []
        p, gated = 0.0, 0
        for layer in layers:
            p = max(p, layer.dropout_p)
            gate = None
            for kind, weight1, bias1, weight2, bias2, norm, _, _ in layer.sublayers:
                if kind is Kind.GATED_FEED_FORWARD:
                    if gate is None:
                        gated = weight1.shape[0]
                    elif gate.shape != weight1.shape:
                        raise Unreadable("gate has other sizes than what it multiplies")
                    elif isinstance(gate, Int8Weight) != isinstance(weight1, Int8Weight):
                        raise Unreadable("weights are int8 in part")
                gate = weight1 if kind is Kind.GATE else None
                if norm.module is not None:
                    raise Unreadable("norm is hooked, replaced or of other sizes")
                parameters += weight1, bias1, weight2, bias2, norm.weight, norm.bias
                eps.append(norm.eps)
        if parameters[2].shape[0] != x.shape[2]:
            raise Unreadable("size is not that of the input")
        given = Parameters.of(parameters)
        tensors = (x, *given.floats) if memory is None else (x, memory, *given.floats)
        grad = wants_grad(*tensors, *own[:2], *cross[:2])
        op = "encoder_layer" if memory is None else "decoder_layer"
        call = Call(op, tensors, grad, LayerArguments(p, options[-1], given.quantized, gated))
        calls.append((call, (layers[0].module, *options, given.tensors, given.scales, eps)))
    if memory is not None:
        batch = 0 if groups[0][0][4] else 1
        if memory.dim() != 3 or any(memory.shape[dim] != x.shape[dim] for dim in (batch, 2)):
            raise Unreadable("memory has other sizes than the input")
    return calls


def find(
    modules: Sequence[torch.nn.Module],
    x: Tensor,
    own: Masks,
    memory: Tensor | None = None,
    cross: Masks = Masks(),  # noqa: B008 - it cannot be changed
    network: bool = True,
    kind: type | None = None,
) -> list[Fused] | None:
    """Returns the calls that run the layers on x, or None if their modules must be called.

    Args:
        network: False leaves the last sub-layer out.
        kind: class of the layers; None: the caller is the layer, and has checked `is_trained`.
    """
    if is_traced() or not dispatch.candidates("encoder_layer", x):
        return None
    if kind is not None and (
        is_trained(modules[0]) or not all(is_unhooked(module, (kind,)) for module in modules)
    ):
        return None
    found = []
    later: list[Any] = []
    try:
        read = map(read_layer, modules, repeat(_OURS), repeat(network), repeat(later))
        for call, layers in _prepare(read, x, own, memory, cross):
            kernel = dispatch.find(call)
            if kernel is None:
                return None
            mask = _to_sdpa(own, x, x, layers)
            other = (None, False) if memory is None else _to_sdpa(cross, memory, x, layers)
            found.append(Fused(kernel, layers, mask, other))
    except Unreadable:
        return None
    if later and not unchanged(later):
        return None  # called as modules, they are quantised again
    return found


def is_trained(layer: Any) -> bool:
    """True if the layer's first weight needs a gradient: a fast check before the layer is read."""
    if not torch.is_grad_enabled():
        return False
    attention = layer._modules.get("self_attn")
    weight = None if attention is None else attention._parameters.get("in_proj_weight")
    return weight is not None and weight.requires_grad


def run(
    found: Sequence[Fused],
    x: Tensor,
    memory: Tensor | None = None,
    starts: Tensor | None = None,
    memory_starts: Tensor | None = None,
) -> Tensor:
    """Returns the output of all layers.

    ``starts``: x is packed, (rows, M), and batch element b is rows starts[b] to starts[b + 1];
    ``memory_starts`` likewise.
    """
    for kernel, layers, own, cross, rotation in found:
        x = kernel.function(*layers, x, *own, memory, *cross, starts, memory_starts, *rotation)
    return x


def try_run(
    modules: Sequence[torch.nn.Module],
    x: Tensor,
    own: Masks,
    memory: Tensor | None = None,
    *rest: Any,
    **named: Any,
) -> Tensor | None:
    """Returns the output of all layers, or None if `find` returns None; arguments: as in `find`."""
    found = find(modules, x, own, memory, *rest, **named)
    return None if found is None else run(found, x, memory)


#: As in `Fused`: no mask.
NO_MASK: tuple[Tensor | None, bool] = None, False


def try_run_layer(
    layer: Layer,
    x: Tensor,
    starts: Tensor | None = None,
    own: tuple[Tensor | None, bool] = NO_MASK,
    memory: Tensor | None = None,
    cross: tuple[Tensor | None, bool] = NO_MASK,
    rotation: tuple[Tensor, ...] = (),
) -> Tensor | None:
    """Returns the output (B, T, M) of a layer whose parts are given, or None if no kernel runs it.

    Args:
        starts: x is (1, rows, M), packed as in `run`.
        own, cross: as in `Fused`.
        rotation: cosines and sines (1 or B, T, channels) of rotary position embeddings; empty: none.
    """
    if not dispatch.candidates("encoder_layer", x):
        return None
    if wants_grad(*rotation) or is_transformed(*rotation):
        return None
    try:
        ((call, layers),) = _prepare([layer], x, Masks(own[0]), memory, Masks(cross[0]))
    except Unreadable:
        return None
    kernel = dispatch.find(call)
    if kernel is None:
        return None
    if starts is None:
        return run([Fused(kernel, layers, own, cross, rotation)], x, memory)
    rotation = tuple(table[0] for table in rotation)
    return run([Fused(kernel, layers, own, cross, rotation)], x[0], starts=starts)[None]


def explain(op: str, layer: Any, *args: Any, **kwargs: Any) -> Explanation:
    """Explains which backend runs the layer in one call on these inputs, and why the others do not."""
    kind = _KINDS[op]
    if not isinstance(layer, kind):
        raise TypeError(f"layer must be a {kind.__name__}, not {type(layer).__name__}")
    given = inspect.signature(kind.forward).bind(layer, *args, **kwargs)
    given.apply_defaults()
    _, x, *rest = given.arguments.values()
    memory, cross = None, Masks()
    if op == "decoder_layer":
        memory, mask, memory_mask, padding, memory_padding, is_causal, memory_is_causal = rest
        own, cross = (
            Masks(mask, padding, is_causal),
            Masks(memory_mask, memory_padding, memory_is_causal),
        )
    else:
        mask, padding, is_causal = rest
        found = masks.check_masks(mask, "src_mask", padding, "src_key_padding_mask", x.dtype)
        own = Masks(*found, is_causal)
    try:
        if not isinstance(layer, DropIn):
            raise Unreadable("forward is torch.nn's; transformer_fast.accelerate swaps it")
        read = read_layer(layer, _OURS)
        ((call, arguments),) = _prepare([read], x, own, memory, cross)
        _to_sdpa(own, x, x, arguments)
        if memory is not None:
            _to_sdpa(cross, memory, x, arguments)
    except Unreadable as reason:
        why = {kernel.backend: [f"its {reason}"] for kernel in dispatch.kernels(op)}
        return Explanation(op, None, why, dispatch.COMPOSED)
    return dispatch.explain_call(call)
