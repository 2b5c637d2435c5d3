"""What a contest lets through, and who judges it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from transformer_fast import dispatch, nn
from transformer_fast.backends import cpu_blocks
from transformer_fast.functional import layer_norm
from transformer_fast.measure import calls, torch_ops
from transformer_fast.measure.clock import Plan
from transformer_fast.measure.contest import Contender, Contest, Row, run_contest
from transformer_fast.measure.judge import ModuleJudge, OpJudge, SampledAttentionJudge
from transformer_fast.measure.ops import op_contest
from transformer_fast.specs import OPS
from transformer_fast.testing import check
from transformer_fast.testing.parity import truth_of

FAST = Plan(rounds=3, seconds=0.05, least=2, sample=1e-5)


def _layer_norm(run: Any, name: str = "cpu", ours: bool = True, inputs: int = 2) -> list[Row]:
    """The rows of a contest of ``run`` against the reference."""
    case = OPS["layer_norm"].bench_cases[-1]
    drawn = [
        [case.build(torch.float32, "cpu", torch.Generator().manual_seed(i))] for i in range(inputs)
    ]
    contenders = [
        Contender(name, run, ours=ours),
        Contender("reference", OPS["layer_norm"].reference),
    ]
    contest = Contest(
        "layer_norm", case.name, drawn, contenders, OpJudge("layer_norm"), 0.0, 0.0, 0.0
    )
    return run_contest(contest, FAST)


def _right(*arguments: Any) -> torch.Tensor:
    return OPS["layer_norm"].reference(*arguments)


def test_a_right_result_is_timed():
    ours, reference = _layer_norm(_right)
    assert ours.ok
    assert not ours.failed
    assert ours.time is not None
    assert len(ours.samples) == ours.time.rounds == len(reference.samples)
    assert ours.vs_reference is not None


def test_a_wrong_result_gets_no_speed():
    ours, reference = _layer_norm(lambda *a: _right(*a) * (1 + 1e-4))
    assert ours.failed
    assert ours.time is None
    assert ours.vs_reference is None
    assert "outside the error budget" in str(ours.reason)
    assert ours.error_ratio is not None
    assert ours.error_ratio > 2
    assert reference.ok


def test_a_peer_may_be_less_accurate_than_a_kernel():
    def sloppy(*arguments: Any) -> torch.Tensor:
        return _right(*arguments) * (1 + 5e-6)

    assert _layer_norm(sloppy)[0].failed
    row = _layer_norm(sloppy, "peer", ours=False)[0]
    assert row.time is not None
    assert row.error_ratio is not None
    assert row.error_ratio > 3


@pytest.mark.parametrize(
    "form",
    [lambda y: y.double(), lambda y: y[:-1], lambda y: (y, y)],
    ids=["dtype", "shape", "two"],
)
def test_a_result_of_another_form_is_wrong(form):
    assert _layer_norm(lambda *a: form(_right(*a)))[0].failed


def test_a_peer_that_is_wrong_or_breaks_fails_nothing():
    row = _layer_norm(lambda *a: _right(*a).bfloat16().float(), "peer", ours=False)[0]
    assert row.ok is False
    assert row.time is None
    assert not row.failed

    def broken(*arguments: Any) -> Any:
        raise OSError("no licence found\nfor this")

    row = _layer_norm(broken, "peer", ours=False)[0]
    assert row.ok is None
    assert row.reason == "OSError in broken: no licence found"
    assert _layer_norm(broken)[0].failed


def test_a_kernel_that_changes_its_input_is_wrong():
    def careless(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        y = _right(x, *rest)
        x[0, 0] += 1
        return y

    row = _layer_norm(careless)[0]
    assert row.failed
    assert row.reason == "it changed its input"


def test_a_kernel_that_remembers_its_result_is_found_out():
    results: list[torch.Tensor] = []

    def remembering(*arguments: Any) -> torch.Tensor:
        if not results:
            results.append(_right(*arguments))
        return results[0]

    row = _layer_norm(remembering)[0]
    assert row.failed
    assert row.time is None
    assert "wrong after" in str(row.reason)


def test_the_fastest_of_torch_is_what_others_are_measured_against():
    case = OPS["layer_norm"].bench_cases[-1]
    inputs = [[case.build(torch.float32, "cpu", None)]]

    def taking(seconds: float) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            time.sleep(seconds)
            return _right(*arguments)

        return run

    names = {"cpu": 0.002, "reference": 0.04, "slow": 0.03, "quick": 0.015}
    contenders = [Contender(name, taking(seconds)) for name, seconds in names.items()]
    judge = OpJudge("layer_norm")
    contest = Contest(
        "layer_norm", "x", inputs, contenders, judge, 0.0, 0.0, 0.0, torch=("slow", "quick")
    )
    row = run_contest(contest, FAST)[0]
    assert row.best_torch == "quick"
    assert row.vs_torch is not None
    assert row.vs_reference is not None
    assert 1.0 < row.vs_torch.value < row.vs_reference.value


def test_recording_tells_what_ran_and_leaves_the_kernels_alone():
    before = {op: dispatch.kernels(op) for op in dispatch.OPS}
    case = OPS["layer_norm"].bench_cases[-1]
    x, shape, *rest = case.build(torch.float32, "cpu", None)
    with calls.record() as found:
        layer_norm(x, shape, *rest, backend="reference")
        layer_norm(x, shape, *rest, backend="reference")
    assert found.calls == {("layer_norm", "reference"): 2}
    blocks = cpu_blocks.layers, cpu_blocks.DecodeStack.__call__
    with pytest.raises(KeyError), calls.record():
        raise KeyError("inside")
    assert (cpu_blocks.layers, cpu_blocks.DecodeStack.__call__) == blocks
    assert {op: dispatch.kernels(op) for op in dispatch.OPS} == before


def test_recording_a_layer_misses_nothing():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x, padding = torch.randn(2, 5, 32), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for hidden in (None, padding):
        with torch.no_grad(), calls.record() as found:
            layer(x, src_key_padding_mask=hidden)
        ran = {op.partition(" ")[0] for op, _ in found.calls}
        assert {"attention", "feed_forward"} <= ran
        with torch.no_grad(), dispatch.use_backend("reference"), calls.record() as found:
            layer(x, src_key_padding_mask=hidden)
        assert {backend for _, backend in found.calls} == {"reference"}
        assert {"attention", "feed_forward"} <= {op for op, _ in found.calls}


_ODD = ("garbage", "empty", "nothing", "ends", "finfo", "callable", "lowest")


@pytest.mark.parametrize("op", OPS)
def test_what_stands_for_torch_does_the_same_work(op):
    checked = 0
    for case in OPS[op].cases:
        arguments = case.build(torch.float32, "cpu", torch.Generator().manual_seed(0))
        dropout_p = OPS[op].named(arguments).get("dropout_p", 0.0)
        if torch_ops.why_not(dropout_p) or any(word in case.name for word in _ODD):
            continue
        # Not a kernel of ours, so with room: what is looked for is other work, not rounding.
        check(op, torch_ops.OPS[op](*arguments), arguments, factor=8.0)
        checked += 1
    assert checked >= 5


def _long_attention(mask: str) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, 2, 200, 8, generator=generator) for _ in range(3))
    given = {
        "bool": torch.rand(1, 1, 200, 200, generator=generator) < 0.5,
        "float": torch.randn(2, 1, 1, 200, generator=generator),
    }.get(mask)
    lengths = torch.tensor([200, 120]) if mask == "lengths" else None
    causal = mask in ("causal", "float")
    return query, key, value, given, lengths, causal, None, 0.0, None, False, True


@pytest.mark.parametrize("mask", ["none", "bool", "float", "lengths", "causal"])
def test_sampling_queries_judges_as_the_whole_does(mask):
    arguments = _long_attention(mask)
    right = OPS["attention"].reference(*arguments)
    judge = SampledAttentionJudge(queries=30)
    assert judge(right, arguments).ok
    assert OpJudge("attention")(right, arguments).ok
    other = OPS["attention"].reference(*arguments[:5], not arguments[5], *arguments[6:])
    assert not judge(other, arguments).ok
    assert not judge((right[0] * 1.001, right[1]), arguments).ok


def test_padded_places_of_a_module_do_not_count():
    real = torch.tensor([[True, True, False]])
    x = torch.randn(1, 3, 4)
    judge = ModuleJudge(torch.tanh, torch.tanh, lambda x: real)
    right = torch.tanh(x)
    assert judge(torch.where(real[..., None], right, math.nan), (x,)).ok
    assert not judge(torch.where(real[..., None], right + 1e-3, right), (x,)).ok


def test_interpreted_kernels_are_not_timed():
    case = OPS["linear"].cases[0]
    inputs = [[case.build(torch.float32, "cpu", None)]]
    reference = OPS["linear"].reference
    dispatch.register(dispatch.Kernel("linear", "triton", reference))
    contest = op_contest("linear", case.name, inputs, ("triton",))
    (triton,) = (c for c in contest.contenders if c.name == "triton")
    assert triton.run is None
    assert "Triton's interpreter" in str(triton.reason)


def test_an_unknown_or_refusing_backend_is_a_row_with_its_reason():
    case = OPS["attention"].case("dropout")
    inputs = [[case.build(torch.float32, "cpu", None)]]
    contest = op_contest("attention", case.name, inputs)
    reasons = {c.name: c.reason for c in contest.contenders if c.run is None}
    assert "it supports cuda tensors, and these are on cpu" in str(reasons["cuda"])
    assert "drops other elements" in str(reasons["torch"])
    assert contest.chosen == calls.chosen("attention", inputs[0][0])


def test_a_reference_that_was_lucky_gets_a_second_look():
    for seed in range(50):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(1, 1, 9, 4) for _ in range(3))
        arguments = q, k, v, None, None, False, 0.5, 0.0, None, False, False
        once, worst = (truth_of("attention", arguments, tries) for tries in (1, 4))
        true = once.true[0]
        assert true is not None
        size = true.abs().max()
        least = torch.finfo(torch.float32).eps / 2
        first, last = max(once.units[0], least), max(worst.units[0], least)
        if last > 1.2 * first:
            break
    judge = OpJudge("attention")

    def at(unit: float) -> Any:
        # At one place so far beyond the limit by the given unit, or inside it.
        wrong = true.clone()
        place = int(true.abs().argmin())
        wrong.view(-1)[place] += (2 * unit + 2 * least) * size
        return wrong.float(), *once.expected[1:]

    assert judge(at(0.97 * first), arguments).ok
    assert judge(at(0.97 * last), arguments).ok
    assert not judge(at(1.03 * last), arguments).ok
