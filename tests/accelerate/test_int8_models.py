"""``accelerate(model, quantize="int8")``: results, reports, restoring, saving, and models left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from accelerate_checks import TextModel, encoder, encoder_layer, form
from harness import same_bits
from torch import Tensor, nn

from transformer_fast import _native, accelerate, functional, restore
from transformer_fast.nn import int8

pytestmark = pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))

#: Largest relative error of the small models here: 8 bits are about 1 %.
ERROR = 0.05


def run(model: nn.Module, *inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(*inputs)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def stack() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), encoder(), nn.Linear(16, 5))


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 7)), 16, generator=torch.Generator().manual_seed(1))


def tokens(length: int) -> Tensor:
    return torch.randint(1, 11, (3, length), generator=torch.Generator().manual_seed(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "stack": (stack, lambda: (x(),)),
    "encoder and decoder": (TextModel, lambda: (tokens(6), tokens(5))),
    "network": (
        lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
        lambda: (x(),),
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", MODELS)
def test_results_are_close_and_restore_gives_the_same_bits(name):
    make, inputs = MODELS[name]
    model = make()
    before, was = run(model, *inputs()), form(model)
    report = accelerate(model, quantize="int8")
    assert not [entry for entry in report.left if entry.name]
    found = run(model, *inputs())
    assert 0.0 < error(found, before) < ERROR
    assert same_bits(run(copy.deepcopy(model), *inputs()), found)
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert all(int8.INT8 in m.__dict__ for m in linears)
    assert restore(model)
    assert form(model) == was
    assert same_bits(run(model, *inputs()), before)


def test_a_linear_layer_computes_the_public_op():
    layer = nn.Linear(16, 24)
    accelerate(layer, quantize="int8")
    expected = functional.int8_linear(
        x(), *functional.quantize_weight(layer.weight.detach()), layer.bias.detach()
    )
    assert same_bits(run(layer, x()), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.neg_(),
        lambda w: w.data.mul_(2.0),
        lambda w: w.numpy().__setitem__(3, 1.0),
        lambda w: setattr(w, "data", torch.ones_like(w)),
    ],
    ids=["in place", "by data", "by numpy", "other memory"],
)
def test_weights_changed_later_are_quantised_again(change):
    layer = nn.Linear(16, 24)
    accelerate(layer, quantize="int8")
    first = run(layer, x())
    record = layer.__dict__[int8.INT8]
    with torch.no_grad():
        kept = record.of(layer, "weight")
        assert record.of(layer, "weight") is kept
        change(layer.weight if change.__code__.co_names[0] != "numpy" else layer.weight.detach())
    found = run(layer, x())
    assert not same_bits(found, first)
    again = nn.Linear(16, 24)
    again.load_state_dict(layer.state_dict())
    accelerate(again, quantize="int8")
    assert same_bits(found, run(again, x()))


def test_gradients_raise_and_name_restore():
    model = encoder_layer()
    accelerate(model, quantize="int8")
    with pytest.raises(NotImplementedError, match=r"restore"):
        model(x())
    with pytest.raises(NotImplementedError, match=r"restore"), torch.no_grad():
        torch.func.jvp(model.linear1, (x(),), (x(),))
