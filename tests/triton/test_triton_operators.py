"""The operators as torch sees them (schema, fakes, tracing), and the calls the kernels refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted import DEVICE
from ops import ROWS

import transformer_fast
from transformer_fast import dispatch
from transformer_fast.backends import triton as backend
from transformer_fast.specs import OPS
from transformer_fast.testing import require_grad

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ops = torch.ops.transformer_fast
SEED = torch.tensor(0x7123456789ABCDEF)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def layer_norm_calls():
    x, w, b = normal(2, 5, 24), normal(24), normal(24)
    rows = normal(10)
    forward, backward = ops.layer_norm_training.triton, ops.layer_norm_backward.triton
    yield forward, (x, None, w, b, 1, 1e-5, 0, 0.0, None)
    yield forward, (x, x.flip(0), None, None, 2, 1e-5, 0, 0.3, SEED)
    kept = (x, None, x, w, rows, rows.abs(), 1, 0)
    yield backward, (*kept, 0.0, None, True, False, True, False)
    yield backward, (*kept, 0.3, SEED, False, True, False, True)


def attention_calls():
    forward = ops.attention_training.triton
    k, v = normal(2, 2, 7, 4, dtype=torch.float16), normal(2, 2, 7, 6, dtype=torch.float16)
    mask, lengths = normal(1, 4, 1, 7, dtype=torch.float16), torch.tensor([7, 2], device=DEVICE)
    q = normal(2, 5, 4, 4, dtype=torch.float16).transpose(1, 2)
    for extra in (
        (None, None, True, 0.5, 0.0, None, False),
        (mask, lengths, False, 0.5, 0.2, SEED, True),
    ):
        yield forward, (q, k, v, *extra)
        output, weights, shift, norm = forward(q, k, v, *extra)
        given = (weights.clone(), weights) if extra[-1] else (None, None)
        yield (
            ops.attention_backward.triton,
            (output.clone(), given[0], q, k, v, *extra[:-1], output, given[1], shift, norm,
             True, True, True, extra[0] is not None),
        )  # fmt: skip
    q, k, v = (x[:1] for x in (q, k, v))
    starts, longest = torch.tensor([0, 3, 3, 5]), (3, 7)
    packed = (None, starts, True, 0.5, 0.0, None)
    yield forward, (q, k, v, *packed, False, starts, *longest)
    output, _, shift, norm = forward(q, k, v, *packed, False, starts, *longest)
    results = (output, None, shift, norm, True, False, True, False)
    yield (
        ops.attention_backward.triton,
        (output.clone(), None, q, k, v, *packed, *results, starts, *longest),
    )


def linear_calls():
    x, w, b = normal(2, 5, 12), normal(9, 12), normal(9)
    y, z = normal(2, 5, 9), normal(2, 5, 9)
    forward, backward = ops.linear_training.triton, ops.linear_backward.triton
    yield forward, (x, w, b, None, 0, False)
    yield forward, (x, w, None, y, 2, True)
    yield backward, (y, x, w, z, 4, True, True, True)
    yield backward, (y, x, w, None, 0, False, True, False)


def feed_forward_calls():
    x, w1, b1 = normal(2, 5, 12), normal(9, 12), normal(9)
    w2, b2, hidden = normal(12, 9), normal(12), normal(2, 5, 9)
    forward, backward = ops.feed_forward_training.triton, ops.feed_forward_backward.triton
    yield forward, (x, w1, b1, w2, b2, 1, 0.2, SEED, True)
    yield forward, (x, w1, None, w2, None, 3, 0.0, None, False)
    kept = (x.flip(0), x, w1, w2, hidden, 2, 0.2, SEED)
    yield backward, (*kept, True, True, True, True, True)
    yield backward, (*kept, False, True, False, False, False)


def cross_entropy_calls():
    x, target = normal(9, 70), torch.arange(9) * 7
    target[3] = -100
    losses, known = normal(9), normal(2, 9)
    forward, backward = ops.cross_entropy.triton, ops.cross_entropy_backward.triton
    yield forward, (x, target, -100, 0.0)
    yield forward, (x.half().t(), torch.arange(70) % 9, 3, 0.1)
    yield backward, (losses, x, target, known, -100, 0.1)
    logits = normal(70, 9, dtype=torch.bfloat16).t()
    yield backward, (losses[:1].expand(9), logits, target, known, 3, 0.0)


CALLS = [layer_norm_calls, attention_calls, linear_calls, feed_forward_calls, cross_entropy_calls]


def on(device: str, value: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("calls", CALLS, ids=lambda calls: calls.__name__.removesuffix("_calls"))
def test_opcheck(calls, device):
    for operator, arguments in calls():
        arguments = tuple(on(device, value) for value in arguments)
        overload = getattr(operator, "default", operator)
        torch.library.opcheck(overload, arguments, test_utils=("test_schema", "test_faketensor"))


def sample(op: str, device: Any, generator: torch.Generator | None) -> tuple[Any, ...]:
    return OPS[op].case(ROWS[op].sample).build(torch.float32, device, generator)


@pytest.mark.parametrize("op", OPS)
def test_one_graph_forward_and_backward(op, device):
    torch.compiler.reset()
    arguments = sample(op, device, torch.Generator().manual_seed(0))
    run = next(k for k in dispatch.kernels(op) if k.backend == "triton").run

    def total(*given: Any) -> torch.Tensor:
        results = run(*given)
        results = results if isinstance(results, tuple) else (results,)
        return sum(r.square().sum() for r in results if r is not None)

    found = []
    for function in (total, torch.compile(total, fullgraph=True, backend="aot_eager")):
        leaves = require_grad(op, arguments)
        value = function(*leaves)
        wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
        found.append([value.detach(), *torch.autograd.grad(value, wanted)])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("op", OPS)
def test_empty_calls_are_the_references(op, device):
    arguments = sample(op, device, None)
    rows = arguments[0].shape[0]
    arguments = tuple(
        x[:0] if isinstance(x, torch.Tensor) and x.shape[:1] == (rows,) else x for x in arguments
    )
    run = next(k for k in dispatch.kernels(op) if k.backend == "triton").run
    expected = OPS[op].reference(*arguments)
    for ours, theirs in zip(
        *(r if isinstance(r, tuple) else (r,) for r in (run(*arguments), expected)), strict=True
    ):
        assert ours is theirs or ours.shape == theirs.shape


def test_named_backend(device):
    x = normal(4, 32)
    with transformer_fast.use_backend("triton"):
        y = transformer_fast.functional.layer_norm(x, (32,))
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (32,)))
    assert transformer_fast.explain("layer_norm", x, (32,)).backend != "triton"


def why_not(op: str, *tensors: torch.Tensor | None, **rest: Any) -> list[str]:
    kernel = next(k for k in dispatch.kernels(op) if k.backend == "triton")
    return dispatch.why_not(
        kernel, dispatch.Call(op, tensors, rest.pop("needs_grad", False), **rest)
    )


def test_limits(device):
    def rows(*shape):
        return torch.empty(shape, device=device)

    assert why_not("layer_norm", rows(1, 16384)) == []
    assert why_not("layer_norm", rows(1, 16385)) == [
        "it normalises up to 16384 values at once and the call has 16385"
    ]
    assert why_not("layer_norm", rows(1, 8192), needs_grad=True) == []
    assert why_not(
        "add_layer_norm", rows(2, 8192), normalized_shape=(2, 8192), needs_grad=True
    ) == ["it normalises up to 8192 values at once with gradients and the call has 16384"]
    assert why_not("attention", *[rows(1, 1, 2, 256)] * 3) == []
    assert why_not("attention", *[rows(1, 1, 2, 257)] * 3) == [
        "it takes head sizes up to 256 and the call has 257"
    ]
    assert why_not("linear", rows(2, 2), rows(2, 2), None, None) == []
    (reason,) = why_not("linear", rows(2, 2).double(), rows(2, 2).double(), None, None)
    assert "float64" in reason


def test_gpus_without_tables_get_those_of_their_family():
    own = {number: number for number in backend.ARCHITECTURES}
    for capability, tiles in {**own, 87: 86, 89: 86, 103: 100, 110: 100, 121: 120, 130: 86}.items():
        assert backend.table_for(capability) == tiles


def test_old_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))

    class Fake(torch.Tensor):
        is_cuda = True

    call = dispatch.Call("linear", (torch.empty(2, 2).as_subclass(Fake),), False)
    assert backend._refuse_place(call) == (
        "it needs a GPU of compute capability 8.0 and this one has 7.5"
    )


def test_a_folder_of_the_name_is_not_triton(monkeypatch):
    class Spec:
        origin = None

    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: Spec)
    assert backend.kernels(interpreted=False)[0].unavailable is not None
    monkeypatch.undo()
    assert backend.kernels(interpreted=False)[0].unavailable is None
    assert backend.kernels(interpreted=False)[0].devices == ("cuda",)
