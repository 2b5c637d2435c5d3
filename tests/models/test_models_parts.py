"""Positions, norms, encoder-only and decoder-only use of the parts, attention weights."""

from __future__ import annotations

import pytest
import torch
from models_ruler import (
    PAD,
    PlainAnnotatedNorm,
    plain_embedding,
    plain_output,
    plain_positions,
    plain_stack,
    small,
    small_language_model,
    tokens,
)
from module_ruler import check_budget

from transformer_fast import models, nn


@pytest.mark.parametrize(("length", "width"), [(1, 1), (7, 8), (50, 5), (300, 64)])
def test_sinusoidal_positions(length: int, width: int) -> None:
    positions = models.SinusoidalPositions(length, width)
    exact = plain_positions(length, width)
    assert (positions(length) - exact).abs().max() <= torch.finfo(torch.float32).eps
    assert torch.equal(positions(length - 1, 1), positions(length)[1:])
    assert positions.state_dict() == {}


def test_learned_positions_are_trained() -> None:
    model = small(positions="learned")
    source, target = tokens(23, [7, 3]), tokens(19, [4, 6])
    model(source, target).sum().backward()
    table = model.encoder.embedding.positions.table
    assert table.grad[:7].abs().sum() > 0
    assert table.grad[7:].abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_annotated_layer_norm(dtype: torch.dtype) -> None:
    norm = models.AnnotatedLayerNorm(11, 0.1, dtype=dtype)
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    plain = PlainAnnotatedNorm(11, 0.1).to(dtype)
    plain.load_state_dict(norm.state_dict())
    exact = PlainAnnotatedNorm(11, 0.1)
    exact.load_state_dict(norm.state_dict())
    exact = exact.double()
    x = torch.randn(50, 11, dtype=dtype) * 3 + 1
    check_budget(norm(x), plain(x), exact(x.double()))
    constant = torch.ones(2, 11, dtype=dtype, requires_grad=True)
    result = norm(constant)
    assert torch.equal(result, norm.bias.expand(2, 11))
    result.sum().backward()
    assert constant.grad is not None
    assert torch.isfinite(constant.grad).all()


def test_annotated_layer_norm_is_not_the_usual_one() -> None:
    x = torch.randn(5, 6)
    usual, annotated = nn.LayerNorm(6), models.AnnotatedLayerNorm(6)
    assert (usual(x) - annotated(x)).abs().max() > 0.05
    with pytest.raises(ValueError, match="d_model must be at least 2"):
        models.AnnotatedLayerNorm(1)


def test_encoder_alone() -> None:
    """Encoder-only: a classifier that takes the mean over real tokens."""
    encoder = models.Encoder(23, 16, 2, 2, 24, 0.0, "gelu", norm_first=True, pad_token=PAD)
    source = tokens(23, [7, 3, 5])
    hidden = encoder(source)
    options = {
        "d_model": 16,
        "nhead": 2,
        "dim_feedforward": 24,
        "activation": "gelu",
        "layer_norm_eps": 1e-5,
        "norm_first": True,
        "norm": "layer_norm",
        "bias": True,
    }
    results = []
    for dtype in (torch.float32, torch.float64):
        stack = plain_stack(encoder, options, 2, False).to(dtype).train()
        x = plain_embedding(encoder.embedding, source, dtype)
        results.append(stack(x, src_key_padding_mask=source == PAD))
    real = source != PAD
    check_budget(hidden[real], results[0][real], results[1][real])


def test_decoder_only() -> None:
    model = small_language_model(norm_first=True, activation="gelu", tie_output=True)
    ids = tokens(19, [9, 9])
    results = []
    for dtype in (torch.float32, torch.float64):
        stack = plain_stack(model.encoder, model.config, 2, False).to(dtype)
        x = plain_embedding(model.encoder.embedding, ids, dtype)
        causal = torch.ones(9, 9, dtype=torch.bool).triu(1)
        results.append(plain_output(model.output, stack(x, mask=causal)))
    check_budget(model(ids), *results)
    assert torch.equal(model.log_probabilities(ids), torch.log_softmax(model(ids), -1))
    again = models.LanguageModel(**model.config).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(ids), model(ids))


def test_attention_weights_of_chosen_layers_only() -> None:
    model = small()
    source, target = tokens(23, [7, 3]), tokens(19, [4, 6])
    before = model(source, target)
    with models.attention_weights(model, "decoder.*.multihead_attn", "encoder.*.0.*") as weights:
        inside = model(source, target)
    torch.testing.assert_close(inside, before)
    assert set(weights) == {
        "decoder.stack.layers.0.multihead_attn",
        "decoder.stack.layers.1.multihead_attn",
        "encoder.stack.layers.0.self_attn",
    }
    cross = weights["decoder.stack.layers.1.multihead_attn"]
    assert cross.shape == (2, 2, 6, 7)
    torch.testing.assert_close(cross.sum(-1), torch.ones(2, 2, 6))
    assert cross[1, :, :, 3:].abs().max() == 0
    assert not cross.requires_grad
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(model(source, target), before)


def test_attention_weights_by_hand() -> None:
    model = small()
    target, memory = tokens(19, [6, 6]), torch.randn(2, 5, 16)
    with models.attention_weights(model, "decoder.stack.layers.0.self_attn") as weights:
        model.decode(target, memory)
    attention = model.decoder.stack.layers[0].self_attn
    x = model.decoder.embedding(target)
    projected = torch.nn.functional.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    q, k, _ = (part.view(2, 6, 2, 8).transpose(1, 2) for part in projected.chunk(3, -1))
    scores = q @ k.transpose(-2, -1) / 8**0.5
    scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
    found = weights["decoder.stack.layers.0.self_attn"]
    torch.testing.assert_close(found, scores.softmax(-1).detach())


@pytest.mark.parametrize("grad", [True, False])
def test_attention_weights_of_torchs_own_modules(grad: bool) -> None:
    theirs = torch.nn.Transformer(16, 2, 1, 1, 24, batch_first=True).eval()
    source, target = torch.randn(2, 5, 16), torch.randn(2, 3, 16)
    with torch.set_grad_enabled(grad), models.attention_weights(theirs) as weights:
        theirs(source, target)
    assert {name: tuple(w.shape) for name, w in weights.items()} == {
        "encoder.layers.0.self_attn": (2, 2, 5, 5),
        "decoder.layers.0.self_attn": (2, 2, 3, 3),
        "decoder.layers.0.multihead_attn": (2, 2, 3, 5),
    }


def test_attention_weights_give_the_caller_what_it_asked_for() -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    with models.attention_weights(attention) as weights:
        assert attention(x, x, x, need_weights=False)[1] is None
        averaged = attention(x, x, x)[1]
        each = attention(x, x, x, None, True, None, False)[1]
    assert torch.equal(averaged, attention(x, x, x)[1])
    assert torch.equal(each, weights[""])
    assert each.shape == (2, 2, 5, 5)


def test_attention_weights_of_no_such_layer() -> None:
    with (
        pytest.raises(ValueError, match=r"no attention of the model fits 'layer9\.\*'; it has enc"),
        models.attention_weights(small(), "layer9.*"),
    ):
        pass
