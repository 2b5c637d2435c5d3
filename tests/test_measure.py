"""Timing, the checks of benchmark cases, and the description of the machine."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from transformer_fast import _native, dispatch, nn
from transformer_fast.functional import layer_norm
from transformer_fast.measure import calls, clock, machine, roof
from transformer_fast.measure.accuracy import (
    ModuleChecker,
    OpChecker,
    SampledAttentionChecker,
)
from transformer_fast.measure.benchmark_case import BenchmarkCase, Candidate, Row, run_case
from transformer_fast.measure.cases import op_case
from transformer_fast.measure.clock import Plan, alternate, speed_up, summarise
from transformer_fast.specs import OPS
from transformer_fast.testing import call_of

pytestmark = pytest.mark.thorough

FAST = Plan(rounds=3, seconds=0.05, least=2, sample=1e-5)


class FakeTime:
    """A clock that advances only while a candidate works or sleeps."""

    def __init__(self) -> None:
        self.now = self.cpu = 0.0
        self.spinning_until = 0.0  # end of the spinning of a candidate's threads

    def process_time(self) -> float:
        return self.cpu

    def process_time_ns(self) -> int:
        return round(self.cpu * 1e9)

    def sleep(self, seconds: float) -> None:
        self.cpu += min(seconds, max(0.0, self.spinning_until - self.now))
        self.now += seconds

    def perf_counter_ns(self) -> int:
        return round(self.now * 1e9)

    def perf_counter(self) -> float:
        return self.now

    def worker(self, *durations: float) -> Callable[[int], None]:
        """Returns a candidate that takes these times in turn, repeatedly."""
        done = iter(range(10**9))

        def work(index: int) -> None:
            self.now += durations[next(done) % len(durations)]

        return work


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    time = FakeTime()
    monkeypatch.setattr(clock, "time", time)
    return time


def test_samples_are_seconds_per_call(fake):
    plan = Plan(rounds=5, seconds=1e9, least=5, sample=1.0)
    samples = alternate({"short": fake.worker(0.25), "long": fake.worker(7.0)}, 2, plan)
    assert samples == {"short": [0.25] * 5, "long": [7.0] * 5}


def test_the_time_limit_allows_the_minimum_number_of_rounds(fake):
    for seconds, rounds in ((0.5, 3), (45.0, 5), (1e9, 8)):
        plan = Plan(rounds=8, seconds=seconds, least=3, sample=1.0)
        assert len(alternate({"a": fake.worker(10.0)}, 1, plan)["a"]) == rounds


def test_rounds_are_shuffled_and_share_inputs():
    seen: list[tuple[str, int]] = []
    candidates = {name: (lambda i, name=name: seen.append((name, i))) for name in "abc"}
    alternate(candidates, 2, Plan(12, 1e9, 12, sample=1e-9, settle=0.0))
    rounds = [seen[i : i + 3] for i in range(6, len(seen), 3)]
    assert len(rounds) == 12
    assert all(sorted(name for name, _ in one) == ["a", "b", "c"] for one in rounds)
    assert all(len({index for _, index in one}) == 1 for one in rounds)
    assert len({tuple(name for name, _ in one) for one in rounds}) > 2
    assert {one[0][1] for one in rounds} == {0, 1}


def test_samples_may_be_cpu_time(fake):
    def waiting(index: int) -> None:
        fake.now += 3.0
        fake.cpu += 1.0

    plan = Plan(rounds=2, seconds=1e9, least=2, sample=1.0, cpu_time=True)
    assert alternate({"a": waiting}, 1, plan) == {"a": [1.0, 1.0]}


def test_short_calls_settle_before_timing(fake):
    slow_at_first = iter(range(10**9))
    plan = Plan(rounds=2, seconds=1e9, least=2, sample=1.0, settle=0.5)

    def cold(index: int) -> None:
        # Every fourth call is slow: the first of the settling calls, never a timed one.
        fake.now += 4.0 if next(slow_at_first) % 4 == 2 else 0.5

    samples = alternate({"a": cold}, 1, plan)
    assert samples["a"][0] == 0.5
    assert alternate({"a": fake.worker(6.0)}, 1, plan)["a"] == [6.0, 6.0]


@pytest.mark.parametrize("rest", [0.1, 0.004, 0.0])
def test_pauses_outlast_spinning_threads(fake, rest):
    disturbed = []

    def spinner(index: int) -> None:
        fake.now += 0.5
        fake.spinning_until = fake.now + 0.010

    def other(index: int) -> None:
        disturbed.append(fake.now < fake.spinning_until)
        fake.now += 0.5

    plan = Plan(rounds=6, seconds=1e9, least=6, sample=0.5, settle=0.0, rest=rest)
    samples = alternate({"spinner": spinner, "other": other}, 1, plan)
    assert samples == {"spinner": [0.5] * 6, "other": [0.5] * 6}
    # The first two calls estimate the duration of a call.
    assert any(disturbed[2:]) == (rest < 0.010)


@pytest.mark.parametrize("broken", [False, True])
def test_garbage_collection_is_disabled_while_timing(broken):
    def call(index: int) -> None:
        nonlocal off
        off = off or not gc.isenabled()
        if broken and off:
            raise KeyError("broken")

    off = False
    if broken:
        with pytest.raises(KeyError):
            alternate({"a": call}, 1, FAST)
    else:
        alternate({"a": call}, 1, FAST)
    assert off
    assert gc.isenabled()


def test_summaries_have_median_and_quartiles():
    assert summarise([4.0, 1.0, 2.0, 3.0, 5.0]) == (3.0, 2.0, 4.0, 5)
    assert summarise([2.0, 1.0]).median == 1.5
    with pytest.raises(ValueError, match="samples must not be empty"):
        summarise([])


def test_common_drift_cancels_in_the_ratio():
    drift = [1.0, 9.0, 1.5, 4.0, 2.0, 8.0, 3.0]
    ratio = speed_up([2.5 * d for d in drift], drift)
    assert ratio == pytest.approx((2.5, 2.5, 2.5))
    assert ratio.significant


def test_noise_widens_the_interval_of_the_ratio():
    generator = torch.Generator().manual_seed(0)
    noise = (1 + torch.rand(2, 15, generator=generator)).tolist()
    ratio = speed_up(*noise)
    assert ratio.low < ratio.value < ratio.high
    assert ratio.low < 1.0 < ratio.high
    assert not ratio.significant
    with pytest.raises(ValueError, match="pairs from the same rounds"):
        speed_up([1.0], [1.0, 2.0])


def test_the_lower_roof_applies():
    compute = roof.Roof(100.0, copy=10.0, read=20.0, flops=1000.0, bytes=50.0, written=0.0)
    assert (compute.bound, compute.seconds) == ("compute", 10.0)
    for written, seconds in ((0.0, 25.0), (100.0, 35.0), (250.0, 50.0), (400.0, 50.0)):
        moved = replace(compute, bytes=500.0, written=written)
        assert (moved.bound, moved.seconds) == ("bandwidth", seconds)
    better = compute.better(roof.Roof(50.0, 20.0, 10.0, 0.0, 0.0, 0.0))
    assert (better.peak, better.copy, better.read, better.flops) == (100.0, 20.0, 20.0, 1000.0)


def test_fp32_has_a_second_roof_for_bf16x3():
    one = roof.Roof(100.0, 10.0, 20.0, flops=1000.0, bytes=50.0, written=0.0)
    assert one.split_seconds is None
    assert replace(one, split_peak=90.0).split_seconds is None
    assert replace(one, split_peak=250.0).split_seconds == 4.0
    assert replace(one, split_peak=1e9).split_seconds == 2.5
    better = replace(one, split_peak=200.0).better(replace(one, split_peak=250.0))
    assert better.split_peak == 250.0
    assert one.better(replace(one, split_peak=250.0)).split_peak == 250.0
    assert one.better(one).split_peak is None


@pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))
def test_probes_of_small_and_large_sizes():
    for size in (1.0, 1e12):
        found = roof.probe(size, size, 0.0, torch.float32)
        assert found is not None
        assert found.peak > 1e9
        assert found.read >= found.copy > 1e8
        assert found.flops == size
        assert (found.split_peak is not None) == (_native.module.isa() == "amx")
    assert roof.peaks()["fp32"] > 1.0
    dots = _native.module.dot_types()
    assert [name for name in ("int8", "bf16") if name in roof.peaks()] == dots
    found = [roof.probe(1.0, 1.0, 0.0, torch.float32, product=name) for name in (None, "int8")]
    assert (found[1].peak > 2.0 * found[0].peak) == ("int8" in dots)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("AMD EPYC", "AMD EPYC, family 25, model 17"),
        (
            "Intel(R) Xeon(R) Processor @ 2.70GHz",
            "Intel(R) Xeon(R) Processor @ 2.70GHz, family 25, model 17",
        ),
        ("AMD EPYC 9354 32-Core Processor",) * 2,
    ],
)
def test_cpu_names_without_a_model_number_get_one(name, expected, monkeypatch):
    """Virtual machines hide the model number; results of two CPU generations would then be mixed
    up.
    """
    one = f"cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: {name}\nstepping\t: 1\n"
    monkeypatch.setattr(_native.Path, "read_text", lambda *_, **__: one + "\n" + one)
    assert _native.cpu_model() == expected


def test_a_forced_instruction_set_is_another_machine():
    whole = machine.describe() | {"cpu": "Fast", "isa": "amx", "cpu_isa": "amx", "threads": 2}
    held = whole | {"isa": "avx2", "torch_isa": "avx2"}
    assert machine.slug(whole) == "fast-amx-2-threads"
    assert machine.slug(held) == "fast-amx-2-threads-avx2"
    assert machine.forced_isa(whole) is None
    assert "held to avx2, PyTorch to avx2 (the CPU has amx)" in machine.line(held)
    assert machine.differences(whole, held) == ["isa is 'amx' in one and 'avx2' in the other"]


def _layer_norm(run: Any, name: str = "cpu", ours: bool = True, inputs: int = 2) -> list[Row]:
    """Returns the rows of a benchmark case that compares ``run`` with the reference."""
    case = OPS["layer_norm"].bench_cases[-1]
    drawn = [
        [case.build(torch.float32, "cpu", torch.Generator().manual_seed(i))] for i in range(inputs)
    ]
    candidates = [
        Candidate(name, run, ours=ours),
        Candidate("reference", OPS["layer_norm"].reference),
    ]
    benchmark_case = BenchmarkCase(
        "layer_norm", case.name, drawn, candidates, OpChecker("layer_norm"), 0.0, 0.0, 0.0
    )
    return run_case(benchmark_case, FAST)


def _right(*arguments: Any) -> torch.Tensor:
    return OPS["layer_norm"].reference(*arguments)


def _times(factor: float) -> Callable[..., torch.Tensor]:
    return lambda *arguments: _right(*arguments) * factor


def _broken(*arguments: Any) -> Any:
    raise OSError("no licence found\nfor this")


def _careless(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    y = _right(x, *rest)
    x[0, 0] += 1
    return y


def _remembering() -> Callable[..., torch.Tensor]:
    results: list[torch.Tensor] = []

    def run(*arguments: Any) -> torch.Tensor:
        results.append(_right(*arguments))
        return results[0]

    return run


BUDGET = "its result is outside the error budget, so no speed is given"
AFTER = "its result was right before the timing and is wrong after it"


@pytest.mark.parametrize(
    ("run", "ours", "ok", "reason"),
    [
        (_right, True, True, None),
        (_times(1 + 1e-4), True, False, BUDGET),
        # A peer may be less accurate than a kernel, without failing the case.
        (_times(1 + 5e-6), True, False, BUDGET),
        (_times(1 + 5e-6), False, True, None),
        (lambda *a: _right(*a).bfloat16().float(), False, False, BUDGET),
        (_broken, False, None, "OSError in _broken: no licence found"),
        (_broken, True, False, "OSError in _broken: no licence found"),
        # a wrong dtype, shape or number of results
        (lambda *a: _right(*a).double(), True, False, BUDGET),
        (lambda *a: _right(*a)[:-1], True, False, BUDGET),
        (lambda *a: (_right(*a), _right(*a)), True, False, BUDGET),
        (_careless, True, False, "it changed its input"),
        (_remembering(), True, False, AFTER),
    ],
)
def test_only_right_results_are_timed(run, ours, ok, reason):
    row, reference = _layer_norm(run, "cpu" if ours else "peer", ours)
    assert (row.ok, row.reason, row.failed) == (ok, reason, ours and ok is False)
    assert reference.ok
    assert (row.time is not None) == (row.vs_reference is not None) == (ok is True)
    if ok:
        assert len(row.samples) == row.time.rounds == len(reference.samples)
    if reason == BUDGET:
        assert row.error_ratio is None or row.error_ratio > 2
    assert ours or not ok or row.error_ratio > 3


def test_candidates_are_compared_with_the_fastest_of_pytorch(fake):
    case = OPS["layer_norm"].bench_cases[-1]
    inputs = [[case.build(torch.float32, "cpu", None)]]

    def taking(seconds: float) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            fake.now += seconds
            return _right(*arguments)

        return run

    names = {"cpu": 0.002, "reference": 0.04, "slow": 0.03, "quick": 0.015}
    candidates = [Candidate(name, taking(seconds)) for name, seconds in names.items()]
    checker = OpChecker("layer_norm")
    benchmark_case = BenchmarkCase(
        "layer_norm", "x", inputs, candidates, checker, 0.0, 0.0, 0.0, torch=("slow", "quick")
    )
    row = run_case(benchmark_case, FAST)[0]
    assert row.best_torch == "quick"
    assert row.vs_torch is not None
    assert row.vs_reference is not None
    assert 1.0 < row.vs_torch.value < row.vs_reference.value


def test_recording_names_the_kernels_and_restores_them():
    before = {op: dispatch.kernels(op) for op in (*dispatch.OPS, *dispatch.FUSED)}
    case = OPS["layer_norm"].bench_cases[-1]
    x, shape, *rest = case.build(torch.float32, "cpu", None)
    with calls.record() as found:
        layer_norm(x, shape, *rest, backend="reference")
        layer_norm(x, shape, *rest, backend="reference")
    assert found.calls == {("layer_norm", "reference"): 2}
    with pytest.raises(KeyError), calls.record():
        raise KeyError("inside")
    assert {op: dispatch.kernels(op) for op in before} == before


def test_recording_a_layer_covers_all_its_ops():
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
def test_checks_of_sampled_queries_agree_with_full_checks(mask):
    arguments = _long_attention(mask)
    right = OPS["attention"].reference(*arguments)
    checker = SampledAttentionChecker(queries=30)
    assert checker(right, arguments).ok
    assert OpChecker("attention")(right, arguments).ok
    other = OPS["attention"].reference(*arguments[:5], not arguments[5], *arguments[6:])
    assert not checker(other, arguments).ok
    assert not checker((right[0] * 1.001, right[1]), arguments).ok


def test_padded_positions_are_not_checked():
    real = torch.tensor([[True, True, False]])
    x = torch.randn(1, 3, 4)
    checker = ModuleChecker(torch.tanh, torch.tanh, lambda x: real)
    right = torch.tanh(x)
    assert checker(torch.where(real[..., None], right, math.nan), (x,)).ok
    assert not checker(torch.where(real[..., None], right + 1e-3, right), (x,)).ok


def test_interpreted_kernels_are_not_timed():
    case = OPS["linear"].cases[0]
    inputs = [[case.build(torch.float32, "cpu", None)]]
    reference = dispatch.unpacked(OPS["linear"].reference)
    dispatch.register(dispatch.Kernel("linear", "triton", reference))
    benchmark_case = op_case("linear", case.name, inputs, ("triton",))
    (triton,) = (c for c in benchmark_case.candidates if c.name == "triton")
    assert triton.run is None
    assert "Triton's interpreter" in str(triton.reason)


def test_unsupported_backends_have_a_reason():
    case = OPS["attention"].case("dropout")
    inputs = [[case.build(torch.float32, "cpu", None)]]
    benchmark_case = op_case("attention", case.name, inputs)
    reasons = {c.name: c.reason for c in benchmark_case.candidates if c.run is None}
    assert "it supports cuda tensors, and these are on cpu" in str(reasons["cuda"])
    assert "drops other elements" in str(reasons["torch"])
    explained = dispatch.explain_call(call_of("attention", inputs[0][0]))
    assert benchmark_case.chosen == explained.backend
    assert benchmark_case.inside == {("attention", explained.backend): explained.reasons}
