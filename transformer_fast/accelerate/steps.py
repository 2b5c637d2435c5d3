"""Native steps of decoders of transformers, and their caches.

A step is a call of the decoder with one new token of each sequence and a cache of the earlier ones.
Its layers may attend to an encoder's output. `StepDecoder.forward` runs a step as transformers' own
``forward`` with a `Chain` in place of the layers: embeddings, positions, masks and the final norm
remain the model's code. All other calls run as before.

The cache remains one of transformers' classes `EncoderDecoderCache` and `DynamicCache`. Its keys
and values are views of one buffer (`_Past`). If other code replaces these tensors, such as a call
with several tokens, the next step copies the new ones into a new buffer. The parts of the cache get
a subclass, whose method for beam search reorders the buffer, and copies no keys of the encoder's
output, since the beams of a source share them.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .. import memory as packed_memory
from .._context import are_plain_on_cpu, current_settings, in_torch_func, is_traced
from ..models.generation import decoders
from ..nn.bound import Bound, bound_to
from ..nn.drop_in import DropIn
from ..nn.guard import Guard, Unreadable
from ..recipe import Layer, Place
from . import classes, formula, packing
from .parts import is_ours
from .private_names import (
    CACHES,
    MASK,
    MEMORY,
    MEMORY_MASK,
    NAME_OF_ATTENTION,
    ROTATION,
    load,
)


class Step(NamedTuple):
    """The recipe of a decoder layer for steps, and the layer's `formula.content`."""

    recipe: Layer[Place]
    content: tuple[Any, ...]
    #: `settings` of the layer.
    settings: tuple[tuple[str, Any], ...]
    #: Length of the tuple that the layer returns; 0: a tensor.
    returned: int


class StepDecoder(DropIn):
    """Base of the classes that `accelerate` gives to decoders."""

    #: The decoder's class before `accelerate`.
    _theirs: Any
    #: Name of the ModuleList of layers, and the recipe of each layer.
    _stack: str
    _steps: tuple[Step, ...]
    #: Names of the arguments of ``forward``, and among them the one of the cache.
    _names: tuple[str, ...]
    _cache: str
    _call: DecoderCall


class DecoderCall(NamedTuple):
    """How a decoder calls its layers."""

    #: Names of the arguments after the hidden states.
    names: tuple[str, ...]
    #: True if the layers attend to an encoder's output.
    is_crossed: bool
    #: Length of the tuple that a layer returns; 0: a tensor.
    returned: int = 0
    #: True if the first layer computes a bias of relative positions for all layers.
    has_bias: bool = False


#: transformers creates no mask if it gets one of four dimensions. `Chain` ignores this one.
_ANY_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)


@functools.cache
def forward_of(kind: Any) -> Any:
    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = None if is_traced() or torch.is_grad_enabled() else try_step(self, args, kwargs)
        return kind.forward(self, *args, **kwargs) if found is None else found

    return forward


