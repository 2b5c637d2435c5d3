"""A diagram of how a model's layers connect, drawn from the model itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure

from .canvas import LINE_HEIGHT, SUM_RADIUS, Canvas, Point, text_width
from .model_facts import EmbeddingFacts, LayerFacts, ModelFacts, OutputFacts, StackFacts, read_model

_COLOURS = {
    "embedding": "#F6D5E5",
    "positions": "#FFFFFF",
    "attention": "#FBDDB0",
    "ffn": "#C6E4F5",
    "norm": "#F7F3B5",
    "output": "#CDEBDD",
}
#: Inches between two things in a column, around boxes in a frame, and of a residual's detour.
_GAP, _PAD, _DETOUR = 0.24, 0.14, 0.2
#: Between the two columns: the memory's way and its label.
_BETWEEN = 1.15


def model_diagram(model: torch.nn.Module, *, title: str | None = None) -> Figure:
    """Boxes and arrows: embeddings, layers with their residuals and norms, output.

    All is read from the model: numbers of layers, d_model, heads, FFN, activations, which norms
    there are and where (post-norm or pre-norm), positions, scaling, tied weights. Layers that are
    alike are drawn once.

    Args:
        model: of `transformer_fast.models`, torch.nn.Transformer, its stacks or its layers (torch's
            or ours), or a module that holds exactly one of them.
        title: what stands above; None: the class and its number of parameters.

    Raises:
        TypeError: a model without layers of torch.nn's kind.
        ValueError: a model that has several of them.

    Source: "Attention Is All You Need", figure 1.
    """
    facts = read_model(model)
    canvas = Canvas()
    texts = [text for stack in facts.stacks for text in _texts(stack)]
    if facts.output is not None:
        texts += [text for _, text in _output_boxes(facts.output)]
    width = max(2.0, max(map(text_width, texts)) + 0.24)
    columns = []
    x = 0.0
    paired = len(facts.stacks) == 2
    for number, stack in enumerate(facts.stacks):
        # Residuals run on the outer side, so that the memory's way in is free.
        outer = -1.0 if number == 0 and paired else 1.0
        columns.append(_Column(canvas, stack, x, width, outer, paired).draw())
        x += width + 2 * _PAD + _BETWEEN
    last = columns[-1]
    if facts.output is not None:
        last.output(facts.output)
        last.to_the_end(f"logits (B, T, {facts.output.vocab_size:,})")
    else:
        last.to_the_end(
            f"output (B, {'T' if last.stack.side == 'decoder' else 'S'}, {last.d_model})"
        )
    if paired:
        _memory(canvas, columns[0], last)
    elif last.crossings:
        _memory(canvas, None, last)
    dashed = facts.tied_output or facts.shared_table
    if facts.tied_output:
        last.tie_output()
    if facts.shared_table:
        _tie_embeddings(canvas, columns[0], last)
    _words(canvas, facts, title, dashed)
    return canvas.figure()


def _attention_text(kind: str, layer: LayerFacts) -> str:
    size = layer.d_model // layer.heads
    return f"{kind}\n{layer.heads} heads of {size}"


def _self_attention_kind(stack: StackFacts) -> str:
    return "Causal self-attention" if stack.causal else "Self-attention"


def _ffn_text(layer: LayerFacts) -> str:
    sizes = (layer.d_model, layer.hidden, layer.d_model)
    return f"Feed-forward, {layer.activation}\n" + " \u2192 ".join(map(str, sizes))


def _embedding_text(embedding: EmbeddingFacts) -> str:
    text = f"Token embedding\n{embedding.vocab_size:,} \u00d7 {embedding.size}"
    if embedding.scale == 1.0:
        return text
    root = math.isclose(embedding.scale, math.sqrt(embedding.size))
    return f"{text}, scaled by " + (f"\u221a{embedding.size}" if root else f"{embedding.scale:g}")


def _output_boxes(output: OutputFacts) -> list[tuple[str, str]]:
    """(name, text) from the bottom up."""
    bias = "" if output.bias else ", no bias"
    size = output.d_model
    boxes = []
    if output.projected is not None:
        boxes.append(("projection", f"Linear, no bias\n{size} \u2192 {output.projected}"))
        size = output.projected
    return [*boxes, ("linear", f"Linear{bias}\n{size} \u2192 {output.vocab_size:,}")]


def _texts(stack: StackFacts) -> list[str]:
    """What has to fit into the boxes of a column."""
    texts = [stack.final_norm or "", _embedding_text(stack.embedding) if stack.embedding else ""]
    for _, layer in stack.layers:
        texts += [_attention_text(_self_attention_kind(stack), layer), _ffn_text(layer), layer.norm]
    return texts


@dataclass
class _Column:
    """One stack, drawn from the bottom up around x."""

    canvas: Canvas
    stack: StackFacts
    x: float
    width: float
    #: +1.0 or -1.0: the side of residuals, positions and numbers of layers.
    outer: float
    #: Whether it is one of two.
    paired: bool

    def __post_init__(self) -> None:
        #: Top of what was drawn last, where the next arrow starts.
        self.end = 0.0
        #: Heights of the cross-attentions, and of the boxes that can share a weight.
        self.crossings: list[float] = []
        self.embedding_y = self.output_y = 0.0
        self.frame_edge = self.x + self.outer * (self.width / 2 + _PAD + _DETOUR + 0.08)
        self.far_edge = self.frame_edge

    @property
    def d_model(self) -> int | str:
        return self.stack.layers[-1][1].d_model if self.stack.layers else "M"

    def draw(self) -> _Column:
        side = self.stack.side
        what = "tokens" if self.stack.embedding else "vectors"
        whose = {"encoder": "source ", "decoder": "target "}[side] if self.paired else ""
        words = whose + what
        self.canvas.text(self.x, self.end - 0.07, words, va="top", gid=f"{side}.input")
        if self.stack.embedding is not None:
            self._embedding(self.stack.embedding)
        first = 0
        for count, layer in self.stack.layers:
            self._layers(first, count, layer)
            first += count
        if self.stack.final_norm is not None:
            self._box("final_norm", self.stack.final_norm, "norm")
        return self

    def _arrow_to(self, y: float, name: str = "flow") -> None:
        self.canvas.line(name, [(self.x, self.end), (self.x, y)])

    def _box(self, name: str, text: str, colour: str, gap: float = _GAP) -> float:
        """On top of what is there; gives the height of its middle."""
        bottom = self.end + gap
        height = (text.count("\n") + 1) * LINE_HEIGHT + 0.16
        self._arrow_to(bottom)
        self.canvas.box(
            f"{self.stack.side}.{name}", self.x - self.width / 2, bottom, self.width, height, text,
            _COLOURS[colour],
        )  # fmt: skip
        self.end = bottom + height
        return bottom + height / 2

    def _sum(self, name: str) -> float:
        y = self.end + _GAP + SUM_RADIUS
        self._arrow_to(y - SUM_RADIUS)
        self.canvas.sum(f"{self.stack.side}.{name}", self.x, y)
        self.end = y + SUM_RADIUS
        return y

    def _embedding(self, embedding: EmbeddingFacts) -> None:
        self.embedding_y = self._box("embedding", _embedding_text(embedding), "embedding")
        if embedding.projected is not None:
            text = f"Linear, no bias\n{embedding.size} \u2192 {embedding.projected}"
            self._box("embedding.projection", text, "embedding")
        if embedding.positions is None:
            return
        y = self._sum("positions.sum")
        text = f"{embedding.positions} positions\nup to {embedding.max_len:,}"
        width, height = text_width(text) + 0.24, 2 * LINE_HEIGHT + 0.16
        near = self.x + self.outer * (self.width / 2 - 0.35)
        left = near if self.outer > 0 else near - width
        self.canvas.box(
            f"{self.stack.side}.positions", left, y - height / 2, width, height, text,
            _COLOURS["positions"],
        )  # fmt: skip
        self.canvas.line("flow", [(near, y), (self.x + self.outer * SUM_RADIUS, y)])
        self.far_edge = near + self.outer * width
        self.end = max(self.end, y + height / 2 - 0.12)

    def _layers(self, first: int, count: int, layer: LayerFacts) -> None:
        bottom = self.end + 0.18
        sublayers = [("self_attn", _attention_text(_self_attention_kind(self.stack), layer))]
        if layer.crossed:
            sublayers.append(("multihead_attn", _attention_text("Cross-attention", layer)))
        sublayers.append(("ffn", _ffn_text(layer)))
        for name, text in sublayers:
            self._sublayer(f"{first}.{name}", text, layer)
        top = self.end + _PAD
        inner = self.x - self.outer * (self.width / 2 + _PAD)
        self.canvas.frame(
            f"{self.stack.side}.{first}", min(inner, self.frame_edge), bottom,
            abs(self.frame_edge - inner), top - bottom,
        )  # fmt: skip
        times = f"{count} \u00d7"
        place = self.frame_edge + self.outer * 0.12
        self.canvas.text(
            place, (bottom + top) / 2, times, ha="left" if self.outer > 0 else "right",
            fontsize=13, fontweight="bold", gid=f"{self.stack.side}.{first}.count",
        )  # fmt: skip
        # The way on starts where the frame ends.
        self.canvas.line("flow", [(self.x, self.end), (self.x, top)], arrow=False)
        self.end = top
        edge = place + self.outer * (text_width(times, 13) * 1.15)
        self.far_edge = max(self.far_edge * self.outer, edge * self.outer) * self.outer

    def _sublayer(self, name: str, text: str, layer: LayerFacts) -> None:
        """Post-norm: norm(x + f(x)); pre-norm: x + f(norm(x))."""
        side = self.stack.side
        # The residual leaves below the first box; the arrow into that box starts lower still.
        branch = self.end + 0.32
        colour = "ffn" if name.endswith("ffn") else "attention"
        if layer.norm_first:
            self._box(f"{name}.norm", layer.norm, "norm", 0.48)
        middle = self._box(name, text, colour, _GAP if layer.norm_first else 0.48)
        if name.endswith("multihead_attn"):
            self.crossings.append(middle)
        y = self._sum(f"{name}.sum")
        detour = self.x + self.outer * (self.width / 2 + _DETOUR)
        points: list[Point] = [
            (self.x, branch),
            (detour, branch),
            (detour, y),
            (self.x + self.outer * SUM_RADIUS, y),
        ]
        self.canvas.line(f"{side}.{name}.residual", points)
        if not layer.norm_first:
            self._box(f"{name}.norm", layer.norm, "norm")

    def output(self, output: OutputFacts) -> None:
        for name, text in _output_boxes(output):
            self.output_y = self._box(f"output.{name}", text, "output", _GAP + 0.1)

    def to_the_end(self, words: str) -> None:
        self._arrow_to(self.end + 0.3)
        self.end += 0.3
        self.canvas.text(self.x, self.end + 0.03, words, va="bottom", gid="output")

    def tie_output(self) -> None:
        right = self.x + self.width / 2
        far = self.far_edge + 0.16
        points = [(right, self.embedding_y), (far, self.embedding_y), (far, self.output_y),
                  (right, self.output_y)]  # fmt: skip
        self.canvas.line("tied.output", points, arrow=False, dashed=True)


def _memory(canvas: Canvas, encoder: _Column | None, decoder: _Column) -> None:
    """The encoder's output, to every cross-attention."""
    edge = decoder.x - decoder.width / 2
    way = edge - _PAD - _BETWEEN / 2
    if encoder is None:
        for y in decoder.crossings:
            canvas.line("memory", [(way, y), (edge, y)])
            canvas.text(way - 0.06, y, "memory", ha="right", gid="memory")
        return
    top = encoder.end + 0.24
    canvas.text(
        encoder.x, top + 0.04, f"memory (B, S, {encoder.d_model})", va="bottom", gid="memory"
    )
    for number, y in enumerate(decoder.crossings):
        start: list[Point] = [(encoder.x, encoder.end), (encoder.x, top), (way, top)]
        canvas.line("memory", [*(start if number == 0 else [(way, top)]), (way, y), (edge, y)])
        canvas.text(edge - _PAD - 0.06, y + 0.04, "K, V", ha="right", va="bottom", gid="memory.kv")


