"""Calls of transformers' `generate` by a model whose decoder has native steps (`generation`).

transformers' own code runs, with four things around it. Untracked writes to weights are looked for
once a search (`memory.compared_once`). Logits processors that search the vocabulary for their tokens in
each step do so once. Beam search finds the highest scores by blocks, greedy search with our argmax.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import memory
from .._context import is_traced
from ..models.generation.methods import bind_best, top
from ..nn.drop_in import DropIn, subclass
from .private_names import OBJECTS, load

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
        return type(found)(map(_searching_once, found))

    return processors


@functools.cache
def _continuations_of(kind: Any) -> Any:
    @functools.wraps(kind._get_top_k_continuations)
    def continuations(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Blocks():
            return kind._get_top_k_continuations(self, *args, **kwargs)

    return continuations


@functools.cache
def _sample_of(kind: Any) -> Any:
    @functools.wraps(kind._sample)
    def sample(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        processors, config = kwargs.get("logits_processor"), kwargs.get("generation_config")
        # Scores that are returned must be plain tensors.
        if processors is not None and config is not None and not config.output_scores:
            kwargs["logits_processor"] = _greedy_class(type(processors))(processors)
        with memory.compared_once():
            return kind._sample(self, input_ids, *args, **kwargs)

    return sample


@functools.cache
def _beams_of(kind: Any) -> Any:
    @functools.wraps(kind._beam_search)
    def search(self: Any, *args: Any, **kwargs: Any) -> Any:
        with memory.compared_once():
            return kind._beam_search(self, *args, **kwargs)

    return search


_METHODS = {
    "_beam_search": _beams_of,
    "_get_logits_processor": _processors_of,
    "_get_top_k_continuations": _continuations_of,
    "_sample": _sample_of,
}


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
        with torch._C.DisableTorchFunctionSubclass():
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
        self.found: tuple[Tensor, Tensor, int, Tensor] | None = None

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.arange:
            key = args, kwargs
            if self.numbers is None or self.numbers[0] != key:
                self.numbers = key, function(*args, **(kwargs or {}))
            return self.numbers[1]
        if function is not torch.isin or kwargs or self.numbers is None or len(args) != 2:
            return function(*args, **(kwargs or {}))
        numbers, tokens = args
        if (
            numbers is not self.numbers[1]
            or not isinstance(tokens, Tensor)
            or tokens.is_inference()
        ):
            return function(*args)
        found = self.found
        if not (
            found and found[0] is numbers and found[1] is tokens and found[2] == tokens._version
        ):
            found = self.found = numbers, tokens, tokens._version, function(*args)
        return found[3]


def _searching_once(processor: Any) -> Any:
    """Returns a processor with the same attributes; the given one if its class is not known."""
    kinds = [load(_PROCESSORS, name) for name in OBJECTS[_PROCESSORS]]
    if type(processor) not in kinds:
        return processor
    copied = object.__new__(_class_of_processors(type(processor)))
    copied.__dict__ = processor.__dict__  # the same, since users may change it amid a call
    object.__setattr__(copied, "_once", _Once())
    return copied


@functools.cache
def _class_of_processors(kind: Any) -> Any:
    @functools.wraps(kind.__call__)
    def call(self: Any, input_ids: Tensor, scores: Tensor) -> Any:
        with self._once:
            return kind.__call__(self, input_ids, scores)

    return type(kind.__name__, (kind,), {"__call__": call, "__slots__": ("_once",)})
