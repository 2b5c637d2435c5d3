"""Figures: attention, masks, positions, losses and diagrams of models; the page with all of them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import python
from torch import Tensor

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

import numpy
from matplotlib import image
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from examples import pictures
from transformer_fast import functional, models, nn, training, viz

pytestmark = pytest.mark.thorough


def draw(figure: Figure) -> FigureCanvasAgg:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas


def maps(figure: Figure) -> list[Any]:
    """Returns the axes with an image, without colour bars."""
    return [axes for axes in figure.axes if axes.images and axes.get_label() != "<colorbar>"]


def shown(axes: Any) -> tuple[Tensor, Tensor]:
    """Returns the values of an image, and where they are masked."""
    array = axes.images[0].get_array()
    data = torch.from_numpy(numpy.ma.getdata(array).astype(numpy.float64))
    return data, torch.from_numpy(numpy.ma.getmaskarray(array).copy())


B, H, T, S = 2, 3, 4, 5
QUERIES, KEYS = ["le", "chat", "dort", "."], ["the", "cat", "is", "asleep", "."]
WORDS = ["<pad>", "<s>", *(f"w{i}" for i in range(2, 20))]


def weights() -> torch.Tensor:
    return torch.rand(B, H, T, S).softmax(-1)


def test_attention_has_a_map_per_layer_and_head() -> None:
    found = {f"decoder.layers.{i}.multihead_attn": weights() for i in (0, 3)}
    figure = viz.attention_maps(found, QUERIES, KEYS, index=1, title="Cross")
    panels = maps(figure)
    assert len(panels) == 2 * H
    for number, panel in enumerate(panels):
        layer, head = divmod(number, H)
        data, hidden = shown(panel)
        torch.testing.assert_close(data.float(), list(found.values())[layer][1, head])
        assert not hidden.any()
        # All maps share one colour scale, so that they can be compared.
        assert panel.images[0].get_clim() == (0.0, max(float(w[1].max()) for w in found.values()))
    draw(figure)


def test_padding_and_future_keys_are_hidden() -> None:
    square = torch.rand(S, S).softmax(-1)
    padding = torch.tensor([False, False, False, True, True])
    figure = viz.attention_maps(square, KEYS, key_padding=padding, is_causal=True)
    _, hidden = shown(maps(figure)[0])
    later = torch.ones(S, S, dtype=torch.bool).triu(1)
    assert torch.equal(hidden, padding | later)
    figure = viz.attention_maps(square, query_padding=padding)
    assert torch.equal(shown(maps(figure)[0])[1], padding[:, None].expand(S, S))


# Models


def transformer(**options: Any) -> models.Transformer:
    return models.Transformer(
        20, d_model=16, nhead=2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=24,
        pad_token=0, **options,
    )  # fmt: skip


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    source, target = torch.randint(2, 20, (2, 6)), torch.randint(2, 20, (2, 4))
    source[1, 4:], target[1, 3:] = 0, 0
    return source, target


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_attention_of_a_translator(kind: str) -> None:
    model = transformer().train()
    model.encoder.stack.layers[0].eval()
    modes = [part.training for part in model.modules()]
    source, target = tokens()
    figure = viz.model_attention(
        model, source, None if kind == "encoder" else target, kind=kind, index=1,
        source_vocabulary=WORDS,
    )  # fmt: skip
    assert modes == [part.training for part in model.modules()]

    name = f"{'encoder' if kind == 'encoder' else 'decoder'}.stack.layers.*"
    name += ".multihead_attn" if kind == "cross" else ".self_attn"
    model.eval()
    with torch.no_grad(), models.attention_weights(model, name) as expected:
        model(source, target)
    queries, keys = {
        "encoder": (source, source), "decoder": (target, target), "cross": (target, source)
    }[kind]  # fmt: skip
    panels = maps(figure)
    assert len(panels) == 4
    right = (queries[1] == 0)[:, None] | (keys[1] == 0)
    if kind == "decoder":
        right = right | torch.ones_like(right).triu(1)
    for number, panel in enumerate(panels):
        data, hidden = shown(panel)
        assert torch.equal(hidden, right)
        found = list(expected.values())[number // 2][1, number % 2]
        torch.testing.assert_close(data.float()[~right], found[~right])
    draw(figure)


ROWS, COLS = 5, 6


def visible(panel: Any) -> torch.Tensor:
    data, hidden = shown(panel)
    return ~hidden & (data > 0.5)


def attended(**options: Any) -> torch.Tensor:
    """Returns which keys affect each query in the op itself, (B, H, ROWS, COLS)."""
    q, k = torch.randn(2, 2, ROWS, 8), torch.randn(2, 2, COLS, 8)
    # With the identity matrix as values, the output is the weights.
    v = torch.eye(COLS).expand(2, 2, COLS, COLS)
    return functional.scaled_dot_product_attention(q, k, v, **options) > 0


def test_combined_masks_match_attention() -> None:
    mask = torch.rand(2, 2, ROWS, COLS) > 0.3
    lengths = torch.tensor([6, 3])
    figure = viz.masks(
        ROWS, COLS, attn_mask=mask, key_lengths=lengths, is_causal=True, index=1, head=1
    )
    panels = maps(figure)
    past = torch.ones(ROWS, COLS, dtype=torch.bool).tril()
    expected = attended(attn_mask=mask & past, key_lengths=lengths)
    assert torch.equal(visible(panels[-1]), expected[1, 1])
    assert torch.equal(visible(panels[0]), mask[1, 1])
    assert torch.equal(visible(panels[1]), (torch.arange(COLS) < 3).expand(ROWS, COLS))
    assert torch.equal(visible(panels[2]), torch.ones(ROWS, COLS, dtype=torch.bool).tril())
    draw(figure)


def test_masks_show_both_polarities() -> None:
    mask = torch.rand(ROWS, COLS) > 0.5
    here = viz.masks(ROWS, COLS, attn_mask=mask)
    theirs = viz.masks(ROWS, COLS, attn_mask=mask, true_means="hidden")
    assert torch.equal(visible(maps(here)[0]), mask)
    assert torch.equal(visible(maps(theirs)[0]), ~mask)


POSITIONS = models.SinusoidalPositions(60, 32)


def test_positions_show_the_table_and_curves() -> None:
    figure = viz.positional_encoding(POSITIONS, 50, dimensions=[3, 8])
    data, _ = shown(maps(figure)[0])
    torch.testing.assert_close(data.float(), POSITIONS.table[:50].T)
    for line, dimension in zip(figure.axes[1].lines, (3, 8), strict=True):
        found = torch.tensor(line.get_ydata(), dtype=torch.float32)
        torch.testing.assert_close(found, POSITIONS.table[:50, dimension])
    draw(figure)


def history(scale: float = 1.0) -> training.History:
    found = training.History()
    found.loss = [8.0 * scale, 4.0 * scale, 6.0 * scale]
    found.seconds = [0.5, 0.25, 0.25]
    found.validation = [(2, {"loss": 5.0}), (3, {"error": 0.1})]
    return found


def test_losses_show_the_history() -> None:
    figure = viz.loss_curves({"one": history(), "$two$": history(0.5)}, window=2, title="a $ b")
    over_steps, over_time = figure.axes
    single, mean, dots = over_steps.lines[:3]
    assert single.get_xdata().tolist() == [1, 2, 3]
    assert single.get_ydata().tolist() == [8.0, 4.0, 6.0]
    assert mean.get_ydata().tolist() == [8.0, 6.0, 5.0]
    assert (dots.get_xdata().tolist(), dots.get_ydata().tolist()) == ([2], [5.0])
    assert over_time.lines[0].get_xdata().tolist() == [0.5, 0.75, 1.0]
    assert over_time.lines[2].get_xdata().tolist() == [0.75]
    figure.canvas.draw()


def of_weights(*given: Any, **options: Any) -> Any:
    return viz.attention_maps(*given or (weights(),), **options)


def of_model(model: torch.nn.Module | None = None, **options: Any) -> Any:
    source, target = tokens()
    model = transformer() if model is None else model
    return viz.model_attention(model, **{"source": source, "target": target} | options)


def of_masks(**options: Any) -> Any:
    return viz.masks(**{"query_length": ROWS, "key_length": COLS} | options)


def of_losses(histories: Any, **options: Any) -> Any:
    return viz.loss_curves(histories, **options)


OTHER_KEYS = {"a": weights(), "b": torch.rand(B, H, S, S)}
SHAPE = (ROWS, COLS)
#: Exception -> (a call that raises it, a part of the message).
WRONG: dict[type[Exception], list[tuple[Any, str]]] = {
    TypeError: [
        (lambda: of_model(torch.nn.Linear(2, 2)), "not Linear: for others, record models.att"),
        (lambda: of_losses({"one": []}), r"histories\['one'\] must be a History, not list"),
    ],
    ValueError: [
        (lambda: of_weights(torch.rand(3)), r"\(B, H, T, S\).* not \[3\]"),
        (lambda: of_weights(torch.full((T, S), math.nan)), "holds NaN or negative numbers"),
        (lambda: of_weights(weights(), QUERIES[:3]), "query_tokens must name 4 tokens, not 3"),
        (lambda: of_weights(OTHER_KEYS),
         r"one query length and one key length, \(4, 5\) as 'a' has, but 'b' has \(5, 5\)"),
        (lambda: of_model(kind="self"), "kind must be one of encoder, decoder, cross for a Trans"),
        (lambda: of_model(target=None), 'kind "cross" needs a target'),
        (lambda: of_model(models.LanguageModel(20, 16, 2, 1, 24)), "LanguageModel takes no target"),
        (lambda: of_masks(attn_mask=torch.ones(5, 7)), r"\(B, H, 5, 6\), not \[5, 7\]"),
        (lambda: of_masks(attn_mask=torch.full(SHAPE, math.nan)), "must not hold NaN"),
        (lambda: of_masks(key_lengths=torch.tensor([7])), r"must be in \[0, 6\], not 7"),
    ],
    IndexError: [
        (lambda: of_weights(heads=[3]), r"heads must be in \[0, 3\), not 3"),
        (lambda: of_model(index=5), r"index must be in \[0, 2\), not 5"),
        (lambda: of_masks(attn_mask=torch.ones(2, 1, *SHAPE), index=2), "index must be in"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("error", "call", "said"), [(kind, *one) for kind, found in WRONG.items() for one in found]
)
def test_invalid_input_raises(error: type[Exception], call: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        call()


HIDDEN = """
import sys
asked = []

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "matplotlib":
            asked.append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
