"""Attention maps show the weights, under the right tokens, and hide what is hidden."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from viz_ruler import assert_legible, labels, legend, maps, shown

from transformer_fast import models, viz

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


def nan_weights() -> torch.Tensor:
    return torch.full((T, S), float("nan"))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "said"),
    [
        (([[1.0]],), {}, TypeError, "weights must be a Tensor of floating point, not list"),
        ((torch.ones(2, 2, dtype=torch.int64),), {}, TypeError, "floating point, not torch.int64"),
        (({},), {}, ValueError, "weights is empty"),
        ((torch.rand(3),), {}, ValueError, r"\(B, H, T, S\).* not \[3\]"),
        ((nan_weights(),), {}, ValueError, "holds NaN or negative numbers"),
        ((-weights(),), {}, ValueError, "holds NaN or negative numbers"),
        ((weights(), QUERIES[:3]), {}, ValueError, "query_tokens must name 4 tokens, not 3"),
        ((weights(), None, "abcde"), {}, TypeError, "key_tokens must be a sequence of tokens"),
        ((weights(),), {"index": 2}, IndexError, r"index must be in \[0, 2\), not 2"),
        ((weights(),), {"heads": [3]}, IndexError, r"heads must be in \[0, 3\), not 3"),
        ((weights(),), {"heads": []}, ValueError, "heads must name at least one head"),
        ((weights(),), {"key_padding": torch.zeros(4, dtype=torch.bool)}, ValueError,
         r"key_padding must have shape \[5\], not \[4\]"),
        ((weights(),), {"query_padding": torch.zeros(4)}, TypeError,
         "query_padding must be a bool Tensor, True at padding, not torch.float32"),
        (({"a": weights(), "b": torch.rand(B, H, S, S)},), {}, ValueError,
         r"one query length and one key length, \(4, 5\) as 'a' has, but 'b' has \(5, 5\)"),
    ],
)  # fmt: skip
def test_bad_input(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        viz.attention_maps(*arguments, **options)


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


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"kind": "self"}, ValueError, "kind must be one of encoder, decoder, cross for a Trans"),
        ({"target": None}, ValueError, 'kind "cross" needs a target'),
        ({"layers": [2]}, IndexError, r"layers must be in \[0, 2\), not 2"),
        ({"layers": []}, ValueError, "layers must name at least one layer"),
        ({"index": 5}, IndexError, r"index must be in \[0, 2\), not 5"),
        ({"source_vocabulary": WORDS[:2]}, ValueError, "source_vocabulary has no token for id"),
        ({"source_vocabulary": "words"}, TypeError, "source_vocabulary must be a sequence"),
        ({"model": torch.nn.Linear(2, 2)}, TypeError, "not Linear: for others, record models.att"),
    ],
)
def test_bad_input_of_models(options: dict[str, Any], error: type[Exception], said: str) -> None:
    source, target = tokens()
    arguments = {"model": transformer(), "source": source, "target": target} | options
    with pytest.raises(error, match=said):
        viz.model_attention(**arguments)


def test_a_target_that_nobody_wants() -> None:
    source, target = tokens()
    with pytest.raises(ValueError, match="a LanguageModel takes no target"):
        viz.model_attention(models.LanguageModel(20, 16, 2, 1, 24), source, target)
