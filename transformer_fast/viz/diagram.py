"""Diagram of a model's layers and their connections, drawn from the model itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Patch
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Bbox

from ..models import (
    Decoder,
    Encoder,
    LanguageModel,
    SinusoidalPositions,
    TokenEmbedding,
    Transformer,
)
from ..models.embedding import OutputProjection
from ..nn.fusion import activation_name

_FONT_SIZE = 9.0
_LINE_HEIGHT = _FONT_SIZE * 1.35 / 72
_SUM_RADIUS = 0.12
_INK = "#222222"
_COLOURS = {
    "embedding": "#F6D5E5",
    "positions": "#FFFFFF",
    "attention": "#FBDDB0",
    "ffn": "#C6E4F5",
    "norm": "#F7F3B5",
    "output": "#CDEBDD",
}
#: Inches: gap between boxes of a column, padding of a frame, detour of a residual connection.
_GAP, _PAD, _DETOUR = 0.24, 0.14, 0.2
#: Inches between the two columns, for the memory's arrow and its label.
_BETWEEN = 1.15


def model_diagram(model: torch.nn.Module, *, title: str | None = None) -> Figure:
    """Draws a model as boxes and arrows: embeddings, layers with residuals and norms, output.

    Everything is read from the model: number of layers, d_model, heads, feed-forward size,
    activations, kind and place of the norms (post-norm or pre-norm), positions, scaling, tied weights.
    Equal layers are drawn once.

    Args:
        model: a model of `transformer_fast.models`, a Transformer of torch.nn or transformer_fast.nn,
            one of its stacks or layers, or a module that contains exactly one of these.
        title: title of the figure; None: the class and its number of parameters.

    Raises:
        TypeError: the model has no such layers.
        ValueError: the model contains several of them.

    Source: "Attention Is All You Need", figure 1.
    """
    facts = read_model(model)
    canvas = _Canvas()
    texts = [text for stack in facts.stacks for text in _column_texts(stack)]
    texts += [text for _, text in _output_boxes(facts.output)]
    width = max(2.0, max(map(_text_width, texts)) + 0.24)
    paired = len(facts.stacks) == 2
    columns = [
        # Residuals run on the outer side, so that they do not cross the memory's arrow.
        _Column(canvas, stack, i * (width + 2 * _PAD + _BETWEEN), width, 2 * i - 1 if paired else 1)
        for i, stack in enumerate(facts.stacks)
    ]
    for column, whose in zip(columns, ("source ", "target ") if paired else ("",), strict=True):
        column.draw(whose)
    first, last = columns[0], columns[-1]
    for name, text in _output_boxes(facts.output):
        last.box(f"output.{name}", text, "output", _GAP + 0.1)
    if facts.output is not None:
        words = f"logits (B, T, {len(facts.output.weight):,})"
    else:
        words = f"output (B, {'T' if last.stack.side == 'decoder' else 'S'}, {last.d_model})"
    last.arrow_to(last.end + 0.3)
    canvas.text("output", last.x, last.end + 0.03, words, va="bottom")
    _memory(canvas, first if paired else None, last)
    if facts.tied_output:
        # Around everything beside the last column.
        right, far = last.x + width / 2, canvas.extent().x1 + 0.16
        low, high = last.middles["embedding"], last.middles["output.linear"]
        points = [(right, low), (far, low), (far, high), (right, high)]
        canvas.line("tied.output", *points, arrow=False, dashed=True)
    if facts.shared_table:
        sides = ((first, first.x + width / 2), (last, last.x - width / 2))
        points = [(x, column.middles["embedding"]) for column, x in sides]
        canvas.line("tied.embeddings", *points, arrow=False, dashed=True)
    _words(canvas, facts, title)
    return canvas.figure()


def _memory(canvas: _Canvas, encoder: _Column | None, decoder: _Column) -> None:
    """Draws the arrows from the encoder's output to every cross-attention."""
    edge = decoder.x - decoder.width / 2
    way = edge - _PAD - _BETWEEN / 2
    crossings = [y for name, y in decoder.middles.items() if name.endswith(".multihead_attn")]
    if encoder is None:
        for y in crossings:
            canvas.line("memory", (way, y), (edge, y))
            canvas.text("memory", way - 0.06, y, "memory", ha="right")
        return
    top = encoder.end + 0.24
    label = f"memory (B, S, {encoder.d_model})"
    canvas.text("memory", encoder.x, top + 0.04, label, va="bottom")
    start = [(encoder.x, encoder.end), (encoder.x, top)]
    for y in crossings:
        canvas.line("memory", *start, (way, top), (way, y), (edge, y))
        canvas.text("memory.kv", edge - _PAD - 0.06, y + 0.04, "K, V", ha="right", va="bottom")
        start = []