import transformer_fast
from transformer_fast import models, nn
print(asked)
try:
    from transformer_fast import viz
except ImportError as error:
    print(error)
"""


def test_only_viz_needs_matplotlib() -> None:
    assert python("-c", HIDDEN).stdout == (
        "[]\ntransformer_fast.viz needs matplotlib, which is not installed: pip install matplotlib\n"
    )


# Diagrams


def texts(figure: Figure) -> dict[str, str]:
    """Returns the text in the box, or at the position, of each name."""
    return {str(text.get_gid()): text.get_text() for text in figure.axes[0].texts}


def lines(figure: Figure, name: str) -> int:
    """Returns the number of lines with that name."""
    found = [patch for patch in figure.axes[0].patches if isinstance(patch, FancyArrowPatch)]
    return sum(patch.get_gid() == name for patch in found)


def test_boxes_name_classes_and_sizes() -> None:
    model = models.Transformer(
        8000, 6000, d_model=64, nhead=4, num_encoder_layers=2, num_decoder_layers=3,
        dim_feedforward=96, activation="gelu", dropout=0.25, max_len=77,
    )  # fmt: skip
    figure = viz.model_diagram(model)
    said = texts(figure)
    assert said["decoder.embedding"] == "Token embedding\n6,000 \u00d7 64, scaled by √64"
    assert said["decoder.0.multihead_attn"] == "Cross-attention\n4 heads of 16"
    assert said["encoder.0.ffn"] == "Feed-forward, gelu\n64 → 96 → 64"
    assert (said["encoder.0.count"], said["decoder.0.count"]) == ("2 \u00d7", "3 \u00d7")
    assert said["summary"] == "d_model 64, post-norm, dropout 0.25"
    draw(figure)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_the_memory_and_tied_weights_have_lines(tied: bool, shared: bool) -> None:
    model = models.Transformer(
        40, None if shared else 40, d_model=16, nhead=2, num_encoder_layers=1,
        num_decoder_layers=3, tie_output=tied, embedding_size=8,
    )  # fmt: skip
    model.decoder.stack.layers[1] = nn.TransformerDecoderLayer(16, 4, 24, batch_first=True)
    figure = viz.model_diagram(model)
    assert lines(figure, "memory") == 3
    assert lines(figure, "tied.output") == tied
    assert lines(figure, "tied.embeddings") == shared
    assert ("tied.legend" in texts(figure)) is (tied or shared)
    draw(figure)


def test_unsupported_models_raise() -> None:
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2)
    stack.layers[1] = torch.nn.Identity()
    for model, said in (
        (torch.nn.Linear(2, 2), "no Transformer that can be drawn: a Linear without"),
        (stack, "TransformerDecoderLayer, and one of its layers is Identity"),
    ):
        with pytest.raises(TypeError, match=said):
            viz.model_diagram(model)


# The page


def test_the_page_contains_all_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "pictures"
    pictures.main(["--out", str(folder), "--steps", "2"])
    files = sorted(folder.glob("*.png"))
    names = [file.stem for file in files]
    for start in ("attention_cross", "layers_", "positions", "masks_"):
        assert any(name.startswith(start) for name in names), start
    for file in files:
        pixels = image.imread(file)
        assert min(pixels.shape[:2]) > 200
        assert pixels[..., :3].std() > 0.01, f"{file.name} shows nothing"
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'<figure id="(\w+)">', page) != []
    assert sorted(re.findall(r'<figure id="(\w+)">', page)) == names
    # the page embeds its images
    assert page.count("data:image/png;base64,") == len(names) == page.count("<img ")
    assert f"{len(names)} pictures" in capsys.readouterr().out
