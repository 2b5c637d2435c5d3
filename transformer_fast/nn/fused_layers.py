"""Runs layers and stacks in one call each, if the result is that of their modules.

`find` returns None if a layer must be composed of ops or modules, and `explain` gives the reason:
gradients, active dropout, hooks, replaced modules, dtypes or devices that no kernel for layers supports.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import dispatch, fast_path
from .._context import is_plain_eager, is_traced, is_transformed, settings
from ..dispatch import Call, Explanation, Kernel
from ..functional.attention import attend as attend_to_heads
from ..ops.arguments import AttentionArguments, LayerStack
from ..ops.autograd import wants_grad
from ..recipe import Sublayer
from . import masks
from .bound import Bound, Group, bound_to
from .drop_in import DropIn
from .fusion import compose_bound, read_layer
from .guard import Guard, Unreadable
from .int8 import run_linear
from .multihead_attention import MultiheadAttention

#: Without torch.nn's own attention, whose results for fully masked queries differ.
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


NO_MASKS = Masks()
#: Value of `Fused.own` and `Fused.cross` if there is no mask.
NO_MASK: tuple[Tensor | None, bool] = None, False


class Fused(NamedTuple):
    """A call of one or several layers, or of part of one, and the kernel that runs it."""

    kernel: Kernel
    stack: LayerStack
    #: (mask, is_causal) of self-attention and of attention to the memory; the masks in SDPA's
    #: polarity, broadcastable to (B, H, T, S).
    own: tuple[Tensor | None, bool]
    cross: tuple[Tensor | None, bool]


def _to_sdpa(
    given: Masks, source: Tensor, x: Tensor, stack: LayerStack
) -> tuple[Tensor | None, bool]:
    """Returns the mask in SDPA's polarity, and whether it is causal."""
    mask, padding, is_causal = given
    if mask is None and padding is None and not is_causal:
        return NO_MASK
    if is_causal and mask is None:
        raise Unreadable("is_causal comes without a mask")
    if mask is not None and padding is not None and mask.dtype != padding.dtype:
        raise Unreadable("masks differ in dtype")
    if any(
        m is not None and m.dtype != torch.bool and not m.is_floating_point() for m in given[:2]
    ):
        raise Unreadable("a mask is neither bool nor floating point")
    mask = masks.to_attention_mask(
        None if is_causal else mask, padding, x, source, 1 if stack.batch_first else 0, stack.heads
    )
    return mask, is_causal


def _call(group: Group, x: Tensor, memory: Tensor | None, grad: bool) -> Call:
    """Returns the call of layers on x. Raises `Unreadable` if sizes differ."""
    if x.dim() != 3:
        raise Unreadable(f"input has {x.dim()} dimensions and not 3")
    if x.shape[2] != group.width:
        raise Unreadable("size is not that of the input")
    if memory is None:
        return Call("encoder_layer", (x, *group.floats), grad, group.arguments)
    batch = 0 if group.stack.batch_first else 1
    if memory.dim() != 3 or any(memory.shape[dim] != x.shape[dim] for dim in (batch, 2)):
        raise Unreadable("memory has other sizes than the input")
    return Call("decoder_layer", (x, memory, *group.floats), grad, group.arguments)


def read(owner: Any, guard: Guard, network: bool = True, kind: type | None = None) -> list[Any]:
    """Returns the recipes of the layers that a ModuleList of ``kind`` has; None: of a single layer."""
    if kind is None:
        return [read_layer(owner, _OURS, guard, network)]
    recipes = []
    for index, layer in enumerate(guard.children(owner)):
        guard.unhooked(layer, str(index), (kind,))
        recipes.append(read_layer(layer, _OURS, guard, network, f"{index}."))
    return recipes


def bind(owner: torch.nn.Module, kind: type | None = None) -> Bound:
    """Returns the layers of `read`, bound to their tensors. Raises `Unreadable`."""
    return bound_to(owner, (True, kind), partial(read, owner, kind=kind))