def try_step(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of a call that is a step; None: the decoder's own code must run."""
    given = dict(zip(decoder._names, args, strict=False)) | kwargs
    chain = _chain(decoder, given)
    if chain is None:
        return None
    given.pop("return_dict", None)
    if given.get("use_cache") is None and "use_cache" in decoder._names:
        given["use_cache"] = decoder.config.use_cache
    # The copy shares all parts and attributes with the decoder, except the layers.
    chain.copied = copied = object.__new__(decoder._theirs)
    copied.__dict__.update(decoder.__dict__)
    copied.__dict__["_modules"] = {**decoder._modules, decoder._stack: (chain,)}
    if decoder._call.is_crossed:
        given |= {MASK: _ANY_MASK} | ({MEMORY_MASK: None} if MEMORY_MASK in given else {})
    try:
        found = _inner_forward(decoder._theirs)(copied, **given)
    except _NotAStepError:
        return None
    noted = _noted.get()
    if noted is not None:
        chain.given, chain.hidden = given, found[0]
        noted.append(chain)
    return found


@functools.cache
def _inner_forward(kind: Any) -> Callable[..., Any]:
    """Returns a decoder's forward without transformers' decorators, which collect layers' outputs.

    The decorators take a tenth of an int8 step. The trial of two steps validates this forward, too.
    """
    return inspect.unwrap(kind.forward)


#: Native steps of the current call; None: they are not recorded.
_noted: ContextVar[list[Chain] | None] = ContextVar("noted", default=None)


@contextmanager
def noted_steps() -> Iterator[list[Chain]]:
    """Context manager that yields a list, to which native steps within the block are added."""
    found: list[Chain] = []
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


class _NotAStepError(Exception):
    """Raised if no kernel supports the arguments that the decoder passes to its layers."""


#: Arguments of a decoder that `_chain` reads.
_READ = frozenset({"input_ids", "inputs_embeds", MASK, MEMORY, MEMORY_MASK, *CACHES})
#: Arguments that layers do not read: embeddings and rotations of positions are computed before.
_FREE = frozenset({"use_cache", "return_dict", "position_ids", "cache_position"})


def _chain(decoder: Any, given: dict[str, Any]) -> Chain | None:
    """Returns the `Chain` of a step; None: the call is no step, or must run module by module."""
    cache = given.get(decoder._cache)
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    config, is_crossed = decoder.config, decoder._call.is_crossed
    if (
        cache is None
        or decoder.training
        or not isinstance(tokens, Tensor)
        or tokens.dim() < 2
        or tokens.shape[1] != 1
        or (is_crossed and given.get(MASK) is not None)
        or (given.get(MEMORY) is not None) is not is_crossed
        or given.get("return_dict", getattr(config, "return_dict", True)) is False
        or getattr(config, "is_causal", None) is not None
        or any(
            value is not None and value is not False
            for name, value in given.items()
            if name not in _READ and name not in _FREE
        )
        or getattr(config, "output_attentions", False)
        or getattr(config, "output_hidden_states", False)
        or in_torch_func()
        or torch.is_autocast_enabled("cpu")
    ):  # fmt: skip
        return None
    # Some models do not run all their layers. BART's attribute counts the layers of the encoder.
    if not is_crossed and vars(config).get("num_hidden_layers") not in (None, len(decoder._steps)):
        return None
    parts = _layers_of(cache, len(decoder._steps), is_crossed)
    if parts is None or any(len(part[0].keys) != len(tokens) for part in parts):
        return None
    padding_mask = given.get(MEMORY_MASK)
    if padding_mask is not None and (
        not is_crossed or padding_mask.shape != (len(tokens), parts[1][0].keys.shape[2])
    ):
        return None
    layers = decoder._modules[decoder._stack]
    try:
        bound = bound_to(layers, StepDecoder, functools.partial(_read, layers, decoder._steps))
    except Unreadable:
        return None
    return Chain(decoder, bound, cache, parts, padding_mask)


def _read(layers: Any, steps: Sequence[Step], guard: Guard) -> list[Layer[Place]]:
    modules = guard.children(layers)
    if len(modules) != len(steps):
        raise Unreadable("layers were added or removed")
    for index, (layer, step) in enumerate(zip(modules, steps, strict=True)):
        if any(m.training for m in layer.modules()) or formula.content(layer) != step.content:
            raise Unreadable("layer was changed")
        for name, module in layer.named_modules():
            guard.unhooked(module, f"{index}.{name}")
            config = vars(module).get("config")
            if config is not None:
                for key in (NAME_OF_ATTENTION, *dict(step.settings)):
                    guard.value(vars(config), key)
                if not is_ours(config):
                    raise Unreadable("attention is not ours")
        if settings(layer) != step.settings:
            raise Unreadable("config was changed")
    guard.whole(layers)

    def within(index: int, place: Place) -> Place:
        return replace(place, module=f"{index}.{place.module}".rstrip("."))

    return [step.recipe.each(functools.partial(within, i)) for i, step in enumerate(steps)]


def settings(layer: Any) -> tuple[tuple[str, Any], ...]:
    """Returns the plain values in the configs of a layer's modules, since calls may read them.

    Excludes private values and the ids of special tokens.
    """
    configs = (vars(module).get("config") for module in layer.modules())
    found = {
        key: value
        for config in configs
        if config is not None
        for key, value in vars(config).items()
        if classes.is_plain(value) and not key.startswith("_") and not key.endswith("token_id")
    }
    return (*found.items(),)


class Chain:
    """Replaces all layers of a decoder in one step.

    `repeat` runs the following steps without checks, for searches that run no code of users. Then,
    until `finish`, only the length of the cache is up to date.
    """

    #: The copy of the decoder with this chain, the arguments of its call, and the result (R, 1, M).
    copied: Any
    given: dict[str, Any]
    hidden: Tensor
    past: _Past

    def __init__(
        self, decoder: Any, bound: Bound, cache: Any, parts: tuple[Any, ...], mask: Tensor | None
    ) -> None:
        self.decoder, self.bound, self.cache, self.parts = decoder, bound, cache, parts
        self.mask = mask
        self.is_repeated = False

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns the result (R, 1, M) of the last layer, and adds the new keys to the cache."""
        call, own = self.decoder._call, self.parts[0]
        given = dict(zip(call.names, args, strict=False)) | kwargs
        own_mask = None if call.is_crossed else given.get(MASK)
        tables = given.get(ROTATION) or ()
        if self.is_repeated:
            y = self.run(x, own_mask, tables)
            self.past.show_length()
            return y
        if not are_plain_on_cpu((x, own_mask, *tables)) or x.shape[:-1] != (len(own[0].keys), 1):
            raise _NotAStepError
        # Tables of other shapes are for several tokens, or for parts of a head.
        if any(t.dim() != 3 or t.shape[1] != 1 or t.shape[0] not in (1, len(x)) for t in tables):
            raise _NotAStepError
        if not {t.dtype for t in (*tables, own_mask) if t is not None} <= {
            x.dtype, torch.float32, torch.bool,
        }:  # fmt: skip
            raise _NotAStepError
        dtype = x.dtype
        if dtype == torch.float32 and decoders.caches_in_bf16(self.bound.layers):
            dtype = torch.bfloat16
        memory: _Memory | None = None
        part = self.cache
        if call.is_crossed:
            part, of_memory = self.cache.self_attention_cache, self.cache.cross_attention_cache
            kept = _kept.get(of_memory)
            if isinstance(kept, _Memory) and kept.holds(self.parts[1], dtype, self.mask):
                memory = kept
            else:
                memory = _Memory(self.parts[1], dtype, self.mask, kept)
        past = _kept.get(part)
        beams = None if memory is None else memory.beams
        if not (isinstance(past, _Past) and past.holds(own, dtype, beams)):
            past = _Past(own, dtype, beams)
        kernel = past.bind(self.bound, x.reshape(x.shape[0], -1), memory)
        mask_shape = (1, 1, past.length + 1)
        if kernel is None or (own_mask is not None and own_mask.shape[1:] != mask_shape):
            raise _NotAStepError
        self.past, self.kernel = past, kernel
        y = self.run(x, own_mask, tables)
        past._show(own)
        _keep(part, past)
        if memory is not None:
            _keep(of_memory, memory)
        return y

    def run(self, x: Tensor, own_mask: Tensor | None, tables: Sequence[Tensor]) -> Any:
        """Returns the result of the last layer, whose new keys are in the buffer."""
        call, past = self.decoder._call, self.past
        past.make_room()
        if call.has_bias:
            own_mask = past.bias(self.decoder, self.is_repeated)
        cos, sin = (t.flatten(0, 1) for t in tables) if tables else (None, None)
        y = self.kernel(x.flatten(0, 1), past.buffer, past.length, own_mask, cos, sin)
        past.wrote()
        y = y.view(x.shape)
        return (y, *[None] * (call.returned - 1)) if call.returned else y

    def can_repeat(self) -> bool:
        """True if the arguments of the next step follow from those of this one."""
        given = [self.given.get(name) for name in ("position_ids", "cache_position")]
        shapes = (len(self.hidden), 1), (1, 1), (1,)
        known = all(x is None or x.shape in shapes for x in given)
        return known and self.given.get("inputs_embeds") is None

    def repeat(self, tokens: Tensor) -> Tensor:
        """Returns the decoder's output (R, 1, M) for the next tokens (R,)."""
        given, self.is_repeated = self.given, True
        given["input_ids"] = tokens[:, None]
        for name in ("position_ids", "cache_position"):
            if given.get(name) is not None:
                given[name] = given[name] + 1
        mask = given.get(MASK)
        if mask is not None and mask is not _ANY_MASK:
            given[MASK] = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
        forward = _inner_forward(self.decoder._theirs)
        return forward(self.copied, **given)[0]  # type: ignore[no-any-return]

    def reorder(self, rows: Tensor) -> None:
        """Makes sequence r continue sequence ``rows[r]`` of the same source."""
        past = self.past
        past.buffer = past.reordering.apply(past.buffer, rows, past.length)
        past.show_length()

    def finish(self) -> None:
        self.past._show(self.past.layers)


# The cache.


def _layers_of(cache: Any, count: int, is_crossed: bool) -> tuple[list[Any], ...] | None:
    """Returns the layers of each part of a cache; None if it is empty or of another class."""
    kinds, plain, both = _cache_kinds()
    parts: tuple[Any, ...] = (cache,)
    if is_crossed:
        if type(cache) is not both:
            return None
        parts = cache.self_attention_cache, cache.cross_attention_cache
        if not all(map(cache.is_updated.get, range(count))):
            return None
    found = []
    for part in parts:
        if type(part) not in kinds or part.offloading or len(part.layers) != count:
            return None
        for layer in part.layers:
            if type(layer) is not plain or not layer.is_initialized or layer.keys.dim() != 4:
                return None
            if layer.keys.shape[2] == 0 or layer.keys.shape != part.layers[0].keys.shape:
                return None
        found.append(part.layers)
    return tuple(found)


#: Part of a cache -> our buffers for it, from the last step.
_kept: WeakKeyDictionary[Any, _Past | _Shared] = WeakKeyDictionary()


def keep_shared(part: Any, beams: int) -> None:
    """Records that adjacent beams have equal keys and values of the encoder's output."""
    _keep(part, _Shared(part.layers, beams))


def _keep(part: Any, kept: _Past | _Shared) -> None:
    part.__class__ = _cache_class()
    _kept[part] = kept


@functools.cache
def _cache_kinds() -> tuple[Any, Any, Any]:
    names = "DynamicCache", "DynamicLayer", "EncoderDecoderCache"
    whole, layer, both = (load("transformers.cache_utils", name) for name in names)
    return (whole, _cache_class()), layer, both


@functools.cache
def _cache_class() -> Any:
    base: Any = load("transformers.cache_utils", "DynamicCache")

    class StepCache(base):  # type: ignore[misc]
        """A DynamicCache whose tensors native steps read; copies and pickles are DynamicCaches."""

        def reorder_cache(self, beam_idx: Tensor) -> None:
            kept = _kept.get(self)
            if kept is None or not kept.reorder(self.layers, beam_idx.long()):
                super().reorder_cache(beam_idx)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return copyreg._reconstructor, (base, object, None), self.__dict__  # type: ignore[attr-defined]

    return StepCache


def _are_within_sources(rows: Tensor, beams: int) -> bool:
    """True if each sequence continues one of its source, which has ``beams`` adjacent ones."""
    return torch.equal(rows // beams, torch.arange(len(rows)) // beams)


class _Past:
    """One buffer with keys and values of self-attention of all layers; the cache has its views."""

    def __init__(self, layers: Sequence[Any], dtype: torch.dtype, beams: int | None) -> None:
        """``beams``: adjacent sequences of a source; None: those with equal keys and values."""
        self.beams = _beams(layers, None) if beams is None else beams
        self._bound: tuple[Any, ...] = ()
        self.length = layers[0].keys.shape[2]
        self._allocate(layers, dtype)
        self._show(layers)

    def _allocate(self, layers: Sequence[Any], dtype: torch.dtype) -> None:
        rows, heads, _, size = layers[0].keys.shape
        shape = (len(layers), 2, rows, heads, 2 * self.length + 32, size)
        with torch.inference_mode(False):  # inference tensors have no version counter
            self.buffer = decoders.empty_cache(layers[0].keys, shape, dtype)
        for both, layer in zip(self._views(), layers, strict=True):
            both[0].copy_(layer.keys)
            both[1].copy_(layer.values)
        self.layers = layers
        self.reordering = decoders.Reordering(self.buffer, self.beams)
        self._bias: tuple[Tensor, list[Any]] | None = None

    def _views(self) -> Tensor:
        """Returns (layers, 2, R, H, length, D)."""
        return self.buffer.narrow(4, 0, self.length)

    def _show(self, layers: Sequence[Any]) -> None:
        self.shown = self._views().flatten(0, 1).unbind(0)
        for layer, keys, values in zip(layers, self.shown[0::2], self.shown[1::2], strict=True):
            layer.keys, layer.values = keys, values
        self.version = self.buffer._version

    def holds(self, layers: Sequence[Any], dtype: torch.dtype, beams: int | None) -> bool:
        """True if the layers still have the views that the last step assigned.

        False for a cropped cache: the user may keep views of positions that a step would overwrite.
        """
        buffer = self.buffer
        if buffer.dtype != dtype or len(layers) != len(buffer):
            return False
        if beams is not None and beams != self.beams:
            return False
        tensors = [x for layer in layers for x in (layer.keys, layer.values)]
        return all(x is y for x, y in zip(tensors, self.shown, strict=True))

    def bind(
        self, steps: Bound, sample: Tensor, memory: _Memory | None
    ) -> Callable[..., Tensor] | None:
        """Returns the function that runs steps on inputs like ``sample`` (R, M), or None."""
        # Not the buffer itself, which changes: kernels depend on its dtype only.
        key = steps, memory, sample.shape, sample.dtype, current_settings().backend
        if self._bound[:-1] != key:
            given: Any = ([], None, None)
            if memory is not None:
                given = memory.tensors, memory.visible.mask, memory.visible.lengths
            self._bound = (*key, decoders.bind_stack(sample, self.buffer, steps, *given))
        return self._bound[-1]  # type: ignore[no-any-return]

    def bias(self, decoder: Any, is_known: bool) -> Tensor:
        """Returns the bias of relative positions (1, H, 1, length + 1) of the next step.

        It depends on differences of positions only, so it is a part of the row of the last position.
        is_known: True if its parameters have not changed since the last step.
        """
        most = self.buffer.shape[4]
        if is_known and self._bias is not None:
            return self._bias[0].narrow(3, most - self.length - 1, self.length + 1)
        module = packing.bias_of(decoder._modules[decoder._stack][0])
        tensors = [*module.relative_attention_bias.parameters()]
        copies = packed_memory.COPIES["cpu"]
        if self._bias is None or not all(
            state.is_unchanged(x) for state, x in zip(self._bias[1], tensors, strict=True)
        ):
            states = [copies.snapshot(x, x) for x in tensors]
            row = module.compute_bias(1, most, past_seen_tokens=most - 1)
            self._bias = row.contiguous(), states
        return self._bias[0].narrow(3, most - self.length - 1, self.length + 1)

    def _find_writes(self) -> None:
        """Makes the next reordering copy everything if other code has written to the buffer."""
        if self.buffer._version != self.version:
            self.reordering = decoders.Reordering(self.buffer, self.beams)

    def make_room(self) -> None:
        self._find_writes()
        if self.length == self.buffer.shape[4]:
            self._show(self.layers)
            self._allocate(self.layers, self.buffer.dtype)

    def wrote(self) -> None:
        self.reordering.wrote(self.length)
        self.length += 1

    def show_length(self) -> None:
        """Gives the first layer keys of the current length, where `get_seq_length` reads it."""
        self.layers[0].keys = self.buffer[0, 0].narrow(2, 0, self.length)
        self.version = self.buffer._version

    def reorder(self, layers: Sequence[Any], rows: Tensor) -> bool:
        """Makes sequence r continue sequence ``rows[r]``; False if a layer has another tensor."""
        if len(rows) != self.buffer.shape[2]:
            return False
        if not self.holds(layers, self.buffer.dtype, self.beams):
            return False
        self._find_writes()
        if not _are_within_sources(rows, self.beams):
            self.reordering = decoders.Reordering(self.buffer, self.beams)
        self.buffer = self.reordering.apply(self.buffer, rows, self.length)
        self._show(layers)
        return True


class _Shared:
    """Keys and values of the encoder's output, equal in groups of ``beams`` adjacent sequences."""

    def __init__(self, layers: Sequence[Any], beams: int) -> None:
        self.beams = beams
        self.shown = [
            (x, packing.version(x)) for layer in layers for x in (layer.keys, layer.values)
        ]

    def are_shown(self, layers: Sequence[Any]) -> bool:
        tensors = [x for layer in layers for x in (layer.keys, layer.values)]
        return len(tensors) == len(self.shown) and all(
            x is y and packing.version(x) == version
            for x, (y, version) in zip(tensors, self.shown, strict=True)
        )

    def reorder(self, layers: Sequence[Any], rows: Tensor) -> bool:
        """True if reordering changes nothing, since the beams of a source have equal tensors."""
        return (
            len(rows) == len(self.shown[0][0])
            and self.are_shown(layers)
            and _are_within_sources(rows, self.beams)
        )


class _Memory(_Shared):
    """Copies of the keys and values of each source: a tensor (2, B, H, S, D) for each layer."""

    def __init__(
        self, layers: Sequence[Any], dtype: torch.dtype, mask: Tensor | None, kept: Any
    ) -> None:
        """``kept``: an earlier record of the layers' tensors, or None."""
        self.dtype = dtype
        #: (R, S), True at positions that are not padding; None: no mask.
        self.real = None if mask is None else mask != 0
        is_known = isinstance(kept, _Shared) and kept.are_shown(layers)
        beams = _beams(layers, self.real, kept.beams if is_known else None)
        self.tensors = []
        for layer in layers:
            keys, values = layer.keys[::beams], layer.values[::beams]
            both = decoders.empty_cache(keys, (2, *keys.shape), dtype)
            both[0].copy_(keys)
            both[1].copy_(values)
            self.tensors.append(both)
            if beams == 1 and dtype == keys.dtype:
                layer.keys, layer.values = both.unbind(0)  # frees the original
        padding = None if self.real is None else ~self.real[::beams]
        self.visible = decoders.MemoryPositions.of(padding)
        super().__init__(layers, beams)

    def holds(self, layers: Sequence[Any], dtype: torch.dtype, mask: Tensor | None) -> bool:
        """True if layers and mask (R, S) have the values from which the tensors were made."""
        if dtype != self.dtype or not self.are_shown(layers):
            return False
        if mask is None or self.real is None:
            return mask is self.real
        return torch.equal(mask != 0, self.real)


def _beams(layers: Sequence[Any], real: Tensor | None, known: int | None = None) -> int:
    """Returns how many adjacent sequences have equal keys and values, and equal rows of ``real``.

    real: (R, S), True at unpadded positions, or None. known: the result without it, or None.
    """
    rows = len(layers[0].keys)
    differ = torch.zeros(max(0, rows - 1), dtype=torch.bool)
    if known is not None:
        differ[known - 1 :: known] = True
    for layer in layers if known is None else ():
        for x in (layer.keys, layer.values):
            differ |= (x[1:] != x[:-1]).flatten(1).any(1)
    if real is not None:
        differ |= (real[1:] != real[:-1]).any(1)
    return math.gcd(rows, *(differ.nonzero().flatten() + 1).tolist())