def _words(canvas: _Canvas, facts: ModelFacts, title: str | None) -> None:
    """Writes the title, the properties that all layers share, and the meaning of dashes."""
    layers = [layer for stack in facts.stacks for _, layer in stack.layers]
    drawn = canvas.extent()
    middle, top = (drawn.x0 + drawn.x1) / 2, drawn.y1 + 0.14
    sizes = sorted({layer.d_model for layer in layers})
    common = [f"d_model {', '.join(map(str, sizes))}"] if sizes else []
    common += sorted({"pre-norm" if layer.norm_first else "post-norm" for layer in layers})
    rates = {layer.dropout for layer in layers}
    if len(rates) == 1:
        common.append(f"dropout {rates.pop():g}")
    canvas.text("summary", middle, top, ", ".join(common), va="bottom")
    if title is None:
        title = f"{facts.name}, {facts.parameters:,} parameters"
    canvas.text("title", middle, top + 0.22, title, va="bottom", fontsize=12, fontweight="bold")
    if facts.tied_output or facts.shared_table:
        y = drawn.y0 - 0.2
        ends = (middle - 0.75, y), (middle - 0.3, y)
        canvas.line("tied.legend", *ends, arrow=False, dashed=True)
        canvas.text("tied.legend", middle - 0.22, y, "the same weights", ha="left")


def _sublayers(stack: StackFacts, layer: LayerFacts) -> list[tuple[str, str]]:
    """Returns (name, text) of each box, from the bottom up."""
    heads = f"\n{layer.heads} heads of {layer.d_model // layer.heads}"
    kind = "Causal self-attention" if stack.causal else "Self-attention"
    sizes = f"{layer.d_model} \u2192 {layer.hidden} \u2192 {layer.d_model}"
    crossed = [("multihead_attn", f"Cross-attention{heads}")] if layer.crossed else []
    ffn = "ffn", f"Feed-forward, {layer.activation}\n{sizes}"
    return [("self_attn", kind + heads), *crossed, ffn]


def _embedding_text(embedding: TokenEmbedding) -> str:
    size = embedding.table.embedding_dim
    text = f"Token embedding\n{embedding.vocab_size:,} \u00d7 {size}"
    if embedding.scale == 1.0:
        return text
    root = math.isclose(embedding.scale, math.sqrt(size))
    return f"{text}, scaled by " + (f"\u221a{size}" if root else f"{embedding.scale:g}")


def _projection_text(projection: torch.nn.Linear) -> str:
    return f"Linear, no bias\n{projection.in_features} \u2192 {projection.out_features}"


def _output_boxes(output: OutputProjection | None) -> list[tuple[str, str]]:
    """Returns (name, text) of each box, from the bottom up."""
    if output is None:
        return []
    vocab_size, size = output.weight.shape
    bias = "" if output.bias is not None else ", no bias"
    boxes = [("linear", f"Linear{bias}\n{size} \u2192 {vocab_size:,}")]
    if output.projection is not None:
        boxes.insert(0, ("projection", _projection_text(output.projection)))
    return boxes


def _column_texts(stack: StackFacts) -> list[str]:
    """Returns the texts that must fit into the boxes of a column."""
    texts = [stack.final_norm or "", _embedding_text(stack.embedding) if stack.embedding else ""]
    for _, layer in stack.layers:
        texts += [layer.norm, *(text for _, text in _sublayers(stack, layer))]
    return texts


