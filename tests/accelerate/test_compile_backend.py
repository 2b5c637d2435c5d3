"""torch.compile(model, backend="transformer_fast") rewrites hand-written models: same results."""

from __future__ import annotations

import copy
import functools
import math
import threading
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate_checks import Written, check, check_training, compiled
from hand_written import (
    ACTIVATIONS,
    ATTENTIONS,
    NORMS,
    Attention,
    B,
    Block,
    Convolutions,
    ConvolutionsAlone,
    FeedForward,
    M,
    Norm,
    T,
    Translator,
    annotated_norm,
    causal,
    divided,
    einsum,
    nan_to_num,
    padding,
    sentences,
    with_fully_masked_rows,
    zeroed_weights,
)
from harness import python
from module_checks import assert_same_numbers, cast, check_budget
from torch import Tensor
from torch.fx import GraphModule

from transformer_fast import _native, accelerate, compile_backend, compile_reports
from transformer_fast.compile import inner

pytestmark = [pytest.mark.sampled(12, 25), pytest.mark.usefixtures("fresh")]

#: The default of users; tests in this folder run the rest eagerly.
COMPILE_REST = {"inner": inner.compile_rest}


def _x() -> Tensor:
    return torch.randn(B, T, M)


def _parameter(*size: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(size) / 8)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name: str) -> None:
    attend, mask = ATTENTIONS[name]
    [report] = check(Attention(attend()), _x(), _x(), mask(), attention=1, linear=4)
    assert not report.left
    assert not {"softmax", "matmul", "bmm", "einsum", "baddbmm", "exp"} & set(report.others)


def _with_views(q: Tensor, k: Tensor, v: Tensor, by_hand: bool) -> tuple[Tensor, Tensor]:
    """Views of two attention results: one with the query's memory layout, and a contiguous one."""
    if by_hand:
        found = torch.softmax(q @ k.mT / 4, -1) @ v
        other = torch.einsum("bhts,bhsd->bthd", torch.softmax(q @ k.mT / 2, -1), v)
        return found.view(-1, *found.shape[2:]), other.transpose(1, 2).view(-1, *found.shape[2:])
    found = F.scaled_dot_product_attention(q, k, v)
    other = F.scaled_dot_product_attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v)
    return found.view(-1, *found.shape[2:]), other.transpose(1, 2).view(*other.mT.shape[::3], -1)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_views_of_attention_results(by_hand: bool, grad: bool) -> None:
    ours, reports = compiled(_with_views)
    qkv = [torch.randn(2, 3, 33, 16, requires_grad=grad) for _ in range(3)]
    for found, expected in zip(ours(*qkv, by_hand), _with_views(*qkv, by_hand), strict=True):
        torch.testing.assert_close(found, expected)
    assert reports[0].counts["attention"] == 2


@pytest.mark.parametrize(
    ("attend", "shape"),
    [(divided, None), (divided, (T, 9)), (divided, (B, 1, 1, 9)), (einsum, (B, 1, T, 9))],
)
def test_cross_attention_with_another_number_of_keys(
    attend: Any, shape: tuple[int, ...] | None
) -> None:
    """Attention to a memory of 9 tokens; all of them are masked for some queries."""
    mask = None if shape is None else torch.rand(shape) > 0.6
    if mask is not None:
        mask[..., 0, :] = False
    check(Attention(attend), _x(), torch.randn(B, 9, M), mask, attention=1, linear=4)


@pytest.mark.parametrize("mask", [None, causal(), padding(), with_fully_masked_rows()])
def test_fully_masked_rows_with_a_finite_fill_average_all_values(mask: Tensor | None) -> None:
    """With a fill of -1e9, fully masked rows have equal weights for all keys."""
    model = Attention(divided).eval()
    ours, _ = compiled(model)
    x = 30 * _x()  # scores above 1000: -1e9 added to them would differ from a fill with -1e9
    assert_same_numbers(ours, model, (x, x, mask), {}, grad=False)
    with torch.no_grad():
        _, ours_weights = ours(x, x, mask)
    if mask is not None and mask.shape[-2] == T:
        fully_masked = ~mask.any(-1, keepdim=True).expand(B, 4, T, 1)
        assert torch.allclose(ours_weights[fully_masked[..., 0]], torch.full((T,), 1 / T))


def test_fully_masked_rows_with_an_infinite_fill_return_zeros() -> None:
    """The only intended difference from PyTorch: NaN becomes 0."""
    attend, _ = ATTENTIONS["multiplied"]
    model = Attention(attend()).eval()
    ours, _ = compiled(model)
    x, mask = _x(), with_fully_masked_rows()
    with torch.no_grad():
        expected, got = model(x, x, mask), ours(x, x, mask)
    fully_masked = expected.isnan()
    assert fully_masked.any()
    torch.testing.assert_close(got[~fully_masked], expected[~fully_masked])
    torch.testing.assert_close(got[fully_masked], model.out.bias.expand_as(got)[fully_masked])


@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(M, M), Norm(NORMS[name]))
    [report] = check(model, 1 + 3 * _x(), layer_norm=1)
    assert not {"mean", "std", "var", "var_mean", "std_mean", "sqrt", "sub"} & set(report.others)
    torch.nn.init.normal_(model[0].weight, 0, 1e-4)
    torch.nn.init.zeros_(model[0].bias)
    check(model, _x(), layer_norm=1)  # with a variance so small that eps matters


def test_norm_of_equal_values_is_finite() -> None:
    model = Norm(annotated_norm)
    ours, _ = compiled(model)
    x = torch.ones(B, T, M)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model.shift.expand(B, T, M))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_feed_forward(name: str) -> None:
    [report] = check(FeedForward(ACTIVATIONS[name]), _x(), feed_forward=1, linear=0)
    assert not report.others


@pytest.mark.parametrize(
    ("cross", "norm_first", "norm"),
    [(True, True, None), (True, False, annotated_norm), (False, True, annotated_norm),
     (False, False, None)],
)  # fmt: skip
def test_encoder_and_decoder_layers(cross: bool, norm_first: bool, norm: Any) -> None:
    model = Block(cross, norm_first, norm)
    sums = 2 + cross if not norm_first else 1 + cross
    [report] = check(
        model, _x(), _x(), causal(), padding(),
        attention=1 + cross, feed_forward=1, linear=4 * (1 + cross), add_layer_norm=sums,
        layer_norm=int(norm_first),
    )  # fmt: skip
    assert not report.left


