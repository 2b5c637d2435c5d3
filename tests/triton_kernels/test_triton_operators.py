"""Limits of the Triton kernels, and the GPUs that they support."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import kernel_of

from transformer_fast import dispatch
from transformer_fast.backends import triton as backend
from transformer_fast.testing import call_of

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def why_not(op: str, *arguments: Any, needs_grad: bool = False) -> list[str]:
    call = call_of(op, arguments)
    return dispatch.why_not(kernel_of(op, "triton"), call._replace(needs_grad=needs_grad))


def test_sizes_beyond_the_limits_are_refused(device):
    def rows(*shape):
        return torch.empty(shape, device=device)

    assert why_not("layer_norm", rows(1, 16384), (16384,), None, None, 1e-5) == []
    assert why_not("layer_norm", rows(1, 16385), (16385,), None, None, 1e-5) == [
        "it supports up to 16384 columns, and the call has 16385"
    ]
    assert why_not("layer_norm", rows(1, 8192), (8192,), None, None, 1e-5, needs_grad=True) == []
    x = rows(2, 8192)
    arguments = (x, x, (2, 8192), None, None, 1e-5, 0.0, None)
    assert why_not("add_layer_norm", *arguments, needs_grad=True) == [
        "it supports up to 8192 columns with gradients, and the call has 16384"
    ]
    assert why_not("attention", *[rows(1, 1, 2, 256)] * 3) == []
    assert why_not("attention", *[rows(1, 1, 2, 257)] * 3) == [
        "it supports head sizes up to 256, and the call has 257"
    ]
    assert why_not("linear", rows(2, 2), rows(2, 2), None) == []
    (reason,) = why_not("linear", rows(2, 2).double(), rows(2, 2).double(), None)
    assert "float64" in reason


def test_gpus_without_a_tile_table_use_a_related_one():
    own = {number: number for number in backend.ARCHITECTURES}
    for capability, tiles in {**own, 87: 86, 89: 86, 103: 100, 110: 100, 121: 120, 130: 86}.items():
        assert backend.table_for(capability) == tiles


def test_old_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))

    class Fake(torch.Tensor):
        is_cuda = True

    call = dispatch.Call("linear", (torch.empty(2, 2).as_subclass(Fake),), False, None)
    assert backend._refuse_place(call) == (
        "it needs compute capability 8.0 or higher, and this GPU has 7.5"
    )


def test_a_folder_named_triton_is_not_the_package(monkeypatch):
    class Spec:
        origin = None

    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: Spec)
    assert backend.kernels(interpreted=False)[0].unavailable is not None
    monkeypatch.undo()
    assert backend.kernels(interpreted=False)[0].unavailable is None
    assert backend.kernels(interpreted=False)[0].devices == ("cuda",)
