"""Decoders of transformers whose steps in `generate` run all layers in one native call.

A step is a call of the decoder with one new token for each sequence and a cache that holds the
earlier ones. The decoder's class is replaced by one whose ``forward`` runs a step as transformers' own
``forward`` with a `_Chain` in place of the layers: embeddings, positions and the final norm stay the
model's code. All other calls run as they did.

The layers are read as a recipe from the graph of one call (`compile.layer`), which a trial in float64
confirms. A second trial compares two steps of the whole decoder with those of its own code.

The cache stays transformers' `EncoderDecoderCache`, with keys and values that are views of one buffer
(`_Places`). Whatever else replaces them, such as a call with several tokens, is found at the next step,
which then copies them into a new buffer. The class of its two parts is replaced so that beam search
reorders the buffer, and copies no keys of the encoder's output: those are shared by a source's beams.
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
from ..compile.attention import NO_MASKS, Masks
from ..compile.capture import NotCapturedError, capture, tensors_of
from ..compile.layer import NotALayerError, layer_of, names_of
from ..models.generation import decoders
from ..nn.bound import Bound, bound_to
from ..nn.drop_in import DropIn, original_class, subclass
from ..nn.guard import Guard, Unreadable
from ..recipe import Layer, Place
from . import classes, formula, packing
from .classes import ClassChange
from .padded_places import undisturbed
from .parts import is_model, is_ours
from .private_names import CACHES, MASK, MEMORY, MEMORY_MASK, NAME_OF_ATTENTION, load

#: Beginning of the report's remark on a decoder.
ONE_CALL = "generate: one call a step"


class _Step(NamedTuple):
    """A layer of a decoder: its recipe for steps, and `formula.content` of the layer it holds for."""

    recipe: Layer[Place]
    content: tuple[Any, ...]


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
    given |= {MASK: _ANY_MASK, MEMORY_MASK: None}
    try:
        return kind.forward(copied, **given)
    except _NotAStepError:
        return None


class _NotAStepError(Exception):
    """Raised if no kernel runs the hidden states that the decoder has computed."""


#: Arguments that `_chain` reads, and those that do not change what layers compute.
_READ = frozenset({"input_ids", "inputs_embeds", MASK, MEMORY, MEMORY_MASK, *CACHES})
_FREE = frozenset({"use_cache", "return_dict"})


def _chain(decoder: Any, given: dict[str, Any]) -> _Chain | None:
    """Returns what runs the layers of a step; None: the call is no step, or must run module by module."""
    cache = given.get(decoder._cache)
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    config = decoder.config
    if (
        cache is None
        or decoder.training
        or not isinstance(tokens, Tensor)
        or tokens.dim() < 2
        or tokens.shape[1] != 1
        or given.get(MASK) is not None
        or given.get(MEMORY) is None
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
    parts = _layers_of(cache, len(decoder._steps))
    if parts is None:
        return None
    padding_mask = given.get(MEMORY_MASK)
    keys = parts[1][0].keys
    if padding_mask is not None and padding_mask.shape != (tokens.shape[0], keys.shape[2]):
        return None
    if keys.shape[0] != tokens.shape[0] or parts[0][0].keys.shape[0] != tokens.shape[0]:
        return None
    layers = decoder._modules[decoder._stack]
    try:
        bound = bound_to(layers, StepDecoder, functools.partial(_read, layers, decoder._steps))
    except Unreadable:
        return None
    return _Chain(bound, cache, parts, padding_mask)


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
                guard.value(vars(config), NAME_OF_ATTENTION)
                if not is_ours(config):
                    raise Unreadable("attention is not ours")
    guard.whole(layers)

    def within(index: int, place: Place) -> Place:
        return replace(place, module=f"{index}.{place.module}".rstrip("."))

    return [step.recipe.each(functools.partial(within, i)) for i, step in enumerate(steps)]


class _Chain:
    """Stands in for all layers of a decoder in one step."""

    def __init__(
        self, bound: Bound, cache: Any, parts: tuple[Any, Any], mask: Tensor | None
    ) -> None:
        self.bound, self.cache, self.parts, self.mask = bound, cache, parts, mask

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the result (R, 1, M) of the last layer, and adds the new keys to the cache."""
        if not are_plain_on_cpu((x,)):
            raise _NotAStepError
        own, cross = self.parts
        dtype = x.dtype
        if dtype == torch.float32 and decoders.caches_in_bf16(self.bound.layers):
            dtype = torch.bfloat16
        memory = _kept.get(self.cache.cross_attention_cache)
        if not (isinstance(memory, _Memory) and memory.holds(cross, dtype, self.mask)):
            memory = _Memory(cross, dtype, self.mask)
        places = _kept.get(self.cache.self_attention_cache)
        if not (isinstance(places, _Places) and places.holds(own, dtype, memory.beams)):
            places = _Places(own, dtype, memory.beams)
        rows = x.reshape(x.shape[0], -1)
        run = memory.bind(self.bound, rows, places.buffer)
        if run is None:
            raise _NotAStepError
        places.make_room()
        y = run(rows, places.buffer, places.length)
        places.wrote(own)
        _keep(self.cache.self_attention_cache, places)
        _keep(self.cache.cross_attention_cache, memory)
        return y.view(x.shape)


