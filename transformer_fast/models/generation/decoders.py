"""The decoders behind generation, one step at a time: `CachedDecoder` has a key-value cache, so that each
new token costs the work of one token. `RecomputedDecoder` computes all tokens again, for any stack and
to check the cache.

`CachedDecoder` reads the parts of a stack from its modules, and chooses once for each shape of step
whether one kernel runs it whole. Under autocast matrix products run in its dtype, as in the public
functions; the weights are cast once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _native, dispatch, functional, nn
from ..._context import is_traced
from ...dispatch import Call
from ...functional import causal_mask
from ...functional.attention import attend_directly
from ...nn import masks
from ...nn.bound import Bound, bound_to
from ...nn.fusion import LAYER_NORM, LINEAR, affine, read_layer
from ...nn.guard import Guard, Unreadable, is_unhooked
from ...nn.int8 import Int8Weight, Weight, run_feed_forward, run_linear
from ...ops.arguments import AttentionArguments
from ...ops.autograd import wants_grad
from ...recipe import NO_NORM, Kind, Layer, Linear, Norm, NormKind, Place, Sublayer
from ..attention_weights import evaluating
from ..embedding import OutputProjection
from . import cuda_graph

_ATTENTION = (torch.nn.MultiheadAttention, nn.MultiheadAttention)
_ENCODER_LAYER = (torch.nn.TransformerEncoderLayer, nn.TransformerEncoderLayer)
_DECODER_LAYER = (torch.nn.TransformerDecoderLayer, nn.TransformerDecoderLayer)
_STACK = (
    torch.nn.TransformerEncoder,
    torch.nn.TransformerDecoder,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)


class Stack(NamedTuple):
    """The layers of a `TransformerEncoder` or `TransformerDecoder`, with one ``norm_first`` for all."""

    d_model: int
    heads: int
    norm_first: bool
    layers: Sequence[Layer[Any]]
    #: The norm after the last layer; None: none.
    final_norm: Norm[Any] | None
    #: The layers without the memory's projections: its keys and values are computed before the steps.
    steps: Bound


def read_stack(stack: Any, crossed: bool) -> Stack:
    """Returns the parts of a `TransformerDecoder` (crossed) or a `TransformerEncoder`.

    Raises `Unreadable` if a layer is unreadable, or if layers differ in options, dtype or device.
    """
    kinds = _DECODER_LAYER if crossed else _ENCODER_LAYER

    def read(guard: Guard, width: int = 0) -> list[Layer[Place]]:
        if not is_unhooked(stack, _STACK):
            raise Unreadable("the stack is hooked or has a forward of its own")
        guard.unhooked(stack, "the stack")
        recipes = []
        for i, module in enumerate(guard.children(guard.entry(stack, "_modules", "layers"))):
            if not is_unhooked(module, kinds):
                raise Unreadable(f"layers.{i} is hooked or has a forward of its own")
            try:
                guard.unhooked(module, f"layers.{i}")
                recipe = read_layer(module, _ATTENTION, guard, path=f"layers.{i}.")
            except Unreadable as reason:
                raise Unreadable(f"layers.{i}.{reason}") from None
            recipes.append(without_memory(recipe, width) if width else recipe)
        return recipes

    bound = bound_to(stack, kinds, read)
    layers = bound.layers
    if not layers:
        raise Unreadable("the stack has no layers")
    first = layers[0]
    own = first.sublayers[0]
    for layer in layers:
        if layer.norm_first != first.norm_first:
            raise Unreadable("the layers differ in norm_first")
        if layer.sublayers[0].heads != own.heads:
            raise Unreadable("the layers differ in heads")
    if len({(p.dtype, p.device) for p in stack.parameters() if p.dtype != torch.int8}) != 1:
        raise Unreadable("its parameters differ in dtype or device")
    d_model = own.maps[-1].weight.shape[0]
    if crossed:
        bound = bound_to(stack, (kinds, "steps"), partial(read, width=d_model))
    final = None if stack.norm is None else _final_norm(stack.norm, d_model)
    return Stack(d_model, own.heads, first.norm_first, layers, final, bound)


def without_memory(recipe: Layer[Place], width: int) -> Layer[Place]:
    """Returns the recipe for steps, in which attention to the memory projects only the queries."""
    sublayers = []
    for one in recipe.sublayers:
        if one.kind is Kind.CROSS_ATTENTION:
            query, *others, out = one.maps
            if not others:
                query = query.each(partial(replace, rows=(0, width)))
            one = replace(one, maps=(query, out))
        sublayers.append(one)
    return replace(recipe, sublayers=tuple(sublayers))


def _final_norm(module: Any, width: int) -> Norm[Any]:
    if is_unhooked(module, LAYER_NORM) and module.normalized_shape == (width,):
        return Norm(NormKind.LAYER, *affine(module), module.eps)
    return replace(NO_NORM, module=module)


#: (input (N, M)) -> (N, Mout)
Map = Callable[[Tensor], Tensor]


def product_dtype(tensor: Tensor) -> torch.dtype:
    """Returns the dtype of matrix products with ``tensor``: its own, or autocast's."""
    kind = tensor.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def _cast(one: Linear[Any], dtype: torch.dtype) -> Linear[Any]:
    """Returns the map with floating-point parameters in this dtype."""
    return one.each(lambda x: x if isinstance(x, Int8Weight) else x.to(dtype))