def _tie_embeddings(canvas: Canvas, encoder: _Column, decoder: _Column) -> None:
    ends = [
        (encoder.x + encoder.width / 2, encoder.embedding_y),
        (decoder.x - decoder.width / 2, decoder.embedding_y),
    ]
    canvas.line("tied.embeddings", ends, arrow=False, dashed=True)


def _words(canvas: Canvas, facts: ModelFacts, title: str | None, dashed: bool) -> None:
    """Title, what all layers have in common, and what dashes mean."""
    layers = [layer for stack in facts.stacks for _, layer in stack.layers]
    middle = canvas.middle
    told = []
    sizes = sorted({layer.d_model for layer in layers})
    if sizes:
        told.append(f"d_model {', '.join(map(str, sizes))}")
    order = {True: "pre-norm", False: "post-norm"}
    told += [order[first] for first in sorted({layer.norm_first for layer in layers})]
    rates = {layer.dropout for layer in layers}
    if len(rates) == 1:
        told.append(f"dropout {rates.pop():g}")
    top = canvas.top + 0.14
    canvas.text(middle, top, ", ".join(told), va="bottom", gid="summary")
    if title is None:
        title = f"{facts.name}, {facts.parameters:,} parameters"
    canvas.text(middle, top + 0.22, title, va="bottom", fontsize=12, fontweight="bold", gid="title")
    if dashed:
        y = canvas.bottom - 0.2
        canvas.line(
            "tied.legend", [(middle - 0.75, y), (middle - 0.3, y)], arrow=False, dashed=True
        )
        canvas.text(middle - 0.22, y, "the same weights", ha="left", gid="tied.legend")
