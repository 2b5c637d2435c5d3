"""Maps of queries and keys: attention weights of tensors or of a model, and masks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from matplotlib import colormaps
from matplotlib.axis import Axis, XAxis
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from ..models import Encoder, LanguageModel, Transformer, attention_weights
from ..models.attention_weights import evaluating
from ..reference.attention import visible_places
from . import style

VISIBLE, HIDDEN, BLIND = "#56B4E9", "#D9D9D9", "#D55E00"
_HIDDEN: Any = {"facecolor": HIDDEN, "edgecolor": "#B8B8B8", "hatch": "////", "linewidth": 0.0}
#: Height of a tick's label, in inches.
_TICK_SPACE = style.TICK_SIZE * 1.35 / 72
_LONGEST_TOKEN = 16


Vocabulary = Sequence[str] | Mapping[int, str]

#: Class of model -> kind of attention -> (the attention's name in a layer, the figure's title).
_KINDS: dict[type[torch.nn.Module], dict[str, tuple[str, str]]] = {
    Transformer: {
        "encoder": ("encoder.stack.layers.{}.self_attn", "Encoder self-attention"),
        "decoder": ("decoder.stack.layers.{}.self_attn", "Decoder self-attention"),
        "cross": ("decoder.stack.layers.{}.multihead_attn", "Cross-attention, decoder to encoder"),
    },
    LanguageModel: {"decoder": ("encoder.stack.layers.{}.self_attn", "Self-attention, causal")},
    Encoder: {"encoder": ("stack.layers.{}.self_attn", "Encoder self-attention")},
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
    """Draws attention weights: one map for each layer (rows) and head (columns), tokens on the axes.

        with models.attention_weights(model, "decoder.*.multihead_attn") as weights:
            model(source, target)
        viz.attention_maps(weights, target_words, source_words)

    Each row of a map is a query, each column a key. All maps share one scale, from 0 to the largest
    weight. Hidden positions are grey.

    Args:
        weights: (B, H, T, S), (H, T, S) or (T, S); or several with the same T and S, by layer name,
            as `models.attention_weights` returns them.
        query_tokens: T tokens; None: their positions.
        key_tokens: S tokens; None: the query tokens if given and S is T, else their positions.
        index: sequence of the batch.
        heads: heads to draw; None: all.
        average: draw one map for each layer, the mean of its heads.
        query_padding: bool (T,), True at padding, drawn grey; None: no padding.
        key_padding: bool (S,), the same for keys.
        is_causal: draw keys after the query (s > t) as hidden.
        title: title of the figure.

    Raises:
        TypeError: weights are not floating-point tensors, or a padding mask is not bool.
        ValueError: shapes do not match, or weights are NaN or negative.
        IndexError: a sequence or head out of range.
    """
    maps = _maps_of(weights, index)
    rows, columns = next(iter(maps.values())).shape[-2:]
    queries, keys = check_tokens(query_tokens, key_tokens, rows, columns)
    padding = check_padding("query_padding", query_padding, rows)[:, None] | check_padding(
        "key_padding", key_padding, columns
    )
    hidden = padding | torch.ones_like(padding).triu(1) if is_causal else padding
    chosen = {name: _heads(found, heads, average) for name, found in maps.items()}
    shown = ~hidden
    seen = [float(m[shown].max()) for row in chosen.values() for m in row.values() if shown.any()]
    scale = 0.0, max(seen, default=0.0) or 1.0
    rows_of_maps = [
        [Map(head if first else "", m, hidden, scale) for head, m in row.items()]
        for first, row in zip((True, *[False] * len(chosen)), chosen.values(), strict=False)
    ]
    count = len(chosen) * max(map(len, rows_of_maps))
    reasons = ["padding"] if padding.any() else []
    reasons += ["after the query (causal)"] if is_causal else []
    figure, panels = draw_maps(
        rows_of_maps, queries, keys, 6.0 if count == 1 else 3.6 if count <= 4 else 2.2, 0.9,
        "attention weight", [legend_entry(f"hidden: {' or '.join(reasons)}")] * bool(reasons),
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
    """Runs a model of `transformer_fast.models` on the given tokens and draws its `attention_maps`.

    The model runs without gradients and without dropout, even in training mode. Padding and causally
    masked positions are grey.

    Args:
        model: `models.Transformer`, `models.LanguageModel` or `models.Encoder`.
        source: token ids (B, S) of the source, or of the only sequence.
        target: token ids (B, T) for the decoder; only for `models.Transformer`.
        kind: "encoder" (self-attention), "decoder" (self-attention) or "cross" (decoder to
            encoder). None: "cross" for `models.Transformer`, else the model's only kind.
        layers: layers to draw; None: all.
        heads, average, index, title: as in `attention_maps`.
        source_vocabulary: the token of each id; None: ids are shown.
        target_vocabulary: the same for the target; None: ids, or the source's vocabulary if the model
            shares it.

    Raises:
        TypeError: a model of another class.
        ValueError: a kind that the model does not have; a target missing or not expected.
        IndexError: a layer, head or sequence out of range.
    """
    kinds = next((found for cls, found in _KINDS.items() if isinstance(model, cls)), None)
    if kinds is None:
        raise TypeError(
            "model must be a models.Transformer, models.LanguageModel or models.Encoder, not "
            f"{type(model).__name__}: for others, record models.attention_weights and show them "
            "with attention_maps"
        )
    paired = isinstance(model, Transformer)
    kind = [*kinds][-1] if kind is None else kind
    if kind not in kinds:
        raise ValueError(
            f"kind must be one of {', '.join(kinds)} for a {type(model).__name__}, not {kind!r}"
        )
    wants_target = paired and kind != "encoder"
    if wants_target and target is None:
        raise ValueError(f'kind "{kind}" needs a target')
    if target is not None and not paired:
        raise ValueError(f"a {type(model).__name__} takes no target")

    name, usual_title = kinds[kind]
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
        {name: weights[name] for name in names}, queries, keys, index=index, heads=heads,
        average=average, query_padding=query_padding, key_padding=key_padding,
        is_causal=kind == "decoder", title=usual_title if title is None else title,
    )  # fmt: skip


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


def _maps_of(weights: Tensor | Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """Returns the maps (H, T, S) of one sequence by layer name; T and S are the same for all."""
    if not isinstance(weights, Mapping):
        weights = {"": weights}
    if not weights:
        raise ValueError(
            "weights is empty: has the model been called within models.attention_weights?"
        )
    found: dict[str, Tensor] = {}
    for name, given in weights.items():
        place = f"weights[{name!r}]" if name else "weights"
        one = style.check_float(place, given)
        if not 2 <= one.dim() <= 4 or one.numel() == 0:
            raise ValueError(
                f"{place} must have shape (B, H, T, S), (H, T, S) or (T, S), none of them 0, not "
                f"{list(one.shape)}"
            )
        if one.isnan().any() or (one < 0).any():
            raise ValueError(
                f"{place} must be attention weights, but holds NaN or negative numbers"
            )
        if one.dim() == 4:
            one = one[style.check_index("index", index, one.shape[0])]
        found[name] = one if one.dim() == 3 else one[None]
        first = next(iter(found))
        sizes, wanted = (tuple(found[which].shape[-2:]) for which in (name, first))
        if sizes != wanted:
            raise ValueError(
                f"all weights must have one query length and one key length, {wanted} as {first!r} "
                f"has, but {name!r} has {sizes}: choose layers by name in models.attention_weights"
            )
    return found


def _heads(weights: Tensor, heads: Sequence[int] | None, average: bool) -> dict[str, Tensor]:
    """Returns the maps (T, S) of one row of the figure, by their titles."""
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
    """Returns "layer 0", ... if the names differ only in the layer's number; else the names."""
    matches = [re.fullmatch(r"(.*\blayers)\.(\d+)\.(\w+)", name) for name in names]
    if len({m and (m[1], m[3]) for m in matches}) == 1 and matches[0]:
        return [f"layer {m[2]}" for m in matches if m]
    return list(names)