def test_encoder_decoder_model() -> None:
    counts = {"attention": 6, "feed_forward": 4, "linear": 25, "add_layer_norm": 8}
    [report] = check(Translator(norm_first=True), *sentences(), **counts)
    assert "softmax" not in report.others


def test_training_gives_the_same_losses() -> None:
    theirs = Translator()
    ours, _ = compiled(copy.deepcopy(theirs))
    source, target = sentences()

    def loss(model: Any, step: int) -> Tensor:
        return F.nll_loss(model(source, target).flatten(0, 1), target.flatten())

    check_training(ours, theirs, loss, rate=3e-3)


def test_dropout() -> None:
    """Dropout draws another pattern than PyTorch's, and the seed determines it."""
    model = Block(False, False, p=0.25)
    ours, reports = compiled(model)
    x = _x()
    torch.manual_seed(3)
    first = ours(x, x, None, None)
    assert not torch.equal(first, ours(x, x, None, None))
    torch.manual_seed(3)
    assert torch.equal(first, ours(x, x, None, None))
    assert reports[0].counts == {
        "attention": 1,
        "feed_forward": 1,
        "add_layer_norm": 2,
        "linear": 4,
    }
    assert "dropout" not in reports[0].others


def test_returned_weights_are_before_or_after_dropout_as_written() -> None:
    for name, dropped in (("divided, (T, T)", True), ("weights before dropout", False)):
        attend, _ = ATTENTIONS[name]
        ours, reports = compiled(Attention(attend(), p=0.5))
        x = _x()
        output, weights = ours(x, x, torch.ones(T, T))
        assert reports[0].counts["attention"] == 1
        assert (weights == 0).any() == dropped
        total = weights.sum(-1)
        assert torch.allclose(total, torch.ones(()), atol=1e-5) != dropped
        output.sum().backward()


def _values_written(q, k, v, mask, drop):
    weights = torch.softmax(q @ k.mT, -1)
    v = v.clone()
    v[:, :, 0].zero_()
    return weights @ v


def _returned_scores(q, k, v, mask, drop):
    scores = q @ k.transpose(-2, -1)
    return torch.softmax(scores, -1) @ v, scores


def _attend(between: Callable[[Tensor], Tensor], dim: int = -1) -> Any:
    """Returns an attention that applies ``between`` to the scores before the softmax."""
    return lambda q, k, v, mask, drop: torch.softmax(between(q @ k.mT), dim) @ v


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (_attend(lambda x: 30 * torch.tanh(x / 30)), "its scores come from tanh"),
        (_attend(lambda x: x, dim=-2), "not over the last dimension"),
        (_returned_scores, "its scores are used elsewhere too"),
        (
            _attend(lambda x: x.masked_fill(~causal(), -5.0)),
            "filled with -5, which does not mask them out",
        ),
        (
            _attend(lambda x: x.masked_fill(~causal(), -1e4) + torch.arange(float(T))),
            "a bias is added to its scores after a finite fill: add it before, or fill with -inf",
        ),
        (
            _attend(lambda x: x.masked_fill(~padding(), -1e4).masked_fill(~causal(), -1e9)),
            "its scores are filled with several values",
        ),
        (
            lambda q, k, v, mask, drop: (torch.softmax(q @ k.mT, -1) * causal()) @ v,
            "its result is not multiplied with values",
        ),
        (
            _attend(lambda x: torch.where(causal(), x, x.min() * 1e6)),
            "the fill value of its scores is not known at compile time",
        ),
        (_attend(lambda x: x * causal()), "its scores are multiplied by a tensor"),
        (_values_written, "a tensor is modified in place between its ops"),
        (
            lambda q, k, v, mask, drop: (
                (q @ k.mT).masked_fill(~causal(), -1e9).softmax(-1).masked_fill(causal(), 0.0) @ v
            ),
            "its weights are masked where its scores are not",
        ),
        (
            lambda q, k, v, mask, drop: (q @ k.mT).transpose(0, 1).softmax(-1).transpose(0, 1) @ v,
            "its scores are permuted",
        ),
    ],
)
def test_unsupported_attention_is_left_with_a_reason(attend: Any, reason: str) -> None:
    [report] = check(Attention(attend), _x(), _x(), None, attention=0, linear=4)
    [left] = [str(found) for found in report.left]
    assert reason in left
    assert f"{__file__}:" in left


def test_unrelated_writes_in_place_are_kept() -> None:
    def forward(self: Any, x: Tensor, step: int) -> Tensor:
        self.cache[:, step] = x[:, 0]
        y = self.attention(x[:, :1], self.cache, None)[0]
        self.cache.mul_(0.5)
        return y

    theirs = Written(forward, attention=Attention(divided), cache=torch.zeros(B, T, M)).eval()
    model = copy.deepcopy(theirs)
    ours, reports = compiled(model)
    with torch.no_grad():
        for step in range(3):
            x = _x()
            torch.testing.assert_close(ours(x, step), theirs(x, step))
            torch.testing.assert_close(model.cache, theirs.cache)
    assert reports[0].counts["attention"] == 1


def test_accelerate_and_compile_combine() -> None:
    """`accelerate` replaces the torch.nn modules, and the backend rewrites the rest."""
    theirs = Written(
        lambda self, x: self.attention(self.layer(x), x, causal())[0],
        layer=torch.nn.TransformerEncoderLayer(M, 4, 64, 0.0, batch_first=True),
        attention=Attention(divided),
    )
    model = copy.deepcopy(theirs)
    accelerate(model)
    ours, reports = compiled(model)
    assert_same_numbers(ours, theirs, (_x(),), {}, grad=True)
    assert all(report.counts["attention"] >= 1 for report in reports)


def test_inner_backend_by_name() -> None:
    theirs, given = Block(False, True).eval(), (_x(), _x(), causal(), None)
    model = copy.deepcopy(theirs)
    options = {"inner": "aot_eager"}
    ours = torch.compile(model, backend=compile_backend, options=options, fullgraph=True)
    assert_same_numbers(ours, theirs, given, {}, grad=True)
    assert_same_numbers(ours, theirs, given, {}, grad=False)


