"""models.Transformer against torch.nn's own modules, and what it promises beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models_ruler import PAD, plain_forward, small, tokens
from module_ruler import check_budget

from transformer_fast import models, nn

OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {},
    "pre-norm": {"norm_first": True},
    "gelu": {"activation": "gelu"},
    "final norm": {"final_norm": True},
    "pre-norm without final norm": {"norm_first": True, "final_norm": False},
    "shared": {"target_vocab_size": None},
    "tied": {"tie_output": True},
    "shared and tied": {"target_vocab_size": None, "tie_output": True, "output_bias": False},
    "projected": {"embedding_size": 10},
    "projected and tied": {"embedding_size": 10, "tie_output": True},
    "annotated": {"norm": "annotated", "norm_first": True, "layer_norm_eps": 1e-6},
    "annotated post-norm": {"norm": "annotated", "layer_norm_eps": 0.5},
    "no biases": {"bias": False, "output_bias": False},
    "odd width": {"d_model": 15, "nhead": 3},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("example", [[7, 7, 7], [7, 3, 5]], ids=str)
def test_traced_models_look_for_padding(example: list[int]) -> None:
    """Though the example has none."""
    model, target = small().eval(), tokens(19, [6, 6, 6])
    traced = torch.jit.trace(model, (tokens(19, example), target), check_trace=False)
    for lengths in ([7, 3, 5], [7, 7, 7]):
        source = tokens(19, lengths)
        torch.testing.assert_close(traced(source, target), model(source, target))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("padded", [False, True])
def test_forward_is_that_of_plain_pytorch(options: dict[str, Any], padded: bool) -> None:
    model = small(**options)
    source = tokens(19, [7, 3, 5] if padded else [7, 7, 7])
    target = tokens(19, [2, 6, 4] if padded else [6, 6, 6])
    got = model(source, target)
    plain = plain_forward(model, source, target, torch.float32)
    exact = plain_forward(model, source, target, torch.float64)
    real = target != PAD
    check_budget(got[real], plain[real], exact[real])
    with torch.no_grad():  # where other kernels may run
        check_budget(model(source, target)[real], plain[real], exact[real])


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"norm": "annotated"}])
def test_gradients_are_those_of_plain_pytorch(options: dict[str, Any]) -> None:
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
    # Look-ups of the pad token give the table no gradient; plain indexing above does.
    check_budget(got[1:], plain[1:], exact[1:])


def test_the_parts_make_up_forward() -> None:
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


def test_no_token_sees_a_later_one_or_padding() -> None:
    model = small()
    source, target = tokens(23, [7, 4], 9), tokens(19, [6, 6])
    before = model(source, target)
    changed = target.clone()
    changed[:, 4:] = 3
    assert torch.equal(model(source, changed)[:, :4], before[:, :4])
    # What stands at padding is nothing to the rest, nor is how much there is of it.
    longer = torch.cat((source, torch.zeros(2, 5, dtype=torch.int64)), 1)
    torch.testing.assert_close(model(longer, target), before)
    padding = source == PAD
    other = source.masked_fill(padding, 5)
    torch.testing.assert_close(model(other, target, source_padding=padding), before)


def test_padding_may_stand_anywhere() -> None:
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


def test_config_and_weights_are_all_there_is_to_save(tmp_path: Path) -> None:
    model = small(norm_first=True, embedding_size=10, tie_output=True, norm="annotated")
    torch.save({"config": model.config, "weights": model.state_dict()}, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    again = models.Transformer(**saved["config"]).eval()
    again.load_state_dict(saved["weights"])
    source, target = tokens(23, [7, 3]), tokens(19, [4, 6])
    assert torch.equal(again(source, target), model(source, target))


def test_the_layers_are_ours() -> None:
    model = small()
    kinds = {type(layer) for half in (model.encoder, model.decoder) for layer in half.stack.layers}
    assert kinds == {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}


def test_dropout_acts_in_training_only() -> None:
    model = small(dropout=0.5)
    source, target = tokens(23, [7, 3]), tokens(19, [4, 6])
    assert torch.equal(model(source, target), model(source, target))
    model.train()
    assert not torch.equal(model(source, target), model(source, target))


def test_int32_tokens() -> None:
    model = small()
    source, target = tokens(23, [7, 3]), tokens(19, [4, 6])
    assert torch.equal(model(source.int(), target.int()), model(source, target))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = small(dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    logits = model(tokens(23, [7, 3]), tokens(19, [4, 6]))
    assert logits.dtype == dtype
    assert torch.isfinite(logits).all()


def test_built_on_meta_and_made_real_it_has_its_positions() -> None:
    model = small(device="meta").to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, models.SinusoidalPositions):
            module.reset_parameters()
    like = small()
    model.load_state_dict(like.state_dict())
    source, target = tokens(23, [7, 3]), tokens(19, [4, 6])
    assert torch.equal(model(source, target), like(source, target))


# What Dynamo does with an autograd.Function, it warns about itself.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_without_a_break() -> None:
    model = small(num_encoder_layers=1, num_decoder_layers=1)
    source, target = tokens(23, [7, 3]), tokens(19, [4, 6])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(source, target), model(source, target))
    compiled(source, target).sum().backward()
    assert model.output.weight.grad is not None


def test_training_learns_to_copy() -> None:
    model = small(
        target_vocab_size=None,
        tie_output=True,
        num_encoder_layers=1,
        num_decoder_layers=1,
        dropout=0.0,
    ).train()
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    source = tokens(8, [4] * 4)
    target = torch.cat((torch.full((4, 1), 1), source, torch.full((4, 1), 2)), 1)
    for _ in range(70):
        logits = model(source, target[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.1
    assert torch.equal(model.generate(source).tokens, target[:, 1:])
