"""Diagrams say what is in the model, and draw its connections where they are."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch
from viz_checks import assert_legible, draw, within

from transformer_fast import models, nn, viz


def texts(figure: Figure) -> dict[str, str]:
    """What stands in the box, or at the place, of each name."""
    return {str(text.get_gid()): text.get_text() for text in figure.axes[0].texts}


def boxes(figure: Figure, kind: type = FancyBboxPatch) -> dict[str, Any]:
    return {p.get_gid(): p for p in figure.axes[0].patches if isinstance(p, kind)}


def middle(patch: FancyBboxPatch) -> tuple[float, float]:
    return patch.get_x() + patch.get_width() / 2, patch.get_y() + patch.get_height() / 2


def lines(figure: Figure, name: str) -> list[list[tuple[float, float]]]:
    """The corners of all lines of that name."""
    return [
        [(float(x), float(y)) for x, y in patch._path_original.vertices]
        for patch in figure.axes[0].patches
        if isinstance(patch, FancyArrowPatch) and patch.get_gid() == name
    ]


def assert_clear(figure: Figure) -> None:
    """Words are legible and within their boxes, and no box lies on another."""
    assert_legible(figure)
    renderer = draw(figure).get_renderer()
    found = boxes(figure)
    for text in figure.axes[0].texts:
        if text.get_gid() in found:
            box = found[text.get_gid()].get_window_extent(renderer)
            own = text.get_window_extent(renderer)
            assert within(own, box), text.get_text()
    named = {name for name in found if name in texts(figure)}
    for one, other in combinations(sorted(named), 2):
        a, b = (found[name].get_window_extent(renderer) for name in (one, other))
        apart = a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 or b.y1 <= a.y0
        assert apart, f"{one} and {other} overlap"


def order(figure: Figure, side: str) -> list[str]:
    """Boxes and sums of one column from the bottom up."""
    found = {name: middle(p)[1] for name, p in boxes(figure).items() if name in texts(figure)}
    found |= {name: circle.center[1] for name, circle in boxes(figure, Circle).items()}
    column = [name for name in found if name.startswith(f"{side}.")]
    return [name.removeprefix(f"{side}.") for name in sorted(column, key=lambda n: found[n])]


def test_what_the_boxes_say() -> None:
    model = models.Transformer(
        8000, 6000, d_model=64, nhead=4, num_encoder_layers=2, num_decoder_layers=3,
        dim_feedforward=96, activation="gelu", dropout=0.25, max_len=77,
    )  # fmt: skip
    figure = viz.model_diagram(model)
    said = texts(figure)
    assert said["encoder.embedding"] == "Token embedding\n8,000 \u00d7 64, scaled by √64"
    assert said["decoder.embedding"] == "Token embedding\n6,000 \u00d7 64, scaled by √64"
    assert said["encoder.positions"] == "Sinusoidal positions\nup to 77"
    assert said["encoder.0.self_attn"] == "Self-attention\n4 heads of 16"
    assert said["decoder.0.self_attn"] == "Causal self-attention\n4 heads of 16"
    assert said["decoder.0.multihead_attn"] == "Cross-attention\n4 heads of 16"
    assert said["encoder.0.ffn"] == "Feed-forward, gelu\n64 → 96 → 64"
    assert said["encoder.0.count"] == "2 \u00d7"
    assert said["decoder.0.count"] == "3 \u00d7"
    assert said["decoder.output.linear"] == "Linear\n64 → 6,000"
    assert said["output"] == "logits (B, T, 6,000)"
    assert said["summary"] == "d_model 64, post-norm, dropout 0.25"
    count = sum(parameter.numel() for parameter in model.parameters())
    assert said["title"] == f"Transformer, {count:,} parameters"
    assert "tied.legend" not in said
    assert_clear(figure)


def test_post_norm_and_pre_norm() -> None:
    for norm_first in (False, True):
        model = models.Transformer(
            9, d_model=16, nhead=2, num_encoder_layers=1, num_decoder_layers=1, norm="annotated",
            norm_first=norm_first,
        )  # fmt: skip
        figure = viz.model_diagram(model)
        column = ["embedding", "positions", "positions.sum"]
        for name in ("self_attn", "multihead_attn", "ffn"):
            parts = [f"0.{name}", f"0.{name}.sum"]
            norm = f"0.{name}.norm"
            column += [norm, *parts] if norm_first else [*parts, norm]
        column += ["final_norm"] if norm_first else []
        column += ["output.linear"]
        found = order(figure, "decoder")
        # Position vectors come in from the side, at the height of their sum.
        assert sorted(found[1:3]) == column[1:3]
        assert found[3:] == column[3:]
        assert texts(figure)["decoder.0.ffn.norm"] == "AnnotatedLayerNorm"
        assert ("pre-norm" in texts(figure)["summary"]) is norm_first
        for name in ("self_attn", "multihead_attn", "ffn"):
            (residual,) = lines(figure, f"decoder.0.{name}.residual")
            # From below the norm (pre) or the sub-layer (post), around, into the sum.
            lowest = boxes(figure)[f"decoder.0.{name}{'.norm' if norm_first else ''}"]
            assert residual[0][1] < lowest.get_y()
            assert residual[-1][1] == pytest.approx(
                boxes(figure, Circle)[f"decoder.0.{name}.sum"].center[1]
            )
            assert residual[1][0] > lowest.get_x() + lowest.get_width()
        assert_clear(figure)


def test_the_memory_goes_to_every_cross_attention() -> None:
    model = models.Transformer(9, 9, 16, 2, 1, 3, 24)
    model.decoder.stack.layers[1] = nn.TransformerDecoderLayer(16, 4, 24, batch_first=True)
    figure = viz.model_diagram(model)
    names = [n for n in texts(figure) if n.endswith(".multihead_attn")]
    assert names == [f"decoder.{i}.multihead_attn" for i in range(3)]
    ends = [line[-1] for line in lines(figure, "memory")]
    targets = [boxes(figure)[name] for name in names]
    assert [x for x, _ in ends] == pytest.approx([box.get_x() for box in targets])
    assert [y for _, y in ends] == pytest.approx([middle(box)[1] for box in targets])
    start = lines(figure, "memory")[0][0]
    assert start[0] == pytest.approx(middle(boxes(figure)["encoder.0.ffn"])[0])
    assert texts(figure)["memory"] == "memory (B, S, 16)"
    # The encoder's residuals leave its way free.
    (residual,) = lines(figure, "encoder.0.ffn.residual")
    assert residual[1][0] < boxes(figure)["encoder.0.ffn"].get_x()
    assert_clear(figure)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_tied_weights(tied: bool, shared: bool) -> None:
    model = models.Transformer(
        40, None if shared else 40, d_model=16, nhead=2, num_encoder_layers=1,
        num_decoder_layers=1, tie_output=tied, embedding_size=8,
    )  # fmt: skip
    figure = viz.model_diagram(model)
    found = boxes(figure)
    assert len(lines(figure, "tied.output")) == tied
    assert len(lines(figure, "tied.embeddings")) == shared
    assert ("tied.legend" in texts(figure)) is (tied or shared)
    if tied:
        (line,) = lines(figure, "tied.output")
        assert line[0][1] == pytest.approx(middle(found["decoder.embedding"])[1])
        assert line[-1][1] == pytest.approx(middle(found["decoder.output.linear"])[1])
        assert texts(figure)["decoder.output.projection"] == "Linear, no bias\n16 → 8"
    assert texts(figure)["encoder.embedding.projection"] == "Linear, no bias\n8 → 16"
    assert_clear(figure)


def test_a_tie_made_by_hand_is_seen() -> None:
    model = models.LanguageModel(40, 16, 2, 1, 24)
    assert not lines(viz.model_diagram(model), "tied.output")
    model.output.weight = model.encoder.embedding.table.weight
    assert lines(viz.model_diagram(model), "tied.output")


def test_language_model() -> None:
    model = models.LanguageModel(
        50, 16, 2, 4, 24, activation=torch.nn.functional.leaky_relu, positions=None,
        embedding_scale=1.0, output_bias=False, dropout=0.0,
    )  # fmt: skip
    figure = viz.model_diagram(model, title="Mine: $5")
    said = texts(figure)
    assert said["title"] == "Mine: $5"
    assert said["decoder.input"] == "tokens"
    assert said["decoder.embedding"] == "Token embedding\n50 \u00d7 16"
    assert said["decoder.0.ffn"].startswith("Feed-forward, leaky_relu")
    assert said["decoder.output.linear"] == "Linear, no bias\n16 → 50"
    assert "decoder.positions" not in said
    assert "decoder.0.multihead_attn" not in said
    assert not lines(figure, "memory")
    assert_clear(figure)


def test_models_of_torch_nn() -> None:
    figure = viz.model_diagram(torch.nn.Transformer(16, 2, 2, 2, 24, batch_first=True))
    said = texts(figure)
    assert said["encoder.final_norm"] == said["decoder.final_norm"] == "LayerNorm"
    assert said["encoder.input"] == "source vectors"
    assert said["decoder.0.self_attn"].startswith("Self-attention")  # the call's mask decides
    assert said["output"] == "output (B, T, 16)"
    assert_clear(figure)
    layer = torch.nn.TransformerDecoderLayer(16, 2, 24)
    figure = viz.model_diagram(layer)
    assert texts(figure)["memory"] == "memory"
    assert len(lines(figure, "memory")) == 1
    assert_clear(figure)


def test_runs_of_equal_layers() -> None:
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 4)
    stack.layers[3] = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True, batch_first=True)
    figure = viz.model_diagram(stack)
    said = texts(figure)
    assert (said["encoder.0.count"], said["encoder.3.count"]) == ("3 \u00d7", "1 \u00d7")
    assert said["encoder.3.ffn"] == "Feed-forward, relu\n16 → 32 → 16"
    assert said["summary"] == "d_model 16, post-norm, pre-norm, dropout 0.1"
    assert_clear(figure)


class Around(torch.nn.Module):
    def __init__(self, **parts: torch.nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def test_a_module_around_the_model() -> None:
    inner = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2)
    model = Around(head=torch.nn.Linear(16, 2), body=inner)
    figure = viz.model_diagram(model)
    assert texts(figure)["title"].startswith("Around (its TransformerEncoder), ")
    assert texts(figure)["encoder.0.count"] == "2 \u00d7"
    assert_clear(figure)


def test_bad_input() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not int"):
        viz.model_diagram(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no Transformer that can be drawn: a Linear without"):
        viz.model_diagram(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="several Transformers, one, two: pass one of them"):
        viz.model_diagram(Around(one=layer, two=layer.__class__(16, 2, 24, batch_first=True)))
    stack = nn.TransformerEncoder(layer, 2)
    stack.layers[1] = torch.nn.Identity()
    with pytest.raises(
        TypeError, match="TransformerDecoderLayer, and one of its layers is Identity"
    ):
        viz.model_diagram(stack)