# The cache.


def _layers_of(cache: Any, count: int) -> tuple[list[Any], list[Any]] | None:
    """Returns the layers of both parts of a cache that holds tokens; None for other classes of caches."""
    if type(cache) is not load("transformers.cache_utils", "EncoderDecoderCache"):
        return None
    kinds = load("transformers.cache_utils", "DynamicCache"), _cache_class()
    plain = load("transformers.cache_utils", "DynamicLayer")
    found = []
    for part in (cache.self_attention_cache, cache.cross_attention_cache):
        if type(part) not in kinds or part.offloading or len(part.layers) != count:
            return None
        for layer in part.layers:
            if type(layer) is not plain or not layer.is_initialized or layer.keys.dim() != 4:
                return None
            if layer.keys.shape[2] == 0 or layer.keys.shape != part.layers[0].keys.shape:
                return None
        found.append(part.layers)
    return (found[0], found[1]) if all(map(cache.is_updated.get, range(count))) else None


#: Part of a cache -> what the last step made of it.
_kept: WeakKeyDictionary[Any, _Places | _Memory] = WeakKeyDictionary()


def _keep(part: Any, kept: _Places | _Memory) -> None:
    part.__class__ = _cache_class()
    _kept[part] = kept


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

    def __init__(self, layers: Sequence[Any], dtype: torch.dtype, beams: int) -> None:
        self.beams = beams
        self.length = layers[0].keys.shape[2]
        self._allocate(layers, dtype)
        self._show(layers)

    def _allocate(self, layers: Sequence[Any], dtype: torch.dtype) -> None:
        rows, heads, _, size = layers[0].keys.shape
        shape = (len(layers), 2, rows, heads, 2 * self.length + 32, size)
        self.buffer = decoders.empty_cache(layers[0].keys, shape, dtype)
        for both, layer in zip(self._views(), layers, strict=True):
            both[0].copy_(layer.keys)
            both[1].copy_(layer.values)
        self.layers = layers
        self.reordering = decoders.Reordering(self.buffer, self.beams)

    def _views(self) -> Tensor:
        """Returns (layers, 2, R, H, length, D)."""
        return self.buffer.narrow(4, 0, self.length)

    def _show(self, layers: Sequence[Any]) -> None:
        self.shown = self._views().flatten(0, 1).unbind(0)
        for layer, keys, values in zip(layers, self.shown[0::2], self.shown[1::2], strict=True):
            layer.keys, layer.values = keys, values

    def holds(self, layers: Sequence[Any], dtype: torch.dtype, beams: int) -> bool:
        """True if the layers have the tensors that the last step showed them.

        A cropped cache is copied: its owner may keep tensors with the places that would be overwritten.
        """
        buffer = self.buffer
        if buffer.dtype != dtype or beams != self.beams or len(layers) != len(buffer):
            return False
        if buffer.is_inference() and not torch.is_inference_mode_enabled():
            return False
        tensors = [x for layer in layers for x in (layer.keys, layer.values)]
        return all(x is y for x, y in zip(tensors, self.shown, strict=True))

    def make_room(self) -> None:
        if self.length == self.buffer.shape[4]:
            self._allocate(self.layers, self.buffer.dtype)

    def wrote(self, layers: Sequence[Any]) -> None:
        """Shows one more place."""
        self.reordering.wrote(self.length)
        self.length += 1
        self._show(layers)

    def reorder(self, layers: Sequence[Any], rows: Tensor) -> bool:
        """Makes sequence r continue sequence ``rows[r]``; False: the layers have other tensors now."""
        if len(rows) != self.buffer.shape[2]:
            return False
        if not self.holds(layers, self.buffer.dtype, self.beams):
            return False
        if not _are_within_sources(rows, self.beams):
            self.reordering = decoders.Reordering(self.buffer, self.beams)
        self.buffer = self.reordering.apply(self.buffer, rows, self.length)
        self._show(layers)
        return True


