"""`transformer_fast.nn` stands where `torch.nn` stood."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from module_ruler import OURS

from transformer_fast import functional, nn


def test_every_name_of_torch_is_there() -> None:
    names = [name for name in dir(torch.nn) if not name.startswith("_")]
    assert len(names) > 150
    replaced = {cls.__name__ for cls in OURS} | {"functional"}
    for name in names:
        same = getattr(nn, name) is getattr(torch.nn, name)
        assert same is (name not in replaced), name
    assert {*names} <= {*dir(nn)}


def test_ours_are_subclasses() -> None:
    assert len(OURS) == 11
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
    module = importlib.import_module("transformer_fast.nn.layer_norm")
    assert module.__name__ == "transformer_fast.nn.layer_norm"
    assert module is sys.modules["transformer_fast.nn.layer_norm"]


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