class _Column:
    """One stack, drawn from the bottom up around x.

    ``outer``: the side of residuals, positions and numbers of layers; 1: right, -1: left.
    """

    def __init__(
        self, canvas: _Canvas, stack: StackFacts, x: float, width: float, outer: int
    ) -> None:
        self.canvas, self.stack, self.x, self.width, self.outer = canvas, stack, x, width, outer
        self.d_model = stack.layers[-1][1].d_model if stack.layers else "M"
        #: Top of the last box, where the next arrow starts.
        self.end = 0.0
        #: y of each box's centre, by name.
        self.middles: dict[str, float] = {}

    def _out(self, inches: float) -> float:
        """Returns the x at this distance from the column's outer edge."""
        return self.x + self.outer * (self.width / 2 + inches)

    def draw(self, whose: str) -> None:
        words = whose + ("tokens" if self.stack.embedding else "vectors")
        self.canvas.text(f"{self.stack.side}.input", self.x, -0.07, words, va="top")
        if self.stack.embedding is not None:
            self._embedding(self.stack.embedding)
        first = 0
        for count, layer in self.stack.layers:
            self._layers(first, count, layer)
            first += count
        if self.stack.final_norm is not None:
            self.box("final_norm", self.stack.final_norm, "norm")

    def arrow_to(self, y: float) -> None:
        self.canvas.line("flow", (self.x, self.end), (self.x, y))
        self.end = y

    def box(self, name: str, text: str, colour: str, gap: float = _GAP) -> None:
        """Draws a box on top of the column."""
        self.arrow_to(self.end + gap)
        height = (text.count("\n") + 1) * _LINE_HEIGHT + 0.16
        place = (self.x - self.width / 2, self.end, self.width, height)
        self.canvas.box(f"{self.stack.side}.{name}", *place, text, _COLOURS[colour])
        self.middles[name] = self.end + height / 2
        self.end += height

    def _sum(self, name: str) -> float:
        """Draws the residual sum; returns the y of its centre."""
        self.arrow_to(self.end + _GAP)
        y = self.end + _SUM_RADIUS
        self.canvas.sum(f"{self.stack.side}.{name}", self.x, y)
        self.end = y + _SUM_RADIUS
        return y

    def _embedding(self, embedding: TokenEmbedding) -> None:
        self.box("embedding", _embedding_text(embedding), "embedding")
        if embedding.projection is not None:
            self.box("embedding.projection", _projection_text(embedding.projection), "embedding")
        if embedding.positions is None:
            return
        y = self._sum("positions.sum")
        kind = "Sinusoidal" if isinstance(embedding.positions, SinusoidalPositions) else "Learned"
        text = f"{kind} positions\nup to {self.stack.max_len:,}"
        width, height = _text_width(text) + 0.24, 2 * _LINE_HEIGHT + 0.16
        near = self._out(-0.35)
        left = near if self.outer > 0 else near - width
        name = f"{self.stack.side}.positions"
        place = (left, y - height / 2, width, height)
        self.canvas.box(name, *place, text, _COLOURS["positions"])
        self.canvas.line("flow", (near, y), (self.x + self.outer * _SUM_RADIUS, y))
        self.end = max(self.end, y + height / 2 - 0.12)

    def _layers(self, first: int, count: int, layer: LayerFacts) -> None:
        bottom = self.end + 0.18
        for name, text in _sublayers(self.stack, layer):
            self._sublayer(f"{first}.{name}", text, layer)
        top = self.end + _PAD
        edge, inner = (
            self._out(_PAD + _DETOUR + 0.08),
            self.x - self.outer * (self.width / 2 + _PAD),
        )
        name = f"{self.stack.side}.{first}"
        self.canvas.frame(name, min(inner, edge), bottom, abs(edge - inner), top - bottom)
        self.canvas.text(
            f"{name}.count", edge + self.outer * 0.12, (bottom + top) / 2, f"{count} \u00d7",
            ha="left" if self.outer > 0 else "right", fontsize=13, fontweight="bold",
        )  # fmt: skip
        # The next arrow starts at the frame's end.
        self.canvas.line("flow", (self.x, self.end), (self.x, top), arrow=False)
        self.end = top

    def _sublayer(self, name: str, text: str, layer: LayerFacts) -> None:
        """Post-norm: norm(x + f(x)); pre-norm: x + f(norm(x))."""
        # The residual branches off below the first box, above the start of that box's arrow.
        branch = self.end + 0.32
        if layer.norm_first:
            self.box(f"{name}.norm", layer.norm, "norm", 0.48)
        colour = "ffn" if name.endswith("ffn") else "attention"
        self.box(name, text, colour, _GAP if layer.norm_first else 0.48)
        y = self._sum(f"{name}.sum")
        detour, into = self._out(_DETOUR), self.x + self.outer * _SUM_RADIUS
        corners = (self.x, branch), (detour, branch), (detour, y), (into, y)
        self.canvas.line(f"{self.stack.side}.{name}.residual", *corners)
        if not layer.norm_first:
            self.box(f"{name}.norm", layer.norm, "norm")


