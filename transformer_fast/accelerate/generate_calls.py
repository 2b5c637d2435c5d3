"""Calls of transformers' `generate` by a model whose decoder has native steps (`generation`).

transformers' own code runs, with five things around it. Untracked writes to weights are looked for
once a search (`memory.compared_once`). Logits processors that search the vocabulary for their tokens in
each step do so once. Beam search finds the highest scores by blocks, greedy search with our argmax.
The first tokens of beams, which are equal, are computed for one beam of each source.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import memory
from .._context import as_plain_tensors, is_traced
from ..models.generation.methods import bind_best, top
from ..nn.drop_in import DropIn, subclass
from .classes import code_of_others
from .padded_places import is_hooked
from .private_names import CACHES, OBJECTS, load

_PROCESSORS = "transformers.generation.logits_process"


class GeneratingModel(DropIn):
    """Base of the classes that `accelerate` gives to models with a native decoder."""


def class_of(kind: Any) -> Any:
    """Returns the class for models of a class, or the reason why there is none."""
    methods = {name: make(kind) for name, make in _METHODS.items() if hasattr(kind, name)}
    return subclass(kind, (GeneratingModel, kind), **methods)


@functools.cache
def _processors_of(kind: Any) -> Any:
    @functools.wraps(kind._get_logits_processor)
    def processors(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = kind._get_logits_processor(self, *args, **kwargs)
        copied = copy.copy(found)
        copied[:] = map(_searching_once, found)
        return copied

    return processors


def _within(context: Callable[[], AbstractContextManager[Any]], name: str) -> Callable[..., Any]:
    """Returns a function of a class that returns the class's method, run within a context."""

    @functools.cache
    def method_of(kind: Any) -> Any:
        method = getattr(kind, name)

        @functools.wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with context():
                return method(self, *args, **kwargs)

        return run

    return method_of