def find(
    owner: torch.nn.Module, x: Tensor, own: Masks, memory: Tensor | None = None,
    cross: Masks = NO_MASKS, network: bool = True, kind: type | None = None,
) -> list[Fused] | None:  # fmt: skip
    """Returns the calls that run the layers on x, or None if their modules must be called.

    Args:
        owner: a layer, which has checked `is_trained`, or with ``kind`` a ModuleList of layers.
        network: False leaves the last sub-layer out.
        kind: class of the layers.
    """
    if is_traced() or not dispatch.supports_context("encoder_layer", x):
        return None
    if kind is not None and is_trained(owner[0]):  # type: ignore[index]
        return None
    found = []
    try:
        bound = bound_to(owner, (network, kind), partial(read, owner, network=network, kind=kind))
        grad = torch.is_grad_enabled() and (
            bound.needs_grad() or wants_grad(x, memory, *own[:2], *cross[:2])
        )
        for group in bound.groups:
            kernel = dispatch.find(_call(group, x, memory, grad))
            if kernel is None:
                return None
            mask = other = NO_MASK
            if own is not NO_MASKS:
                mask = _to_sdpa(own, x, x, group.stack)
            if memory is not None and cross is not NO_MASKS:
                other = _to_sdpa(cross, memory, x, group.stack)
            found.append(Fused(kernel, group.stack, mask, other))
    except Unreadable:
        return None
    return found


_dtype = attrgetter("dtype")
_enter = fast_path.entry("encoder_layer")


def is_small(shape: Sequence[int], grad: bool) -> bool:
    """True if the q, k, v projections of x have fewer multiply-adds than the layers' limit."""
    return 3 * math.prod(shape) * shape[-1] < fast_path.LAYER_LIMITS[grad]


def _entered(
    group: Group, dropouts: Sequence[float], x: Tensor, own: tuple[Tensor | None, bool],
    memory: Tensor | None, cross: tuple[Tensor | None, bool],
) -> Tensor | None:  # fmt: skip
    """Returns the output of a layer in one call of its entry; None if that declines.

    dropouts: a list, as `Bound.active_dropouts`. own, cross: as in `Fused`.
    """
    given = group.stack.for_entry
    if given is None:
        return None
    return _enter(x, *given, *own, memory, *cross, dropouts)  # type: ignore[no-any-return]


def _try_enter(
    owner: torch.nn.Module, x: Tensor, own: Masks, memory: Tensor | None, cross: Masks, network: bool,
    kind: type | None,
) -> Tensor | None:  # fmt: skip
    """Returns the output of small layers, with gradients and dropout; arguments: as in `find`."""
    if is_plain_eager(x, memory) is None:
        return None
    try:
        bound = bound_to(owner, (network, kind), partial(read, owner, network=network, kind=kind))
        if len(bound.groups) != 1:
            return None
        (group,) = bound.groups
        mask = NO_MASK if own is NO_MASKS else _to_sdpa(own, x, x, group.stack)
        other = NO_MASK
        if memory is not None and cross is not NO_MASKS:
            other = _to_sdpa(cross, memory, x, group.stack)
    except Unreadable:
        return None
    return _entered(group, bound.active_dropouts, x, mask, memory, other)


def try_compose(layer: Any, x: Tensor, own: Masks) -> Tensor | None:
    """Returns the output of an encoder layer in training, composed of ops; None if its modules must be
    called."""
    if is_plain_eager(x) is None or x.dim() != 3:
        return None
    try:
        bound = bind(layer)
        (group,) = bound.groups
    except Unreadable:
        return None
    assert bound.parameters is not None
    tensors = bound.parameters.tensors
    if x.shape[2] != group.width or is_plain_eager(x, *tensors) is None:
        return None
    if {*map(_dtype, tensors)} != {x.dtype}:
        return None
    attention = layer.self_attn
    if own is not NO_MASKS:
        F._mha_shape_check(x, x, x, own.key_padding, own.attention, group.stack.heads)  # type: ignore[attr-defined]
    try:
        mask, is_causal = _to_sdpa(own, x, x, group.stack)
    except Unreadable:
        return None

    def attend(x: Tensor, one: Sublayer[Any], dropout_p: float) -> Tensor:
        joined = one.maps[0]
        projected = run_linear(attention._saved(x), joined.weight, joined.bias)
        q, k, v = attention._heads(projected, int(one.batch_first), 3)
        arguments = AttentionArguments(q, k, v, mask, is_causal=is_causal, dropout_p=dropout_p)
        output, _ = attend_to_heads(arguments)
        if one.batch_first:
            return output.transpose(1, 2).flatten(2)
        return output.permute(2, 0, 1, 3).flatten(2)

    return compose_bound(bound.layers[0], bound.dropouts[0], x, attend)