def _text_width(text: str) -> float:
    """Returns the width of the widest line, in inches."""
    font = FontProperties(size=_FONT_SIZE)
    lines = filter(str.strip, text.split("\n"))
    return max((TextPath((0, 0), s, prop=font).get_extents().width for s in lines), default=0) / 72


class _Canvas:
    """A drawing in units of inches; names become the gid of the artists."""

    def __init__(self) -> None:
        self._figure = Figure(figsize=(1.0, 1.0))
        self._axes = self._figure.add_axes((0.0, 0.0, 1.0, 1.0))
        self._axes.set_axis_off()

    def box(
        self, name: str, left: float, bottom: float, width: float, height: float, text: str,
        colour: str,
    ) -> None:  # fmt: skip
        """Draws a box with centred text."""
        self._round(name, left, bottom, width, height, 0.07, facecolor=colour, edgecolor=_INK)
        self.text(name, left + width / 2, bottom + height / 2, text)

    def frame(self, name: str, left: float, bottom: float, width: float, height: float) -> None:
        colours = {"facecolor": "#F5F5F5", "edgecolor": "#888888"}
        self._round(name, left, bottom, width, height, 0.12, zorder=1, **colours)

    def _round(
        self, name: str, left: float, bottom: float, width: float, height: float, radius: float,
        **options: Any,
    ) -> None:  # fmt: skip
        style = f"round,pad=0,rounding_size={radius}"
        self._add(FancyBboxPatch((left, bottom), width, height, style), name, **options)

    def _add(self, patch: Patch, name: str, **options: Any) -> None:
        patch.set(**{"gid": name, "zorder": 3, "linewidth": 0.9, "clip_on": False} | options)
        self._axes.add_artist(patch)

    def sum(self, name: str, x: float, y: float) -> None:
        """Draws a circle with a plus sign: a sum."""
        self._add(Circle((x, y), _SUM_RADIUS), name, facecolor="white", edgecolor=_INK)
        self.text(name, x, y, "+", fontsize=11)

    def line(
        self, name: str, *points: tuple[float, float], arrow: bool = True, dashed: bool = False
    ) -> None:
        """Draws straight lines through the points, with an arrow head at the last."""
        patch = FancyArrowPatch(
            path=Path(points), arrowstyle="-|>" if arrow else "-", mutation_scale=9
        )
        colour, width, style = ("#0072B2", 1.1, (0, (4, 2))) if dashed else (_INK, 0.9, "-")
        self._add(patch, name, color=colour, linewidth=width, linestyle=style, zorder=2)

    def text(self, name: str, x: float, y: float, text: str, **options: Any) -> None:
        usual: dict[str, Any] = {
            "ha": "center",
            "va": "center",
            "fontsize": _FONT_SIZE,
            "zorder": 4,
        }
        self._axes.text(x, y, text, gid=name, parse_math=False, **usual | options)

    def extent(self) -> Bbox:
        """Returns the bounding box of all artists."""
        drawn: Sequence[Any] = (*self._axes.patches, *self._axes.texts)
        boxes = [artist.get_window_extent() for artist in drawn]
        return Bbox.union(boxes).transformed(self._axes.transData.inverted())

    def figure(self) -> Figure:
        """Returns the drawing with a margin, at its size in inches."""
        found = self.extent().padded(0.2)
        self._figure.set_size_inches(found.width, found.height)
        self._axes.set(xlim=found.intervalx, ylim=found.intervaly)
        return self._figure


# The facts about a model that the diagram shows, read from the model.


class LayerFacts(NamedTuple):
    #: True if it has cross-attention.
    crossed: bool
    d_model: int
    heads: int
    hidden: int
    activation: str
    norm_first: bool
    #: Class name of its norms.
    norm: str
    dropout: float