@functools.cache
def _sample_of(kind: Any) -> Any:
    @functools.wraps(kind._sample)
    def sample(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        processors, config = kwargs.get("logits_processor"), kwargs.get("generation_config")
        # Scores that are returned, or read by code of others, must be plain tensors.
        if (
            processors is not None
            and config is not None
            and not config.output_scores
            and kind._sample is load("transformers.generation", "GenerationMixin")._sample
        ):
            copied = copy.copy(processors)
            of_list: Any = type(processors)
            copied.__class__ = _greedy_class(of_list)
            kwargs["logits_processor"] = copied
        with memory.compared_once():
            return kind._sample(self, input_ids, *args, **kwargs)

    return sample


@functools.cache
def _prefill_of(kind: Any) -> Any:
    @functools.wraps(kind._prefill)
    def prefill(
        self: Any, input_ids: Tensor, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any
    ) -> Any:  # fmt: skip
        from .generation import keep_shared  # which imports this module

        beams = generation_config.num_beams or 1
        one = None
        if (
            beams > 1
            and self.config.is_encoder_decoder
            and not is_hooked(self)
            and code_of_others(self) is None
        ):
            one = _of_one_beam(generation_config, {**model_kwargs, "input_ids": input_ids})
        if one is None:
            return kind._prefill(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
        tokens = one.pop("input_ids")
        outputs = kind._prefill(self, tokens, generation_config, one, *args, **kwargs)
        cache = _cache_of(one)
        cache.self_attention_cache.batch_repeat_interleave(beams)
        for layer in cache.cross_attention_cache.layers:
            layer.keys = layer.keys.repeat_interleave(beams, 0)
            layer.values = layer.values.repeat_interleave(beams, 0)
        keep_shared(cache.cross_attention_cache, beams)
        outputs["logits"] = outputs.logits.repeat_interleave(beams, 0)
        return outputs

    return prefill


def _cache_of(given: dict[str, Any]) -> Any:
    return next((given[name] for name in CACHES if given.get(name) is not None), None)


def _of_one_beam(config: Any, given: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the arguments of the first beam of each source; None if beams differ, or of other calls."""
    names = "DynamicCache", "EncoderDecoderCache"
    plain, both = (load("transformers.cache_utils", name) for name in names)
    cache, encoded, beams = _cache_of(given), given.get("encoder_outputs"), config.num_beams
    if (
        type(cache) is not both
        or {type(cache.self_attention_cache), type(cache.cross_attention_cache)} != {plain}
        or cache.get_seq_length() > 0
        or any(
            part.offloading for part in (cache.self_attention_cache, cache.cross_attention_cache)
        )
        or config.output_attentions
        or config.output_hidden_states
        or not isinstance(encoded, dict)
        or [*encoded] != ["last_hidden_state"]
    ):
        return None
    found = {**given, "encoder_outputs": encoded[0]}
    for name, x in found.items():
        if isinstance(x, Tensor):
            if x.dim() == 0 or len(x) != len(given["input_ids"]) or len(x) % beams > 0:
                return None
            each = x.unflatten(0, (-1, beams))
            if not torch.equal(each[:, 1:], each[:, :-1]):
                return None
            found[name] = x[::beams]
    return {**found, "encoder_outputs": type(encoded)(last_hidden_state=found["encoder_outputs"])}


#: PyTorch's topk is faster on shorter rows.
_LONG = 10_000


class _Blocks(TorchFunctionMode):
    """Computes `torch.topk` by blocks."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if function is torch.topk and len(args) == 1 and {*given} == {"k"} and not is_traced():
            return _topk(*args, **given)
        return function(*args, **given)


_METHODS: dict[str, Callable[[Any], Any]] = {
    "_beam_search": _within(memory.compared_once, "_beam_search"),
    "_get_logits_processor": _processors_of,
    "_get_top_k_continuations": _within(_Blocks, "_get_top_k_continuations"),
    "_prefill": _prefill_of,
    "_sample": _sample_of,
}


def _topk(x: Tensor, k: int) -> Any:
    """Returns the result of `torch.topk` for (R, V)."""
    if x.dim() != 2 or not x.is_cpu or not max(_LONG, k) < x.shape[1]:
        return torch.topk(x, k)
    values, indices = top(x, k + 1)
    # Which of equal values PyTorch takes first is unspecified, so it decides, also about NaN.
    if not bool((values[:, :-1] > values[:, 1:]).all()):
        return torch.topk(x, k)
    return torch.return_types.topk((values[:, :k], indices[:, :k]))  # type: ignore[attr-defined]


class _Scores(Tensor):
    """Scores of the next tokens (R, V), whose `torch.argmax` is ours; other results are plain tensors."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with as_plain_tensors():
            if function is torch.argmax and len(args) == 1 and kwargs == {"dim": -1}:
                x = args[0].as_subclass(Tensor)
                return bind_best(x)(x)
            return function(*args, **(kwargs or {}))


@functools.cache
def _greedy_class(kind: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = kind.__call__(self, *args, **kwargs)
        return found.as_subclass(_Scores) if type(found) is Tensor and found.is_cpu else found

    return type(kind.__name__, (kind,), {"__call__": call})


class _Once(TorchFunctionMode):
    """Computes `torch.isin` of the numbers of a vocabulary once, as long as the tokens are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: tuple[Any, Tensor] | None = None
        self.found: tuple[Tensor, Tensor, Tensor] | None = None

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.arange:
            key = args, kwargs, torch.is_inference_mode_enabled()
            if self.numbers is None or self.numbers[0] != key:
                self.numbers = key, function(*args, **(kwargs or {}))
            return self.numbers[1]
        if function is not torch.isin or kwargs or self.numbers is None or len(args) != 2:
            return function(*args, **(kwargs or {}))
        numbers, tokens = args
        if numbers is not self.numbers[1] or not isinstance(tokens, Tensor):
            return function(*args)
        found = self.found
        if found is None or found[0] is not numbers or not torch.equal(found[1], tokens):
            found = self.found = numbers, tokens.clone(), function(*args)
        return found[2]


def _searching_once(processor: Any) -> Any:
    """Returns a processor with the same attributes; the given one if its class is unknown."""
    kind: Any = type(processor)
    if kind not in [load(_PROCESSORS, name) for name in OBJECTS[_PROCESSORS]]:
        return processor
    # The same attributes, since users may change them amid a call.
    copied = _processor(_class_of_processors(kind), processor.__dict__)
    object.__setattr__(copied, "_once", _Once())
    return copied


def _processor(kind: Any, attributes: dict[str, Any]) -> Any:
    made = object.__new__(kind)
    made.__dict__ = attributes
    return made


@functools.cache
def _class_of_processors(kind: Any) -> Any:
    @functools.wraps(kind.__call__)
    def call(self: Any, input_ids: Tensor, scores: Tensor) -> Any:
        with self._once:
            return kind.__call__(self, input_ids, scores)

    made: Any = call
    made.__signature__ = inspect.signature(kind.__call__)  # transformers asks for it in each step

    def reduced(self: Any, protocol: Any) -> Any:
        return _processor, (kind, self.__dict__)

    names = {"__call__": made, "__slots__": ("_once",), "__reduce_ex__": reduced}
    return type(kind.__name__, (kind,), names)