def _with_maps_in(dtype: torch.dtype, layer: Layer[Any]) -> Layer[Any]:
    sublayers = (
        replace(one, maps=tuple(_cast(each, dtype) for each in one.maps)) for one in layer.sublayers
    )
    return replace(layer, sublayers=tuple(sublayers))


def bind_linear(weight: Weight, bias: Tensor | None, like: Tensor) -> Map:
    """Returns the linear map, whose parameters are cast once if autocast is on. like: its input."""
    dtype = product_dtype(like)
    one = _cast(Linear(weight, bias), dtype)
    return lambda x: run_linear(x.to(dtype), one.weight, one.bias)


def normed(x: Tensor, norm: Norm[Any] | None) -> Tensor:
    """Returns the norm of (N, M); None: there is none."""
    if norm is None:
        return x
    if norm.module is not None:
        return norm.module(x)  # type: ignore[no-any-return]
    return functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def bind_stack(
    sample: Tensor,
    cache: Tensor,
    steps: Bound,
    memories: Sequence[Tensor],
    mask: Tensor | None,
    key_lengths: Tensor | None,
) -> Callable[..., Tensor] | None:
    """Returns a function that runs all layers in one call; None: they need separate kernels.

    steps: the layers, as `without_memory` returns them.
    """
    if sample.shape[0] == 0 or is_traced():
        return None
    try:
        group, *others = steps.groups
    except Unreadable:
        return None
    if others:
        return None
    # A cache in bfloat16 of a float32 model: see `caches_in_bf16`.
    caches = (cache, *memories) if cache.dtype == sample.dtype else ()
    tensors = (sample, *caches, *group.floats)
    call = Call("decode_step", tensors, wants_grad(*tensors), group.arguments)
    kernel = dispatch.find(call)
    if kernel is None:
        return None
    return kernel.function(group.stack, sample.shape[0], memories, mask, key_lengths)  # type: ignore[no-any-return]


def caches_in_bf16(layers: Sequence[Layer[Any]]) -> bool:
    """True if float32 keys and values are cached in bfloat16: all projections of attention are int8, and
    the CPU multiplies bfloat16. Steps of many sequences mostly read the cache."""
    for layer in layers:
        for one in layer.sublayers:
            if one.kind is not Kind.FEED_FORWARD:
                for each in one.maps:
                    if not isinstance(each.weight, Int8Weight):
                        return False
    return _native.module is not None and "bf16" in _native.module.dot_types()