class _Memory:
    """Keys and values of the encoder's output: one tensor (2, B, H, S, D) for each layer."""

    def __init__(self, layers: Sequence[Any], dtype: torch.dtype, mask: Tensor | None) -> None:
        self.dtype = dtype
        #: (R, S), True at places that are not padding; None: no mask.
        self.real = None if mask is None else mask != 0
        self.beams = _beams(layers, self.real)
        self.tensors = []
        for layer in layers:
            keys, values = layer.keys[:: self.beams], layer.values[:: self.beams]
            both = decoders.empty_cache(keys, (2, *keys.shape), dtype)
            both[0].copy_(keys)
            both[1].copy_(values)
            self.tensors.append(both)
            if self.beams == 1 and dtype == keys.dtype:
                layer.keys, layer.values = both.unbind(0)  # frees the original
        padding = None if self.real is None else ~self.real[:: self.beams]
        self.places = decoders.MemoryPlaces.of(padding)
        self.shown = [(x, _version(x)) for layer in layers for x in (layer.keys, layer.values)]
        self._bound: tuple[Any, ...] = ()

    def holds(self, layers: Sequence[Any], dtype: torch.dtype, mask: Tensor | None) -> bool:
        """True if the layers and the mask (R, S) have the values that the tensors were made from."""
        if dtype != self.dtype or not self._are_shown(layers):
            return False
        if mask is None or self.real is None:
            return mask is self.real
        return torch.equal(mask != 0, self.real)

    def _are_shown(self, layers: Sequence[Any]) -> bool:
        tensors = [x for layer in layers for x in (layer.keys, layer.values)]
        return len(tensors) == len(self.shown) and all(
            x is y and _version(x) == version
            for x, (y, version) in zip(tensors, self.shown, strict=True)
        )

    def bind(self, steps: Bound, sample: Tensor, cache: Tensor) -> Callable[..., Tensor] | None:
        """Returns the function that runs steps like (R, M) with a cache like this one."""
        # Not the cache itself, whose buffer changes: kernels depend on its dtype only.
        key = steps, sample.shape, sample.dtype, cache.dtype, current_settings().backend
        if self._bound[:-1] != key:
            run = decoders.bind_stack(
                sample, cache, steps, self.tensors, self.places.mask, self.places.lengths
            )
            self._bound = (*key, run)
        return self._bound[-1]  # type: ignore[no-any-return]

    def reorder(self, layers: Sequence[Any], rows: Tensor) -> bool:
        """True if the layers' tensors stay what they are: the beams of a source have equal ones."""
        return (
            len(rows) == len(self.shown[0][0])
            and self._are_shown(layers)
            and _are_within_sources(rows, self.beams)
        )


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _beams(layers: Sequence[Any], real: Tensor | None) -> int:
    """Returns how many adjacent sequences have equal keys and values of the encoder's output."""
    rows = len(layers[0].keys)
    differ = torch.zeros(max(0, rows - 1), dtype=torch.bool)
    for layer in layers:
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
    return changes, notes


