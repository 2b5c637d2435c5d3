"""Decoders of transformers whose steps in `generate` run all layers in one native call.

A step is a call of the decoder with one new token for each sequence and a cache that holds the
earlier ones; its layers may attend to an encoder's output. The decoder's class is replaced by one whose
``forward`` runs a step as transformers' own ``forward`` with a `_Chain` in place of the layers:
embeddings, positions, masks and the final norm stay the model's code. All other calls run as they did.

The layers are read as a recipe from the graph of one call (`compile.layer`), which a trial in float64
confirms. A second trial compares two steps of the whole decoder with those of its own code.

The cache stays transformers' `EncoderDecoderCache` or `DynamicCache`, with keys and values that are
views of one buffer (`_Places`). Whatever else replaces them, such as a call with several tokens, is
found at the next step, which then copies them into a new buffer. The class of its parts is replaced so
that beam search reorders the buffer, and copies no keys of the encoder's output: those are shared by a
source's beams.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import memory as packed_memory
from .._context import are_plain_on_cpu, current_settings, in_torch_func, is_traced
from ..compile.attention import Masks
from ..compile.capture import NotCapturedError, capture, shadow, tensors_of
from ..compile.layer import NotALayerError, layer_of, names_of
from ..models.generation import decoders
from ..nn.bound import Bound, bound_to
from ..nn.drop_in import DropIn, original_class, subclass
from ..nn.guard import Guard, Unreadable
from ..recipe import Layer, Place
from ..testing import GRADIENT_FACTOR
from ..testing.parity import compare
from . import classes, formula, generate_calls, packing
from .classes import ClassChange
from .padded_places import undisturbed
from .parts import is_model, is_ours
from .private_names import (
    BIAS,
    CACHES,
    MASK,
    MEMORY,
    MEMORY_BIAS,
    MEMORY_MASK,
    NAME_OF_ATTENTION,
    ROTATION,
    load,
)

#: Beginning of the report's remark on a decoder.
ONE_CALL = "generate: one call a step"


class _Step(NamedTuple):
    """The recipe of a decoder layer for steps, and the layer's `formula.content`."""

    recipe: Layer[Place]
    content: tuple[Any, ...]
    #: `_settings` of the layer.
    settings: tuple[tuple[str, Any], ...]
    #: Length of the tuple that the layer returns; 0: a tensor.
    returned: int


class StepDecoder(DropIn):
    """Base of the classes that `accelerate` gives to decoders."""

    #: The decoder's class before `accelerate`.
    _theirs: Any
    #: Name of the ModuleList of layers, and the recipe of each layer.
    _stack: str
    _steps: tuple[_Step, ...]
    #: Names of the arguments of ``forward``, and among them the one of the cache.
    _names: tuple[str, ...]
    _cache: str
    _call: _Call


#: Classes that change nothing but how `generate` runs.
KINDS = StepDecoder, generate_calls.GeneratingModel


class _Call(NamedTuple):
    """How a decoder calls its layers."""

    #: Names of the arguments after the hidden states.
    names: tuple[str, ...]
    #: True if the layers attend to an encoder's output.
    is_crossed: bool
    #: Length of the tuple that a layer returns; 0: a tensor.
    returned: int = 0
    #: True if the first layer computes a bias of relative positions for all layers.
    has_bias: bool = False


#: A mask (B, H, T, S), which transformers passes on to the layers as it is. `_Chain` ignores it.
_ANY_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)


@functools.cache
def _forward_of(kind: Any) -> Any:
    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = None if is_traced() or torch.is_grad_enabled() else _try_step(self, args, kwargs)
        return kind.forward(self, *args, **kwargs) if found is None else found

    return forward