def _gated(self: Any, x: Tensor) -> Tensor:
    """Rotary positions and a gate, which no op of this library computes."""
    one, other = x.chunk(2, -1)
    turned = x * x.cos() + torch.cat((-other, one), -1) * x.sin()
    return self.down(F.silu(self.gate(turned)) * self.up(turned)) + x


def _gated_model() -> torch.nn.Module:
    parts = {name: torch.nn.Linear(M, M) for name in ("up", "gate", "down")}
    return Written(_gated, **parts).eval()


def _replace_inductor(run: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces every backend by ``run(module)``; returns the list of requested backend names."""
    requested: list[str] = []

    def look_up(name: str) -> Any:
        requested.append(name)
        return lambda module, inputs: run(module)

    monkeypatch.setattr(torch._dynamo, "lookup_backend", look_up)
    return requested


@pytest.mark.thorough
@torch.no_grad()
def test_inductor_compiles_the_remaining_ops_in_inference() -> None:
    compile_reports(clear=True)
    model, x = _gated_model(), _x()
    ours = torch.compile(copy.deepcopy(model), backend=compile_backend, options=COMPILE_REST)
    for _ in range(3):
        torch.testing.assert_close(ours(x), model(x))
    [report] = compile_reports(clear=True)
    assert "  compiled by inductor: " in str(report)


@torch.no_grad()
def test_programs_that_inductor_cannot_compile_run_eagerly(monkeypatch) -> None:
    def broken(module: GraphModule) -> Any:
        raise RuntimeError("no")

    messages: list[Any] = []
    monkeypatch.setattr(inner._log, "warning", lambda *args: messages.append(args))
    requested = _replace_inductor(broken, monkeypatch)
    model, x = _gated_model(), _x()
    ours = torch.compile(copy.deepcopy(model), backend=compile_backend, options=COMPILE_REST)
    for _ in range(3):
        torch.testing.assert_close(ours(x), model(x))
    assert requested.count("inductor") == 1
    [(text, *values)] = messages
    assert "run in eager mode" in text % tuple(values)


def _attends_over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.unflatten(-1, (4, 8)).transpose(1, 2) for x in (q, k, v))
    return torch.softmax(q @ k.mT, -2) @ v


def _attends_over_queries_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.unflatten(-1, (4, 8)).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT
    powers = torch.exp(scores - scores.amax((-2,), True))
    return (powers / powers.sum(-2, keepdim=True)) @ v


@torch.no_grad()
@pytest.mark.parametrize("attend", [_attends_over_queries, _attends_over_queries_by_hand])
def test_a_softmax_over_another_dimension_stays_as_written(attend: Any) -> None:
    """Inductor would compute it over the last dimension, see `inner.why_not`."""
    compile_reports(clear=True)
    qkv = [torch.randn(2, 7, 32) for _ in range(3)]
    ours = torch.compile(attend, backend=compile_backend, options=COMPILE_REST)
    torch.testing.assert_close(ours(*qkv), attend(*qkv))
    assert "softmax over another dimension" in compile_reports(clear=True)[0].rest


def _writes(x: Tensor, p: Tensor) -> Any:
    p.mul_(0.5)
    return torch.sin(x) @ p


def _writes_behind_an_alias(x: Tensor, p: Tensor) -> Any:
    x.add_(1)
    return torch.sin(p) * 2


def _draws(x: Tensor, p: Tensor) -> Any:
    return x.t(), x + torch.rand_like(x), p.sin()


def _strided(x: Tensor, p: Tensor) -> Any:
    return x.as_strided((3,), (2,)) * 2 + p.sin().sum(), torch.tensor([math.inf, -math.inf]) * p[
        0, 0
    ]


def _float8(x: Tensor, p: Tensor) -> Any:
    return (x.sin() * p.sum()).to(torch.float8_e5m2).float()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("function", "context"),
    [(_writes, torch.inference_mode), *((function, torch.no_grad) for function in (
        _writes, _writes_behind_an_alias, _draws, _strided, _float8
    ))],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_compiled_programs_have_the_effects_of_the_program(function: Any, context: Any) -> None:
    """Results, inputs and random state are those of an eager run; writes happen once."""

    def run(options: dict[str, Any]) -> Any:
        torch.compiler.reset()
        torch.manual_seed(0)
        compiled = torch.compile(function, backend=compile_backend, options=options, dynamic=False)
        with context():
            memory = torch.arange(24.0)
            x, p = memory[:16].view(4, 4)[:, :2], torch.nn.Parameter(memory[2:18].view(4, 4)[:2])
            results = [compiled(x, p) for _ in range(3)]
            return results, memory, torch.get_rng_state()

    torch.testing.assert_close(run(COMPILE_REST), run({"inner": None}), equal_nan=True)


@torch.no_grad()
def test_overlapping_first_calls_write_their_caches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread starts in the first call of the first thread, and ends before it."""
    entered, leave = threading.Event(), threading.Event()

    def wait() -> None:
        if threading.current_thread().name == "first" and not entered.is_set():
            entered.set()
            assert leave.wait(30)

    def step(cache: Tensor, x: Tensor) -> Any:
        cache.add_(x)
        return (cache * 2,)

    graph = torch.fx.symbolic_trace(step).graph
    with graph.inserting_before(next(n for n in graph.nodes if n.op == "call_method")):
        graph.call_function(wait)
    module = GraphModule({}, graph)
    _replace_inductor(lambda module: module.forward, monkeypatch)
    run = inner.compile_rest(module, [torch.zeros(3), torch.ones(3)])
    caches = {name: torch.zeros(3) for name in ("first", "second")}

    def call(name: str) -> None:
        run(caches[name], torch.ones(3))

    first, second = (threading.Thread(target=call, args=(name,), name=name) for name in caches)
    first.start()
    assert entered.wait(30)
    second.start()
    second.join()
    leave.set()
    first.join()
    assert all(torch.equal(cache, torch.ones(3)) for cache in caches.values())


@pytest.mark.thorough
@torch.no_grad()
def test_running_statistics_are_updated_once() -> None:
    """Batch norm writes its statistics without incrementing their version counters."""
    torch.compiler.reset()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).train()
    compiled = torch.compile(copy.deepcopy(model), backend=compile_backend, options=COMPILE_REST)
    for _ in range(4):
        x = torch.randn(16, 8) + 3.0
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(compiled.state_dict(), {
            f"_orig_mod.{name}": value for name, value in model.state_dict().items()
        })  # fmt: skip


