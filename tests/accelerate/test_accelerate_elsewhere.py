"""Accelerated models in copies, pickles, torch.compile, DistributedDataParallel and FSDP2."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate_ruler import M, TextModel, encoder, encoder_layer, tokens
from module_ruler import assert_same_numbers, check_budget

from transformer_fast import accelerate, nn, restore
from transformer_fast.nn.swapped import RECORD
from transformer_fast.testing import GRADIENT_FACTOR

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


class Sub(torch.nn.LayerNorm):
    """A user's subclass, which becomes a class that no module holds."""


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy])
def test_copies_are_accelerated_too(how: Any) -> None:
    model = torch.nn.Sequential(encoder_layer(), Sub(M))
    accelerate(model)
    again = how(model)
    assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
    if how is copy.deepcopy:
        assert all(p is not q for p, q in zip(again.parameters(), model.parameters(), strict=True))
        assert restore(again) == ["0", "0.self_attn", "0.norm1", "0.norm2", "1"]
        assert type(again[1]) is Sub
        assert type(model[0]) is nn.TransformerEncoderLayer  # the original is another model
    one = how(model[0])
    assert type(one) is nn.TransformerEncoderLayer
    assert one.__dict__[RECORD] == model[0].__dict__[RECORD]


def test_a_copied_layer_makes_a_stack() -> None:
    layer = encoder_layer()
    accelerate(layer)
    stack = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    assert {type(m) for m in stack.layers} == {nn.TransformerEncoderLayer}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_hold_the_model_as_it_was(protocol: int) -> None:
    model = torch.nn.Sequential(encoder_layer(), Sub(M)).eval()
    types = [type(m) for m in model.modules()]
    accelerate(model)
    again = pickle.loads(pickle.dumps(model, protocol))
    assert [type(m) for m in again.modules()] == types
    assert not any(RECORD in m.__dict__ for m in again.modules())
    assert restore(again) == []
    assert not again[0].training
    assert_same_numbers(again, model, (torch.randn(2, 3, M),), {}, grad=False)
    accelerate(again)
    assert type(again[0]) is nn.TransformerEncoderLayer


def test_pickles_load_without_this_library(tmp_path: Path) -> None:
    model = torch.nn.Sequential(encoder_layer(), torch.nn.LayerNorm(M)).eval()
    accelerate(model)
    torch.save(model, tmp_path / "model.pt")
    x = torch.randn(2, 3, M)
    with torch.no_grad():
        torch.save((x, model(x)), tmp_path / "calls.pt")
    code = (
        "import sys, torch\n"
        "sys.modules['transformer_fast'] = None\n"
        "model = torch.load('model.pt', weights_only=False)\n"
        "x, expected = torch.load('calls.pt')\n"
        "torch.testing.assert_close(model(x), expected)\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=tmp_path)


def test_state_dicts() -> None:
    model, plain = TextModel(), TextModel()
    accelerate(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True), strict=True)
    model.load_state_dict(plain.state_dict(), strict=True)


@pytest.mark.parametrize("compiled_first", [True, False])
def test_compiled(compiled_first: bool) -> None:
    torch.compiler.reset()
    theirs = encoder_layer(dropout=0.0)
    ours = copy.deepcopy(theirs)
    x = torch.randn(2, 5, M)
    compiled = torch.compile(ours, backend="eager")
    if compiled_first:
        compiled(x)
    report = accelerate(compiled if compiled_first else ours)
    assert report.swapped
    assert type(ours) is nn.TransformerEncoderLayer
    assert_same_numbers(compiled, theirs, (x,), {}, grad=True)
    restore(compiled)
    assert type(ours) is torch.nn.TransformerEncoderLayer
    assert_same_numbers(compiled, theirs, (x,), {}, grad=True)


def test_traced_by_fx() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = encoder_layer(dropout=0.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * 2

    theirs = Model()
    traced = torch.fx.symbolic_trace(theirs)
    report = accelerate(traced)
    assert report["layer"].outcome == "swapped"
    assert_same_numbers(traced, copy.deepcopy(theirs), (torch.randn(2, 3, M),), {}, grad=True)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone; the paths through the wrappers are those of any group."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("this build of torch has no gloo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrapped_first", [True, False])
def test_distributed_data_parallel(wrapped_first: bool) -> None:
    theirs = TextModel(dropout=0.0)
    ours = copy.deepcopy(theirs)
    if not wrapped_first:
        accelerate(ours)
    model = torch.nn.parallel.DistributedDataParallel(ours)
    if wrapped_first:
        report = accelerate(model, verify=tokens())
        assert report.verified
        assert report["module.transformer"].outcome == "swapped"
    source, target = tokens()
    exact = copy.deepcopy(theirs).double()
    for one in (theirs, model, exact):
        one(source, target).square().mean().backward()
    grads = [[p.grad for p in one.parameters()] for one in (ours, theirs, exact)]
    check_budget(*grads, GRADIENT_FACTOR)
    assert len(restore(model)) == len([m for m in theirs.modules() if "norm" in repr(type(m))]) + 13


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore")
def test_fully_shard() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    theirs = encoder(dropout=0.0)
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    for layer in ours.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(ours, mesh=mesh)
    x = torch.randn(2, 5, M)
    exact = copy.deepcopy(theirs).double()
    for model, given in ((theirs, x), (ours, x), (exact, x.double())):
        model(given).square().mean().backward()
    grads = [[p.grad for p in one.parameters()] for one in (theirs, exact)]
    check_budget([p.grad.full_tensor() for p in ours.parameters()], *grads, GRADIENT_FACTOR)
    with pytest.raises(RuntimeError, match="its class was changed again, to FSDP"):
        restore(ours)

    late = encoder()
    fully_shard(late, mesh=mesh)
    report = accelerate(late)
    assert report[""].reason == "it is sharded by fully_shard; call accelerate before fully_shard"
    assert "is a DTensor" in report["layers.0"].reason
    assert not report.swapped
