"""Running a model of `transformer_fast.models` to see what its attentions look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models import Encoder, LanguageModel, Transformer, attention_weights
from ..models.generation.recomputed import evaluating
from . import style

Vocabulary = Sequence[str] | Mapping[int, str]

#: For each kind: the attention's name behind the layer's number, and its picture's title.
_KINDS = {
    "encoder": ("encoder.stack.layers.{}.self_attn", "Encoder self-attention"),
    "decoder": ("decoder.stack.layers.{}.self_attn", "Decoder self-attention"),
    "cross": ("decoder.stack.layers.{}.multihead_attn", "Cross-attention, decoder to encoder"),
}


@dataclass(frozen=True)
class Seen:
    """What one run of the model gave, of the sequence that is to be shown."""

    #: (B, H, T, S) by the attention's name.
    weights: dict[str, Tensor]
    query_tokens: list[str]
    key_tokens: list[str]
    query_padding: Tensor | None
    key_padding: Tensor | None
    is_causal: bool
    title: str


def watch(
    model: torch.nn.Module,
    source: Tensor,
    target: Tensor | None,
    kind: str | None,
    layers: Sequence[int] | None,
    source_vocabulary: Vocabulary | None,
    target_vocabulary: Vocabulary | None,
    index: int,
) -> Seen:
    kinds = _kinds_of(model)
    if kind is None:
        kind = kinds[-1]
    if kind not in kinds:
        raise ValueError(
            f"kind must be one of {', '.join(kinds)} for a {type(model).__name__}, not {kind!r}"
        )
    wants_target = isinstance(model, Transformer) and kind != "encoder"
    if wants_target and target is None:
        raise ValueError(f'kind "{kind}" needs a target')
    if target is not None and not isinstance(model, Transformer):
        raise ValueError(f"a {type(model).__name__} takes no target")

    half = _half(model, kind)
    name, title = _KINDS[kind]
    if isinstance(model, LanguageModel):
        name = _KINDS["encoder"][0]
    elif isinstance(model, Encoder):
        name = name.removeprefix("encoder.")
    size = len(half.stack.layers)
    numbers = range(size) if layers is None else layers
    if len(numbers) == 0:
        raise ValueError("layers must name at least one layer")
    names = [name.format(style.check_index("layers", layer, size)) for layer in numbers]
    with torch.no_grad(), evaluating(model), attention_weights(model, *names) as weights:
        if isinstance(model, Transformer):
            model(source, target) if wants_target else model.encode(source)
        else:
            model(source)
    shared = isinstance(model, Transformer) and model.config["target_vocab_size"] is None
    target_name = "target_vocabulary"
    if target_vocabulary is None and shared:
        target_name, target_vocabulary = "source_vocabulary", source_vocabulary
    style.check_index("index", index, source.shape[0])

    def words_and_padding(of_target: bool) -> tuple[list[str], Tensor | None]:
        tokens = target if of_target else source
        assert tokens is not None
        vocabulary = target_vocabulary if of_target else source_vocabulary
        padding = _half(model, "decoder" if of_target else "encoder").padding_mask(tokens)
        label = target_name if of_target else "source_vocabulary"
        ids = tokens[index].tolist()
        return _words(label, ids, vocabulary), None if padding is None else padding[index]

    from_target = isinstance(model, Transformer) and kind != "encoder"
    queries, query_padding = words_and_padding(from_target)
    keys, key_padding = words_and_padding(from_target and kind != "cross")
    return Seen(
        {name: weights[name] for name in names},
        queries,
        keys,
        query_padding,
        key_padding,
        kind == "decoder",
        title if isinstance(model, (Transformer, Encoder)) else "Self-attention, causal",
    )


def _kinds_of(model: torch.nn.Module) -> tuple[str, ...]:
    if isinstance(model, Transformer):
        return ("encoder", "decoder", "cross")
    if isinstance(model, LanguageModel):
        return ("decoder",)
    if isinstance(model, Encoder):
        return ("encoder",)
    raise TypeError(
        "model must be a models.Transformer, models.LanguageModel or models.Encoder, not "
        f"{type(model).__name__}: for others, record models.attention_weights and show them with "
        "attention_maps"
    )


def _half(model: Any, kind: str) -> Any:
    if isinstance(model, Transformer):
        return model.encoder if kind == "encoder" else model.decoder
    return model.encoder if isinstance(model, LanguageModel) else model


def _words(name: str, ids: Sequence[int], vocabulary: Vocabulary | None) -> list[str]:
    if vocabulary is None:
        return [str(i) for i in ids]
    if isinstance(vocabulary, str):
        raise TypeError(f"{name} must be a sequence of tokens, not one str")
    try:
        return [str(vocabulary[i]) for i in ids]
    except (IndexError, KeyError):
        known = range(len(vocabulary)) if isinstance(vocabulary, Sequence) else vocabulary
        missing = next(i for i in ids if i not in known)
        raise ValueError(f"{name} has no token for id {missing}") from None
