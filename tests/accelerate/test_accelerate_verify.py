"""accelerate(model, verify=...): before against after, and back if they differ."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate_ruler import MODELS, B, M, T, TextModel, encoder_layer, tokens
from torch import Tensor

from transformer_fast import accelerate, nn
from transformer_fast.accelerate import register_converter

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


@pytest.mark.parametrize("name", MODELS)
def test_ours_pass(name: str) -> None:
    model, args, kwargs = MODELS[name]()
    wrapped = Wrapped(model)
    report = accelerate(wrapped, verify={"args": args, "kwargs": kwargs})
    assert report.verified
    assert not report.notes
    assert report.swapped


class Wrapped(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, args: Any, kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.fixture
def registry() -> Iterator[None]:
    yield
    for cls in (torch.nn.LayerNorm, torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer):
        register_converter(cls, None)


class WrongNorm(torch.nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (1 + 1e-4)


class WrongGradient(torch.nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(
            input, self.normalized_shape, self.weight.detach(), self.bias, self.eps
        )


class WrongInTraining(torch.nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input if not self.training else -input)


class WrongInInference(torch.nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input if torch.is_grad_enabled() else -input)


class FlippedPadding(torch.nn.TransformerEncoderLayer):
    """Wrong only where something is padded."""

    def forward(self, src: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        if src_key_padding_mask is not None:
            src_key_padding_mask = src_key_padding_mask.logical_not()
        return super().forward(src, src_key_padding_mask=src_key_padding_mask)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("base", "wrong", "told"),
    [
        (torch.nn.LayerNorm, WrongNorm, "inference: outputs differ"),
        (torch.nn.LayerNorm, WrongGradient, "evaluation: gradients differ"),
        (torch.nn.LayerNorm, WrongInTraining, "training: outputs differ"),
        (torch.nn.LayerNorm, WrongInInference, "inference: outputs differ"),
        (torch.nn.TransformerEncoderLayer, FlippedPadding, "layer with padding: outputs differ"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_wrong_conversions_are_taken_back(base: type, wrong: type, told: str) -> None:
    model = torch.nn.Sequential()
    model.layer = encoder_layer(dropout=0.1)
    types = [type(m) for m in model.modules()]
    names = [set(m.__dict__) for m in model.modules()]
    register_converter(base, wrong)
    with pytest.warns(UserWarning, match="changed the model's numbers and was taken back"):
        report = accelerate(model, verify=torch.randn(B, T, M))
    assert report.verified is False
    assert told in str(report)
    assert not report.swapped
    assert "everything was taken back" in report["layer.norm1"].reason
    assert [type(m) for m in model.modules()] == types
    assert [set(m.__dict__) for m in model.modules()] == names


class Eventful(torch.nn.Module):
    """Buffers that change, dropout, a counter: nothing that verify should leave a mark on."""

    def __init__(self) -> None:
        super().__init__()
        self.text = TextModel(dropout=0.3)
        self.batch_norm = torch.nn.BatchNorm1d(11)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.batch_norm(self.text(source, target).flatten(0, 1))


def test_verify_leaves_no_trace() -> None:
    model = Eventful()
    model.batch_norm.eval()
    for p in model.text.head.parameters():
        p.grad = torch.ones_like(p)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    training = [m.training for m in model.modules()]
    source, target = tokens()
    random = torch.get_rng_state()
    given = source.clone(), target.clone()
    report = accelerate(model, verify=(source, target))
    assert report.verified
    assert torch.equal(torch.get_rng_state(), random)
    assert [m.training for m in model.modules()] == training
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.text.head.parameters())
    assert all(p.grad is None for p in model.text.transformer.parameters())
    assert torch.equal(source, given[0])
    assert torch.equal(target, given[1])
    assert model.text.transformer.encoder.layers[0].dropout.p == 0.3
    assert model.text.transformer.encoder.layers[0].self_attn.dropout == 0.3
    assert torch.backends.mha.get_fastpath_enabled()


def test_random_models_are_compared_where_they_can_be() -> None:
    class Noisy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(M)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + torch.randn_like(x)) if self.training else self.norm(x)

    report = accelerate(Noisy(), verify=torch.randn(2, M))
    assert report.verified
    assert "random numbers in train mode" in report.notes[0]


def test_rows_that_see_nothing_do_not_count() -> None:
    attention = torch.nn.MultiheadAttention(M, 4, batch_first=True)
    mask = torch.zeros(B, T, dtype=torch.bool)
    mask[1] = True
    x = torch.randn(B, T, M)
    example = {"query": x, "key": x, "value": x, "key_padding_mask": mask}
    assert attention(**example)[0].isnan().any()
    assert accelerate(attention, verify=example).verified
    assert not attention(**example)[0].isnan().any()


@pytest.mark.filterwarnings("default:accelerate changed")
def test_a_model_of_nan_proves_nothing() -> None:
    norm = torch.nn.LayerNorm(M)
    with pytest.warns(UserWarning, match="are all NaN or infinite"):
        report = accelerate(norm, verify=torch.full((2, M), torch.nan))
    assert report.verified is False


def test_what_the_model_raises_is_raised_and_nothing_changes() -> None:
    model = TextModel()
    with pytest.raises(IndexError):
        accelerate(model, verify=tuple(torch.full((1, 3), 99) for _ in range(2)))
    with pytest.raises(TypeError, match="verify must be a tuple of positional arguments"):
        accelerate(model, verify=3)
    assert not any(isinstance(m, (nn.LayerNorm, nn.Transformer)) for m in model.modules())
    assert all(m.training for m in model.modules())


def test_half_precision_and_autocast() -> None:
    layer = encoder_layer(dropout=0.0).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert accelerate(layer, verify=torch.randn(2, 5, M, dtype=torch.bfloat16)).verified
        with torch.autocast("cpu", torch.bfloat16):
            assert accelerate(encoder_layer(), verify=torch.randn(2, 5, M)).verified
