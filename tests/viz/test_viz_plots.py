"""Figures of attention, masks, positions and losses, and what is said without matplotlib."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import python
from viz_checks import assert_legible, labels, legend, maps, shown

from transformer_fast import functional, models, training, viz

B, H, T, S = 2, 3, 4, 5
QUERIES, KEYS = ["le", "chat", "dort", "."], ["the", "cat", "is", "asleep", "."]
WORDS = ["<pad>", "<s>", *(f"w{i}" for i in range(2, 20))]


def weights() -> torch.Tensor:
    return torch.rand(B, H, T, S).softmax(-1)


def test_a_map_for_each_layer_and_head() -> None:
    found = {f"decoder.layers.{i}.multihead_attn": weights() for i in (0, 3)}
    figure = viz.attention_maps(found, QUERIES, KEYS, index=1, title="Cross")
    panels = maps(figure)
    assert len(panels) == 2 * H
    for number, panel in enumerate(panels):
        layer, head = divmod(number, H)
        data, hidden = shown(panel)
        torch.testing.assert_close(data.float(), list(found.values())[layer][1, head])
        assert not hidden.any()
        assert panel.get_title() == (f"head {head}" if layer == 0 else "")
        # Tokens stand at the edges of the grid.
        assert labels(panel.xaxis) == (KEYS if layer == 1 else [])
        assert labels(panel.yaxis) == (QUERIES if head == 0 else [])
        assert panel.get_ylabel() == (f"layer {(0, 3)[layer]}\nquery" if head == 0 else "")
        assert panel.get_xlabel() == ("key" if layer == 1 else "")
        # One scale for all, so that maps can be compared.
        assert panel.images[0].get_clim() == (0.0, max(float(w[1].max()) for w in found.values()))
    assert figure.get_suptitle() == "Cross"
    assert not legend(figure)
    assert_legible(figure)


def test_chosen_heads_and_their_mean() -> None:
    given = weights()
    figure = viz.attention_maps(given, heads=[2, 0])
    assert [panel.get_title() for panel in maps(figure)] == ["head 2", "head 0"]
    torch.testing.assert_close(shown(maps(figure)[0])[0].float(), given[0, 2])
    (panel,) = maps(viz.attention_maps(given, heads=[2, 0], average=True))
    assert panel.get_title() == "mean of 2 heads"
    torch.testing.assert_close(shown(panel)[0].float(), given[0, [2, 0]].mean(0))
    (panel,) = maps(viz.attention_maps(given[0, 1].bfloat16()))
    torch.testing.assert_close(shown(panel)[0].float(), given[0, 1].bfloat16().float())


def test_padding_and_what_comes_later_are_hidden() -> None:
    square = torch.rand(S, S).softmax(-1)
    padding = torch.tensor([False, False, False, True, True])
    figure = viz.attention_maps(square, KEYS, key_padding=padding, is_causal=True)
    _, hidden = shown(maps(figure)[0])
    later = torch.ones(S, S, dtype=torch.bool).triu(1)
    assert torch.equal(hidden, padding | later)
    assert labels(maps(figure)[0].xaxis) == KEYS  # the query's, for self-attention
    assert legend(figure) == ["hidden: padding or after the query (causal)"]
    figure = viz.attention_maps(square, query_padding=padding)
    assert torch.equal(shown(maps(figure)[0])[1], padding[:, None].expand(S, S))
    assert legend(figure) == ["hidden: padding"]


def test_the_scale_is_of_what_can_be_seen() -> None:
    given = torch.tensor([[0.2, 0.9], [0.3, 0.7]])
    figure = viz.attention_maps(given, key_padding=torch.tensor([False, True]))
    assert maps(figure)[0].images[0].get_clim() == pytest.approx((0.0, 0.3))


def test_long_and_odd_tokens_stay_legible() -> None:
    odd = ["$x_1$", "tab\there", "a very long token indeed", "two words"]
    figure = viz.attention_maps(weights(), odd, title="$5 to $6")
    found = labels(maps(figure)[0].yaxis)
    assert found == ["$x_1$", "tab\\there", "a␣very␣long␣tok…", "two␣words"]
    assert_legible(figure)
    many = [f"token{i}" for i in range(200)]
    figure = viz.attention_maps(torch.rand(200, 200), many, many)
    assert len(labels(maps(figure)[0].xaxis)) < 100
    places = maps(figure)[0].xaxis.get_ticklocs()
    assert labels(maps(figure)[0].xaxis) == [many[int(place)] for place in places]
    assert_legible(figure)


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
def test_the_weights_of_a_model(kind: str) -> None:
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
    assert labels(panels[2].xaxis) == [WORDS[i] for i in keys[1]]
    assert labels(panels[2].yaxis) == [WORDS[i] for i in queries[1]]
    assert_legible(figure)


def test_language_models_and_encoders() -> None:
    source, _ = tokens()
    model = models.LanguageModel(20, 16, 2, 2, 24)
    figure = viz.model_attention(model, source, layers=[1], heads=[0])
    (panel,) = maps(figure)
    data, hidden = shown(panel)
    assert torch.equal(hidden, torch.ones(6, 6, dtype=torch.bool).triu(1))
    torch.testing.assert_close(data.sum(1), torch.ones(6, dtype=torch.float64))
    assert labels(panel.xaxis) == [str(int(i)) for i in source[0]]
    figure = viz.model_attention(models.Encoder(20, 16, 2, 1, 24), source, average=True)
    assert not shown(maps(figure)[0])[1].any()
    assert figure.get_suptitle() == "Encoder self-attention"


ROWS, COLS = 5, 6


def visible(panel: Any) -> torch.Tensor:
    data, hidden = shown(panel)
    return ~hidden & (data > 0.5)


def attended(**options: Any) -> torch.Tensor:
    """Where the op itself looks, (B, H, ROWS, COLS): keys that move the result."""
    q, k = torch.randn(2, 2, ROWS, 8), torch.randn(2, 2, COLS, 8)
    # With the identity as values, the output is the weights.
    v = torch.eye(COLS).expand(2, 2, COLS, COLS)
    return functional.scaled_dot_product_attention(q, k, v, **options) > 0


def test_all_together_is_what_attention_does() -> None:
    mask = torch.rand(2, 2, ROWS, COLS) > 0.3
    lengths = torch.tensor([6, 3])
    figure = viz.masks(
        ROWS, COLS, attn_mask=mask, key_lengths=lengths, is_causal=True, index=1, head=1
    )
    panels = maps(figure)
    assert [panel.get_title().split("\n")[0] for panel in panels] == [
        "attn_mask", "key_lengths", "is_causal", "all together"
    ]  # fmt: skip
    past = torch.ones(ROWS, COLS, dtype=torch.bool).tril()
    expected = attended(attn_mask=mask & past, key_lengths=lengths)
    assert torch.equal(visible(panels[-1]), expected[1, 1])
    assert torch.equal(visible(panels[0]), mask[1, 1])
    assert torch.equal(visible(panels[1]), (torch.arange(COLS) < 3).expand(ROWS, COLS))
    assert torch.equal(visible(panels[2]), torch.ones(ROWS, COLS, dtype=torch.bool).tril())
    assert_legible(figure)


def test_polarity() -> None:
    mask = torch.rand(ROWS, COLS) > 0.5
    here = viz.masks(ROWS, COLS, attn_mask=mask)
    theirs = viz.masks(ROWS, COLS, attn_mask=mask, true_means="hidden")
    assert torch.equal(visible(maps(here)[0]), mask)
    assert torch.equal(visible(maps(theirs)[0]), ~mask)
    assert maps(here)[0].get_title() == "attn_mask\nbool: True = may attend"
    assert maps(theirs)[0].get_title() == "attn_mask\nbool: True = hidden (torch.nn)"
    assert len(maps(here)) == 1  # one mask is all there is


def test_padding() -> None:
    padding = torch.tensor([[False] * COLS, [False, False, True, True, True, True]])
    figure = viz.masks(ROWS, COLS, key_padding=padding, index=1)
    assert torch.equal(visible(maps(figure)[0]), ~padding[1].expand(ROWS, COLS))
    assert "True = padding" in maps(figure)[0].get_title()


def test_float_masks() -> None:
    mask = torch.randn(ROWS, COLS)
    mask[:, 2] = -math.inf
    figure = viz.masks(ROWS, COLS, attn_mask=mask, is_causal=True)
    first, _, last = maps(figure)
    data, hidden = shown(first)
    assert torch.equal(hidden, mask == -math.inf)
    torch.testing.assert_close(data.float()[~hidden], mask[~hidden])
    low, high = first.images[0].get_clim()
    assert low == -high == -float(mask[mask != -math.inf].abs().max())
    data, hidden = shown(last)
    past = torch.zeros(ROWS, COLS).masked_fill(torch.ones(ROWS, COLS).triu(1) > 0, -math.inf)
    assert torch.equal(~hidden, attended(attn_mask=mask + past)[0, 0])
    torch.testing.assert_close(data.float()[~hidden], mask[~hidden])
    bars = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    assert [bar.get_ylabel() for bar in bars] == ["added to the score"]
    # One that only hides needs no scale.
    only = torch.zeros(ROWS, COLS).masked_fill(torch.ones(ROWS, COLS).triu(1) > 0, -math.inf)
    figure = viz.masks(ROWS, COLS, attn_mask=only)
    assert len(figure.axes) == 1
    assert torch.equal(visible(maps(figure)[0]), only == 0)


def test_queries_that_see_nothing_are_outlined() -> None:
    mask = torch.ones(ROWS, COLS, dtype=torch.bool)
    mask[2] = False
    figure = viz.masks(ROWS, COLS, attn_mask=mask, key_lengths=torch.tensor([4]))
    (outline,) = maps(figure)[-1].patches
    assert (outline.get_x(), outline.get_y(), outline.get_width()) == (-0.5, 1.5, COLS)
    assert "sees nothing: output 0" in legend(figure)
    assert not maps(figure)[0].patches
    figure = viz.masks(ROWS, COLS, is_causal=True)
    assert legend(figure) == ["may attend", "hidden"]


def test_tokens_and_no_mask() -> None:
    figure = viz.masks(3, query_tokens=["a", "b", "c"], title="None")
    (panel,) = maps(figure)
    assert panel.get_title() == "no mask\nevery query sees every key"
    assert visible(panel).all()
    assert labels(panel.xaxis) == labels(panel.yaxis) == ["a", "b", "c"]
    assert_legible(figure)


POSITIONS = models.SinusoidalPositions(60, 32)


def test_the_table_and_its_curves() -> None:
    figure = viz.positional_encoding(POSITIONS, 50, dimensions=[3, 8])
    data, _ = shown(maps(figure)[0])
    torch.testing.assert_close(data.float(), POSITIONS.table[:50].T)
    curves = figure.axes[1]
    assert [len(line.get_ydata()) for line in curves.lines] == [50, 50]
    for line, dimension in zip(curves.lines, (3, 8), strict=True):
        found = torch.tensor(line.get_ydata(), dtype=torch.float32)
        torch.testing.assert_close(found, POSITIONS.table[:50, dimension])
    # Curves differ in more than colour.
    assert len({line.get_linestyle() for line in curves.lines}) == 2
    assert legend(figure)[0].startswith("dimension 3: cos, period 11.17")
    period = 2 * torch.pi * 10000 ** (8 / 32)
    assert legend(figure)[1] == f"dimension 8: sin, period {period:.4g}"
    assert figure.get_suptitle() == "Sinusoidal positions: 50 of 60, d_model = 32"
    assert_legible(figure)


def test_the_periods_told_are_the_curves() -> None:
    table = models.SinusoidalPositions(700, 32).table
    period = 2 * torch.pi * 10000 ** (16 / 32)  # 628.3
    place = round(period)
    torch.testing.assert_close(table[place, 16], table[0, 16], atol=1e-2, rtol=0)
    figure = viz.positional_encoding(table, dimensions=[16])
    assert legend(figure) == ["dimension 16"]  # nothing is known of a bare table
    told = viz.positional_encoding(models.SinusoidalPositions(700, 32), dimensions=[16])
    assert legend(told) == [f"dimension 16: sin, period {period:.4g}"]


def test_from_models() -> None:
    model = models.LanguageModel(9, 16, 2, 1, 24, positions="learned", max_len=12)
    figure = viz.positional_encoding(model)
    expected = model.encoder.embedding.positions.table.detach()
    torch.testing.assert_close(shown(maps(figure)[0])[0].float(), expected.T)
    low, high = maps(figure)[0].images[0].get_clim()
    assert low == -high == -float(expected.abs().max())
    assert figure.get_suptitle() == "Learned positions: 12 of 12, d_model = 16"
    assert_legible(viz.positional_encoding(torch.zeros(1, 2), title="One"))


def history(scale: float = 1.0) -> training.History:
    found = training.History()
    found.loss = [8.0 * scale, 4.0 * scale, 6.0 * scale]
    found.seconds = [0.5, 0.25, 0.25]
    found.validation = [(2, {"loss": 5.0}), (3, {"error": 0.1})]
    return found


def test_what_is_drawn() -> None:
    figure = viz.loss_curves({"one": history(), "$two$": history(0.5)}, window=2, title="a $ b")
    over_steps, over_time = figure.axes
    single, mean, dots = over_steps.lines[:3]
    assert single.get_xdata().tolist() == [1, 2, 3]
    assert single.get_ydata().tolist() == [8.0, 4.0, 6.0]
    assert mean.get_ydata().tolist() == [8.0, 6.0, 5.0]
    assert (dots.get_xdata().tolist(), dots.get_ydata().tolist()) == ([2], [5.0])
    assert over_time.lines[0].get_xdata().tolist() == [0.5, 0.75, 1.0]
    assert over_time.lines[2].get_xdata().tolist() == [0.75]
    assert len({line.get_color() for line in over_steps.lines}) == 2
    figure.canvas.draw()


def of_weights(*given: Any, **options: Any) -> Any:
    return viz.attention_maps(*given or (weights(),), **options)


def of_model(model: torch.nn.Module | None = None, **options: Any) -> Any:
    source, target = tokens()
    model = transformer() if model is None else model
    return viz.model_attention(model, **{"source": source, "target": target} | options)


def of_masks(**options: Any) -> Any:
    return viz.masks(**{"query_length": ROWS, "key_length": COLS} | options)


def of_positions(positions: Any = POSITIONS, **options: Any) -> Any:
    return viz.positional_encoding(positions, **options)


def of_losses(histories: Any, **options: Any) -> Any:
    return viz.loss_curves(histories, **options)


OTHER_KEYS = {"a": weights(), "b": torch.rand(B, H, S, S)}
FOURS = torch.zeros(4, dtype=torch.bool)
SHAPE = (ROWS, COLS)
#: Calls, what they raise, and what is said.
WRONG: dict[type[Exception], list[tuple[Any, str]]] = {
    TypeError: [
        (lambda: of_weights([[1.0]]), "weights must be a Tensor of floating point, not list"),
        (lambda: of_weights(torch.ones(2, 2).long()), "floating point, not torch.int64"),
        (lambda: of_weights(weights(), None, "abcde"), "key_tokens must be a sequence of tokens"),
        (lambda: of_weights(query_padding=torch.zeros(4)),
         "query_padding must be a bool Tensor, True at padding, not torch.float32"),
        (lambda: of_model(source_vocabulary="words"), "source_vocabulary must be a sequence"),
        (lambda: of_model(torch.nn.Linear(2, 2)), "not Linear: for others, record models.att"),
        (lambda: of_masks(query_length=2.0), "query_length must be an int, not float"),
        (lambda: of_masks(attn_mask=torch.ones(SHAPE).int()), "or floating point, not torch.int"),
        (lambda: of_masks(key_padding=torch.zeros(2, COLS)), "key_padding must be a bool Tensor"),
        (lambda: of_masks(key_lengths=torch.ones(1)), "key_lengths must be int32 or int64"),
        (lambda: of_positions(torch.nn.Linear(2, 2)), "or models.LearnedPositions, not Linear"),
        (lambda: of_positions(3), "not int"),
        (lambda: of_losses(history()), "histories must be a dict of History, not History"),
        (lambda: of_losses({"one": []}), r"histories\['one'\] must be a History, not list"),
    ],
    ValueError: [
        (lambda: of_weights({}), "weights is empty"),
        (lambda: of_weights(torch.rand(3)), r"\(B, H, T, S\).* not \[3\]"),
        (lambda: of_weights(torch.full((T, S), math.nan)), "holds NaN or negative numbers"),
        (lambda: of_weights(-weights()), "holds NaN or negative numbers"),
        (lambda: of_weights(weights(), QUERIES[:3]), "query_tokens must name 4 tokens, not 3"),
        (lambda: of_weights(heads=[]), "heads must name at least one head"),
        (lambda: of_weights(key_padding=FOURS), r"key_padding must have shape \[5\], not \[4\]"),
        (lambda: of_weights(OTHER_KEYS),
         r"one query length and one key length, \(4, 5\) as 'a' has, but 'b' has \(5, 5\)"),
        (lambda: of_model(kind="self"), "kind must be one of encoder, decoder, cross for a Trans"),
        (lambda: of_model(target=None), 'kind "cross" needs a target'),
        (lambda: of_model(models.LanguageModel(20, 16, 2, 1, 24)), "LanguageModel takes no target"),
        (lambda: of_model(layers=[]), "layers must name at least one layer"),
        (lambda: of_model(source_vocabulary=WORDS[:2]), "source_vocabulary has no token for id"),
        (lambda: of_masks(query_length=0), "query_length must be at least 1, not 0"),
        (lambda: of_masks(true_means="yes"), '"visible" or "hidden", not \'yes\''),
        (lambda: of_masks(attn_mask=torch.ones(5, 7)), r"\(B, H, 5, 6\), not \[5, 7\]"),
        (lambda: of_masks(attn_mask=torch.full(SHAPE, math.nan)), "must not hold NaN"),
        (lambda: of_masks(key_lengths=torch.tensor([7])), r"must be in \[0, 6\], not 7"),
        (lambda: of_masks(key_lengths=torch.tensor(3)), r"key_lengths must have shape \(B,\)"),
        (lambda: of_masks(key_tokens=["a"]), "key_tokens must name 6 tokens, not 1"),
        (lambda: of_positions(torch.zeros(2, 2, 2)), r"shape \(L, M\), not \[2, 2, 2\]"),
        (lambda: of_positions(length=61), r"length must be an int in \[1, 60\], not 61"),
        (lambda: of_positions(length=0), "not 0"),
        (lambda: of_positions(dimensions=[]), "dimensions must name 1 to 6, not 0"),
        (lambda: of_positions(dimensions=range(7)), "dimensions must name 1 to 6, not 7"),
        (lambda: of_losses({"one": training.History()}), r"histories\['one'\] has no steps"),
        (lambda: of_losses({}), "histories must have 1 to 6 runs, not 0"),
        (lambda: of_losses({"one": history()}, window=0), "window must be at least 1, not 0"),
    ],
    IndexError: [
        (lambda: of_weights(index=2), r"index must be in \[0, 2\), not 2"),
        (lambda: of_weights(heads=[3]), r"heads must be in \[0, 3\), not 3"),
        (lambda: of_model(layers=[2]), r"layers must be in \[0, 2\), not 2"),
        (lambda: of_model(index=5), r"index must be in \[0, 2\), not 5"),
        (lambda: of_masks(attn_mask=torch.ones(2, 1, *SHAPE), index=2), "index must be in"),
        (lambda: of_masks(attn_mask=torch.ones(2, 2, *SHAPE), head=2), "head must be in"),
        (lambda: of_positions(dimensions=[32]), r"dimensions must be in \[0, 32\), not 32"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("error", "call", "said"), [(kind, *one) for kind, found in WRONG.items() for one in found]
)
def test_bad_input(error: type[Exception], call: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        call()


HIDDEN = """
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
import transformer_fast
from transformer_fast import models, nn
try:
    from transformer_fast import viz
except ImportError as error:
    print(error)
"""


def test_missing_matplotlib_is_named() -> None:
    assert python("-c", HIDDEN).stdout.strip() == (
        "transformer_fast.viz needs matplotlib, which is not installed: "
        "pip install transformer_fast[viz]"
    )


def test_importing_the_package_does_not_import_matplotlib() -> None:
    code = "import sys, transformer_fast; from transformer_fast import models, nn; "
    code += "print('matplotlib' in sys.modules)"
    assert python("-c", code).stdout == "False\n"