def _try_step(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of a call that is a step; None: the decoder's own code must run."""
    given = dict(zip(decoder._names, args, strict=False)) | kwargs
    chain = _chain(decoder, given)
    if chain is None:
        return None
    kind = decoder._theirs
    # The copy has the decoder's parts and attributes; only its layers differ.
    copied = object.__new__(kind)
    copied.__dict__.update(decoder.__dict__)
    copied.__dict__["_modules"] = {**decoder._modules, decoder._stack: (chain,)}
    if decoder._call.is_crossed:
        given |= {MASK: _ANY_MASK} | ({MEMORY_MASK: None} if MEMORY_MASK in given else {})
    try:
        return kind.forward(copied, **given)
    except _NotAStepError:
        return None


class _NotAStepError(Exception):
    """Raised if no kernel supports the arguments that the decoder passes to its layers."""


#: Arguments that `_chain` reads, and those that do not change what layers compute.
_READ = frozenset({"input_ids", "inputs_embeds", MASK, MEMORY, MEMORY_MASK, *CACHES})
#: The decoder computes embeddings and rotations from positions, before its layers.
_FREE = frozenset({"use_cache", "return_dict", "position_ids", "cache_position"})


def _chain(decoder: Any, given: dict[str, Any]) -> _Chain | None:
    """Returns the `_Chain` of a step; None: the call is no step, or must run module by module."""
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
    # Some models run fewer layers than they have. In BART the attribute counts the encoder's layers.
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
    return _Chain(decoder, bound, cache, parts, padding_mask)


def _read(layers: Any, steps: Sequence[_Step], guard: Guard) -> list[Layer[Place]]:
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
        if _settings(layer) != step.settings:
            raise Unreadable("config was changed")
    guard.whole(layers)

    def within(index: int, place: Place) -> Place:
        return replace(place, module=f"{index}.{place.module}".rstrip("."))

    return [step.recipe.each(functools.partial(within, i)) for i, step in enumerate(steps)]


def _settings(layer: Any) -> tuple[tuple[str, Any], ...]:
    """Returns the plain values in the config of a layer's modules: their code may read them in each call.

    Private ones and the numbers of special tokens are not among them.
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


class _Chain:
    """Stands in for all layers of a decoder in one step."""

    def __init__(
        self, decoder: Any, bound: Bound, cache: Any, parts: tuple[Any, ...], mask: Tensor | None
    ) -> None:
        self.decoder, self.bound, self.cache, self.parts = decoder, bound, cache, parts
        self.mask = mask

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns the result (R, 1, M) of the last layer, and adds the new keys to the cache."""
        call, own = self.decoder._call, self.parts[0]
        given = dict(zip(call.names, args, strict=False)) | kwargs
        own_mask = None if call.is_crossed else given.get(MASK)
        rotation = given.get(ROTATION)
        tables = rotation or ()
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
        if dtype == torch.float32 and self.in_bf16():
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
        places = _kept.get(part)
        beams = None if memory is None else memory.beams
        if not (isinstance(places, _Places) and places.holds(own, dtype, beams)):
            places = _Places(own, dtype, beams)
        rows = x.reshape(x.shape[0], -1)
        run = places.bind(self.bound, rows, memory)
        if run is None:
            raise _NotAStepError
        places.make_room()
        if call.has_bias:
            own_mask = places.bias(self.decoder)
        elif own_mask is not None and own_mask.shape[1:] != (1, 1, places.length + 1):
            raise _NotAStepError
        cos, sin = (t.flatten(0, 1) for t in tables) if tables else (None, None)
        y = run(rows, places.buffer, places.length, own_mask, cos, sin)
        places.wrote(own)
        _keep(part, places)
        if memory is not None:
            _keep(of_memory, memory)
        y = y.view(x.shape)
        return (y, *[None] * (call.returned - 1)) if call.returned else y

    def in_bf16(self) -> bool:
        return decoders.caches_in_bf16(self.bound.layers)


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
_kept: WeakKeyDictionary[Any, _Places | _Shared] = WeakKeyDictionary()


def keep_shared(part: Any, beams: int) -> None:
    """Records that adjacent beams have equal keys and values of the encoder's output."""
    _keep(part, _Shared(part.layers, beams))


def _keep(part: Any, kept: _Places | _Shared) -> None:
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
    """True if each sequence continues one of the same source; ``beams`` adjacent ones have one."""
    return torch.equal(rows // beams, torch.arange(len(rows)) // beams)


class _Places:
    """Keys and values of self-attention: of all layers in one buffer, of which the cache shows views."""

    def __init__(self, layers: Sequence[Any], dtype: torch.dtype, beams: int | None) -> None:
        """``beams``: see `_Memory.beams`; None: adjacent sequences that are equal now are beams."""
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

        False for a cropped cache: the user may keep views of places that a step would overwrite.
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
        """Returns the function that runs steps like (R, M) with a cache like this one."""
        # Not the buffer itself, which changes: kernels depend on its dtype only.
        key = steps, memory, sample.shape, sample.dtype, current_settings().backend
        if self._bound[:-1] != key:
            given: Any = ([], None, None)
            if memory is not None:
                given = memory.tensors, memory.places.mask, memory.places.lengths
            self._bound = (*key, decoders.bind_stack(sample, self.buffer, steps, *given))
        return self._bound[-1]  # type: ignore[no-any-return]

    def bias(self, decoder: Any) -> Tensor:
        """Returns the bias of relative positions (1, H, 1, length + 1) of the next step.

        It depends on differences of positions only, so the last place's row serves all places.
        """
        module = packing.bias_of(decoder._modules[decoder._stack][0])
        tensors, most = [*module.relative_attention_bias.parameters()], self.buffer.shape[4]
        copies = packed_memory.COPIES["cpu"]
        if self._bias is None or not all(
            state.is_unchanged(x, 1) for state, x in zip(self._bias[1], tensors, strict=True)
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
            self._allocate(self.layers, self.buffer.dtype)

    def wrote(self, layers: Sequence[Any]) -> None:
        """Assigns views with one more place to the layers."""
        self.reordering.wrote(self.length)
        self.length += 1
        self._show(layers)

    def reorder(self, layers: Sequence[Any], rows: Tensor) -> bool:
        """Makes sequence r continue sequence ``rows[r]``; False if the layers have other tensors."""
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
    """Keys and values of the encoder's output that adjacent ``beams`` have in common."""

    def __init__(self, layers: Sequence[Any], beams: int) -> None:
        self.beams = beams
        self.shown = [(x, _version(x)) for layer in layers for x in (layer.keys, layer.values)]

    def are_shown(self, layers: Sequence[Any]) -> bool:
        tensors = [x for layer in layers for x in (layer.keys, layer.values)]
        return len(tensors) == len(self.shown) and all(
            x is y and _version(x) == version
            for x, (y, version) in zip(tensors, self.shown, strict=True)
        )

    def reorder(self, layers: Sequence[Any], rows: Tensor) -> bool:
        """True if the reordering changes nothing, because beams of one source have equal tensors."""
        return (
            len(rows) == len(self.shown[0][0])
            and self.are_shown(layers)
            and _are_within_sources(rows, self.beams)
        )


class _Memory(_Shared):
    """Copies of such keys and values: one tensor (2, B, H, S, D) for each layer."""

    def __init__(
        self, layers: Sequence[Any], dtype: torch.dtype, mask: Tensor | None, kept: Any
    ) -> None:
        """``kept``: an earlier record of the layers' tensors, or None."""
        self.dtype = dtype
        #: (R, S), True at places that are not padding; None: no mask.
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
        self.places = decoders.MemoryPlaces.of(padding)
        super().__init__(layers, beams)

    def holds(self, layers: Sequence[Any], dtype: torch.dtype, mask: Tensor | None) -> bool:
        """True if the layers and the mask (R, S) have the values that the tensors were made from."""
        if dtype != self.dtype or not self.are_shown(layers):
            return False
        if mask is None or self.real is None:
            return mask is self.real
        return torch.equal(mask != 0, self.real)


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _beams(layers: Sequence[Any], real: Tensor | None, known: int | None = None) -> int:
    """Returns how many adjacent sequences have equal keys and values of the encoder's output.

    known: the result without the mask, or None.
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


# Which decoders.


def make_plan(
    root: torch.nn.Module, is_wanted: Callable[[torch.nn.Module, str], bool]
) -> tuple[list[ClassChange], dict[str, str]]:
    """Returns the changes of the decoders in a model, after all others, and remarks by name.

    is_wanted: False for modules that the user excludes.
    """
    changes, notes = [], {}
    for name, module in root.named_modules():
        if isinstance(module, StepDecoder):
            notes[name] = ONE_CALL
            continue
        stack = _stack_of(module)
        if stack is None:
            continue
        found: ClassChange | str = "filter_fn excludes a part of it"
        if all(is_wanted(m, f"{name}.{n}".strip(".")) for n, m in module.named_modules()):
            found = _find(name, module, stack)
        if isinstance(found, str):
            notes[name] = f"generate: module by module: {found}"
        else:
            notes[name] = ONE_CALL
            changes.append(found)
    decoders = {change.module for change in changes}
    for name, model in root.named_modules() if decoders else ():
        if not is_generating(model) or decoders.isdisjoint(model.modules()):
            continue
        kind, original = type(model), original_class(model)
        made = generate_calls.class_of(kind)
        if is_wanted(model, name) and not isinstance(made, str):
            earlier = None if original is kind else original
            changes.append(ClassChange(name, model, kind, made, original=earlier))
    return changes, notes


def is_generating(model: Any) -> bool:
    """True for models with the method `generate` of transformers."""
    return is_model(model) and isinstance(model, load("transformers.generation", "GenerationMixin"))


def next_step(model: Any, inputs: Any, outputs: Any) -> dict[str, Any] | None:
    """Returns arguments of a step that continues a call of a model, or None without a cache.

    inputs: (args, kwargs) of the call.
    """
    names = inspect.signature(model.forward).parameters
    cache = next((name for name in CACHES if name in names), None)
    kept = next((outputs[name] for name in CACHES if name in outputs), None)
    given = inspect.signature(model.forward).bind(*inputs[0], **inputs[1]).arguments
    encoded = getattr(outputs, "encoder_last_hidden_state", None)
    tokens, mask = given.get("decoder_input_ids"), given.get(MASK)
    tokens = given.get("input_ids") if tokens is None else tokens
    if cache is None or kept is None or not isinstance(tokens, Tensor):
        return None
    found = {cache: kept, "use_cache": True}
    if encoded is None:
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        return found | {"input_ids": tokens[:, :1], MASK: mask}
    return found | {"encoder_outputs": (encoded,), MASK: mask, "decoder_input_ids": tokens[:, :1]}


def is_change(change: Any) -> bool:
    """True for the change of a decoder's class, or of its model's; the report has no entry for it."""
    return isinstance(change, ClassChange) and issubclass(change.after, KINDS)


def _stack_of(module: Any) -> str | None:
    """Returns the name of a decoder's layers, or None if the module is no decoder."""
    if not is_model(module) or not is_ours(module.config):
        return None
    stacks = [
        name
        for name, child in module._modules.items()
        if isinstance(child, torch.nn.ModuleList) and len(child) > 0 and _cache_of(child[0])
    ]
    # T5's encoder has the layers of its decoder.
    is_encoder = getattr(module, "is_decoder", True) is False
    return stacks[0] if len(stacks) == 1 and not is_encoder else None


def _cache_of(module: Any) -> str | None:
    """Returns the name of the argument with earlier keys and values."""
    kind: Any = original_class(module)
    names = inspect.signature(kind.forward).parameters
    return next((name for name in CACHES if name in names), None)


def _find(name: str, decoder: Any, stack: str) -> ClassChange | str:
    """Returns the change of a decoder, or the reason why its steps run module by module."""
    kind, original, cache = type(decoder), original_class(decoder), _cache_of(decoder)
    parameters = [*inspect.signature(kind.forward).parameters][1:]
    if "forward" in decoder.__dict__:
        return "its forward was replaced on the instance"
    if cache is None or not {MASK, "input_ids"} <= {*parameters}:
        return "it takes other arguments"
    layers = decoder._modules[stack]
    reason = (
        classes.sharded(decoder)
        or classes.code_of_others(decoder)
        or next(filter(None, map(classes.code_of_others, layers)), None)
    )
    if reason is not None:
        return reason
    takes = inspect.signature(original_class(layers[0]).forward).parameters  # type: ignore[attr-defined]
    may_be_crossed = MEMORY in takes and MEMORY in parameters
    with undisturbed(decoder):
        found = _recognise_all(decoder, layers, _Call((*takes,)[2:], may_be_crossed))
        if isinstance(found, str) and may_be_crossed:  # it may lack cross-attention
            other = _recognise_all(decoder, layers, _Call((*takes,)[2:], False))
            found = f"{found}; without an encoder: {other}" if isinstance(other, str) else other
        if isinstance(found, str):
            return found
        call, steps = found
        made = subclass(
            kind, (StepDecoder, kind), forward=_forward_of(kind), _theirs=original, _stack=stack,  # type: ignore[arg-type]
            _steps=tuple(steps), _names=tuple(parameters), _cache=cache, _call=call,
        )  # fmt: skip
        if isinstance(made, str):
            return made
        try:
            reason = _difference(decoder, made)
        except Exception as error:
            reason = f"a trial of two steps failed ({type(error).__name__}: {error})"
        packed_memory.forget_packed(decoder)
    earlier = None if original is kind else original  # `padded_places` has changed it, too
    return reason or ClassChange(name, decoder, kind, made, original=earlier)


class _Attention(packing.Rows):
    """Stands in for the masks in a trial call of a layer: each token attends to all keys.

    biases: added to the scores of self-attention, and of attention to the encoder's output.
    """

    def __init__(self, *biases: Tensor | None) -> None:
        self.calls, self.is_plain, self.biases = 0, True, biases

    def attend(
        self, function: Any, module: Any, query: Tensor, key: Tensor, value: Tensor,
        position_bias: Any, is_known: bool, **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        bias = self.biases[self.calls] if self.calls < len(self.biases) else None
        self.calls += 1
        is_plain = is_known and options.get("softcap") is None
        if position_bias is not bias and (bias is not None or bool(position_bias.any())):
            is_plain = False
        self.is_plain = self.is_plain and is_plain and is_ours(getattr(module, "config", None))
        options = {"scale": options.get("scaling"), "enable_gqa": key.shape[1] < query.shape[1]}
        y = F.scaled_dot_product_attention(query, key, value, bias, **options)
        return y.transpose(1, 2).contiguous(), None


def _recognise_all(decoder: Any, layers: Any, call: _Call) -> tuple[_Call, list[_Step]] | str:
    """Returns how the layers are called and their recipes, or the reason why there are none."""
    steps: list[_Step] = []
    judged: dict[tuple[Any, ...], Layer[Place]] = {}
    width, length = decoder.config.hidden_size, formula.TOKENS
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    try:
        biased = packing.bias_of(layers[0]) if BIAS in call.names else None
        if biased is not None and not _is_of_differences(biased):
            return "its bias depends on more than the difference of two positions"
        call = call._replace(has_bias=biased is not None)
        inputs = {"x": normal(1, length, width)}
        if call.is_crossed:
            inputs["memory"] = normal(1, length + 2, width)
        if ROTATION in call.names:
            shape = 1, length, packing.rotated_channels(decoder.config)
            inputs |= {"cos": normal(*shape), "sin": normal(*shape)}
        if biased is not None:
            heads = biased.compute_bias(1, 1).shape[1]
            inputs["bias"] = normal(1, heads, length, length)
            if call.is_crossed:
                inputs["memory_bias"] = normal(1, heads, length, length + 2)
        for layer in layers:
            steps.append(_recognise(layer, call, inputs, biased, judged))
            biased = None
    except NotCapturedError as error:  # or `NotALayerError`
        return str(error).partition("\n")[0]
    except Exception as error:  # the layer requires other arguments, or refuses float64
        first = str(error).partition("\n")[0]
        return f"a trial call failed ({type(error).__name__}: {first})"
    returned = {step.returned for step in steps}
    return (
        (call._replace(returned=returned.pop()), steps) if len(returned) == 1 else "layers differ"
    )


def _is_of_differences(biased: Any) -> bool:
    """True if a bias of relative positions depends only on the distance from key to query."""
    length = 300  # T5's bias is constant from 128 positions on
    all_places = biased.compute_bias(length, length).tril()
    last = biased.compute_bias(1, length, past_seen_tokens=length - 1)
    return torch.equal(all_places[..., -1:, :], last) and torch.equal(
        all_places[..., 1:, 1:], all_places[..., :-1, :-1]
    )


def _recognise(
    layer: Any, call: _Call, inputs: dict[str, Tensor], biased: Any,
    judged: dict[tuple[Any, ...], Layer[Place]],
) -> _Step:  # fmt: skip
    """Returns the recipe of a layer's steps. Raises `NotCapturedError` with the reason if there is none.

    inputs: hidden states, the encoder's output, cosines and sines, and biases of scores, in float64.
    biased: the module that computes the bias for all layers; None: it is in another layer.
    judged: earlier results. Layers that differ only in number and weights share a trial.
    """
    dtypes = {parameter.dtype for parameter in layer.parameters()}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        raise NotALayerError("its weights are not all float32, or all bfloat16")
    name, returned = _cache_of(layer), 0

    def run(copied: Any, x: Tensor, cache: Any = None, **inputs: Tensor) -> Tensor:
        nonlocal returned
        biases = inputs.get("bias"), inputs.get("memory_bias")
        probe = _Attention(*biases)
        given: dict[Any, Any] = {MASK: probe, name: cache}
        if call.is_crossed:
            given |= {MEMORY: inputs["memory"], MEMORY_MASK: probe}
        if call.has_bias:
            given |= zip((BIAS, MEMORY_BIAS), biases)  # noqa: B905 - a layer may have only one
        if "cos" in inputs:
            given[ROTATION] = inputs["cos"], inputs["sin"]
        y = copied(x, **given)
        if probe.calls != 1 + call.is_crossed or not probe.is_plain:
            raise NotALayerError("its attention has a bias, or is not looked up in the registry")
        returned = len(y) if isinstance(y, tuple) else 0
        return y[0] if isinstance(y, tuple) else y  # type: ignore[no-any-return]

    captured = capture(layer, run, inputs, original_class, dtype=torch.float32)
    nodes = captured.inputs
    rotation = ("cos", "sin") if "cos" in inputs else ()
    found = layer_of(captured, "x", rotation, for_steps=True)
    masks = [Masks(None, nodes.get(bias), False) for bias in ("bias", "memory_bias")]
    crosses = found.memory == "memory" if call.is_crossed else found.memory is None
    if not crosses or [found.own, found.cross] != masks:
        raise NotALayerError("it does not attend to the encoder's output, or has a mask of its own")
    given = tensors_of(layer)
    used = {id(given[name]) for name in names_of(found.layer)}
    used |= {id(x) for x in ([] if biased is None else biased.relative_attention_bias.parameters())}
    if {id(tensor) for tensor in given.values()} != used:
        raise NotALayerError(
            "it has parameters or buffers besides those of its linear maps and norms"
        )
    key = formula.content(layer, without="layer_idx")
    if judged.get(key) != found.layer:
        x, memory, bias = inputs["x"], inputs.get("memory"), inputs.get("bias")
        tables = tuple(inputs[table] for table in rotation)

        # Token by token, each attends to those before it in the cache.
        def steps(copied: Any) -> Tensor:
            cache, found = _new_cache(call.is_crossed), []
            for t in range(x.shape[1]):
                part = {table: inputs[table][:, t : t + 1] for table in rotation}
                part |= {} if bias is None else {"bias": bias[:, :, t : t + 1, : t + 1]}
                part |= {} if memory is None else {"memory": memory}
                found.append(run(copied, x[:, t : t + 1], cache, **part))
            return torch.cat(found, 1)

        own = Masks(None, None, True)
        if bias is not None:
            hidden = torch.full(bias.shape[2:], -torch.inf, dtype=bias.dtype).triu(1)
            own = Masks(None, bias + hidden, False)  # type: ignore[arg-type]
        formula.judge(layer, found, steps, x, rotation=tables, memory=memory, own=own)
        judged[key] = found.layer
    width = inputs["x"].shape[-1]
    recipe = decoders.without_memory(found.layer, width)
    return _Step(recipe, formula.content(layer), _settings(layer), returned)


def _new_cache(is_crossed: bool, config: Any = None) -> Any:
    """Returns an empty cache, as `generate` makes it if ``config`` is that of the decoder."""
    kinds = [load("transformers.cache_utils", n) for n in ("EncoderDecoderCache", "DynamicCache")]
    parts = [kinds[1](config=config) for _ in range(1 + is_crossed)]
    return kinds[0](*parts) if is_crossed else parts[0]


class _Wide:
    """Stands in for the layers of a decoder: runs copies in float64, of one layer at a time."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _in_float64(self.layer)(*args, **kwargs)


def _in_float64(module: Any) -> Any:
    def wide(x: Tensor) -> Tensor:
        return x.detach().double() if x.is_floating_point() else x

    return shadow(module, wide, original_class, False)


def _difference(decoder: Any, made: Any) -> str | None:
    """Returns the reason if two steps of the class differ from those of the decoder's own code."""
    generator = torch.Generator().manual_seed(2)
    layers, call = decoder._modules[made._stack], made._call
    dtype = next(layers.parameters()).dtype
    words = decoder.get_input_embeddings().num_embeddings
    tokens = torch.randint(0, words, (2, 4), generator=generator)
    memory = torch.randn(2, 3, decoder.config.hidden_size, generator=generator).to(dtype)
    kind: Any = original_class(decoder)
    copied, plain = object.__new__(made), object.__new__(kind)
    for one, stack in ((copied, layers), (plain, None)):
        one.__dict__.update(decoder.__dict__)
        one.__dict__["_modules"] = {**decoder._modules, made._stack: stack}
    wide = _in_float64(plain)
    wide.__dict__["_modules"][made._stack] = tuple(map(_Wide, layers))
    results: list[list[Tensor]] = [[], [], []]
    caches = [_new_cache(call.is_crossed, decoder.config) for _ in results]
    seen = 0
    for part in tokens.split([2, 1, 1], 1):
        seen += part.shape[1]
        given = {"input_ids": part, "use_cache": True}
        if call.is_crossed:
            given[MEMORY] = memory
            if MEMORY_MASK in made._names:
                given[MEMORY_MASK] = torch.tensor([[1, 1, 1], [1, 1, 0]])
        else:
            given[MASK] = torch.ones(2, seen, dtype=torch.long).index_fill_(1, torch.tensor(0), 0)
            given[MASK][0] = 1
        of_each = [given | {made._cache: cache} for cache in caches]
        of_each[2] |= {MEMORY: memory.double()} if call.is_crossed else {}
        expected = made._theirs.forward(decoder, **of_each[1])[0]
        right = type(wide).forward(wide, **of_each[2])[0]
        if part.shape[1] > 1:
            made._theirs.forward(decoder, **of_each[0])
            continue
        found = _try_step(copied, (), of_each[0])
        if found is None:
            return "no kernel for steps supports its sizes, or its cache"
        for kept, result in zip(results, (found[0], expected, right), strict=True):
            kept.append(result)
    found, expected, right = (torch.cat(each, 1) for each in results)
    # Errors of several layers add up, as in gradients.
    parity = compare("hidden states", found, expected, right, GRADIENT_FACTOR)
    return None if parity.ok else f"its steps compute something else than its layers: {parity}"