def next_step(model: Any, inputs: Any, outputs: Any) -> dict[str, Any] | None:
    """Returns the arguments of a step after a call of an encoder-decoder, or None if it has no cache.

    inputs: (args, kwargs) of the call.
    """
    names = inspect.signature(model.forward).parameters
    cache = next((name for name in CACHES if name in names), None)
    encoded = getattr(outputs, "encoder_last_hidden_state", None)
    if cache is None or encoded is None:
        return None
    kept = next((outputs[name] for name in CACHES if name in outputs), None)
    given = inspect.signature(model.forward).bind(*inputs[0], **inputs[1]).arguments
    tokens = given.get("decoder_input_ids")
    tokens = given.get("input_ids") if tokens is None else tokens
    if kept is None or not isinstance(tokens, Tensor):
        return None
    return {
        "encoder_outputs": (encoded,), MASK: given.get(MASK), "decoder_input_ids": tokens[:, :1],
        cache: kept, "use_cache": True,
    }  # fmt: skip


def is_change(change: Any) -> bool:
    """True for the change of a decoder's class; the report has no entry for it."""
    return isinstance(change, ClassChange) and issubclass(change.after, StepDecoder)


def _stack_of(module: Any) -> str | None:
    """Returns the name of the layers of an encoder-decoder's decoder, or None if it is none."""
    if not is_model(module) or not is_ours(module.config):
        return None
    stacks = [
        name
        for name, child in module._modules.items()
        if isinstance(child, torch.nn.ModuleList)
        and len(child) > 0
        and MEMORY in inspect.signature(child[0].forward).parameters
    ]
    return stacks[0] if len(stacks) == 1 else None


def _find(name: str, decoder: Any, stack: str) -> ClassChange | str:
    """Returns the change of a decoder, or the reason why its steps run module by module."""
    kind = type(decoder)
    parameters = [*inspect.signature(kind.forward).parameters][1:]
    caches = [each for each in parameters if each in CACHES]
    if "forward" in decoder.__dict__:
        return "its forward was replaced on the instance"
    if not caches or not {MEMORY, MEMORY_MASK, MASK} <= {*parameters}:
        return "it takes other arguments"
    layers = decoder._modules[stack]
    reason = (
        classes.sharded(decoder)
        or classes.code_of_others(decoder)
        or next(filter(None, map(classes.code_of_others, layers)), None)
    )
    if reason is not None:
        return reason
    steps, judged = [], {}  # type: ignore[var-annotated]
    with undisturbed(decoder):
        try:
            for layer in layers:
                steps.append(_recognise(layer, decoder.config.hidden_size, judged))
        except NotCapturedError as error:  # or `NotALayerError`
            return str(error)
        except Exception as error:  # the layer requires other arguments, or refuses float64
            return f"a trial call failed ({type(error).__name__}: {error})"
        made = subclass(
            kind, (StepDecoder, kind), forward=_forward_of(kind), _theirs=kind, _stack=stack,  # type: ignore[arg-type]
            _steps=tuple(steps), _names=tuple(parameters), _cache=caches[0],
        )  # fmt: skip
        if isinstance(made, str):
            return made
        try:
            reason = _difference(decoder, made)
        except Exception as error:
            reason = f"a trial of two steps failed ({type(error).__name__}: {error})"
        packed_memory.forget_packed(decoder)
    return reason or ClassChange(name, decoder, kind, made)


