"""Operators called by hand with what no public function gives them: errors, and never old memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_fast import _native, functional

pytestmark = pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))

OPS = torch.ops.transformer_fast
DTYPES = [torch.float32, torch.bfloat16]


def layers(x: Tensor, starts: Tensor | None, activation: int = 1, heads: int = 2) -> Tensor:
    width = x.shape[-1]
    parameters = [torch.randn(shape).to(x.dtype) if shape else None for shape in (
        (3 * width, width), (), (width, width), (), (width,), ()
    )]  # fmt: skip
    return OPS.cpu_layers(  # type: ignore[no-any-return]
        x, None, [0], parameters, [None] * 2, [1e-5], False, heads, activation, True, None, False,
        None, False, starts, None,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("starts", [[0], [0, 4], [1, 5], [2], [0, 2, 6], [0, -1, 5], [0, 3, 2, 5]])
def test_sequences_are_all_rows(starts: list[int], dtype: torch.dtype) -> None:
    x = torch.randn(5, 8).to(dtype)
    assert layers(x, torch.tensor([0, 2, 5])).isfinite().all()
    with pytest.raises(RuntimeError, match="starts"):
        layers(x, torch.tensor(starts))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_sequence_of_no_rows(dtype: torch.dtype) -> None:
    assert layers(torch.randn(0, 8).to(dtype), torch.tensor([0])).shape == (0, 8)
    assert layers(torch.randn(0, 8).to(dtype), torch.tensor([0, 0])).shape == (0, 8)


@pytest.mark.parametrize("backend", ["cpu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("power", [32, 40])
def test_a_result_of_too_many_bytes_is_an_error(
    power: int, dtype: torch.dtype, backend: str
) -> None:
    """2^64 bytes and more; products that are 0 or small mod 2^64."""
    x = torch.zeros(1, 4, dtype=dtype).expand(2 ** (power - 1), 4)
    weight = torch.zeros(1, 4, dtype=dtype).expand(2 ** (power - 1), 4)
    with pytest.raises(RuntimeError, match="Storage size calculation overflowed"):
        functional.linear(x, weight, backend=backend)
    with pytest.raises(RuntimeError, match="can't allocate memory: you tried to allocate"):
        functional.linear(x[: 2**20], weight, backend=backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_hidden_block_of_too_many_bytes_is_an_error(dtype: torch.dtype) -> None:
    one = torch.zeros(1, 1, dtype=dtype)
    x, weight1, weight2 = one.expand(2**24, 1), one.expand(2**40, 1), one.expand(1, 2**40)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        functional.feed_forward(x, weight1, None, weight2, None, backend="cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_is_over_dimensions_that_there_are(dtype: torch.dtype) -> None:
    x = torch.randn(4, 6).to(dtype)
    for dims in (0, -1, 3):
        with pytest.raises(RuntimeError, match=f"the last {dims} dimensions .* of 2"):
            OPS.layer_norm.cpu(x, None, None, dims, 1e-5, 0)
        with pytest.raises(RuntimeError, match=f"the last {dims} dimensions .* of 2"):
            OPS.add_layer_norm.cpu(x, x, None, None, dims, 1e-5, 0)
    assert OPS.layer_norm.cpu(x[:0], None, None, 2, 1e-5, 0).shape == (0, 6)


def test_rows_of_no_classes() -> None:
    losses, known = OPS.linear_cross_entropy.cpu(
        torch.randn(3, 4), torch.randn(0, 4), None, torch.full((3,), -100), -100, 0.0
    )
    assert torch.equal(losses, torch.zeros(3))
    assert torch.equal(known, torch.zeros(2, 3))


@pytest.mark.parametrize("wants", [(True, True, True), (True, False, False), (False, True, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "reference", "torch"])
def test_gradients_worked_out_with_losses(backend: str, dtype: torch.dtype, wants: Any) -> None:
    if backend == "cpu" and dtype != torch.bfloat16:
        pytest.skip("the CPU's kernel is for half types")
    tensors = (torch.randn(shape).to(dtype) for shape in ((9, 4), (7, 4), (7,)))
    torch.library.opcheck(
        getattr(OPS.linear_cross_entropy_gradients, backend),
        (None, *tensors, torch.arange(9) % 7, 4, 2, 0.1, *wants),
        test_utils=("test_schema", "test_faketensor"),
    )


def _activation_calls(dtype: torch.dtype) -> dict[str, Callable[[int], Any]]:
    x, w1, w2 = (torch.randn(shape).to(dtype) for shape in ((3, 4), (5, 4), (4, 5)))
    y, z = torch.randn(3, 5).to(dtype), torch.randn(3, 5).to(dtype)
    wanted = [True] * 5
    return {
        "linear": lambda a: OPS.linear.cpu(x, w1, None, None, a),
        "linear, kept": lambda a: OPS.linear_training.cpu(x, w1, None, None, a, True),
        "linear backward": lambda a: OPS.linear_backward.cpu(y, x, w1, z, a, True, True, True),
        "network": lambda a: OPS.feed_forward.cpu(x, w1, None, w2, None, a),
        "training": lambda a: OPS.feed_forward_training.cpu(
            x, w1, None, w2, None, a, 0.0, None, True
        ),
        "network backward": lambda a: OPS.feed_forward_backward.cpu(
            x, x, w1, w2, z, a, 0.0, None, *wanted
        ),
        "layers": lambda a: layers(x, torch.tensor([0, 3]), a),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(_activation_calls(torch.float32)))
def test_there_are_five_activations(name: str, dtype: torch.dtype) -> None:
    call = _activation_calls(dtype)[name]
    for activation in range(1 if "backward" in name else 0, 5):
        call(activation)
    for activation in (-1, 5, 2**32 + 1):
        with pytest.raises(RuntimeError, match=f"there is no activation {activation}"):
            call(activation)