@torch.no_grad()
def test_query_heads_that_broadcast_to_repeated_heads() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, _repeated(k, 3), _repeated(v, 3))

    torch.compiler.reset()
    compiled = torch.compile(attend, backend=compile_backend, options={"inner": None})
    for shape in ((2, 1, 4, 8), (1, 4, 8)):
        q, k, v = torch.randn(shape), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
        torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))


def _repeated(x: Tensor, n: int) -> Tensor:
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, n, s, d).reshape(b, h * n, s, d)


def _tiled(x: Tensor, n: int) -> Tensor:
    """Repeats the sequence of heads, so that copies of one head are not adjacent."""
    b, h, s, d = x.shape
    return x[:, None].expand(b, n, h, s, d).reshape(b, h * n, s, d)


def _flipped(x: Tensor, n: int) -> Tensor:
    b, h, s, d = x.shape
    return x[:, [1, 0], None].expand(b, h, n, s, d).reshape(b, h * n, s, d)


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("repeat", [_repeated, _tiled, _flipped])
def test_repeated_heads_are_shared(repeat: Any, dynamic: bool) -> None:
    """Attention gets the keys and values without the repetition of each head."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k, v = (
            k.view(*k.shape[:2], 2, 8).transpose(1, 2),
            v.view(*v.shape[:2], 2, 8).transpose(1, 2),
        )
        return F.scaled_dot_product_attention(q, repeat(k, 3), repeat(v, 3), attn_mask=mask)

    torch.compiler.reset()
    graphs: list[Any] = []
    options = {"inner": lambda module, inputs: graphs.append(module.graph) or module.forward}
    compiled = torch.compile(attend, backend=compile_backend, options=options, dynamic=dynamic)
    for length in (5, 7):
        q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, length, 16), torch.randn(2, length, 16)
        mask = torch.rand(2, 1, 4, length) > 0.3
        torch.testing.assert_close(compiled(q, k, v, mask), attend(q, k, v, mask))
    shared = repeat is _repeated and not dynamic  # the number of heads is known
    for graph in graphs:
        assert any(n.target == "expand" for n in graph.nodes) != shared


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch: None, "not used in training"),
        (lambda patch: patch.setattr("shutil.which", lambda name: None), "needs a C++ compiler"),
    ],
)
def test_why_not_names_the_reason(change: Any, reason: str, monkeypatch) -> None:
    change(monkeypatch)
    x = torch.randn(4, M, requires_grad="training" in reason)
    module = torch.fx.symbolic_trace(torch.nn.Linear(M, M))
    assert reason in (inner.why_not(module, [x]) or "")
    with torch.no_grad():
        assert "training" not in (inner.why_not(module, [x]) or "")


@torch.no_grad()
def test_inductor_is_not_used_for_graphs_with_masks(monkeypatch) -> None:
    requested = _replace_inductor(lambda module: module.forward, monkeypatch)
    model = Block(True, False).eval()
    torch.compile(model, backend=compile_backend, options=COMPILE_REST)(_x(), _x(), causal(), None)
    assert "inductor" not in requested
    assert "left to eager PyTorch (inductor is not used with attention masks" in str(
        compile_reports(clear=True)[-1]
    )


def test_autocast() -> None:
    model = Block(True, False).eval()
    ours, reports = compiled(model)
    given = _x(), _x(), causal(), padding()
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            got, expected = ours(*given), model(*given)
        check_budget(got, expected, copy.deepcopy(model).double()(*cast(given, torch.float64)))
    assert reports[0].counts["attention"] == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = Block(False, True, annotated_norm).to(dtype).eval()
    ours, reports = compiled(model)
    given = _x().to(dtype), _x().to(dtype), causal(), None
    assert_same_numbers(ours, model, given, {}, grad=False)
    assert reports[0].counts["attention"] == 1


def test_reports_and_options() -> None:
    compile_reports(clear=True)
    model = torch.compile(FeedForward(), backend=compile_backend)
    model(_x())
    [report] = compile_reports(clear=True)
    assert str(report) == "rewritten: 1 feed_forward."
    assert compile_reports() == []
    for options, message in (
        ({"fast": True}, "takes the options inner, report and quantize, not fast"),
    ):
        broken = torch.compile(FeedForward(), backend=compile_backend, options=options)
        with pytest.raises(Exception, match=message):
            broken(_x())


_REGISTERED_WITHOUT_ENTRY_POINT = """
import importlib.metadata, sys
importlib.metadata.entry_points = lambda **_: importlib.metadata.EntryPoints()
import torch
if "dynamo" in sys.argv: import torch._dynamo
import transformer_fast
assert "dynamo" in sys.argv or "torch._dynamo" not in sys.modules
assert torch._dynamo.lookup_backend("transformer_fast") is transformer_fast.compile_backend
"""


@pytest.mark.thorough
@pytest.mark.parametrize("first", ["", "dynamo"])
def test_name_is_registered_without_an_entry_point(first: str) -> None:
    """A checkout that is not installed registers it, before or after the import of Dynamo."""
    python("-c", _REGISTERED_WITHOUT_ENTRY_POINT, first)


def test_name_is_registered_by_the_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package needs only the entry point of pyproject.toml."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    group = "torch_dynamo_backends"
    [(name, target)] = project["project"]["entry-points"][group].items()
    assert name == "transformer_fast"
    registry = torch._dynamo.backends.registry
    torch.compiler.list_backends()  # reads the entry points, once per process
    monkeypatch.setitem(registry._BACKENDS, name, EntryPoint(name, target, group))
    monkeypatch.delitem(registry._COMPILER_FNS, name, raising=False)
    assert name in torch.compiler.list_backends()
    compile_reports(clear=True)
    model, x = FeedForward(), _x()
    ours = torch.compile(model, backend="transformer_fast")
    torch.testing.assert_close(ours(x), model(x))
    assert compile_reports(clear=True)[0].counts == {"feed_forward": 1}


@pytest.mark.parametrize("name", ["full_like scores", "permuted", "one key head", "temperatures"])
def test_one_dynamic_graph_serves_all_attention_lengths(name: str) -> None:
    model = Attention(ATTENTIONS[name][0]()).eval()
    ours, reports = compiled(model)
    with torch.no_grad():
        for length in (5, 6, 9):
            x, mask = torch.randn(B, length, M), torch.ones(length, length).tril() > 0
            if name == "permuted":
                mask = torch.randn(B, length, length)
            torch.testing.assert_close(ours(x, x, mask), model(x, x, mask))
    assert [report.counts["attention"] for report in reports] == [1, 1]


@pytest.mark.parametrize("attend", [zeroed_weights, nan_to_num])
def test_fully_masked_rows_return_zeros_if_the_model_says_so(attend: Any) -> None:
    mask = with_fully_masked_rows()
    model = Attention(attend).eval()
    ours, _ = compiled(model)
    with torch.no_grad():
        got = ours(_x(), _x(), mask)
    output = got[0] if isinstance(got, tuple) else got
    fully_masked = ~mask.any(-1)[:, 0]
    torch.testing.assert_close(output[fully_masked], model.out.bias.expand_as(output[fully_masked]))
    if isinstance(got, tuple):
        assert (got[1].transpose(1, 2)[fully_masked] == 0).all()


@pytest.mark.parametrize(
    "activation", [torch.relu, torch.nn.ReLU(inplace=True), torch.nn.GELU("tanh")]
)
def test_convolutions_of_kernel_size_1_are_linear_maps(activation: Any) -> None:
    [report] = check(Convolutions(activation), _x(), feed_forward=1, add_layer_norm=1)
    assert set(report.others) == {"flatten", "getitem"}
    [report] = check(ConvolutionsAlone(activation), _x(), feed_forward=1)
    assert set(report.others) == {"flatten", "transpose", "contiguous", "view"}


def _patches(conv: torch.nn.Module, tokens: Callable[[Tensor], Tensor]) -> torch.nn.Module:
    """Returns a patch embedding."""
    return Written(lambda self, x: tokens(self.conv(x)) + 1, conv=conv)


_IMAGE, _CONV2D = (2, 3, 13, 16), functools.partial(torch.nn.Conv2d, 3, 32)


@pytest.mark.parametrize(
    ("conv", "size", "tokens"),
    [
        (_CONV2D(4, 4), _IMAGE, lambda x: x.flatten(2).transpose(1, 2)),
        (_CONV2D((3, 2), (3, 2), bias=False), _IMAGE, lambda x: torch.flatten(x, 2).mT),
        (_CONV2D(1), _IMAGE, lambda x: x.reshape(2, 32, -1).permute(0, 2, 1)),
        (_CONV2D(4, 4, padding="valid"), _IMAGE, lambda x: x.flatten(-2).transpose(-1, -2)),
        (torch.nn.Conv3d(3, 32, 2, 2), (2, 3, 4, 6, 5), lambda x: x.flatten(2).transpose(1, 2)),
    ],
)
def test_patch_embeddings(conv: torch.nn.Module, size: tuple[int, ...], tokens: Any) -> None:
    check(_patches(conv, tokens), torch.randn(size), linear=1)


def _flat(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


@pytest.mark.parametrize(
    ("conv", "tokens"),
    [
        (_CONV2D(4, 3), _flat),
        (_CONV2D(4, (4, 2)), _flat),
        (_CONV2D(4, 4, padding=1), _flat),
        (_CONV2D(2, 2, dilation=2), _flat),
        (torch.nn.Conv2d(3, 33, 4, 4, groups=3), _flat),
        (_CONV2D(4, 4), lambda x: x.flatten(2)),
        (_CONV2D(4, 4), lambda x: x.mean(3).transpose(1, 2)),
        (_CONV2D(4, 4), lambda x: _flat(x) + x.mean()),
        (_CONV2D(4, 4), lambda x: _flat(x) * x.flatten(2).mean()),
        (_CONV2D(4, 4), lambda x: _flat(x).mT.view(2, -1)),
    ],
)
def test_other_convolutions_are_left(conv: torch.nn.Module, tokens: Any) -> None:
    [report] = check(_patches(conv, tokens), torch.randn(_IMAGE), linear=0)
    assert report.others["conv2d"] == 1


@torch.no_grad()
@pytest.mark.parametrize("name", ["padding", "stride"])
def test_convolutions_with_symbolic_arguments(name: str) -> None:
    def tokens(x: Tensor, n: int) -> Tensor:
        return _flat(F.conv2d(x, weight, None, **{"stride": 4, name: n})) + 1

    x, weight = torch.randn(_IMAGE), torch.randn(32, 3, 4, 4)
    ours, _ = compiled(tokens)
    for n in (1, 2, 3):
        torch.testing.assert_close(ours(x, n), tokens(x, n))


@torch.no_grad()
def test_patch_embeddings_under_vmap() -> None:
    def tokens(x: Tensor) -> Tensor:
        return torch.func.vmap(lambda one: _flat(F.conv2d(one, weight, None, 4)) + 1)(x)

    x, weight = torch.randn(2, *_IMAGE), torch.randn(32, 3, 4, 4)
    torch.testing.assert_close(compiled(tokens)[0](x), tokens(x))


def test_in_place_activation_and_dropout_are_removed() -> None:
    model = Written(
        lambda self, x: self.norm(x + self.dropout(self.w_2(self.dropout(F.relu_(self.w_1(x)))))),
        w_1=torch.nn.Linear(M, 2 * M), w_2=torch.nn.Linear(2 * M, M), norm=torch.nn.LayerNorm(M),
        dropout=torch.nn.Dropout(0.5, inplace=True),
    )  # fmt: skip
    ours, reports = compiled(model)
    ours(_x()).sum().backward()
    assert reports[0].counts == {"feed_forward": 1, "add_layer_norm": 1}
    assert set(reports[0].others) <= {"getitem"}


def _in_out(self: Any, x: Tensor) -> Tensor:
    hidden = torch.addmm(self.bias, x.view(-1, M), self.first).view(*x.shape[:-1], 64)
    return F.gelu(hidden) @ self.second + x @ self.first @ self.second


def _reused(self: Any, x: Tensor) -> Tensor:
    """Overwrites the input of a product before the result is reshaped."""
    y = 2 * x
    first = torch.addmm(self.bias, y.view(-1, M), self.first)
    y.add_(1)
    second = y.view(-1, M) @ self.first
    y.copy_(x)
    return first.view(*x.shape[:-1], 64) + second.view(*x.shape[:-1], 64)


@pytest.mark.parametrize(
    ("forward", "counts"), [(_in_out, {"feed_forward": 1, "linear": 2}), (_reused, None)]
)
def test_weights_stored_as_in_out(forward: Any, counts: dict[str, int] | None) -> None:
    """The layout of Conv1D of transformers."""
    model = Written(
        forward, first=_parameter(M, 64), second=_parameter(64, M), bias=_parameter(64)
    ).eval()
    ours, reports = compiled(model)
    assert_same_numbers(ours, model, (_x(),), {}, grad=False)
    [report] = reports
    if counts is not None:
        assert report.counts == counts
        assert not report.left


@torch.no_grad()
def test_products_with_dynamic_sizes() -> None:
    """No guard is added for a size that is marked as dynamic."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return (x.view(-1, M) @ weight).view(4, -1, 64)

    weight = torch.nn.Parameter(torch.randn(M, 64))
    ours = torch.compile(run, backend="transformer_fast")
    for size in (4, 8):
        x = torch.randn(size, 16, M)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(ours(x, weight), run(x, weight))
    empty = torch.randn(0, 3, M // 2)
    theirs = lambda x, weight: (x.view(0, M) @ weight).view(0, 3, 64)  # noqa: E731
    assert torch.compile(theirs, backend="transformer_fast")(empty, weight).shape == (0, 3, 64)


def _broadcast(self: Any, x: Tensor) -> Tensor:
    """Biases of one value for all units, which F.linear and addmm allow."""
    y = F.linear(F.relu(F.linear(x, self.weight, self.bias)), self.weight)
    return torch.addmm(self.bias, y.flatten(0, 1), self.weight)


def _one_number(self: Any, x: Tensor) -> Tensor:
    """A norm whose weight and bias are one number each."""
    x = F.linear(x, self.weight)
    mean, std = x.mean(dim=-1, keepdim=True), x.std(dim=-1, keepdim=True)
    return self.alpha * (x - mean) / (std + 10**-6) + self.bias


def _convolutions(kernel_size: int) -> torch.nn.Module:
    model = Convolutions()
    model.w_1 = torch.nn.Conv1d(M, 2 * M, kernel_size, padding="same")
    return model


#: name: (model, inputs, number of insertions of each op, numbers of some unchanged calls)
OTHERS: dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, int], Any]] = {
    "F.scaled_dot_product_attention": (
        lambda: Attention(
            lambda q, k, v, *_: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        ),
        lambda: (_x(), _x(), None), {"attention": 1, "linear": 4}, None,
    ),
    "one query and a growing cache": (
        lambda: Written(
            lambda self, x, past: self.attention(x, torch.cat([past, x], dim=1), None)[0],
            attention=Attention(divided),
        ),
        lambda: (torch.randn(B, 1, M), torch.randn(B, 9, M)), {"attention": 1, "linear": 4}, None,
    ),
    "checkpointed": (
        lambda: Written(
            lambda self, x: torch.utils.checkpoint.checkpoint(
                self.block, x, x, causal(), None, use_reentrant=False
            ),
            block=Block(False, True),
        ),
        lambda: (_x(),), {"attention": 1, "feed_forward": 1}, None,
    ),
    "norm with scalar affine": (
        lambda: Written(
            _one_number, alpha=_parameter(1), bias=_parameter(1), weight=_parameter(M, M)
        ),
        lambda: (_x(),), {"layer_norm": 1}, {"expand": 2, "mean": 0, "std": 0, "sub": 0},
    ),
    "gelu of a long sum": (
        lambda: Written(
            lambda self, x: ACTIVATIONS["gelu tanh by hand"](
                sum((x.sin() / 9 for _ in range(9)), self.weight * x)
            ),
            weight=_parameter(M),
        ),
        lambda: (_x(),), {}, {"tanh": 0, "gelu": 1},
    ),
    "gelu plus a small number": (
        lambda: Written(
            lambda self, x: 0.5 * ((x := self.weight * x) * (1 + torch.erf(x / 2**0.5)) + 2e-5),
            weight=_parameter(M),
        ),
        lambda: (_x(),), {}, {"erf": 1, "gelu": 0},
    ),
    "biases that broadcast": (
        lambda: Written(_broadcast, weight=_parameter(M, M), bias=_parameter(1)),
        lambda: (_x(),), {"feed_forward": 0, "linear": 2}, None,
    ),
    "convolutions over several positions": (
        lambda: _convolutions(3),
        lambda: (_x(),), {"feed_forward": 0, "add_layer_norm": 1}, {"conv1d": 2},
    ),
    "unbatched images": (
        lambda: torch.nn.Sequential(
            torch.nn.Conv2d(8, 8, 1), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 1)
        ),
        lambda: (torch.randn(8, 8, 8),), {"feed_forward": 0}, None,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_other_models(name: str) -> None:
    make, inputs, counts, stays = OTHERS[name]
    [report] = check(make(), *inputs(), **counts)
    for op, count in (stays or {}).items():
        assert report.others[op] == count


def test_unsupported_weight_layout_is_reported() -> None:
    """Products with a matrix in a memory layout that the kernels do not support."""
    model = Written(
        lambda self, x: torch.addmm(x.sum(), x.flatten(0, 1), self.weight).view_as(x) @ self.weight,
        weight=_parameter(M, M),
    )
    [report] = check(model, _x())
    assert str(report).count("its weight is stored as (in, out)") == 2


def _masked_and_causal(x: Tensor, mask: Tensor) -> Tensor:
    heads = x.view(B, T, 4, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, mask, is_causal=True)


def _one_value_head(x: Tensor, _: Tensor) -> Tensor:
    heads = x.view(B, T, 4, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads[:, :2], heads[:, :1], enable_gqa=True)


def _whole_numbers(x: Tensor, mask: Tensor) -> Tensor:
    weight = torch.arange(M * M).view(M, M)
    return F.linear(F.relu(F.linear(x.long(), weight)), weight)


@torch.no_grad()
@pytest.mark.parametrize(
    ("call", "mask", "dynamic"),
    [
        (_masked_and_causal, causal(), False),
        (_masked_and_causal, torch.randn(B, 1, T, T), True),
        (_masked_and_causal, torch.randn(1, 4, 1, T), False),
        (_one_value_head, None, True),
        (_whole_numbers, None, False),
    ],
    ids=["bool mask", "float mask", "mask of keys", "one value head", "whole numbers"],
)
def test_calls_that_only_pytorch_supports_are_left(call: Any, mask: Any, dynamic: bool) -> None:
    x = _x()
    ours, reports = compiled(call, dynamic=dynamic)
    try:
        expected = call(x, mask)
    except RuntimeError as refusal:  # from torch 2.14 on, of a mask together with is_causal
        if "is_causal" not in str(refusal):
            raise
        with pytest.raises(RuntimeError, match="is_causal"):
            ours(x, mask)
        return
    torch.testing.assert_close(ours(x, mask), expected)
    [left] = {str(found) for found in reports[0].left}
    assert "does not support it" in left


WITHOUT_PRIVATE = """
import torch
for name in ("_native_multi_head_attention", "_transformer_encoder_layer_fwd"):
    delattr(torch, name)
from transformer_fast import nn

layer, x = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True).eval(), torch.randn(2, 3, 16)
expected = layer(x)
with torch.no_grad():
    found = layer.self_attn(x, x, x)[0]
    torch.testing.assert_close(layer(x), expected)
    compiled = torch.compile(layer, backend="transformer_fast", options={"inner": None})
    torch.testing.assert_close(compiled(x), expected)
torch.testing.assert_close(found, layer.self_attn(x, x, x)[0])
"""


@pytest.mark.thorough
@pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))
def test_private_functions_of_pytorch_may_be_missing() -> None:
    python("-c", WITHOUT_PRIVATE)


