"""The namespace of transformer_fast.nn, and what of torch.nn's modules its own keep."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
import sys

import pytest
import torch
from module_cases import CASES
from module_checks import OURS

from transformer_fast import functional, nn

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")


@pytest.mark.parametrize("name", CASES)
def test_the_same_seed_gives_the_same_module(name: str) -> None:
    torch.manual_seed(0)
    theirs = CASES[name].make(torch.nn)
    torch.manual_seed(0)
    ours = CASES[name].make(nn)
    assert type(ours) is OURS[type(theirs)]
    expected, found = theirs.state_dict(), ours.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in theirs.named_modules()]
    assert repr(ours) == repr(theirs)
    changed = {"use_nested_tensor"}  # never used by ours
    assert ours.__dict__.keys() == theirs.__dict__.keys()
    for key, value in theirs.__dict__.items():
        if not key.startswith("_") and key not in changed:
            assert ours.__dict__[key] == value, key


@pytest.mark.parametrize("name", CASES)
def test_state_moves_both_ways(name: str) -> None:
    theirs, ours = CASES[name].make(torch.nn), CASES[name].make(nn)
    for source, target in ((theirs, ours), (ours, theirs)):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.normal_()
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        target.load_state_dict(torch.load(file, weights_only=True), strict=True)
        for one, other in zip(source.parameters(), target.parameters(), strict=True):
            assert torch.equal(one, other)
    if theirs.state_dict():
        with pytest.raises(RuntimeError, match="Missing key"):
            ours.load_state_dict({}, strict=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies(name: str, how: str) -> None:
    ours = CASES[name].make(nn).eval()
    ours.note = "kept"  # type: ignore[assignment]
    if how == "deepcopy":
        again = copy.deepcopy(ours)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(ours))
    else:
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    assert [type(m) for m in again.modules()] == [type(m) for m in ours.modules()]
    assert again.note == "kept"
    assert not again.training
    for one, other in zip(ours.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one is not other


def test_states_of_old_versions() -> None:
    attention = nn.MultiheadAttention(8, 2)
    state = attention.__dict__.copy()
    del state["_qkv_same_embed_dim"]
    old = nn.MultiheadAttention.__new__(nn.MultiheadAttention)
    old.__setstate__(state)
    x = torch.randn(3, 1, 8)
    torch.testing.assert_close(old(x, x, x), attention(x, x, x))
    for cls in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        state = cls(8, 2, 16).__dict__.copy()
        del state["activation"]
        layer = cls.__new__(cls)
        layer.__setstate__(state)
        assert layer.activation is torch.nn.functional.relu


def test_dtype_and_device_arguments() -> None:
    for name in ("TransformerEncoderLayer", "TransformerDecoderLayer"):
        layer = getattr(nn, name)(8, 2, 16, device="meta", dtype=torch.bfloat16)
        assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}
    model = nn.Transformer(8, 2, 1, 1, 16, dtype=torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_modules_move_and_convert() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0).double()
    x = torch.randn(3, 2, 8, dtype=torch.float64)
    assert layer(x).dtype == torch.float64
    assert layer.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    assert layer.to("meta")(torch.empty(3, 2, 8, dtype=torch.bfloat16, device="meta")).is_meta


@pytest.mark.parametrize("how", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrised_modules_are_copied(how):
    linear = getattr(torch.nn.utils.parametrizations, how)(nn.Linear(8, 8))
    copied = copy.deepcopy(linear)
    x = torch.randn(3, 8)
    assert type(copied).__name__ == "ParametrizedLinear"
    assert torch.equal(copied.eval()(x), linear.eval()(x))
    with torch.no_grad():
        next(copied.parameters()).add_(1.0)
    assert not torch.equal(next(copied.parameters()), next(linear.parameters()))
    averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Sequential(linear))
    assert torch.equal(averaged(x), linear(x))


def test_stacks_of_parametrised_layers():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    torch.nn.utils.parametrizations.weight_norm(layer.linear1)
    torch.nn.utils.parametrizations.weight_norm(layer.self_attn.out_proj)
    encoder = nn.TransformerEncoder(layer, 2)
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(encoder(x), layer(layer(x)))
    assert encoder.layers[0].linear1 is not encoder.layers[1].linear1


def test_every_name_of_torch_is_there() -> None:
    names = [name for name in dir(torch.nn) if not name.startswith("_")]
    assert len(names) > 150
    replaced = {cls.__name__ for cls in OURS} | {"functional"}
    for name in names:
        same = getattr(nn, name) is getattr(torch.nn, name)
        assert same is (name not in replaced), name
    assert {*names} <= {*dir(nn)}


def test_ours_are_subclasses() -> None:
    assert len(OURS) >= 11
    for theirs, ours in OURS.items():
        assert issubclass(ours, theirs)
        assert ours.__name__ == theirs.__name__
        assert ours.__module__.startswith("transformer_fast.nn.")
    assert isinstance(nn.LayerNorm(3), torch.nn.LayerNorm)
    assert nn.functional is functional


def test_import_forms() -> None:
    scope: dict[str, object] = {}
    exec("from transformer_fast.nn import *", scope)
    assert scope["Linear"] is nn.Linear
    assert scope["Bilinear"] is torch.nn.Bilinear
    assert scope["LayerNorm"] is nn.LayerNorm
    assert scope["utils"] is torch.nn.utils
    exec("from transformer_fast.nn import Linear as L, MultiheadAttention as A, init", scope)
    assert scope["L"] is nn.Linear
    assert scope["A"] is nn.MultiheadAttention
    assert scope["init"] is torch.nn.init
    exec("import transformer_fast.nn.functional as F", scope)
    assert scope["F"] is functional
    with pytest.raises(ImportError, match="cannot import name 'Transfomer'"):
        exec("from transformer_fast.nn import Transfomer", scope)


@pytest.mark.parametrize(
    "name",
    ["init", "utils", "utils.rnn", "utils.parametrizations", "parallel", "modules.linear",
     "attention", "attention.flex_attention", "parameter"],
)  # fmt: skip
def test_submodules_are_torchs_own(name: str) -> None:
    second = importlib.import_module(f"transformer_fast.nn.{name}")
    first = importlib.import_module(f"torch.nn.{name}")
    assert second is first
    assert first.__name__ == f"torch.nn.{name}"
    assert first.__spec__ is not None
    assert first.__spec__.name == f"torch.nn.{name}"
    assert first.__spec__.loader is first.__loader__


def test_our_files_keep_their_names() -> None:
    module = importlib.import_module("transformer_fast.nn.multihead_attention")
    assert module.__name__ == "transformer_fast.nn.multihead_attention"
    assert module is sys.modules["transformer_fast.nn.multihead_attention"]


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match=r"module 'transformer_fast.nn' has no attribute 'X'"):
        nn.X  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformer_fast.nn.no_such_module")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformer_fast.nn.utils.no_such_module")


def test_torch_is_left_alone() -> None:
    assert torch.nn.LayerNorm.__module__ == "torch.nn.modules.normalization"
    assert torch.nn.functional is not functional
    assert type(torch.nn.TransformerEncoderLayer(4, 1).norm1) is torch.nn.LayerNorm
