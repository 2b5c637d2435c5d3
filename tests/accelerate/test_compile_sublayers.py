"""torch.compile(model, backend="transformer_fast") runs stacks of sub-layers in one call."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate_checks import calls_of_layers, compiled
from hand_written import (
    Attention,
    B,
    Block,
    D,
    H,
    M,
    T,
    Translator,
    annotated_norm,
    both,
    causal,
    divided,
    padding,
    rms_norm,
    sentences,
    with_fully_masked_rows,
)  # fmt: skip
from module_checks import assert_same_numbers
from torch import Tensor, nn

from transformer_fast import _native, fast_path
from transformer_fast.compile import run_time
from transformer_fast.compile.sublayers import Sublayers
from transformer_fast.measure.calls import record
from transformer_fast.nn import fused_layers
from transformer_fast.testing.parity import compare

pytestmark = [
    pytest.mark.sampled(15, 30),
    pytest.mark.usefixtures("fresh"),
    pytest.mark.skipif(_native.module is None, reason=str(_native.why_not)),
]


def check(model: nn.Module, *args: Any, stacks: list[int]) -> int:
    """Asserts equal results and the sub-layers of each call; returns how many ran in a call."""
    ours, reports = compiled(copy.deepcopy(model).eval())
    assert_same_numbers(ours, model.eval(), args, {}, grad=False)
    assert reports[0].stacks == stacks, str(reports[0])
    return calls_of_layers(lambda: ours(*args))


@pytest.mark.parametrize("norm", [None, annotated_norm, rms_norm])
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_and_decoder_are_a_call_each(norm_first: bool, norm: Any) -> None:
    model = Translator(norm_first, norm)
    assert check(model, *sentences(), stacks=[4, 6]) == 10


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mask", [None, padding(), causal(), both()])
def test_masks(mask: Tensor | None, norm_first: bool) -> None:
    x = torch.randn(B, T, M)
    assert check(Block(False, norm_first), x, x, mask, None, stacks=[2]) == 2
    memory = torch.randn(B, T, M)
    assert check(Block(True, norm_first), x, memory, causal(), mask, stacks=[3]) == 3


def test_queries_whose_keys_are_all_masked_run_the_replaced_nodes() -> None:
    x = torch.randn(B, T, M)
    assert check(Block(False, False), x, x, with_fully_masked_rows(), None, stacks=[2]) == 0


class Joined(nn.Module):
    """A pre-norm layer with one projection to queries, keys and values, as in GPT-2."""

    def __init__(self, split: str, bias: bool = True, order: str = "qkv") -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(M, 3 * M, bias), nn.Linear(M, M, bias)
        self.one, self.two = nn.Linear(M, 2 * M, bias), nn.Linear(2 * M, M, bias)
        self.norm1, self.norm2 = nn.LayerNorm(M), nn.LayerNorm(M)
        self.split, self.order = split, order

    def heads(self, x: Tensor) -> dict[str, Tensor]:
        y = self.qkv(x)
        batch, length, _ = y.shape
        if self.split == "chunk":
            each = [p.view(batch, length, H, D).transpose(1, 2) for p in y.chunk(3, dim=-1)]
        elif self.split == "split":
            each = [p.reshape(batch, length, H, -1).permute(0, 2, 1, 3) for p in y.split(M, dim=2)]
        elif self.split == "permute":
            each = [*y.reshape(batch, length, 3, H, D).permute(2, 0, 3, 1, 4)]
        elif self.split == "heads inside":  # the three of a head are next to each other
            each = [*y.view(batch, length, H, 3 * D).transpose(1, 2).chunk(3, dim=-1)]
        else:  # neighbouring features belong to different heads
            each = [p.view(batch, length, D, H).permute(0, 3, 1, 2) for p in y.chunk(3, dim=-1)]
        return dict(zip(self.order, each, strict=True))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.attend(**self.heads(self.norm1(x))).transpose(1, 2).flatten(2))
        return x + self.two(F.gelu(self.one(self.norm2(x))))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("split", ["chunk", "split", "permute"])
def test_joined_projections(split: str, bias: bool) -> None:
    model = nn.Sequential(*[Joined(split, bias) for _ in range(3)], nn.LayerNorm(M))
    assert check(model, torch.randn(B, T, M), stacks=[6]) == 6


@pytest.mark.parametrize(
    ("split", "order"),
    [("chunk", "kqv"), ("chunk", "qvk"), ("heads inside", "qkv"), ("interleaved", "qkv")],
)
def test_other_layouts_of_heads_are_left(split: str, order: str) -> None:
    assert check(Joined(split, order=order), torch.randn(B, T, M), stacks=[]) == 0


class Changed(Joined):
    """A layer whose attention the kernel for layers does not compute."""

    def __init__(self, change: str) -> None:
        super().__init__("chunk")
        self.change = change

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.change == "scale":
            return F.scaled_dot_product_attention(q, k, v, scale=0.5)
        if self.change == "rotated":
            q = q * 2.0
        if self.change == "doubled":
            v = v + v
        if self.change == "order of heads":
            return F.scaled_dot_product_attention(q, k, v).flip(1)
        y = F.scaled_dot_product_attention(q, k, v)
        if self.change == "order of tokens":
            return y.transpose(1, 2).reshape(B, H, T, D)
        return y.contiguous().view(B, T, H, D).transpose(1, 2) if self.change == "view" else y


@pytest.mark.parametrize(
    "change", ["scale", "rotated", "doubled", "order of heads", "order of tokens", "view"]
)
def test_other_attentions_are_left(change: str) -> None:
    assert check(Changed(change), torch.randn(B, T, M), stacks=[]) == 0


class Watched(nn.Module):
    """Two layers; the result of the first, or a norm's weight, is returned or changed."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layers, self.what = nn.ModuleList(Block(False, False) for _ in range(2)), what

    def forward(self, x: Tensor) -> Any:
        first, second = self.layers
        y = first(x, None, None, None)
        if self.what == "changed":
            y = y.mul_(2.0)
        if self.what == "weights":
            first.norms[0].weight.mul_(2.0)
        z = second(y, None, None, None)
        if self.what == "weights":
            first.norms[0].weight.div_(2.0)
        return (z, y) if self.what == "between" else z