@pytest.mark.thorough
@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
def test_nested_tensors_run_eagerly() -> None:
    """Inductor's result is not used, since nested tensors cannot be compared."""
    layer = torch.nn.Linear(M, M)
    x = torch.nested.nested_tensor([torch.randn(n, M) for n in (2, 3)], layout=torch.jagged)
    ours = torch.compile(layer, backend=compile_backend, options=COMPILE_REST)
    for _ in range(2):
        torch.testing.assert_close(ours(x).values(), layer(x).values())


_PADDING = torch.tensor([[False] * 7, [False] * 5 + [True] * 2])
_CAUSAL = torch.ones(7, 7, dtype=torch.bool).triu(1)


class Called(torch.nn.Module):
    """Calls a torch.nn module with these keyword arguments; concatenates a tuple of results."""

    def __init__(self, module: torch.nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.module, self.kwargs = module, kwargs
        for name, mask in kwargs.items():
            if isinstance(mask, Tensor):
                self.register_buffer(name, mask)

    def forward(self, *args: Tensor) -> Tensor:
        found = self.module(*args, **{**self.kwargs, **self._buffers})
        return (
            torch.cat([x.flatten() for x in found if x is not None])
            if type(found) is tuple
            else found
        )


_ADDED = {"attn_mask": _CAUSAL.float() * -9, "key_padding_mask": _PADDING.float() * -9}


@pytest.mark.parametrize(("options", "masks"), [
    ({}, {}), ({}, {"key_padding_mask": _PADDING}), ({}, _ADDED),
    ({}, {"attn_mask": _CAUSAL, "is_causal": True, "need_weights": False}),
    ({"bias": False, "add_bias_kv": True}, {"key_padding_mask": _PADDING}),
    ({"add_zero_attn": True, "batch_first": True}, _ADDED),
    ({"kdim": 16, "vdim": 24, "batch_first": True}, {}),
])  # fmt: skip
def test_pytorch_multihead_attention(options: dict[str, Any], masks: dict[str, Any]) -> None:
    module = torch.nn.MultiheadAttention(32, 4, **options)
    sizes = (32, options.get("kdim", 32), options.get("vdim", 32))
    first = (2, 7) if options.get("batch_first") else (7, 2)
    [report] = check(Called(module, **masks), *(torch.randn(*first, n) for n in sizes), attention=1)
    assert "multi_head_attention_forward" not in report.others


@torch.no_grad()
def test_static_keys_are_left() -> None:
    keys = torch.randn(8, 7, 8)  # (B * H, S, D)
    module = torch.nn.MultiheadAttention(32, 4)

    def attend(x: Tensor) -> Tensor:
        return F.multi_head_attention_forward(
            x, x, x, 32, 4, module.in_proj_weight, module.in_proj_bias, None, None, False, 0.0,
            module.out_proj.weight, module.out_proj.bias, static_k=keys,
        )[0]  # fmt: skip

    x = torch.randn(7, 2, 32)
    ours, reports = compiled(attend)
    torch.testing.assert_close(ours(x), attend(x))
    assert not reports[0].counts


@pytest.mark.parametrize("masks", [
    {}, {"src_key_padding_mask": _PADDING}, {"src_mask": _CAUSAL},
    {"src_mask": _CAUSAL, "src_key_padding_mask": _PADDING},
])  # fmt: skip
@pytest.mark.parametrize(
    "options", [{}, {"norm_first": True, "activation": "gelu", "layer_norm_eps": 0.1}]
)
def test_pytorch_encoder_layers(options: dict[str, Any], masks: dict[str, Any]) -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, **options)
    model, x = Called(layer, **masks).eval(), torch.randn(2, 7, 32)
    ours, reports = compiled(copy.deepcopy(model))
    with torch.no_grad():
        expected = model(x)
        found = ours(x)
        again = ours(x)
    for result in (found, again):
        torch.testing.assert_close(result, expected, equal_nan=True)
    assert reports[0].counts == {"encoder_layer": 1}