def empty_cache(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns uninitialised memory for keys and values; large CPU tensors come from our pool.

    Every step touches all of it, a little at thousands of addresses.
    """
    none = like.new_empty(0, dtype=dtype)
    if _native.module is None or type(none) is not Tensor or not none.is_cpu:
        return like.new_empty(shape, dtype=dtype)
    return torch.ops.transformer_fast.uninitialized.cpu(none, shape)


@dataclass
class MemoryPositions:
    """The memory positions that are not padding, in the cheapest form."""

    #: int64 (B,): number of real positions, which come first. None: see mask.
    lengths: Tensor | None
    #: bool (B, 1, 1, S), True = visible. None: all, or see lengths.
    mask: Tensor | None

    @staticmethod
    def of(padding: Tensor | None) -> MemoryPositions:
        """Converts a mask (B, S), True at padding."""
        lengths, mask = (None, None) if padding is None else masks.from_padding_mask(padding)
        return MemoryPositions(lengths, mask)

    def keep(self, sources: Tensor) -> MemoryPositions:
        lengths, mask = (
            None if t is None else t.index_select(0, sources) for t in (self.lengths, self.mask)
        )
        return MemoryPositions(lengths, mask)


def project_memory(cross: Sublayer[Any], memory: Tensor, in_bf16: bool) -> Tensor:
    """Returns the keys and values (2, B, H, S, D) of a memory (B, S, M)."""
    sources, positions, width = memory.shape
    w, b = cross.maps[0].weight, cross.maps[0].bias
    project = bind_linear(w[width:], None if b is None else b[width:], memory)
    both = project(memory.reshape(sources * positions, width))
    both = both.view(sources, positions, 2, cross.heads, width // cross.heads)
    # Each head's keys are contiguous, because every step reads all of them.
    both = both.permute(2, 0, 3, 1, 4)
    dtype = torch.bfloat16 if in_bf16 and both.dtype == torch.float32 else both.dtype
    return empty_cache(both, tuple(both.shape), dtype).copy_(both)


class SeparateOps:
    """The layers of a stack, run op by op, for steps that need separate kernels.

    Args:
        stack: the result of `read_stack`.
        like: the input (R * T, M) of a step: R sequences, T new tokens each.
        memories: the layers' `project_memory`; empty: there is no attention to a memory.
        visible: the memory's positions.
    """

    def __init__(
        self, stack: Stack, like: Tensor, memories: Sequence[Tensor], visible: MemoryPositions
    ) -> None:
        self.norm_first, self.memories, self.visible = stack.norm_first, memories, visible
        self.heads, self.size = stack.heads, stack.d_model // stack.heads
        #: Dtype of products. Autocast's is applied here, to the parameters once.
        self.dtype = product_dtype(like)
        self.casts = self.dtype != like.dtype
        self.layers = [_with_maps_in(self.dtype, layer) for layer in stack.steps.layers]

    def __call__(
        self, x: Tensor, cache: Tensor, start: int, at: cuda_graph.Position | None = None
    ) -> Tensor:
        """Returns the output of all layers.

        Args:
            cache: (layers, 2, R, H, positions, D), with keys and values of the first ``start`` tokens.
            at: position of a single token in device memory, for recorded steps.
        """
        kind = x.device.type
        with torch.autocast(kind, enabled=False) if self.casts else nullcontext():
            for index, layer in enumerate(self.layers):
                for one in layer.sublayers:
                    y = normed(x, one.norm) if self.norm_first else x
                    y = y.to(self.dtype) if self.casts else y
                    first, second = one.maps
                    if one.kind is Kind.FEED_FORWARD:
                        given = first.weight, first.bias, second.weight, second.bias
                        y = run_feed_forward(y, *given, layer.activation)
                    else:
                        y = run_linear(y, first.weight, first.bias)
                        if one.kind is Kind.SELF_ATTENTION:
                            y = self._attend_to_past(y, cache[index], start, at)
                        else:
                            y = self._attend_to_memory(y, self.memories[index])
                        y = run_linear(y, second.weight, second.bias)
                    x = self._joined(y, x, one.norm)
        return x

    def _joined(self, y: Tensor, x: Tensor, norm: Norm[Any]) -> Tensor:
        """Returns the residual connection after a sub-layer, with the norm in post-norm stacks."""
        if self.norm_first or norm.module is not None:
            return y + x if self.norm_first else normed(y + x, norm)
        y = y.to(x.dtype) if self.casts else y
        rest = x.shape[-1:], norm.weight, norm.bias, norm.eps
        return functional.add_layer_norm(y, x, *rest)[0]

    def _attend_to_past(
        self, qkv: Tensor, cache: Tensor, start: int, at: cuda_graph.Position | None
    ) -> Tensor:
        """Attention of the new tokens to themselves and to all earlier tokens."""
        rows = cache.shape[1]
        length = qkv.shape[0] // max(rows, 1)
        qkv = qkv.view(rows, length, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        new, lengths = qkv.narrow(0, 1, 2), None
        if at is None:
            cache.narrow(3, start, length).copy_(new)
            keys, values = cache.narrow(3, 0, start + length).unbind(0)
        else:
            lengths = at.lengths
            cache.index_copy_(3, at.position, new.to(cache.dtype))
            keys, values = cache.narrow(3, 0, at.positions).unbind(0)
        # Only the first call has several tokens, so the causal mask starts at position 0.
        return self._attended(qkv.select(0, 0), keys, values, None, lengths, length > 1)

    def _attend_to_memory(self, query: Tensor, memory: Tensor) -> Tensor:
        """Attention to the memory. The beams of a source are further queries to that source's keys, so
        that its keys are not copied."""
        keys, values = memory.unbind(0)
        shape = keys.shape[0], query.shape[0] // max(keys.shape[0], 1), self.heads, self.size
        query = query.view(shape).transpose(1, 2)
        return self._attended(query, keys, values, self.visible.mask, self.visible.lengths, False)

    def _attended(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None,
        lengths: Tensor | None, is_causal: bool,
    ) -> Tensor:  # fmt: skip
        lowp = query if query.dtype is keys.dtype else query.to(keys.dtype)
        arguments = AttentionArguments(lowp, keys, values, mask, lengths, is_causal)
        y, _ = attend_directly(arguments)
        y = y if lowp is query else y.to(query.dtype)
        return y.transpose(1, 2).reshape(-1, self.heads * self.size)


#: (tokens (R, T), position of the first) -> vectors (R, T, M)
Embed = Callable[[Tensor, int], Tensor]
#: (vectors (R, T, M)) -> logits (R, T, V)
Project = Callable[[Tensor], Tensor]


def bind_project(project: Any, like: Tensor) -> Map:
    """Returns ``project`` for (R, M), on our kernels if a plain Linear or OutputProjection."""
    if is_unhooked(project, LINEAR):
        return bind_linear(*affine(project), like)
    if is_unhooked(project, (OutputProjection,)):
        last = bind_linear(*affine(project), like)
        if project.projection is None:
            return last
        if is_unhooked(project.projection, LINEAR):
            first = bind_linear(*affine(project.projection), like)
            return lambda x: last(first(x))
    return lambda x: project(x[:, None]).squeeze(1)


def select_rows(cache: Tensor, rows: Tensor, start: int, end: int, out: Tensor) -> None:
    """Copies positions start to end of ``cache[:, :, rows]`` (layers, 2, R, H, positions, D) to out."""
    used, to = cache.narrow(4, start, end - start), out.narrow(4, start, end - start)
    torch.index_select(used, 2, rows, out=to)


class Reordering:
    """Moves rows of a cache between two buffers.

    The hypotheses of a source soon share an ancestor: up to it they have equal keys and values, which
    both buffers hold after a move. So only later positions are copied. On the CPU a table of the writer
    of each position shows which these are; on a GPU the host would have to wait for it.
    """

    def __init__(self, cache: Tensor | None = None, beams: int = 1) -> None:
        self.beams = beams
        self.spare: Tensor | None = None
        #: ``shared``: number of leading positions that all beams of a source have in common.
        #: ``equal``: the same before the last reordering; both buffers have equal values there.
        self.shared = self.equal = 0
        #: (R, positions): id of the sequence that wrote each position. Equal ids: the position is shared.
        self.writers: Tensor | None = None
        if cache is not None and beams > 1 and cache.device.type == "cpu":
            self.rows = torch.arange(cache.shape[2])
            # At first each beam is the writer of all its positions: nothing is shared.
            self.writers = self.rows[:, None].repeat(1, cache.shape[4])

    def wrote(self, position: int) -> None:
        """Records that each sequence wrote its own token at position ``position``."""
        if self.writers is not None:
            self.writers.select(1, position).copy_(self.rows)

    def apply(self, cache: Tensor, rows: Tensor, length: int) -> Tensor:
        """Returns ``cache[:, :, rows]`` up to ``length``; the given buffer becomes the spare one."""
        if self.spare is None:
            # Both buffers have a version counter, or none.
            with torch.inference_mode(cache.is_inference()):
                self.spare = torch.empty_like(cache)
        select_rows(cache, rows, self.equal, length, self.spare)
        cache, self.spare = self.spare, cache
        if self.writers is not None:
            self.writers = self.writers.index_select(0, rows)
            self.equal, self.shared = self.shared, self._shared(length)
        return cache

    def _shared(self, length: int) -> int:
        assert self.writers is not None
        writers = self.writers.narrow(1, 0, length).unflatten(0, (-1, self.beams))
        differ = (writers != writers[:, :1]).flatten(0, 1).any(dim=0)
        return int(differ.int().argmax()) if bool(differ.any()) else length


class StepDecoder:
    """Computes logits of the next token for R sequences.

    ``start`` takes the first tokens, ``step`` one more token of each sequence. Each of B sources may
    have several sequences (beams), adjacent rows of one tensor of R = B * beams rows.
    """

    beams = 1

    def start(self, tokens: Tensor) -> Tensor:
        """Returns the logits (R, V) of the token after the first tokens (R, P)."""
        raise NotImplementedError

    def step(self, tokens: Tensor) -> Tensor:
        """Returns the logits (R, V) of the token after these tokens (R,)."""
        raise NotImplementedError

    def reorder(self, rows: Tensor) -> None:
        """Makes sequence r continue sequence ``rows[r]`` of the same source."""
        raise NotImplementedError

    def _rows(self) -> Tensor:
        """Returns the row numbers (R,), on the device of the sequences."""
        raise NotImplementedError

    def _select(self, rows: Tensor) -> None:
        """Continues with these rows; rows may repeat."""
        raise NotImplementedError

    def spread(self, beams: int) -> None:
        """Repeats each sequence ``beams`` times."""
        self.beams *= beams
        self._select(self._rows().repeat_interleave(beams))

    def keep(self, sources: Tensor) -> None:
        """Continues with only these sources and their sequences."""
        beam = torch.arange(self.beams, device=sources.device)
        self._select((sources[:, None] * self.beams + beam).flatten())


class CachedDecoder(StepDecoder):
    """Decoder with a key-value cache.

    Args:
        stack: the result of `read_stack`.
        embed, project: the functions before and after the stack.
        memory: (B, S, M), the input of cross-attention; None: the stack has no cross-attention.
        memory_padding: bool (B, S), True at positions to ignore; None: no padding.
        capacity: maximum number of tokens of a sequence.
    """

    def __init__(
        self,
        stack: Stack,
        embed: Embed,
        project: Project,
        memory: Tensor | None,
        memory_padding: Tensor | None,
        capacity: int,
    ) -> None:
        self.stack, self.embed, self.project, self.capacity = stack, embed, project, capacity
        self.visible = MemoryPositions.of(memory_padding)
        self.in_bf16 = caches_in_bf16(stack.layers)
        self.length = 0  # number of tokens in the cache
        #: Keys and values of the memory in each layer; empty: there is none.
        self.memories: list[Tensor] = []
        for layer in stack.layers if memory is not None else ():
            self.memories.append(project_memory(layer.sublayers[1], memory, self.in_bf16))  # type: ignore[arg-type]
        self._bound: tuple[int, int] | None = None
        # (layers, key and value, R, H, capacity, D).
        self.cache = torch.empty(0)
        self.reordering = Reordering()

    def start(self, tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        x = self.embed(tokens, 0)
        size = self.stack.d_model // self.stack.heads
        shape = (len(self.stack.layers), 2, rows, self.stack.heads, self.capacity, size)
        dtype = product_dtype(x)
        if self.in_bf16 and dtype == torch.float32:
            dtype = torch.bfloat16
        self.cache = empty_cache(x, shape, dtype)
        return self._run(x, rows, length)

    def step(self, tokens: Tensor) -> Tensor:
        logits = self._run(self.embed(tokens.unsqueeze(1), self.length), tokens.shape[0], 1)
        if self.beams > 1:
            self.reordering.wrote(self.length - 1)
        return logits

    def _run(self, x: Tensor, rows: int, length: int) -> Tensor:
        x = x.reshape(rows * length, -1)
        if self._bound != (rows, length):
            self._bind(x, rows, length)
        start, self.length = self.length, self.length + length
        if self.steps is not None:
            return self.steps.step(x, self.cache, start)
        x = self.layers(x, self.cache, start)
        return self._logits(x.view(rows, length, -1)[:, -1] if length > 1 else x)

    def _logits(self, x: Tensor) -> Tensor:
        return self.logits(normed(x, self.stack.final_norm))

    def _bind(self, x: Tensor, rows: int, length: int) -> None:
        self._bound = (rows, length)
        whole = bind_stack(
            x, self.cache, self.stack.steps, self.memories, self.visible.mask, self.visible.lengths
        )
        separate = None if whole else SeparateOps(self.stack, x, self.memories, self.visible)
        #: (x, cache, number of cached tokens) -> output of all layers.
        self.layers: Callable[..., Tensor] = whole or separate  # type: ignore[assignment]
        self.logits = bind_project(self.project, x)
        self.steps: cuda_graph.Steps | None = None
        if length == 1 and separate and cuda_graph.wanted(x):
            run = separate  # a local variable, since `self.layers` may change
            self.steps = cuda_graph.Steps(x, self.capacity, lambda *step: self._logits(run(*step)))

    def reorder(self, rows: Tensor) -> None:
        self.cache = self.reordering.apply(self.cache, rows, self.length)

    def keep(self, sources: Tensor) -> None:
        super().keep(sources)
        self.visible = self.visible.keep(sources)
        self.memories = [memory.index_select(1, sources) for memory in self.memories]

    def _rows(self) -> Tensor:
        return torch.arange(self.cache.shape[2], device=self.cache.device)

    def _select(self, rows: Tensor) -> None:
        """Replaces the cache by one with only these rows; copies only the written positions."""
        shape = list(self.cache.shape)
        shape[2] = rows.shape[0]
        new = empty_cache(self.cache, tuple(shape), self.cache.dtype)
        select_rows(self.cache, rows, 0, self.length, new)
        self.cache = new
        self.reordering = Reordering(new, self.beams)
        self._bound = None


class RecomputedDecoder(StepDecoder):
    """Decoder without a cache, for a stack whose layers can only be called.

    Args:
        stack: called like torch.nn.TransformerDecoder if there is a memory, else like
            torch.nn.TransformerEncoder.
        batch_first: True: the stack takes (R, T, M); False: (T, R, M).
        embed, project, memory, memory_padding: as in `CachedDecoder`.
    """

    def __init__(
        self,
        stack: torch.nn.Module,
        batch_first: bool,
        embed: Embed,
        project: Project,
        memory: Tensor | None,
        memory_padding: Tensor | None,
    ) -> None:
        self.stack, self.batch_first = stack, batch_first
        self.embed, self.project = embed, project
        self.memory, self.memory_padding = memory, memory_padding
        self.tokens = torch.empty(0)

    def start(self, tokens: Tensor) -> Tensor:
        self.tokens = tokens
        return self._run()

    def step(self, tokens: Tensor) -> Tensor:
        self.tokens = torch.cat((self.tokens, tokens[:, None]), dim=1)
        return self._run()

    def _run(self) -> Tensor:
        with evaluating(self.stack, self.embed, self.project):
            x = self._swap(self.embed(self.tokens, 0))
            mask = causal_mask(self.tokens.shape[1], true_means="hidden", device=x.device)
            if self.memory is None:
                y = self.stack(x, mask=mask, is_causal=True)
            else:
                y = self.stack(
                    x,
                    self._swap(self.memory),
                    tgt_mask=mask,
                    tgt_is_causal=True,
                    memory_key_padding_mask=self.memory_padding,
                )
            return self.project(self._swap(y)[:, -1:]).squeeze(1)

    def _swap(self, x: Tensor) -> Tensor:
        return x if self.batch_first else x.transpose(0, 1)

    def reorder(self, rows: Tensor) -> None:
        self.tokens = self.tokens.index_select(0, rows)

    def _rows(self) -> Tensor:
        return torch.arange(self.tokens.shape[0], device=self.tokens.device)

    def _select(self, rows: Tensor) -> None:
        self.tokens = self.tokens.index_select(0, rows)
        if self.memory is not None:
            self.memory = self.memory.index_select(0, rows)
        if self.memory_padding is not None:
            self.memory_padding = self.memory_padding.index_select(0, rows)