@pytest.mark.parametrize(
    ("what", "stacks"),
    [("nothing", [4]), ("between", [2, 2]), ("changed", [2, 2]), ("weights", [2, 2])],
)
def test_results_that_are_used_end_a_stack(what: str, stacks: list[int]) -> None:
    check(Watched(what), torch.randn(B, T, M), stacks=stacks)


class Mixed(nn.Module):
    """Layers that differ in what one call must share."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.one = Block(True, False)
        self.two = Block(True, what == "norm_first", annotated_norm if what == "norm" else None)
        if what == "activation":
            self.two.feed_forward.activation = F.gelu

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        mask, other = causal(), both()
        y = self.one(x, memory, mask, None)
        own = other if self.what == "mask" else mask
        memory = memory * 2.0 if self.what == "memory" else memory
        memory = y if self.what == "itself" else memory
        return self.two(y, memory, own, mask if self.what == "memory mask" else None)


@pytest.mark.parametrize(
    ("what", "stacks"),
    [("nothing", [6]), ("norm_first", [3, 3]), ("norm", [3, 3]), ("activation", [5, 1]),
     ("mask", [3, 3]), ("memory", [4, 2]), ("memory mask", [4, 2]), ("itself", [3, 3])],
)  # fmt: skip
def test_layers_that_differ_are_several_calls(what: str, stacks: list[int]) -> None:
    model, memory = Mixed(what), torch.randn(B, T, M)
    stacks = [n for n in stacks if n > 1]  # a network alone is no stack
    check(model, torch.randn(B, T, M), memory, stacks=stacks)


class Odd(nn.Module):
    """A network, then attention; ``what``: how they differ from a stack of sub-layers."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.attend = what, Attention(divided)
        self.one, self.two = nn.Linear(M, 2 * M), nn.Linear(2 * M, M)
        self.norm1, self.norm2 = nn.LayerNorm(M), nn.LayerNorm(M)
        self.both = nn.LayerNorm((T, M), elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.what == "layout" else x
        x = x + self.two(F.gelu(self.one(self.norm1(x))))
        y = self.norm2(x)
        if self.what == "sizes of the norm":
            return self.both(x + self.attend(x, x, None)[0])
        x = x + self.attend(y, x if self.what == "memory" else y, None)[0]
        return x.transpose(0, 1).reshape(-1, M) if self.what == "layout" else x


@pytest.mark.parametrize(
    ("what", "stacks"),
    [("nothing", [2]), ("memory", [1]), ("sizes of the norm", []), ("layout", [])],
)
def test_results_read_in_other_places(what: str, stacks: list[int]) -> None:
    x, model = torch.randn(B, T, M), Odd(what).eval()
    ours, reports = compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x))
    assert reports[0].stacks == stacks