def masks(
    query_length: int,
    key_length: int | None = None,
    *,
    attn_mask: Tensor | None = None,
    key_padding: Tensor | None = None,
    key_lengths: Tensor | None = None,
    is_causal: bool = False,
    true_means: str = "visible",
    index: int = 0,
    head: int = 0,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Draws each mask of a call of attention and their combination, titled with the meaning of True.

    Blue: the query (row) may attend to the key (column); grey: hidden; other colours: added to the
    score. Outlined rows are fully masked: their output is 0.

    Args:
        query_length, key_length: T and S; key_length None: S is T.
        attn_mask: bool or float, broadcastable to (B, H, T, S). A float mask is added; -inf hides.
        key_padding: bool, broadcastable to (B, S), True at padding as in torch.nn.
        key_lengths: int (B,); keys at this position and later are hidden.
        is_causal: query t attends only to keys s <= t.
        true_means: meaning of True in a bool attn_mask: "visible" as in
            `transformer_fast.functional`, or "hidden" as in torch.nn.
        index, head: sequence of the batch, and head.
        query_tokens, key_tokens: tokens for the axes; None: their positions.
        title: title of the figure.

    Raises:
        TypeError: a mask of another dtype.
        ValueError: a shape that does not match, or another value of true_means.
        IndexError: a sequence or head out of range.
    """
    rows = _length("query_length", query_length)
    columns = rows if key_length is None else _length("key_length", key_length)
    if true_means not in ("visible", "hidden"):
        raise ValueError(f'true_means must be "visible" or "hidden", not {true_means!r}')
    queries, keys = check_tokens(query_tokens, key_tokens, rows, columns)

    # The reference computes visibility; it reads only the sizes of these tensors.
    like = (torch.empty(rows, 0), torch.empty(columns, 0))
    everywhere = torch.ones((rows, columns), dtype=torch.bool)
    #: Title, visible positions (T, S), and the float mask added to the scores (T, S).
    panels: list[tuple[str, Tensor, Tensor | None]] = []
    added: Tensor | None = None

    def panel(title: str, visible: Any, added: Tensor | None = None) -> None:
        panels.append((title, everywhere & visible.reshape(visible.shape[-2:]), added))

    if attn_mask is not None:
        mask = _attn_mask(attn_mask, rows, columns, index, head)
        if mask.dtype == torch.bool:
            meaning = "may attend" if true_means == "visible" else "hidden (torch.nn)"
            mask = mask if true_means == "visible" else ~mask
            panel(f"attn_mask\nbool: True = {meaning}", mask)
        else:
            added = mask.masked_fill(mask == -math.inf, 0.0)
            panel(
                "attn_mask\nfloat: added; -inf = hidden",
                visible_places(*like, mask, None, False),
                added,
            )
    if key_padding is not None:
        padding = style.check_tensor("key_padding", key_padding, "a bool Tensor, True at padding")
        padding = _one_of(padding, index) if padding.dim() == 2 else padding
        padding = check_padding("key_padding", padding, columns)
        panel("key_padding\nbool: True = padding, hidden", ~padding[None])
    if key_lengths is not None:
        lengths = _key_lengths(key_lengths, columns, index)
        panel(
            f"key_lengths\n{int(lengths)} keys; later ones hidden",
            visible_places(*like, None, lengths, False),
        )
    if is_causal:
        panel("is_causal\nquery t sees keys s <= t", visible_places(*like, None, None, True))
    if len(panels) != 1:
        together = torch.stack([everywhere, *(visible for _, visible, _ in panels)]).all(0)
        panel("all together" if panels else "no mask\nevery query sees every key", together, added)
    return _draw(panels, queries, keys, title)


def _length(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
    return value


def _one_of(x: Tensor, index: int, name: str = "index") -> Tensor:
    """Returns the slice of one sequence or head; the only one if all share it."""
    return x[0 if x.shape[0] == 1 else style.check_index(name, index, x.shape[0])]


def _attn_mask(value: Tensor, rows: int, columns: int, index: int, head: int) -> Tensor:
    mask = style.check_tensor("attn_mask", value, "a bool or floating-point Tensor")
    if mask.dtype != torch.bool:
        if not mask.is_floating_point():
            raise TypeError(f"attn_mask must be bool or floating point, not {mask.dtype}")
        mask = style.check_float("attn_mask", mask)
    if mask.isnan().any():
        raise ValueError("attn_mask must not hold NaN")
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if mask.dim() > 4 or shape[2] not in (1, rows) or shape[3] not in (1, columns):
        raise ValueError(
            f"attn_mask must be broadcastable to (B, H, {rows}, {columns}), not {list(mask.shape)}"
        )
    mask = mask.reshape(shape)
    return _one_of(_one_of(mask, index), head, "head").expand(rows, columns)


def _key_lengths(value: Tensor, columns: int, index: int) -> Tensor:
    lengths = style.check_tensor("key_lengths", value, "an int Tensor")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"key_lengths must be int32 or int64, not {lengths.dtype}")
    if lengths.dim() != 1 or lengths.numel() == 0:
        raise ValueError(f"key_lengths must have shape (B,), not {list(lengths.shape)}")
    chosen = _one_of(lengths, index)
    if not 0 <= int(chosen) <= columns:
        raise ValueError(f"key_lengths must be in [0, {columns}], not {int(chosen)}")
    return chosen[None]


def _draw(
    panels: Sequence[tuple[str, Tensor, Tensor | None]],
    queries: Sequence[str],
    keys: Sequence[str],
    title: str | None,
) -> Figure:
    scaled = [added is not None and bool(added.any()) for _, _, added in panels]
    extreme = max((float(a.abs().max()) for _, _, a in panels if a is not None), default=0.0)
    maps = [
        Map(name, added, ~visible, (-extreme, extreme))
        if is_scaled and added is not None
        else Map(name, visible.byte(), ~visible)
        for (name, visible, added), is_scaled in zip(panels, scaled, strict=True)
    ]
    blind = (~panels[-1][1].any(1)).nonzero()[:, 0].tolist()
    outline: dict[str, Any] = {"facecolor": "none", "edgecolor": BLIND, "linewidth": 1.5}
    legend = [legend_entry("may attend", VISIBLE)] if not all(scaled) else []
    legend.append(legend_entry("hidden"))
    if blind:
        legend.append(Patch(label="sees nothing: output 0", **outline))
    figure, axes = draw_maps(
        [maps], queries, keys, 5.0 if len(maps) == 1 else 2.6, 2.1, "added to the score", legend,
        title,
    )  # fmt: skip
    for place in axes[0] if max(len(queries), len(keys)) <= 40 else ():
        # Thin lines between the cells.
        place.set_xticks([i - 0.5 for i in range(1, len(keys))], minor=True)
        place.set_yticks([i - 0.5 for i in range(1, len(queries))], minor=True)
        place.grid(which="minor", color="white", linewidth=0.6)
        place.tick_params(which="minor", length=0)
    axes[0, 0].set_ylabel("query", fontsize=style.LABEL_SIZE)
    for row in blind:
        box = Rectangle((-0.5, row - 0.5), len(keys), 1.0, clip_on=False, zorder=3, **outline)
        axes[0, -1].add_patch(box)
    return figure


# Drawing.


def legend_entry(label: str, colour: str | None = None) -> Patch:
    """Returns a legend entry for a colour; None: for hidden positions."""
    return Patch(label=label, **({"facecolor": colour} if colour else _HIDDEN))


class Map(NamedTuple):
    """One panel: values of queries and keys."""

    title: str
    #: (T, S), drawn where `hidden` is False.
    values: Tensor
    hidden: Tensor
    #: Ends of the colour scale; None: a single colour, `VISIBLE`.
    limits: tuple[float, float] | None = None


def draw_maps(
    rows: Sequence[Sequence[Map]], queries: Sequence[str], keys: Sequence[str], most: float,
    narrowest: float, scale: str, legend: list[Patch], title: str | None,
) -> tuple[Figure, Any]:  # fmt: skip
    """Draws rows of maps, with tokens at the left and below; returns the figure and an array of axes.

    A map measures at most ``most`` inches, unless it would become invisible, and is at least
    ``narrowest`` inches wide. ``scale``: label of the colour scale of maps with limits.
    """
    across, longest = max(map(len, rows)), max(len(queries), len(keys))
    cell = max(min(0.26, most / longest), 1.3 / longest)
    height, width = max(cell * len(queries), 0.6), max(cell * len(keys), narrowest)
    scaled = any(one.limits for row in rows for one in row)
    figure = style.new_figure(
        max(across * (width + 0.2) + token_inches(queries) + (1.7 if scaled else 0.8), 3.4),
        len(rows) * (height + 0.25) + token_inches(keys) + (1.15 if legend else 0.8),
    )
    panels = figure.subplots(len(rows), across, squeeze=False)
    bar = None
    for i, row in enumerate(rows):
        for panel, one in zip(panels[i], row, strict=False):
            # Behind the image: grey and hatched, so that no pale colour resembles it.
            panel.patch.set(**_HIDDEN)
            values = numpy.ma.array(one.values.numpy(), mask=one.hidden.numpy())
            colours: Colormap = ListedColormap([VISIBLE])
            if one.limits:
                colours = colormaps[style.DIVERGING if one.limits[0] < 0 else style.SEQUENTIAL]
            drawn = style.image(
                panel, values, colours.with_extremes(bad="none"), *one.limits or (0, 1)
            )
            bar = drawn if one.limits else bar
            panel.set_title(one.title, fontsize=style.LABEL_SIZE)
            label_tokens(panel.xaxis, keys, width)
            label_tokens(panel.yaxis, queries, height)
            panel.tick_params(labelleft=panel is panels[i, 0], labelbottom=i == len(rows) - 1)
            if i == len(rows) - 1:
                panel.set_xlabel("key", fontsize=style.LABEL_SIZE)
        for panel in panels[i, len(row) :]:
            panel.set_visible(False)
    if bar is not None:
        style.colour_bar(figure, bar, panels, scale, fraction=0.05, aspect=25)
    style.head(figure, title)
    if legend:  # with as many columns as fit
        widest = max(len(str(entry.get_label())) for entry in legend) * 0.065 + 0.5
        fitting = int(figure.get_figwidth() / widest)
        figure.legend(
            handles=legend, loc="outside lower right", ncols=max(1, min(len(legend), fitting)),
            fontsize=style.TICK_SIZE, frameon=False,
        )  # fmt: skip
    return figure, panels


def shown(token: str) -> str:
    """Returns the token as one short line: white space made visible, a long token cut off."""
    signs = (s if s.isprintable() else s.encode("unicode_escape").decode() for s in token)
    token = "".join(signs).replace(" ", "\N{OPEN BOX}")
    if len(token) <= _LONGEST_TOKEN:
        return token
    return token[: _LONGEST_TOKEN - 1] + "\N{HORIZONTAL ELLIPSIS}"


def label_tokens(axis: Axis, tokens: Sequence[str], inches: float) -> None:
    """Labels 0, 1, ... with tokens: as many as fit, in even steps.

    Below a map they are rotated if they do not fit side by side.
    """
    names = [shown(token) for token in tokens]
    below = isinstance(axis, XAxis)
    rotated = below and token_inches(names) + 0.06 > inches / len(names)
    if rotated and all(name.isdigit() for name in names):
        # The names are positions, of which some suffice.
        rotated, space = False, token_inches(names) + 0.06
    else:
        space = 0.0 if below and not rotated else _TICK_SPACE
    step = max(1, math.ceil(len(names) * space / inches))
    axis.set_ticks(list(range(0, len(names), step)))
    # Tokens such as "$" are no formulas.
    axis.set_ticklabels(
        names[::step], fontsize=style.TICK_SIZE, rotation=90 if rotated else 0, parse_math=False
    )
    axis.set_tick_params(length=2)


def token_inches(tokens: Sequence[str]) -> float:
    """Returns the approximate width of the longest token, in inches."""
    return max(len(shown(token)) for token in tokens) * 0.075


def check_tokens(
    queries: Sequence[Any] | None, keys: Sequence[Any] | None, rows: int, columns: int
) -> list[list[str]]:
    """Returns the names of queries and keys; None: the queries' names for keys, else positions."""
    if keys is None and rows == columns:
        keys = queries
    found = []
    for name, tokens, size in (("query_tokens", queries, rows), ("key_tokens", keys, columns)):
        if isinstance(tokens, str):
            raise TypeError(f"{name} must be a sequence of tokens, not one str")
        if tokens is not None and len(tokens) != size:
            raise ValueError(f"{name} must name {size} tokens, not {len(tokens)}")
        found.append([str(token) for token in (range(size) if tokens is None else tokens)])
    return found


def check_padding(name: str, padding: Tensor | None, length: int) -> Tensor:
    if padding is None:
        return torch.zeros(length, dtype=torch.bool)
    found = style.check_tensor(name, padding, "a bool Tensor, True at padding")
    if found.dtype != torch.bool:
        raise TypeError(f"{name} must be a bool Tensor, True at padding, not {found.dtype}")
    if found.shape != (length,):
        raise ValueError(f"{name} must have shape [{length}], not {list(found.shape)}")
    return found