@torch.no_grad()
def test_pytorch_encoder_layers_return_the_dtype_of_autocast() -> None:
    layer, x = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True), torch.ones(2, 7, 32)
    ours = torch.compile(layer.eval(), backend=compile_backend, options={"inner": "aot_eager"})
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x).dtype == layer(x).dtype == torch.bfloat16


@torch.no_grad()
def test_pytorch_encoder_layers_with_an_empty_batch() -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    model, x = Called(layer, src_mask=_CAUSAL), torch.randn(0, 7, 32)
    ours, _ = compiled(model)
    assert ours(x).shape == model(x).shape


@pytest.mark.thorough
@torch.no_grad()
def test_pytorch_encoder_layers_in_dynamic_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(inner._log, "warning", lambda *args: messages.append(args[0]))
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    ours = torch.compile(layer, backend=compile_backend, dynamic=True, options=COMPILE_REST)
    for length in (7, 9):
        x = torch.randn(2, length, 32)
        torch.testing.assert_close(ours(x), layer(x))
    assert not messages


# Functions that write in place.


def _scores(x: Tensor) -> Tensor:
    return x.sin() @ x.cos().mT


def slices_of_a_mask(x: Tensor) -> Tensor:
    mask = torch.zeros(T, T, dtype=torch.bool)
    mask[:, 3:] = True
    return _scores(x).masked_fill(mask, -1e9).softmax(-1) @ x