@pytest.mark.usefixtures("small_calls")
@pytest.mark.skipif(_native.autograd is None, reason=str(_native.why_no_autograd))
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_small_layers_are_trained_in_one_call(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry and the nodes that it replaces, in float32 and float64, draw the same dropout."""
    x, memory = torch.randn(B, T, M), torch.randn(B, T, M)
    model = Block(True, False, p=p).train()
    entered, enter = [], fused_layers._enter

    def gradients(enters: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
        def spy(*given: Any) -> Any:
            entered.append(enter(*given) if enters else None)
            return entered[-1]

        monkeypatch.setattr(fused_layers, "_enter", spy)
        monkeypatch.setattr(_native.autograd, "encoder_layer", spy)  # the entry that tapes call
        ours, reports = compiled(copy.deepcopy(model).to(dtype))
        given = [one.detach().to(dtype).requires_grad_() for one in (x, memory)]
        torch.manual_seed(0)
        y = ours(*given, causal(), padding())
        assert reports[0].stacks == [3]
        return torch.autograd.grad((y * torch.arange(M)).sum(), [*given, *ours.parameters()])

    found, composed = gradients(True, torch.float32), gradients(False, torch.float32)
    assert [y is not None for y in entered] == [True, False, False]
    for one, other, true in zip(found, composed, gradients(False, torch.float64), strict=True):
        parity = compare("a gradient", one, other, true, factor=3.0)
        assert parity.ok, parity.where


@pytest.mark.usefixtures("small_calls")
@pytest.mark.skipif(_native.autograd is None, reason=str(_native.why_no_autograd))
@pytest.mark.parametrize("fill", [-1e9, -math.inf])
@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (3, 5), (2, 4, 4), (2, 1, 1, 6), (2, 3, 4, 4)])
def test_small_masks_are_prepared_alike_in_the_entry(shape: tuple[int, ...], fill: float) -> None:
    enter = fast_path.entry("hidden_mask")
    later = torch.ones(shape).triu(1).bool()
    some, padded = torch.rand(shape) < 0.5, later | (torch.rand(shape[-1]) < 0.3)
    for hidden in (some, torch.zeros(shape).bool(), torch.ones(shape).bool(), later, padded):
        for hides, rank in itertools.product((True, False), range(max(2, len(shape)), 5)):
            condition = hidden if hides else ~hidden
            found = enter(condition, hides, math.isfinite(fill), rank)
            expected = run_time.prepare_hidden(condition, hides, fill, rank)
            torch.testing.assert_close([*found], [*expected], rtol=0, atol=0)


def test_a_frozen_graph_may_get_an_input_that_needs_gradients() -> None:
    x = torch.randn(B, T, M)
    ours, reports = compiled(Block(False, False).eval().requires_grad_(False))
    ours(x, x, None, None)
    assert reports[0].stacks == [2]
    assert ours(x.requires_grad_(), x, None, None).requires_grad


@pytest.mark.thorough
def test_sizes_known_only_at_run_time() -> None:
    model = Translator().eval()
    ours, reports = compiled(model, dynamic=True)
    for batch, length in ((2, 5), (3, 9), (1, 2)):
        source, target = (torch.randint(1, 17, (batch, length + n)) for n in (0, 1))
        with torch.no_grad():
            torch.testing.assert_close(ours(source, target), model(source, target))
    assert [report.stacks for report in reports] == [[4, 6]] * len(reports)


def test_changed_weights_are_seen() -> None:
    x = torch.randn(B, 40, M)
    model = Joined("chunk").eval()
    ours, _ = compiled(model)
    with torch.no_grad():
        ours(x)
        for weight in (model.qkv.weight, model.two.weight, model.norm1.weight):
            weight.data.mul_(1.5)
            torch.testing.assert_close(ours(x), model(x))
        model.out.weight = nn.Parameter(torch.randn(M, M))
        torch.testing.assert_close(ours(x), model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    model = Block(False, False).eval().to(dtype)
    x = torch.randn(B, T, M).to(dtype)
    ours, _ = compiled(model)
    with torch.no_grad(), record() as found:
        y = ours(x, x, padding(), None)
    torch.testing.assert_close(y, model(x, x, padding(), None), rtol=5e-2, atol=5e-2)
    one_call = any(name.endswith("sub-layer") for name, _ in found.calls)
    assert one_call == (dtype == torch.bfloat16)


def test_autocast_runs_the_ops() -> None:
    x = torch.randn(B, T, M)
    ours, reports = compiled(Block(False, False).eval())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours(x, x, None, None)
    assert reports[0].stacks == []


def check_int8(model: nn.Module, x: Tensor, ops: int, calls: int) -> list[int]:
    """Asserts what runs in 8 bits, and the error; returns the sub-layers of each call."""
    ours, reports = compiled(model, quantize="int8")
    with torch.no_grad(), record() as found:
        y, expected = ours(x), model(x)
    assert sum(n for op, n in reports[0].counts.items() if op.startswith("int8_")) == ops
    assert sum(n for (name, _), n in found.calls.items() if name.endswith("sub-layer")) == calls
    assert 1e-4 < (y - expected).norm() / expected.norm() < 0.03  # it is quantised
    return reports[0].stacks


def test_int8() -> None:
    model = nn.Sequential(Joined("chunk"), Joined("split")).eval()
    assert check_int8(model, torch.randn(B, 40, M), ops=6, calls=4) == [4]


class Product(nn.Module):
    """``x @ W + b``, as Conv1D of transformers."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(n, m) / 8), nn.Parameter(torch.randn(m))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return y.view(*x.shape[:-1], -1)


def test_int8_of_weights_that_are_views() -> None:
    model = Joined("split")
    model.qkv, model.out = Product(M, 3 * M), Product(M, M)  # type: ignore[assignment]
    model.one, model.two = Product(M, 2 * M), Product(2 * M, M)  # type: ignore[assignment]
    model, x = model.eval(), torch.randn(B, 40, M)
    assert check(model, torch.randn(B, T, M), stacks=[2]) == 2
    check_int8(model, x, ops=3, calls=2)


def test_compilers_get_the_nodes_of_branches() -> None:
    model, x = Joined("chunk").eval(), torch.randn(B, T, M)
    captured: list[Any] = []

    def inner(module: Any, inputs: Any) -> Any:
        captured.append(module)
        return module.forward

    def branches(x: Tensor, flag: Tensor) -> Tensor:
        return torch.cond(flag, model, lambda x: x + 1.0, (x,))

    ours = torch.compile(branches, backend="transformer_fast", options={"inner": inner})
    with torch.no_grad():
        torch.testing.assert_close(ours(x, torch.tensor(True)), model(x))
    assert not any(isinstance(each, Sublayers) for each in captured[0].modules())


def test_tracers_see_the_replaced_nodes() -> None:
    model, x = Joined("chunk").eval(), torch.randn(B, T, M)
    ours = torch.compile(model, backend="transformer_fast", options={"inner": "aot_eager"})
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x))


@pytest.mark.parametrize(
    "transposed",
    [
        lambda k: k.mT,
        lambda k: k.mH,
        # What Dynamo writes for them from torch 2.14 on.
        torch.ops.aten.mT,
        torch.ops.aten.mH,
    ],
    ids=["mT", "mH", "aten.mT", "aten.mH"],
)
def test_scores_with_a_bias_are_one_call(transposed: Callable[[Tensor], Tensor]) -> None:
    class Biased(Attention):
        def __init__(self) -> None:
            super().__init__(lambda q, k, v, mask, drop: None)  # type: ignore[arg-type, return-value]
            self.norm = nn.LayerNorm(M)
            self.bias = nn.Parameter(torch.randn(1, H, T, T))

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            q, k, v = (
                f(x).view(B, T, H, D).transpose(1, 2) for f in (self.query, self.key, self.value)
            )
            weights = (q @ transposed(k) / math.sqrt(D) + self.bias).softmax(-1)
            y = (weights @ v).transpose(1, 2).reshape(B, T, M)
            return self.norm(x + self.out(y))

    assert check(Biased(), torch.randn(B, T, M), stacks=[1]) == 1
