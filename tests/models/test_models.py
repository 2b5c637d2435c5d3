"""models.Transformer and its parts against plain PyTorch, and the errors that they raise."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models_checks import (
    OPTIONS,
    PAD,
    plain_embedding,
    plain_forward,
    plain_output,
    plain_positions,
    plain_stack,
    small,
    small_language_model,
    tokens,
)
from module_checks import check_budget

from transformer_fast import functional, models


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("example", [[7, 7, 7], [7, 3, 5]], ids=str)
def test_traced_models_support_padding(example: list[int]) -> None:
    """Also if the example input has no padding."""
    model, target = small().eval(), tokens(19, [6, 6, 6])
    traced = torch.jit.trace(model, (tokens(19, example), target), check_trace=False)
    for lengths in ([7, 3, 5], [7, 7, 7]):
        source = tokens(19, lengths)
        torch.testing.assert_close(traced(source, target), model(source, target))


def check_forward(model: models.Transformer, padded: bool, **args: Any) -> None:
    source = tokens(19, [7, 3, 5] if padded else [7, 7, 7])
    target = tokens(19, [2, 6, 4] if padded else [6, 6, 6])
    plain = plain_forward(model, source, target, torch.float32, **args)
    exact = plain_forward(model, source, target, torch.float64, **args)
    real = target != PAD
    for grad in (True, False):  # other kernels may run without gradients
        with torch.set_grad_enabled(grad):
            check_budget(model(source, target, **args)[real], plain[real], exact[real])


@pytest.mark.sampled(50)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("padded", [False, True])
def test_forward_equals_plain_pytorch(options: dict[str, Any], padded: bool) -> None:
    check_forward(small(**options), padded)


@pytest.mark.sampled(50)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("given", [(), ("source",), ("target",), ("memory",), ("heads",)], ids=str)
def test_masks_combine_with_padding_and_causality(
    given: tuple[str, ...], is_causal: bool, padded: bool
) -> None:
    sizes = {"source": (7, 7), "target": (6, 6), "memory": (6, 7), "heads": (6, 6, 6)}
    masks = {
        "target_mask" if name == "heads" else f"{name}_mask": torch.rand(sizes[name]) < 0.4
        for name in given
    }
    for mask in masks.values():
        mask[..., 0] = False  # no row is fully masked: PyTorch would return NaN
    check_forward(small(), padded, **masks, is_causal=is_causal)


def test_window_mask_of_a_decoder_only_model() -> None:
    """A window of two tokens: earlier tokens have no effect with a single layer."""
    model = small_language_model(num_layers=1)
    ids = tokens(19, [8])
    window = ~torch.ones(8, 8, dtype=torch.bool).triu(-1)
    changed = ids.clone()
    changed[0, 3] = (ids[0, 3] - 2) % 16 + 3
    before, after = model(ids, mask=window), model(changed, mask=window)
    same = (before == after).all(-1)[0]
    assert same.tolist() == [True] * 3 + [False] * 2 + [True] * 3


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"norm": "annotated"}])
def test_gradients_equal_plain_pytorch(options: dict[str, Any]) -> None:
    model = small(target_vocab_size=None, tie_output=True, **options)
    source, target = tokens(23, [7, 3]), tokens(23, [4, 6])
    real = target != PAD

    def gradient(logits: torch.Tensor) -> torch.Tensor:
        logits[real].double().square().sum().backward()
        found = model.encoder.embedding.table.weight.grad
        assert found is not None
        model.zero_grad()
        return found

    got = gradient(model(source, target))
    plain = gradient(plain_forward(model, source, target, torch.float32))
    exact_model = small(target_vocab_size=None, tie_output=True, **options).double()
    exact_model.load_state_dict(model.state_dict())
    plain_forward(exact_model, source, target, torch.float64)[real].square().sum().backward()
    exact = exact_model.encoder.embedding.table.weight.grad
    assert exact is not None
    # Embeddings of pad tokens give the table no gradient here; plain indexing above does.
    check_budget(got[1:], plain[1:], exact[1:])


def test_encode_decode_and_output_equal_forward() -> None:
    model = small()
    source, target = tokens(23, [7, 3]), tokens(19, [4, 6])
    memory = model.encode(source)
    hidden = model.decode(target, memory, model.encoder.padding_mask(source))
    assert torch.equal(model.output(hidden), model(source, target))


def test_log_probabilities() -> None:
    model = small()
    source, target = tokens(23, [7, 3]), tokens(19, [4, 6])
    found = model.log_probabilities(source, target)
    assert torch.equal(found, torch.log_softmax(model(source, target), -1))
    assert torch.allclose(found.exp().sum(-1), torch.ones(2, 6))
    half = small().bfloat16()
    assert half.log_probabilities(source, target).dtype == torch.float32


def test_results_do_not_depend_on_later_tokens_or_padding() -> None:
    model = small()
    source, target = tokens(23, [7, 4], 9), tokens(19, [6, 6])
    before = model(source, target)
    changed = target.clone()
    changed[:, 4:] = 3
    assert torch.equal(model(source, changed)[:, :4], before[:, :4])
    # Neither the tokens at padded positions nor the amount of padding affects other positions.
    longer = torch.cat((source, torch.zeros(2, 5, dtype=torch.int64)), 1)
    torch.testing.assert_close(model(longer, target), before)
    padding = source == PAD
    other = source.masked_fill(padding, 5)
    torch.testing.assert_close(model(other, target, source_padding=padding), before)


def test_padding_at_any_position() -> None:
    model = small(positions=None)
    source, target = tokens(23, [4, 4]), tokens(19, [3, 3])
    apart = torch.zeros(2, 8, dtype=torch.int64)
    apart[:, [0, 3, 4, 7]] = source
    torch.testing.assert_close(model(apart, target), model(source, target))


def test_shared_and_tied_weights_are_one_parameter() -> None:
    model = small(target_vocab_size=None, tie_output=True)
    assert model.output.weight is model.encoder.embedding.table.weight
    assert model.output.weight is model.decoder.embedding.table.weight
    assert len([p for p in model.parameters() if p.shape == (23, 16)]) == 1
    model.load_state_dict(small(target_vocab_size=None, tie_output=True).state_dict())
    assert model.output.weight is model.encoder.embedding.table.weight


def test_config_and_state_dict_restore_the_model(tmp_path: Path) -> None:
    model = small(norm_first=True, embedding_size=10, tie_output=True, norm="annotated")
    torch.save({"config": model.config, "weights": model.state_dict()}, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    again = models.Transformer(**saved["config"]).eval()
    again.load_state_dict(saved["weights"])
    source, target = tokens(23, [7, 3]), tokens(19, [4, 6])
    assert torch.equal(again(source, target), model(source, target))


def test_dropout_acts_in_training_only() -> None:
    model = small(dropout=0.5)
    source, target = tokens(23, [7, 3]), tokens(19, [4, 6])
    assert torch.equal(model(source, target), model(source, target))
    model.train()
    assert not torch.equal(model(source, target), model(source, target))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = small(dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    logits = model(tokens(23, [7, 3]), tokens(19, [4, 6]))
    assert logits.dtype == dtype
    assert torch.isfinite(logits).all()


# Dynamo itself triggers this warning when it handles an autograd.Function.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_without_graph_breaks() -> None:
    model = small(num_encoder_layers=1, num_decoder_layers=1)
    source, target = tokens(23, [7, 3]), tokens(19, [4, 6])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(source, target), model(source, target))
    compiled(source, target).sum().backward()
    assert model.output.weight.grad is not None


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


def test_encoder_alone() -> None:
    """An encoder-only classifier that averages over real tokens."""
    options = {
        "d_model": 16, "nhead": 2, "dim_feedforward": 24, "activation": "gelu",
        "layer_norm_eps": 1e-5, "norm_first": True, "norm": "layer_norm", "bias": True,
    }  # fmt: skip
    encoder = models.Encoder(23, num_layers=2, dropout=0.0, pad_token=PAD, **options)
    source = tokens(23, [7, 3, 5])
    hidden = encoder(source)
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


def test_attention_weights_of_selected_layers() -> None:
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


@pytest.mark.parametrize("grad", [True, False])
def test_attention_weights_of_torch_nn_modules(grad: bool) -> None:
    theirs = torch.nn.Transformer(16, 2, 1, 1, 24, batch_first=True).eval()
    source, target = torch.randn(2, 5, 16), torch.randn(2, 3, 16)
    with torch.set_grad_enabled(grad), models.attention_weights(theirs) as weights:
        theirs(source, target)
    assert {name: tuple(w.shape) for name, w in weights.items()} == {
        "encoder.layers.0.self_attn": (2, 2, 5, 5),
        "decoder.layers.0.self_attn": (2, 2, 3, 3),
        "decoder.layers.0.multihead_attn": (2, 2, 3, 5),
    }


def test_attention_weights_of_unknown_layers_raise() -> None:
    with (
        pytest.raises(ValueError, match=r"no attention of the model fits 'layer9\.\*'; it has enc"),
        models.attention_weights(small(), "layer9.*"),
    ):
        pass


SOURCE, TARGET = torch.tensor([[3, 4, 5]]), torch.tensor([[1, 6]])


def called(**options: Any) -> Any:
    """Calls a small model, with these arguments instead of valid ones."""
    return small()(**{"source": SOURCE, "target": TARGET, **options})


def generated(source: Any = SOURCE, **arguments: Any) -> Any:
    return small().generate(source, **arguments)


def prompted(**arguments: Any) -> Any:
    return small_language_model().generate(SOURCE, **({"max_new_tokens": 4} | arguments))


NONE = torch.zeros(1, 2, dtype=torch.bool)
WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    # Tokens
    (lambda: called(source=[[3]]), TypeError, "source must be a Tensor of token ids, not list"),
    (lambda: called(source=SOURCE.float()), TypeError, r"source .* int32, not torch\.float32"),
    (lambda: called(source=SOURCE.bool()), TypeError, r"source .* int32, not torch\.bool"),
    (lambda: called(source=SOURCE[0]), ValueError,
     r"source must have shape \(batch, length\), not \[3\]"),
    (lambda: called(source=SOURCE[:, :0]), ValueError, "source is empty"),
    (lambda: called(target=TARGET[:, :0]), ValueError, "target is empty"),
    (lambda: called(source=SOURCE + 18), IndexError, r"source must .* in \[0, 23\), .* holds 23"),
    (lambda: called(source=-SOURCE), IndexError, r"source must .* in \[0, 23\), but holds -5"),
    (lambda: called(target=TARGET + 13), IndexError, r"target must .* in \[0, 19\), .* holds 19"),
    (lambda: called(source=SOURCE.repeat(1, 22)), ValueError,
     "source has 66 tokens, more than max_len=64"),
    (lambda: called(target=TARGET.repeat(1, 33)), ValueError,
     "target has 66 tokens, more than max_len=64"),
    (lambda: called(target=TARGET.repeat(2, 1)), ValueError, r"memory must .* batch 2, as target"),
    # Masks
    (lambda: called(source_padding=torch.zeros(1, 3)), TypeError,
     r"padding must be a bool Tensor, .* not torch\.float32"),
    (lambda: called(source_padding=NONE), ValueError,
     r"padding must have the shape of source, \[1, 3\], not"),
    (lambda: called(source_mask=torch.zeros(3, 3)), TypeError,
     r"^mask must be a bool Tensor, True where hidden, not .*float"),
    (lambda: called(target_mask=NONE), ValueError, r"^mask must have shape \[2, 2\] or \[batch"),
    (lambda: called(memory_mask=NONE.expand(2, 2)), ValueError,
     r"^memory_mask must have shape \[2, 3\]"),
    (lambda: small().decode(TARGET, small().encode(SOURCE), NONE), ValueError,
     r"memory_padding must have the shape of memory, \[1, 3\]"),
    # Options of the constructor
    (lambda: small(norm="batch"), ValueError,
     "norm must be one of layer_norm, annotated, not 'batch'"),
    (lambda: small(nhead=3), ValueError,
     "d_model must be a positive multiple of nhead, not 16 for nhead=3"),
    (lambda: small(positions="rotary"), ValueError,
     "positions must be one of sinusoidal, learned, or None"),
    (lambda: small(max_len=0), ValueError, "max_len must be at least 1, not 0"),
    (lambda: small(pad_token=19), ValueError, r"pad_token must be a token id in \[0, 19\), not 19"),
    (lambda: small(end_token=-1), ValueError, r"end_token must be a token id in \[0, 19\), not -1"),
    (lambda: small(start_token=40), ValueError,
     r"start_token must be a token id in \[0, 19\), not 40"),
    (lambda: models.AnnotatedLayerNorm(1), ValueError, "d_model must be at least 2"),
    # Generation
    (lambda: small(end_token=None).generate(SOURCE), ValueError, "the end token is missing"),
    (lambda: small(start_token=None).generate(SOURCE), ValueError, "the start token is missing"),
    (lambda: generated(end_token=19), ValueError,
     r"end_token must be a token id in \[0, 19\), or -1"),
    (lambda: generated(max_new_tokens=0), ValueError, "max_new_tokens must be at least 1, not 0"),
    (lambda: generated(max_new_tokens=2.5), TypeError, "max_new_tokens must be an int, not float"),
    (lambda: generated(max_new_tokens=65), ValueError,
     "65 behind 1 tokens is longer than max_len=64"),
    (lambda: generated(method=models.BeamSearch(20)), ValueError,
     "beams must be at most .* 19, not 20"),
    (lambda: generated(method="beam"), TypeError, r"method must be Greedy\(\).* not str"),
    (lambda: generated(prefix=TARGET[:, :0]), ValueError, "prefix is empty"),
    (lambda: generated(prefix=TARGET.repeat(2, 1)), ValueError,
     "a row for each of the 1 sources, not 2"),
    (lambda: generated(prefix=TARGET + 13), IndexError, "prefix must hold token ids"),
    (lambda: generated(tokens(23, [3, 0, 2])), ValueError,
     "source is empty: row 1 has nothing but padding"),
    (lambda: generated(SOURCE[:, :0]), ValueError,
     "source is empty: each sequence must have at least one"),
    (lambda: small().stream(SOURCE[:, :0]), ValueError, "source is empty"),
    # Methods
    (lambda: models.Sampling(0.0), ValueError, "temperature must be above 0, not 0.0"),
    (lambda: models.Sampling(float("nan")), ValueError, "temperature must be above 0"),
    (lambda: models.Sampling(top_k=0), ValueError, "top_k must be at least 1, or None, not 0"),
    (lambda: models.Sampling(top_p=0.0), ValueError, r"top_p must lie in \(0, 1\]"),
    (lambda: models.Sampling(top_p=1.5), ValueError, r"top_p must lie in \(0, 1\]"),
    (lambda: models.BeamSearch(0), ValueError, "beams must be at least 1, not 0"),
    (lambda: models.BeamSearch(3, n_best=4), ValueError, "n_best must lie between 1 and beams=3"),
    # Prompts
    (lambda: prompted(prompt_lengths=torch.tensor([0])), ValueError,
     r"must lie in \[1, 3\], .* 0 to 0"),
    (lambda: prompted(prompt_lengths=torch.tensor([4])), ValueError,
     r"must lie in \[1, 3\], .* 4 to 4"),
    (lambda: prompted(prompt_lengths=torch.tensor([1, 1])), ValueError, r"must have shape \[1\]"),
    (lambda: prompted(prompt_lengths=torch.tensor([1.0])), TypeError, "must be an integer Tensor"),
    (lambda: prompted(max_new_tokens=63), ValueError,
     "63 behind 3 tokens is longer than max_len=64"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "words"), WRONG, ids=lambda x: x if type(x) is str else ""
)
def test_wrong_arguments_raise(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_unsupported_beam_search_raises() -> None:
    model = small_language_model()
    prompt = torch.tensor([[3, 4], [5, 6]])
    with pytest.raises(ValueError, match="beam search needs prompts of one length"):
        model.generate(
            prompt, models.BeamSearch(2), max_new_tokens=2, prompt_lengths=torch.tensor([1, 2])
        )
    with pytest.raises(ValueError, match="beam search cannot stream"):
        model.stream(prompt, models.BeamSearch(2), max_new_tokens=2)


def test_errors_change_no_state() -> None:
    model = small().train()
    source = SOURCE.clone()
    with pytest.raises(ValueError, match="beams must be at most"):
        model.generate(source, models.BeamSearch(20))
    assert all(part.training for part in model.modules())
    assert torch.equal(source, SOURCE)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activations_by_name(activation: str) -> None:
    """Models take the four names of `functional.feed_forward`; torch.nn's layers take two."""
    model = small(activation=activation)
    [layer, *_] = model.encoder.stack.layers
    x = torch.randn(2, 3, layer.linear1.in_features)
    hidden = functional.linear(x, layer.linear1.weight, layer.linear1.bias, activation=activation)
    torch.testing.assert_close(layer.activation(layer.linear1(x)), hidden)
    assert pickle.loads(pickle.dumps(layer.activation)) is not None
    with pytest.raises(ValueError, match="activation must be one of relu, gelu, gelu_tanh, silu"):
        small(activation="tanh")