def through_a_view_of_the_mask(x: Tensor) -> Tensor:
    mask = torch.zeros(T, T, dtype=torch.bool)
    view = mask[None]
    mask.fill_diagonal_(True)
    return _scores(x).masked_fill(view, -1e9).softmax(-1) @ x


def one_mask_in_two_states(x: Tensor) -> Tensor:
    mask = torch.zeros(T, T, dtype=torch.bool)
    first = _scores(x).masked_fill(mask, -1e9).softmax(-1) @ x
    mask[:, 3:] = True
    return first + _scores(first).masked_fill(mask, -1e9).softmax(-1) @ x


def a_mask_made_in_between(x: Tensor) -> Tensor:
    """The written tensor is not one of the attention's own."""
    scores = _scores(x) / 3
    mask = torch.ones(2, 1, T, dtype=torch.bool)
    mask[1, :, 4:] = False
    return scores.masked_fill(~mask, -1e9).softmax(-1) @ x


def values_written(x: Tensor) -> Tensor:
    value = x.sin()
    scores = _scores(x)
    value[:, 0] = 5.0
    return scores.softmax(-1) @ value


def keys_written(x: Tensor) -> Tensor:
    key = x.cos()
    scores = x @ key.mT
    key.mul_(3.0)
    return scores.softmax(-1) @ x + key


