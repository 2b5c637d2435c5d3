"""enable_sdpa(backend="triton"): PyTorch's own function on our kernels, with PyTorch's backward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_fast import _sdpa_operators, disable_sdpa, enable_sdpa

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

B, H, D = 1, 2, 16


@pytest.fixture
def backends(
    device: str, small_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[str]]:
    """Enabled, with a note of the backend of every call."""
    found: list[str] = []
    right = _sdpa_operators.attend

    def attend(backend: str, *args: Any) -> Any:
        found.append(backend)
        return right(backend, *args)

    monkeypatch.setattr(_sdpa_operators, "attend", attend)
    enable_sdpa(backend="triton")
    yield found
    disable_sdpa()


def _masks(queries: int, keys: int) -> dict[str, Any]:
    hidden = torch.rand(B, 1, queries, keys) > 0.6
    hidden[0, 0, 0] = True
    return {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": ~hidden},
        "added": {"attn_mask": torch.randn(1, H, queries, keys).masked_fill(hidden, -math.inf)},
        "scale": {"scale": 0.3},
        "negative scale": {"scale": -0.3},
    }


def _run(args: list[Tensor], kwargs: dict[str, Any]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in args]
    output = F.scaled_dot_product_attention(*leaves, **kwargs)
    weight = torch.linspace(0.5, 1.5, output.numel()).view(output.shape).to(output)
    return [output.detach(), *torch.autograd.grad((output * weight).sum(), leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("queries", "keys"), [(19, 19), (1, 23)])
@pytest.mark.parametrize("name", _masks(1, 1))
def test_numbers_and_gradients(
    name: str, queries: int, keys: int, dtype: torch.dtype, device: str, backends: list[str]
) -> None:
    args = [torch.randn(B, H, n, D, device=device).to(dtype) for n in (queries, keys, keys)]
    kwargs = {
        key: value.to(device) if isinstance(value, Tensor) else value
        for key, value in _masks(queries, keys)[name].items()
    }
    if name == "added":
        kwargs["attn_mask"] = kwargs["attn_mask"].to(dtype)
    ours = _run(args, kwargs)
    assert backends == ["triton"]
    disable_sdpa()
    theirs = _run(args, kwargs)
    double = {
        k: v.double() if k == "attn_mask" and v.dtype == dtype else v for k, v in kwargs.items()
    }
    oracle = _run([x.double() for x in args], double)
    for got, expected, true in zip(ours, theirs, oracle, strict=True):
        size = true.abs().max()
        allowed = 3 * (expected - true).abs().max() + 2 * size * torch.finfo(dtype).eps
        assert (got - true).abs().max() <= allowed


def test_calls_that_it_does_not_take(device: str, backends: list[str]) -> None:
    x = torch.randn(B, H, 5, D, device=device, dtype=torch.float64)
    torch.testing.assert_close(
        F.scaled_dot_product_attention(x, x, x), (x @ x.mT / 4).softmax(-1) @ x
    )
    assert not backends
