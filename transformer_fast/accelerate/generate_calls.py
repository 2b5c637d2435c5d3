"""Calls of transformers' `generate` by a model whose decoder has native steps (`generation`).

Greedy and beam search run in the loops of `models.generation.search`, unless an option or code of
users needs transformers' own loop (`_Search.of`). A step then skips the Python around the decoder.

Every search looks once, not in each step, for untracked writes to weights (`memory.compared_once`)
and for the tokens of logits processors in the vocabulary (`_searching_once`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import memory
from .._context import are_plain_on_cpu, is_traced
from ..models.generation.decoders import StepDecoder
from ..models.generation.methods import BeamSearch, Greedy, top
from ..models.generation.search import Rules, Task, beam_search, one_by_one
from ..nn.drop_in import DropIn, subclass
from .classes import code_of_others
from .padded_positions import is_hooked
from .private_names import CACHES, OBJECTS, SEARCHING, STATELESS, load
from .steps import Chain, keep_shared, noted_steps

_PROCESSORS = "transformers.generation.logits_process"
_CRITERIA = "transformers.generation.stopping_criteria"


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


def _search_of(name: str) -> Callable[..., Any]:
    """Returns a function: class of models -> replacement of its method of this name."""

    @functools.cache
    def method_of(kind: Any) -> Any:
        method = getattr(kind, name)
        is_theirs = method is getattr(load("transformers.generation", "GenerationMixin"), name)

        @functools.wraps(method)
        def run(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            with memory.compared_once():
                if is_theirs and not args:
                    search = _Search.of(self, input_ids, **kwargs)
                    if search is not None:
                        return search.run()
                return method(self, input_ids, *args, **kwargs)

        return run

    return method_of


class _Rules(Rules):
    """The scores of transformers' beam search; ``logits`` are log-probabilities."""

    def __init__(self, early_stopping: bool | str, beams: int) -> None:
        self.early_stopping, self.beams = early_stopping, beams

    def extensions(
        self, logits: Tensor, scores: Tensor, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        sources, live = scores.shape
        values, tokens = top(logits, count + 1)
        values = (values.view(sources, live, -1) + scores[:, :, None]).flatten(1)
        best, place = values.topk(count + 1, dim=1)
        # The order of equal values, and of NaN, is unspecified: there, use PyTorch's topk of the
        # values that transformers passes to it, whose first step has all beams.
        if bool(((best[:, :-1] > best[:, 1:]) | (scores[:, :1] == -math.inf)).all()):
            best, place = best[:, :count], place[:, :count]
            return best, place // (count + 1), tokens.view(sources, -1).gather(1, place)
        others = scores.new_full((sources, self.beams - live), -1e9)
        every = logits.view(sources, live, -1) + torch.cat((scores, others), 1)[:, :, None]
        best, place = every.flatten(1).topk(count, dim=1)
        return best, place // logits.shape[1], place % logits.shape[1]

    def penalty(self, length: int, power: float) -> float:
        return length**power  # type: ignore[no-any-return]

    def is_done(
        self, finished: Any, scores: Tensor, step: int, task: Task, method: BeamSearch
    ) -> Tensor:
        worst, power = finished.scores[:, -1], method.length_penalty
        is_full = worst > -math.inf
        if self.early_stopping is True:
            return is_full  # type: ignore[no-any-return]
        is_bound = self.early_stopping == "never" and power > 0
        best = scores[:, 0] / self.penalty(task.max_new_tokens if is_bound else step + 1, power)
        return is_full & ~(best > worst)


class _Search(StepDecoder):
    """A greedy or beam search of a model in our loops, with transformers' tokens.

    The first step after the prompt calls the model. Later steps call only its decoder
    (`Chain.repeat`) and output layer, if these reproduce the logits of the first; else the model.
    """

    def __init__(
        self, model: Any, tokens: Tensor, config: Any, processors: Any, task: Task,
        given: dict[str, Any],
    ) -> None:  # fmt: skip
        self.model, self.tokens, self.config, self.given = model, tokens, config, given
        self.processors, self.task = processors, task
        self.beams: int = config.num_beams or 1
        self.repeated: Chain | None = None
        self.head: Any = None
        #: Number of steps that ``repeated`` has run since the last update of ``given``.
        self.count = 0

    @staticmethod
    def of(
        model: Any, tokens: Tensor, logits_processor: Any = None, stopping_criteria: Any = None,
        generation_config: Any = None, synced_gpus: bool = False, streamer: Any = None, **given: Any,
    ) -> _Search | None:  # fmt: skip
        """Returns the search of a call of transformers' method; None: its own loop must run."""
        config, cache, beams = generation_config, _cache_of(given), generation_config.num_beams or 1
        kinds = [load(_CRITERIA, name) for name in OBJECTS[_CRITERIA]]
        parts = [cache.self_attention_cache] if hasattr(cache, "self_attention_cache") else [cache]
        if (
            config.do_sample
            or config.return_dict_in_generate
            or config.is_assistant
            or config.low_memory
            or config.prefill_chunk_size is not None
            or not given.get("use_cache")
            or synced_gpus
            or streamer is not None
            or not {*map(type, stopping_criteria)} <= {*kinds}
            or type(logits_processor) is not load(_PROCESSORS, "LogitsProcessorList")
            or not {*map(_kind_of, logits_processor)} <= {load(_PROCESSORS, x) for x in STATELESS}
            or [type(x) for x in parts] != [load("transformers.cache_utils", "DynamicCache")]
            or getattr(cache, "_is_user_defined", False)
            or cache.get_seq_length() > 0
            or hasattr(model, "_reorder_cache")
            or is_traced()
            or not are_plain_on_cpu((tokens,))
            or is_hooked(model)
            or code_of_others(model) is not None
        ):
            return None
        limits = [c for c in stopping_criteria if hasattr(c, "max_length")]
        ends = [c.eos_token_id.tolist() for c in stopping_criteria if hasattr(c, "eos_token_id")]
        pad, size = config._pad_token_tensor, model.get_output_embeddings().weight.shape[0]
        if len(limits) != 1 or len(ends) > 1 or (ends and pad is None):
            return None
        last, most = limits[0].max_length, limits[0].max_position_embeddings
        end, *others = ends[0] if ends else [-1]
        new = last - tokens.shape[1]
        if new < 1 or (most is not None and most < last) or max(end, *others, 0) >= size:
            return None
        if (2 + len(others)) * beams >= size:
            return None
        fill = int(pad) if ends else 0
        if beams > 1 and fill == 0:
            fill = max(end, 0)  # as transformers' beam search
        task = Task(tokens[::beams], None, new, end, fill, (*others,))
        return _Search(model, tokens, config, logits_processor, task, given)

    def run(self) -> Tensor:
        """Returns the prompts, followed by the new tokens."""
        config, prompt = self.config, self.task.prompt
        if self.beams == 1:
            columns = one_by_one(self, self.task, Greedy())
            return torch.cat((prompt, torch.stack([*columns], 1)), 1)
        wanted = config.num_return_sequences or 1
        method = BeamSearch(self.beams, config.length_penalty, n_best=wanted)
        found = beam_search(self, self.task, method, _Rules(config.early_stopping, self.beams))
        return torch.cat((prompt.repeat_interleave(wanted, 0), found.tokens.flatten(0, 1)), 1)

    def start(self, tokens: Tensor) -> Tensor:
        cache, beams = _cache_of(self.given), self.beams
        if beams == 1 or not self.model.config.is_encoder_decoder:
            outputs = self.model._prefill(self.tokens, self.config, self.given)
        else:  # the beams of a source are still equal: compute one of each
            first = torch.arange(0, len(self.tokens), beams)
            given = self._given(first)
            outputs = self.model._prefill(tokens, self.config, given)
            outputs["logits"] = outputs.logits.repeat_interleave(beams, 0)
            cache = _cache_of(given)
            cache.self_attention_cache.batch_repeat_interleave(beams)
            for layer in cache.cross_attention_cache.layers:
                layer.keys = layer.keys.repeat_interleave(beams, 0)
                layer.values = layer.values.repeat_interleave(beams, 0)
            keep_shared(cache.cross_attention_cache, beams)
        self._update(outputs)
        return self._scores(outputs.logits)[::beams]

    def step(self, tokens: Tensor) -> Tensor:
        self.tokens = torch.cat((self.tokens, tokens[:, None]), 1)
        if self.repeated is not None:
            self.count += 1
            return self._scores(self.head(self.repeated.repeat(tokens)))
        inputs = self.model.prepare_inputs_for_generation(
            self.tokens, next_sequence_length=1, **self.given
        )
        with noted_steps() as noted:
            outputs = self.model(**inputs, return_dict=True)
        self._update(outputs)
        if len(noted) == 1 and noted[0].can_repeat():
            self.head = _head_of(self.model, noted[0].hidden, outputs.logits)
            self.repeated = None if self.head is None else noted[0]
        return self._scores(outputs.logits)

    def _update(self, outputs: Any, count: int = 1) -> None:
        self.given = self.model._update_model_kwargs_for_generation(
            outputs, self.given, self.model.config.is_encoder_decoder, count
        )

    def _scores(self, logits: Tensor) -> Tensor:
        scores = logits[:, -1].float()
        if self.beams > 1:
            scores = scores.log_softmax(-1)
        return self.processors(self.tokens, scores)  # type: ignore[no-any-return]

    def reorder(self, rows: Tensor) -> None:
        self.tokens = self.tokens.index_select(0, rows)
        if self.repeated is None:
            _cache_of(self.given).reorder_cache(rows)
        else:
            self.repeated.reorder(rows)

    def spread(self, beams: int) -> None:
        """Does nothing: transformers has repeated the sources for all beams."""

    def _rows(self) -> Tensor:
        return torch.arange(len(self.tokens))

    def _select(self, rows: Tensor) -> None:
        if self.repeated is not None:
            self.repeated.finish()
            self._update({}, self.count)
            self.repeated, self.count = None, 0
        _cache_of(self.given).batch_select_indices(rows)
        self.given, self.tokens = self._given(rows), self.tokens[rows]

    def _given(self, rows: Tensor) -> dict[str, Any]:
        """Returns the model's arguments for these rows."""

        def selected(x: Any) -> Any:
            if isinstance(x, dict):  # the encoder's output
                return type(x)(**{name: selected(value) for name, value in x.items()})
            is_of_rows = isinstance(x, Tensor) and x.dim() > 0 and len(x) == len(self.tokens)
            return x[rows] if is_of_rows else x

        return {name: selected(value) for name, value in self.given.items()}


def _kind_of(processor: Any) -> Any:
    """Returns transformers' class of a logits processor, also of a copy by `_searching_once`."""
    kind: Any = type(processor)
    return kind.__base__ if hasattr(kind, "_once") else kind


def _head_of(model: Any, hidden: Tensor, logits: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Returns the function that computes these logits from the decoder's output, or None."""
    layer, bias = model.get_output_embeddings(), getattr(model, "final_logits_bias", None)
    if bias is not None and bias.dtype == logits.dtype and not bool(bias.any()):
        bias = None
    factors: tuple[float, ...] = (1.0, hidden.shape[-1] ** -0.5)

    def head(factor: float, hidden: Tensor) -> Tensor:
        y = layer(hidden if factor == 1.0 else hidden * factor)
        return y if bias is None else y + bias  # type: ignore[no-any-return]

    for factor in factors:
        found = functools.partial(head, factor)
        y = found(hidden)
        if y.dtype == logits.dtype and torch.equal(y, logits):
            return found
    return None


def _cache_of(given: dict[str, Any]) -> Any:
    return next((given[name] for name in CACHES if given.get(name) is not None), None)


_METHODS: dict[str, Callable[[Any], Any]] = {
    "_beam_search": _search_of("_beam_search"),
    "_get_logits_processor": _processors_of,
    "_sample": _search_of("_sample"),
}


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
    if kind not in [load(_PROCESSORS, name) for name in SEARCHING]:
        return processor
    # The attributes are shared, because users may change them during a call.
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
    made.__signature__ = inspect.signature(kind.__call__)  # transformers reads it in each step

    def reduced(self: Any, protocol: Any) -> Any:
        return _processor, (kind, self.__dict__)

    names = {"__call__": made, "__slots__": ("_once",), "__reduce_ex__": reduced}
    return type(kind.__name__, (kind,), names)