def weights_written(x: Tensor) -> Tensor:
    weights = _scores(x).softmax(-1)
    weights[..., 0] = 0
    return weights @ x


def queries_written_after_scaling(x: Tensor) -> Tensor:
    query = x.sin()
    scaled = query / 3
    query.zero_()
    return (scaled @ x.mT).softmax(-1) @ x + query


def norm_in_place(x: Tensor) -> Tensor:
    x = 2 * x
    mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
    x -= mean
    x /= std + 1e-6
    return x


def norms_input_written(x: Tensor) -> Tensor:
    x = 2 * x
    mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
    centred = x - mean
    x.zero_()
    return centred / (std + 1e-6) + x


def input_written(self: Any, x: Tensor) -> Tensor:
    x = 2 * x
    hidden = self.first(x)
    x += 1
    return self.second(torch.relu(hidden)) + x


def view_of_the_hidden(self: Any, x: Tensor) -> Tensor:
    hidden = self.first(x)
    view = hidden.view(-1, 2 * M)
    return self.second(F.relu_(hidden)) + view.sum()


def dropped_input_written(self: Any, x: Tensor) -> Tensor:
    inner = 2 * x
    dropped = F.dropout(inner, 1e-12, True)
    inner.zero_()
    return self.norm(3 * x + dropped) + inner


def sum_written(self: Any, x: Tensor) -> Tensor:
    total = 2 * x + x.sin()
    view = total.view(-1, M)
    view.mul_(x.view(-1, M))
    return self.norm(total) + total


def residual_in_place(self: Any, x: Tensor) -> Tensor:
    """The residual is added in place, which is common: no other node shares the sum's memory."""
    y = self.second(F.relu(self.first(x)))
    y += x
    return self.norm(y)


def residual_in_place_viewed(self: Any, x: Tensor) -> Tensor:
    y = self.second(F.relu(self.first(x)))
    before = y.view(-1, M)
    y += x
    return self.norm(y) + before.sum()


def gelu_input_written(x: Tensor) -> Tensor:
    hidden = x.sin()
    inner = torch.tanh(0.7978845608 * (hidden + 0.044715 * hidden**3))
    half = 0.5 * hidden
    hidden.zero_()
    return half * (1 + inner) + hidden


#: (function, number of insertions of each op)
WRITES: list[tuple[Callable[..., Any], dict[str, int]]] = [
    (slices_of_a_mask, {"attention": 1}),
    (through_a_view_of_the_mask, {"attention": 1}),
    (one_mask_in_two_states, {"attention": 2}),
    (a_mask_made_in_between, {"attention": 1}),
    (values_written, {}),
    (keys_written, {}),
    (weights_written, {}),
    (queries_written_after_scaling, {"attention": 1}),
    (norm_in_place, {}),
    (norms_input_written, {}),
    (gelu_input_written, {}),
    (input_written, {"linear": 2}),
    (view_of_the_hidden, {"linear": 2}),
    (dropped_input_written, {"layer_norm": 1}),
    (sum_written, {"layer_norm": 1}),
    (residual_in_place, {"feed_forward": 1, "add_layer_norm": 1}),
    (residual_in_place_viewed, {"feed_forward": 1, "layer_norm": 1}),
]


LEFT = (
    values_written, keys_written, weights_written, norms_input_written, norm_in_place, input_written
)  # fmt: skip


@pytest.mark.parametrize(("code", "counts"), WRITES, ids=lambda x: getattr(x, "__name__", ""))
def test_nothing_moves_past_a_write(code: Any, counts: dict[str, int]) -> None:
    layers = {"first": torch.nn.Linear(M, 2 * M), "second": torch.nn.Linear(2 * M, M)}
    theirs = code
    if code.__code__.co_argcount == 2:
        theirs = Written(code, **layers, norm=torch.nn.LayerNorm(M))
    ours, reports = compiled(theirs, fullgraph=True)
    x = _x().requires_grad_()
    assert_same_numbers(ours, theirs, (x,), {}, grad=False)
    try:
        assert_same_numbers(ours, theirs, (x,), {}, grad=True)
    except RuntimeError as error:  # backward needed an overwritten tensor
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    assert reports[0].counts == counts
    is_reported = "modified in place between its ops" in str(reports[0])
    assert is_reported == (code in LEFT)