def is_trained(layer: Any) -> bool:
    """True if the layer's first weight is trained: a fast check before the layer is read."""
    if not torch.is_grad_enabled():
        return False
    attention = layer._modules.get("self_attn")
    weight = None if attention is None else attention._parameters.get("in_proj_weight")
    return weight is not None and weight.requires_grad


def run(
    found: Sequence[Fused], x: Tensor, memory: Tensor | None = None, starts: Tensor | None = None,
    memory_starts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the output of all layers.

    ``starts``: x is packed, (rows, M), and batch element b is rows starts[b] to starts[b + 1];
    ``memory_starts`` likewise.
    """
    for kernel, stack, own, cross in found:
        x = kernel.function(stack, x, *own, memory, *cross, starts, memory_starts)
    return x


def try_run(
    owner: torch.nn.Module, x: Tensor, own: Masks, memory: Tensor | None = None,
    cross: Masks = NO_MASKS, network: bool = True, kind: type | None = None,
) -> Tensor | None:  # fmt: skip
    """Returns the output of all layers, or None if their modules must be called; see `find`.

    Small layers run in their entry, in training, too.
    """
    given = own, memory, cross, network, kind
    if (
        settings.current.falls_back
        and x.dim() == 3
        # `is_small`, inlined, because large layers pay for the call.
        and 3 * x.numel() * x.shape[2] < fast_path.LAYER_LIMITS[torch.is_grad_enabled()]
        and (y := _try_enter(owner, x, *given)) is not None
    ):
        return y
    if torch.is_grad_enabled() and is_trained(owner if kind is None else owner[0]):  # type: ignore[index]
        return None
    found = find(owner, x, *given)
    return None if found is None else run(found, x, memory)


def try_run_bound(
    bound: Bound, x: Tensor, starts: Tensor | None = None,
    own: tuple[Tensor | None, bool] = NO_MASK, memory: Tensor | None = None,
    cross: tuple[Tensor | None, bool] = NO_MASK, rotation: tuple[Tensor, ...] = (),
    dropouts: Sequence[float] = (),
) -> Tensor | None:  # fmt: skip
    """Returns the output (B, T, M) of a layer, or None if no kernel runs it.

    Args:
        starts: x is (1, rows, M), packed as in `run`.
        own, cross: as in `Fused`.
        rotation: cosines and sines (1 or B, T, channels) of rotary position embeddings; empty: none.
        dropouts: a list with the probabilities of dropout, as of `Bound`; empty: none is active.
    """
    try:
        (group,) = bound.groups
    except Unreadable:
        return None
    if starts is None and not rotation:
        y = _entered(group, dropouts or [], x, own, memory, cross)
        if y is not None:
            return y
    if any(dropouts) or not dispatch.supports_context("encoder_layer", x):
        return None
    if wants_grad(*rotation) or is_transformed(*rotation):
        return None
    grad = bound.needs_grad() or wants_grad(x, memory, own[0], cross[0])
    try:
        call = _call(group, x, memory, grad)
    except Unreadable:
        return None
    kernel = dispatch.find(call)
    if kernel is None:
        return None
    if starts is not None:
        x, rotation = x[0], tuple(table[0] for table in rotation)
    done: Tensor = kernel.function(group.stack, x, *own, memory, *cross, starts, None, *rotation)
    return done if starts is None else done[None]


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
        bound = bind(layer)
        (group,) = bound.groups
        grad = bound.needs_grad() or wants_grad(x, memory, *own[:2], *cross[:2])
        call = _call(group, x, memory, grad)
        _to_sdpa(own, x, x, group.stack)
        if memory is not None:
            _to_sdpa(cross, memory, x, group.stack)
    except Unreadable as reason:
        why = {kernel.backend: [f"its {reason}"] for kernel in dispatch.kernels(op)}
        return Explanation(op, None, why, dispatch.COMPOSED)
    return dispatch.explain_call(call)
