"""Attention maps: which query looks at which key, of given weights or of a model that is run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from ..models import Encoder, LanguageModel, Transformer, attention_weights
from ..models.generation.decoders import evaluating
from . import style

Vocabulary = Sequence[str] | Mapping[int, str]

#: For each kind: the attention's name behind the layer's number, and its picture's title.
_KINDS = {
    "encoder": ("encoder.stack.layers.{}.self_attn", "Encoder self-attention"),
    "decoder": ("decoder.stack.layers.{}.self_attn", "Decoder self-attention"),
    "cross": ("decoder.stack.layers.{}.multihead_attn", "Cross-attention, decoder to encoder"),
}


def attention_maps(
    weights: Tensor | Mapping[str, Tensor],
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    *,
    index: int = 0,
    heads: Sequence[int] | None = None,
    average: bool = False,
    query_padding: Tensor | None = None,
    key_padding: Tensor | None = None,
    is_causal: bool = False,
    title: str | None = None,
) -> Figure:
    """A map of attention weights for each layer (rows) and head (columns), tokens on the axes.

        with models.attention_weights(model, "decoder.*.multihead_attn") as weights:
            model(source, target)
        viz.attention_maps(weights, target_words, source_words)

    A row of a map is a query, a column a key; all maps share one scale, from 0 to the greatest
    weight. What is hidden is grey.

    Args:
        weights: (B, H, T, S), (H, T, S) or (T, S); or several of one T and S by their layers'
            names, as `models.attention_weights` gives them.
        query_tokens: T tokens; None: their places.
        key_tokens: S tokens; None: the query's where S is T and they are given, else their places.
        index: which sequence of the batch.
        heads: which heads; None: all.
        average: one map for each layer, the mean of the heads.
        query_padding: bool (T,), True at queries that are padding, shown grey; None: there are none.
        key_padding: bool (S,), the same of keys.
        is_causal: whether keys after the query (s > t) are hidden, shown grey.
        title: of the whole picture.

    Raises:
        TypeError: weights that are no floating-point tensors; a padding mask that is not bool.
        ValueError: shapes that do not fit; NaN or negative numbers among the weights.
        IndexError: no such sequence or head.
    """
    named = _named(weights)
    maps = {name: _one_sequence(name, w, index) for name, w in named.items()}
    rows, columns = next(iter(maps.values())).shape[-2:]
    for name, found in maps.items():
        if found.shape[-2:] != (rows, columns):
            raise ValueError(
                f"all weights must have one query length and one key length, ({rows}, {columns}) "
                f"as {next(iter(maps))!r} has, but {name!r} has {tuple(found.shape[-2:])}: "
                "choose layers by name in models.attention_weights"
            )
    if key_tokens is None and rows == columns:
        key_tokens = query_tokens
    queries = style.check_tokens("query_tokens", query_tokens, rows)
    keys = style.check_tokens("key_tokens", key_tokens, columns)
    padding = torch.zeros((rows, columns), dtype=torch.bool)
    query_padding = style.check_padding("query_padding", query_padding, rows)
    key_padding = style.check_padding("key_padding", key_padding, columns)
    if query_padding is not None:
        padding |= query_padding[:, None]
    if key_padding is not None:
        padding |= key_padding
    hidden = padding | torch.ones_like(padding).triu(1) if is_causal else padding
    chosen = {name: _heads(found, heads, average) for name, found in maps.items()}
    shown = ~hidden
    seen = [float(m[shown].max()) for row in chosen.values() for m in row.values() if shown.any()]
    scale = 0.0, max(seen, default=0.0) or 1.0
    rows_of_maps = [
        [style.Map(head if first else "", m, hidden, scale) for head, m in row.items()]
        for first, row in zip((True, *[False] * len(chosen)), chosen.values(), strict=False)
    ]
    count = len(chosen) * max(map(len, rows_of_maps))
    reasons = ["padding"] if padding.any() else []
    reasons += ["after the query (causal)"] if is_causal else []
    figure, panels = style.draw_maps(
        rows_of_maps, queries, keys, 6.0 if count == 1 else 3.6 if count <= 4 else 2.2, 0.9,
        "attention weight", [style.legend_entry(f"hidden: {' or '.join(reasons)}")] * bool(reasons),
        title,
    )  # fmt: skip
    for panel, name in zip(panels[:, 0], _row_names(list(chosen)), strict=True):
        panel.set_ylabel(f"{name}\nquery".lstrip(), fontsize=style.LABEL_SIZE)
    return figure


def model_attention(
    model: torch.nn.Module,
    source: Tensor,
    target: Tensor | None = None,
    *,
    kind: str | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    average: bool = False,
    index: int = 0,
    source_vocabulary: Vocabulary | None = None,
    target_vocabulary: Vocabulary | None = None,
    title: str | None = None,
) -> Figure:
    """`attention_maps` of a model of `transformer_fast.models`, run on the given tokens.

    The model runs without gradients and without dropout, in whatever mode it is; padding and what
    the causal mask hides are grey.

    Args:
        model: `models.Transformer`, `models.LanguageModel` or `models.Encoder`.
        source: token ids (B, S); of the other models: their tokens.
        target: token ids (B, T) the decoder is given; for `models.Transformer` only.
        kind: "encoder" (self-attention), "decoder" (self-attention) or "cross" (decoder to
            encoder). None: "cross" of a `models.Transformer`, the only one of the others.
        layers: which layers; None: all.
        heads, average, index, title: as in `attention_maps`.
        source_vocabulary: the token of each id; None: ids are shown.
        target_vocabulary: the same of the target; None: ids, or the source's where the model has
            one vocabulary for both.

    Raises:
        TypeError: a model of another kind.
        ValueError: a kind that the model does not have, a target missing or not wanted.
        IndexError: no such layer, head or sequence.
    """
    paired = isinstance(model, Transformer)
    if not isinstance(model, (Transformer, LanguageModel, Encoder)):
        raise TypeError(
            "model must be a models.Transformer, models.LanguageModel or models.Encoder, not "
            f"{type(model).__name__}: for others, record models.attention_weights and show them "
            "with attention_maps"
        )
    decodes = isinstance(model, LanguageModel)
    kinds = tuple(_KINDS) if paired else ("decoder",) if decodes else ("encoder",)
    if kind is None:
        kind = kinds[-1]
    if kind not in kinds:
        raise ValueError(
            f"kind must be one of {', '.join(kinds)} for a {type(model).__name__}, not {kind!r}"
        )
    wants_target = paired and kind != "encoder"
    if wants_target and target is None:
        raise ValueError(f'kind "{kind}" needs a target')
    if target is not None and not paired:
        raise ValueError(f"a {type(model).__name__} takes no target")

    name, usual_title = _KINDS[kind]
    if decodes:
        name, usual_title = _KINDS["encoder"][0], "Self-attention, causal"
    elif not paired:
        name = name.removeprefix("encoder.")
    known: Any = model
    encoder = known if isinstance(model, Encoder) else known.encoder
    half = known.decoder if wants_target else encoder
    size = len(half.stack.layers)
    numbers = range(size) if layers is None else layers
    if len(numbers) == 0:
        raise ValueError("layers must name at least one layer")
    names = [name.format(style.check_index("layers", layer, size)) for layer in numbers]
    with torch.no_grad(), evaluating(model), attention_weights(model, *names) as weights:
        if paired and not wants_target:
            known.encode(source)
        else:
            known(*((source, target) if wants_target else (source,)))
    of_target = "target_vocabulary", target_vocabulary
    if target_vocabulary is None and paired and known.config["target_vocab_size"] is None:
        of_target = "source_vocabulary", source_vocabulary
    style.check_index("index", index, source.shape[0])

    def words_and_padding(part: Any, tokens: Any, *of: Any) -> tuple[list[str], Tensor | None]:
        padding = part.padding_mask(tokens)
        words = _words(tokens[index].tolist(), *of)
        return words, None if padding is None else padding[index]

    of_source = encoder, source, "source_vocabulary", source_vocabulary
    of_queries = (half, target, *of_target) if wants_target else of_source
    queries, query_padding = words_and_padding(*of_queries)
    keys, key_padding = words_and_padding(*of_source if kind == "cross" else of_queries)
    return attention_maps(
        {name: weights[name] for name in names},
        queries,
        keys,
        index=index,
        heads=heads,
        average=average,
        query_padding=query_padding,
        key_padding=key_padding,
        is_causal=kind == "decoder",
        title=usual_title if title is None else title,
    )


def _words(ids: Sequence[int], name: str, vocabulary: Vocabulary | None) -> list[str]:
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


def _named(weights: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not isinstance(weights, Mapping):
        return {"": style.check_float("weights", weights)}
    if not weights:
        raise ValueError(
            "weights is empty: has the model been called within models.attention_weights?"
        )
    return {name: style.check_float(f"weights[{name!r}]", w) for name, w in weights.items()}


def _one_sequence(name: str, weights: Tensor, index: int) -> Tensor:
    """(H, T, S)."""
    said = f"weights[{name!r}]" if name else "weights"
    if not 2 <= weights.dim() <= 4 or weights.numel() == 0:
        raise ValueError(
            f"{said} must have shape (B, H, T, S), (H, T, S) or (T, S), none of them 0, not "
            f"{list(weights.shape)}"
        )
    if weights.isnan().any() or (weights < 0).any():
        raise ValueError(f"{said} must be attention weights, but holds NaN or negative numbers")
    if weights.dim() == 4:
        return weights[style.check_index("index", index, weights.shape[0])]
    return weights if weights.dim() == 3 else weights[None]


def _heads(weights: Tensor, heads: Sequence[int] | None, average: bool) -> dict[str, Tensor]:
    """The maps (T, S) of one row of the picture by what stands above them."""
    numbers = range(weights.shape[0]) if heads is None else heads
    if len(numbers) == 0:
        raise ValueError("heads must name at least one head")
    chosen = [style.check_index("heads", head, weights.shape[0]) for head in numbers]
    if weights.shape[0] == 1:
        return {"": weights[0]}
    if average:
        return {f"mean of {len(chosen)} heads": weights[chosen].mean(0)}
    return {f"head {head}": weights[head] for head in chosen}


def _row_names(names: Sequence[str]) -> list[str]:
    """ "layer 0" where the names differ in the layer's number alone."""
    matches = [re.fullmatch(r"(.*\blayers)\.(\d+)\.(\w+)", name) for name in names]
    if len({m and (m[1], m[3]) for m in matches}) == 1 and matches[0]:
        return [f"layer {m[2]}" for m in matches if m]
    return list(names)