class _Attention(packing.Rows):
    """Stands in for the masks in a trial call of a layer: each token attends to all keys."""

    def __init__(self) -> None:
        self.calls, self.is_plain = 0, True

    def attend(
        self, function: Any, module: Any, query: Tensor, key: Tensor, value: Tensor,
        position_bias: Any, is_known: bool, **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        self.calls += 1
        is_plain = is_known and position_bias is None and options.get("softcap") is None
        self.is_plain = self.is_plain and is_plain and is_ours(getattr(module, "config", None))
        y = F.scaled_dot_product_attention(query, key, value, scale=options.get("scaling"))
        return y.transpose(1, 2).contiguous(), None


def _recognise(layer: Any, width: int, judged: dict[tuple[Any, ...], Layer[Place]]) -> _Step:
    """Returns the recipe of a layer's steps. Raises `NotCapturedError` with the reason if there is none.

    judged: earlier results. Layers that differ only in number and weights share a trial.
    """
    if len({p.dtype for p in layer.parameters()}) != 1:
        raise NotALayerError("its weights have several dtypes")
    of_layer = inspect.signature(original_class(layer).forward).parameters  # type: ignore[attr-defined]
    name = next((each for each in CACHES if each in of_layer), None)
    if name is None:
        raise NotALayerError("it takes no cache")

    def call(copied: Any, x: Tensor, memory: Tensor, cache: Any = None) -> Tensor:
        probe = _Attention()
        y = copied(x, **{MASK: probe, MEMORY: memory, MEMORY_MASK: probe, name: cache})
        if probe.calls != 2 or not probe.is_plain:
            raise NotALayerError("its attention has a bias, or is not looked up in the registry")
        if isinstance(y, tuple):
            raise NotALayerError("it returns more than its hidden states")
        return y  # type: ignore[no-any-return]

    generator = torch.Generator().manual_seed(1)
    x, memory = (
        torch.randn(1, length, width, generator=generator, dtype=torch.float64)
        for length in (formula.TOKENS, formula.TOKENS + 2)
    )
    inputs = {"x": x, "memory": memory}
    captured = capture(layer, call, inputs, original_class, dtype=torch.float32)
    found = layer_of(captured, "x")
    if found.memory != "memory" or found.own != NO_MASKS or found.cross != NO_MASKS:
        raise NotALayerError("it does not attend to the encoder's output, or has a mask of its own")
    used, given = names_of(found.layer), tensors_of(layer)
    if {id(tensor) for tensor in given.values()} != {id(given[name]) for name in used}:
        raise NotALayerError(
            "it has parameters or buffers besides those of its linear maps and norms"
        )
    key = formula.content(layer, without="layer_idx")
    if judged.get(key) != found.layer:
        # Token by token, each attends to those before it in the cache.
        def steps(copied: Any) -> Tensor:
            cache = _new_cache(layer)
            tokens = x.split(1, 1)
            return torch.cat([call(copied, token, memory, cache) for token in tokens], 1)

        formula.judge(layer, found, steps, x, memory=memory, own=Masks(None, None, True))
        judged[key] = found.layer
    return _Step(decoders.without_memory(found.layer, width), formula.content(layer))


def _new_cache(of: Any = None) -> Any:
    kinds = [load("transformers.cache_utils", n) for n in ("EncoderDecoderCache", "DynamicCache")]
    return kinds[0](kinds[1](), kinds[1]())


def _difference(decoder: Any, made: Any) -> str | None:
    """Returns the reason if two steps of the class differ from those of the decoder's own code."""
    generator = torch.Generator().manual_seed(2)
    dtype = next(decoder._modules[made._stack].parameters()).dtype
    tokens = torch.randint(
        0, decoder.get_input_embeddings().num_embeddings, (2, 4), generator=generator
    )
    memory = torch.randn(2, 3, decoder.config.hidden_size, generator=generator).to(dtype)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    copied = object.__new__(made)
    copied.__dict__.update(decoder.__dict__)
    caches = _new_cache(), _new_cache()
    for part in tokens.split([2, 1, 1], 1):
        given = [
            {"input_ids": part, MEMORY: memory, MEMORY_MASK: mask, made._cache: cache, "use_cache": True}
            for cache in caches
        ]  # fmt: skip
        expected = made._theirs.forward(decoder, **given[0])[0]
        if part.shape[1] > 1:
            made._theirs.forward(decoder, **given[1])
            continue
        found = _try_step(copied, (), given[1])
        if found is None:
            return "no kernel for steps supports its sizes"
        error, largest = (found[0] - expected).abs().max(), expected.abs().max()
        if not error <= (1e-4 if dtype == torch.float32 else 5e-2) * largest:
            return "its steps compute something else than its layers one by one"
    return None