class StackFacts(NamedTuple):
    #: "encoder" or "decoder".
    side: str
    #: Runs of equal layers and their lengths, in order.
    layers: list[tuple[int, LayerFacts]]
    final_norm: str | None
    #: True if self-attention is always causal; False if the call decides.
    causal: bool
    embedding: TokenEmbedding | None
    #: Number of positions.
    max_len: int


class ModelFacts(NamedTuple):
    name: str
    parameters: int
    stacks: list[StackFacts]
    output: OutputProjection | None
    #: True if the output shares its weight with the last stack's embedding.
    tied_output: bool
    #: True if both embeddings share one table.
    shared_table: bool


_LAYERS = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)
_DECODERS = (Decoder, torch.nn.TransformerDecoder, torch.nn.TransformerDecoderLayer)
_PAIRS = (Transformer, torch.nn.Transformer)
_KNOWN = (*_PAIRS, LanguageModel, Encoder, torch.nn.TransformerEncoder, *_DECODERS, *_LAYERS)


def read_model(model: Any) -> ModelFacts:
    """Returns the facts about ``model``, or about the only known model inside it."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    inner: Any = model if isinstance(model, _KNOWN) else _inside(model)
    if isinstance(inner, _PAIRS):
        stacks = [_stack(inner.encoder, "encoder"), _stack(inner.decoder, "decoder")]
    elif isinstance(inner, LanguageModel):
        stacks = [_stack(inner.encoder, "decoder")._replace(causal=True)]
    else:
        stacks = [_stack(inner, "decoder" if isinstance(inner, _DECODERS) else "encoder")]
    output = getattr(inner, "output", None)
    tables = [stack.embedding and stack.embedding.table.weight for stack in stacks]
    return ModelFacts(
        type(model).__name__ + (f" (its {type(inner).__name__})" if inner is not model else ""),
        sum(p.numel() for p in model.parameters()),
        stacks,
        output,
        output is not None and output.weight is tables[-1],
        len(stacks) == 2 and tables[0] is not None and tables[0] is tables[1],
    )


def _inside(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the only outermost known model inside a wrapper module."""
    found: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, _KNOWN) and not any(name.startswith(f"{n}.") for n in found):
            found[name] = module
    if not found:
        raise TypeError(
            f"model has no Transformer that can be drawn: a {type(model).__name__} without "
            "torch.nn's layers or transformer_fast's"
        )
    if len(found) > 1:
        raise ValueError(
            f"model has several Transformers, {', '.join(found)}: pass one of them, as in "
            f'model.get_submodule("{next(iter(found))}")'
        )
    return next(iter(found.values()))


def _stack(part: Any, side: str) -> StackFacts:
    """Returns the facts about a layer, a stack, or the encoder or decoder that has one."""
    whole = isinstance(part, (Encoder, Decoder))
    stack = part.stack if whole else part
    layers = [stack] if isinstance(stack, _LAYERS) else getattr(stack, "layers", None)
    if layers is None:
        raise TypeError(
            f"the {side} of model must have layers, and a {type(stack).__name__} has none"
        )
    runs = [(len(list(same)), facts) for facts, same in itertools.groupby(map(_layer, layers))]
    norm = getattr(stack, "norm", None)
    return StackFacts(
        side, runs, None if norm is None else type(norm).__name__, isinstance(part, Decoder),
        part.embedding if whole else None, part.max_len if whole else 0,
    )  # fmt: skip


def _layer(layer: Any) -> LayerFacts:
    if not isinstance(layer, _LAYERS):
        raise TypeError(
            "model must be built of TransformerEncoderLayer and TransformerDecoderLayer, and one "
            f"of its layers is {type(layer).__name__}"
        )
    attention, activation = layer.self_attn, layer.activation
    named = activation_name(activation) or getattr(activation, "__name__", None)
    return LayerFacts(
        isinstance(layer, torch.nn.TransformerDecoderLayer), attention.embed_dim,
        attention.num_heads, layer.linear1.out_features, str(named or type(activation).__name__),
        bool(layer.norm_first), type(layer.norm1).__name__, layer.dropout1.p,
    )  # fmt: skip
