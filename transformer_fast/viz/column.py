"""One column of a diagram: a stack of layers with all that belongs to it, from the bottom up."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..models import SinusoidalPositions, TokenEmbedding
from ..models.embedding import OutputProjection
from .canvas import LINE_HEIGHT, SUM_RADIUS, Canvas, Point, text_width
from .model_facts import LayerFacts, StackFacts

_COLOURS = {
    "embedding": "#F6D5E5",
    "positions": "#FFFFFF",
    "attention": "#FBDDB0",
    "ffn": "#C6E4F5",
    "norm": "#F7F3B5",
    "output": "#CDEBDD",
}
#: Inches between two things in a column, around boxes in a frame, and of a residual's detour.
_GAP, PAD, _DETOUR = 0.24, 0.14, 0.2


def _attention_text(kind: str, layer: LayerFacts) -> str:
    size = layer.d_model // layer.heads
    return f"{kind}\n{layer.heads} heads of {size}"


def _self_attention_kind(stack: StackFacts) -> str:
    return "Causal self-attention" if stack.causal else "Self-attention"


def _ffn_text(layer: LayerFacts) -> str:
    sizes = (layer.d_model, layer.hidden, layer.d_model)
    return f"Feed-forward, {layer.activation}\n" + " \u2192 ".join(map(str, sizes))


def _embedding_text(embedding: TokenEmbedding) -> str:
    size = embedding.table.embedding_dim
    text = f"Token embedding\n{embedding.vocab_size:,} \u00d7 {size}"
    if embedding.scale == 1.0:
        return text
    root = math.isclose(embedding.scale, math.sqrt(size))
    return f"{text}, scaled by " + (f"\u221a{size}" if root else f"{embedding.scale:g}")


def _projection_text(projection: torch.nn.Linear) -> str:
    return f"Linear, no bias\n{projection.in_features} \u2192 {projection.out_features}"


def output_boxes(output: OutputProjection) -> list[tuple[str, str]]:
    """(name, text) from the bottom up."""
    vocab_size, size = output.weight.shape
    bias = "" if output.bias is not None else ", no bias"
    boxes = [("linear", f"Linear{bias}\n{size} \u2192 {vocab_size:,}")]
    if output.projection is not None:
        boxes.insert(0, ("projection", _projection_text(output.projection)))
    return boxes


def column_texts(stack: StackFacts) -> list[str]:
    """What has to fit into the boxes of a column."""
    texts = [stack.final_norm or "", _embedding_text(stack.embedding) if stack.embedding else ""]
    for _, layer in stack.layers:
        texts += [_attention_text(_self_attention_kind(stack), layer), _ffn_text(layer), layer.norm]
    return texts


@dataclass
class Column:
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
        self.frame_edge = self.x + self.outer * (self.width / 2 + PAD + _DETOUR + 0.08)
        self.far_edge = self.frame_edge

    @property
    def d_model(self) -> int | str:
        return self.stack.layers[-1][1].d_model if self.stack.layers else "M"

    def draw(self) -> Column:
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

    def _arrow_to(self, y: float) -> None:
        self.canvas.line("flow", [(self.x, self.end), (self.x, y)])

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

    def _embedding(self, embedding: TokenEmbedding) -> None:
        self.embedding_y = self._box("embedding", _embedding_text(embedding), "embedding")
        if embedding.projection is not None:
            self._box("embedding.projection", _projection_text(embedding.projection), "embedding")
        if embedding.positions is None:
            return
        y = self._sum("positions.sum")
        kind = "Sinusoidal" if isinstance(embedding.positions, SinusoidalPositions) else "Learned"
        text = f"{kind} positions\nup to {self.stack.max_len:,}"
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
        top = self.end + PAD
        inner = self.x - self.outer * (self.width / 2 + PAD)
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
        edge = place + self.outer * (text_width(times, 13, "bold"))
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

    def output(self, output: OutputProjection) -> None:
        for name, text in output_boxes(output):
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
