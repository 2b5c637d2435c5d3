"""A diagram of how a model's layers connect, drawn from the model itself."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure

from .canvas import Canvas, Point, text_width
from .column import PAD, Column, column_texts, output_boxes
from .model_facts import ModelFacts, read_model

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
    texts = [text for stack in facts.stacks for text in column_texts(stack)]
    if facts.output is not None:
        texts += [text for _, text in output_boxes(facts.output)]
    width = max(2.0, max(map(text_width, texts)) + 0.24)
    columns = []
    x = 0.0
    paired = len(facts.stacks) == 2
    for number, stack in enumerate(facts.stacks):
        # Residuals run on the outer side, so that the memory's way in is free.
        outer = -1.0 if number == 0 and paired else 1.0
        columns.append(Column(canvas, stack, x, width, outer, paired).draw())
        x += width + 2 * PAD + _BETWEEN
    last = columns[-1]
    if facts.output is not None:
        last.output(facts.output)
        last.to_the_end(f"logits (B, T, {len(facts.output.weight):,})")
    else:
        last.to_the_end(
            f"output (B, {'T' if last.stack.side == 'decoder' else 'S'}, {last.d_model})"
        )
    if paired:
        _memory(canvas, columns[0], last)
    elif last.crossings:
        _memory(canvas, None, last)
    if facts.tied_output:
        last.tie_output()
    if facts.shared_table:
        ends = [
            (c.x + side * c.width / 2, c.embedding_y) for c, side in ((columns[0], 1), (last, -1))
        ]
        canvas.line("tied.embeddings", ends, arrow=False, dashed=True)
    _words(canvas, facts, title)
    return canvas.figure()


def _memory(canvas: Canvas, encoder: Column | None, decoder: Column) -> None:
    """The encoder's output, to every cross-attention."""
    edge = decoder.x - decoder.width / 2
    way = edge - PAD - _BETWEEN / 2
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
        canvas.text(edge - PAD - 0.06, y + 0.04, "K, V", ha="right", va="bottom", gid="memory.kv")


def _words(canvas: Canvas, facts: ModelFacts, title: str | None) -> None:
    """Title, what all layers have in common, and what dashes mean."""
    layers = [layer for stack in facts.stacks for _, layer in stack.layers]
    middle = (canvas.low[0] + canvas.high[0]) / 2
    told = []
    sizes = sorted({layer.d_model for layer in layers})
    if sizes:
        told.append(f"d_model {', '.join(map(str, sizes))}")
    order = {True: "pre-norm", False: "post-norm"}
    told += [order[first] for first in sorted({layer.norm_first for layer in layers})]
    rates = {layer.dropout for layer in layers}
    if len(rates) == 1:
        told.append(f"dropout {rates.pop():g}")
    top = canvas.high[1] + 0.14
    canvas.text(middle, top, ", ".join(told), va="bottom", gid="summary")
    if title is None:
        title = f"{facts.name}, {facts.parameters:,} parameters"
    canvas.text(middle, top + 0.22, title, va="bottom", fontsize=12, fontweight="bold", gid="title")
    if facts.tied_output or facts.shared_table:
        y = canvas.low[1] - 0.2
        canvas.line(
            "tied.legend", [(middle - 0.75, y), (middle - 0.3, y)], arrow=False, dashed=True
        )
        canvas.text(middle - 0.22, y, "the same weights", ha="left", gid="tied.legend")
