"""Decoders of transformers whose steps in `generate` run all layers in one native call.

The decoder's class is replaced by a `steps.StepDecoder`, and the class of its model by a
`generate_calls.GeneratingModel`.

The layers are read as a recipe from the graph of one call (`compile.layer`), which a trial in float64
confirms. A second trial compares two steps of the whole decoder with those of its own code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import memory as packed_memory
from ..compile.attention import Masks
from ..compile.capture import NotCapturedError, capture
from ..compile.layer import NotALayerError, layer_of
from ..models.generation import decoders
from ..nn.drop_in import original_class, subclass
from ..recipe import Layer, Place
from ..testing import GRADIENT_FACTOR
from ..testing.parity import compare
from . import classes, formula, generate_calls, packing
from .classes import ClassChange
from .padded_positions import undisturbed
from .parts import is_model, is_ours
from .private_names import (
    BIAS,
    CACHES,
    MASK,
    MEMORY,
    MEMORY_BIAS,
    MEMORY_MASK,
    ROTATION,
    load,
)
from .steps import DecoderCall, Step, StepDecoder, forward_of, settings, try_step

#: Beginning of the report's remark on a decoder.
ONE_CALL = "generate: one call a step"
#: Appended to `ONE_CALL` if searches of the model may run in our loops.
LOOPS = ", and plain greedy and beam search in loops of transformer_fast"
#: Classes that change nothing but how `generate` runs.
KINDS = StepDecoder, generate_calls.GeneratingModel


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
    kinds = [*map(type, root.modules()), *(change.after for change in changes)]
    if any(issubclass(kind, generate_calls.GeneratingModel) for kind in kinds):
        notes = {name: note + LOOPS if note == ONE_CALL else note for name, note in notes.items()}
    return changes, notes


def is_generating(model: Any) -> bool:
    """True for models with the method `generate` of transformers."""
    return is_model(model) and isinstance(model, load("transformers.generation", "GenerationMixin"))


def next_step(model: Any, inputs: Any, outputs: Any) -> dict[str, Any] | None:
    """Returns the arguments of a step after a call of a model, or None if it has no cache.

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
        found = _recognise_all(decoder, layers, DecoderCall((*takes,)[2:], may_be_crossed))
        if isinstance(found, str) and may_be_crossed:  # it may lack cross-attention
            other = _recognise_all(decoder, layers, DecoderCall((*takes,)[2:], False))
            found = f"{found}; without an encoder: {other}" if isinstance(other, str) else other
        if isinstance(found, str):
            return found
        call, steps = found
        made = subclass(
            kind, (StepDecoder, kind), forward=forward_of(kind), _theirs=original, _stack=stack,  # type: ignore[arg-type]
            _steps=tuple(steps), _names=tuple(parameters), _cache=cache, _call=call,
        )  # fmt: skip
        if isinstance(made, str):
            return made
        try:
            reason = _difference(decoder, made)
        except Exception as error:
            reason = f"a trial of two steps failed ({type(error).__name__}: {error})"
        packed_memory.forget_packed(decoder)
    earlier = None if original is kind else original  # `padded_positions` has changed it, too
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


def _recognise_all(
    decoder: Any, layers: Any, call: DecoderCall
) -> tuple[DecoderCall, list[Step]] | str:
    """Returns the call of the layers and their recipes, or the reason why they have none."""
    steps: list[Step] = []
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
    all_positions = biased.compute_bias(length, length).tril()
    last = biased.compute_bias(1, length, past_seen_tokens=length - 1)
    return torch.equal(all_positions[..., -1:, :], last) and torch.equal(
        all_positions[..., 1:, 1:], all_positions[..., :-1, :-1]
    )


def _recognise(
    layer: Any, call: DecoderCall, inputs: dict[str, Tensor], biased: Any,
    judged: dict[tuple[Any, ...], Layer[Place]],
) -> Step:  # fmt: skip
    """Returns the recipe of a layer's steps. Raises `NotCapturedError` with the reason if there is none.

    inputs: hidden states, the encoder's output, cosines and sines, and biases of scores, in float64.
    biased: the module that computes the bias for all layers; None: it is in another layer.
    judged: earlier results. Layers that differ only in number and weights share a trial.
    """
    formula.require_one_dtype(layer)
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
    others = [] if biased is None else biased.relative_attention_bias.parameters()
    formula.require_all_used(layer, found.layer, others)
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
    return Step(recipe, formula.content(layer), settings(layer), returned)


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
        return formula.in_float64(self.layer)(*args, **kwargs)


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
    wide = formula.in_float64(plain)
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
        found = try_step(copied, (), of_each[0])
        if found is None:
            return "no kernel for steps supports its sizes, or its cache"
        for kept, result in zip(results, (found[0], expected, right), strict=True):
            kept.append(result)
    found, expected, right = (torch.cat(each, 1) for each in results)
    # Errors of several layers add up, as in gradients.
    parity = compare("hidden states", found, expected, right, GRADIENT_FACTOR)
    return None if parity.ok else f"its steps compute something else than its layers: {parity}"
