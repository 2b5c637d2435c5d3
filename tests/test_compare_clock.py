"""How figures are taken: the clock, the statistics, the roof, the text, the machine line."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from transformer_fast import _native
from transformer_fast.measure import clock, machine, roof, text
from transformer_fast.measure.clock import Plan, alternate
from transformer_fast.measure.summary import speed_up, summarise

FAST = Plan(rounds=3, seconds=0.05, least=2, sample=1e-5)


class FakeTime:
    """A clock that moves only when a contender works, or when somebody sleeps."""

    def __init__(self) -> None:
        self.now = self.cpu = 0.0
        self.spinning_until = 0.0  #: threads of some contender

    def process_time(self) -> float:
        return self.cpu

    def sleep(self, seconds: float) -> None:
        self.cpu += min(seconds, max(0.0, self.spinning_until - self.now))
        self.now += seconds

    def perf_counter_ns(self) -> int:
        return round(self.now * 1e9)

    def perf_counter(self) -> float:
        return self.now

    def worker(self, *durations: float) -> Callable[[int], None]:
        """Takes these times, one after the other, over and over."""
        done = iter(range(10**9))

        def work(index: int) -> None:
            self.now += durations[next(done) % len(durations)]

        return work


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    time = FakeTime()
    monkeypatch.setattr(clock, "time", time)
    return time


def test_samples_are_seconds_per_call_however_often_a_sample_repeats_it(fake):
    plan = Plan(rounds=5, seconds=1e9, least=5, sample=1.0)
    samples = alternate({"short": fake.worker(0.25), "long": fake.worker(7.0)}, 2, plan)
    assert samples == {"short": [0.25] * 5, "long": [7.0] * 5}


def test_the_budget_ends_a_case_but_not_before_the_least_rounds(fake):
    for seconds, rounds in ((0.5, 3), (45.0, 5), (1e9, 8)):
        plan = Plan(rounds=8, seconds=seconds, least=3, sample=1.0)
        assert len(alternate({"a": fake.worker(10.0)}, 1, plan)["a"]) == rounds


def test_rounds_are_shuffled_and_inputs_are_shared_and_change():
    seen: list[tuple[str, int]] = []
    contenders = {name: (lambda i, name=name: seen.append((name, i))) for name in "abc"}
    alternate(contenders, 2, Plan(12, 1e9, 12, sample=1e-9, settle=0.0))
    rounds = [seen[i : i + 3] for i in range(6, len(seen), 3)]
    assert len(rounds) == 12
    assert all(sorted(name for name, _ in one) == ["a", "b", "c"] for one in rounds)
    assert all(len({index for _, index in one}) == 1 for one in rounds)
    assert len({tuple(name for name, _ in one) for one in rounds}) > 2
    assert {one[0][1] for one in rounds} == {0, 1}


def test_short_calls_settle_before_they_are_counted(fake):
    slow_at_first = iter(range(10**9))
    plan = Plan(rounds=2, seconds=1e9, least=2, sample=1.0, settle=0.5)

    def cold(index: int) -> None:
        # Every fourth call is slow: the first of those that settle, never one that counts.
        fake.now += 4.0 if next(slow_at_first) % 4 == 2 else 0.5

    samples = alternate({"a": cold}, 1, plan)
    assert samples["a"][0] == 0.5
    assert alternate({"a": fake.worker(6.0)}, 1, plan)["a"] == [6.0, 6.0]


@pytest.mark.parametrize("rest", [0.1, 0.004, 0.0])
def test_threads_that_spin_on_do_not_disturb_the_next_one(fake, rest):
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
    # The first two calls tell how long one takes.
    assert any(disturbed[2:]) == (rest < 0.010)


@pytest.mark.parametrize("broken", [False, True])
def test_garbage_collection_is_off_while_timing_and_on_again(broken):
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


@pytest.mark.parametrize(
    "bad",
    [
        {"least": 0},
        {"least": 9, "rounds": 8},
        {"seconds": 0},
        {"sample": -1.0},
        {"settle": -1.0},
        {"rest": -1.0},
    ],
)
def test_impossible_plans(bad):
    with pytest.raises(ValueError, match=r"least must|must be positive|must not be negative"):
        Plan(**bad)


def test_summary():
    assert summarise([4.0, 1.0, 2.0, 3.0, 5.0]) == (3.0, 2.0, 4.0, 5)
    assert summarise([2.0, 1.0]).median == 1.5
    with pytest.raises(ValueError, match="samples must not be empty"):
        summarise([])


def test_drift_that_hits_both_cancels_in_the_ratio():
    drift = [1.0, 9.0, 1.5, 4.0, 2.0, 8.0, 3.0]
    ratio = speed_up([2.5 * d for d in drift], drift)
    assert ratio == pytest.approx((2.5, 2.5, 2.5))
    assert ratio.significant


def test_noise_widens_the_interval_until_it_says_nothing():
    generator = torch.Generator().manual_seed(0)
    noise = (1 + torch.rand(2, 15, generator=generator)).tolist()
    ratio = speed_up(*noise)
    assert ratio.low < ratio.value < ratio.high
    assert ratio.low < 1.0 < ratio.high
    assert not ratio.significant
    with pytest.raises(ValueError, match="pairs from the same rounds"):
        speed_up([1.0], [1.0, 2.0])


def test_the_lower_roof_counts():
    compute = roof.Roof(100.0, copy=10.0, read=20.0, flops=1000.0, bytes=50.0, written=0.0)
    assert (compute.bound, compute.seconds) == ("compute", 10.0)
    for written, seconds in ((0.0, 25.0), (100.0, 35.0), (250.0, 50.0), (400.0, 50.0)):
        moved = replace(compute, bytes=500.0, written=written)
        assert (moved.bound, moved.seconds) == ("bandwidth", seconds)
    better = compute.better(roof.Roof(50.0, 20.0, 10.0, 0.0, 0.0, 0.0))
    assert (better.peak, better.copy, better.read, better.flops) == (100.0, 20.0, 20.0, 1000.0)


def test_the_roof_of_pieces_is_fp32s_second_one():
    one = roof.Roof(100.0, 10.0, 20.0, flops=1000.0, bytes=50.0, written=0.0)
    assert one.split_seconds is None
    assert replace(one, split_peak=90.0).split_seconds is None
    assert replace(one, split_peak=250.0).split_seconds == 4.0
    assert replace(one, split_peak=1e9).split_seconds == 2.5
    better = replace(one, split_peak=200.0).better(replace(one, split_peak=250.0))
    assert better.split_peak == 250.0
    assert one.better(replace(one, split_peak=250.0)).split_peak == 250.0
    assert one.better(one).split_peak is None


def test_without_probes_there_is_no_roof_and_a_reason(monkeypatch):
    monkeypatch.setattr(_native, "module", None)
    monkeypatch.setattr(_native, "why_not", "it was not built")
    assert roof.probe(1.0, 1.0, 0.0, torch.float32) is None
    assert roof.why_no_roof(torch.device("cpu")) == "it was not built"
    assert "no probes for meta" in str(roof.why_no_roof(torch.device("meta")))


@pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))
def test_probes_of_little_and_much_work():
    for size in (1.0, 1e12):
        found = roof.probe(size, size, 0.0, torch.float32)
        assert found is not None
        assert found.peak > 1e9
        assert found.read >= found.copy > 1e8
        assert found.flops == size
        assert (found.split_peak is not None) == (_native.module.isa() == "amx")
    assert roof.peaks()["fp32"] > 1.0
    assert ("bf16" in roof.peaks()) == (_native.module.isa() in ("avx512_bf16", "amx"))


def test_text_is_real_and_varies():
    texts = text.paragraphs()
    assert len(texts) > 1000
    assert all(len(one) >= 80 for one in texts)
    assert len({len(one) for one in texts}) > 200
    batches = text.batches(3, 8, longest=300)
    assert all(batch.tokens.shape[1] <= 300 for batch in batches)
    assert all(int(batch.lengths.max()) == batch.tokens.shape[1] for batch in batches)
    assert all(len(set(batch.lengths.tolist())) > 3 for batch in batches)
    first = bytes(batches[0].tokens[0, : batches[0].lengths[0]].tolist())
    assert texts[0].startswith(first)


def test_padding_and_teacher_forcing():
    batch = text.batch([b"abc", b"defgh"], 4, begin=True)
    pad, begin = text.PADDING, text.BEGIN
    assert batch.tokens.tolist() == [[begin, 97, 98, 99], [begin, 100, 101, 102]]
    batch = text.batch([b"abc", b"d"], 9)
    assert batch.tokens.tolist() == [[97, 98, 99], [100, pad, pad]]
    assert batch.real.sum(1).tolist() == batch.lengths.tolist() == [3, 1]
    assert not batch.full
    ((source, target),) = text.pairs(1, 2, longest=50)
    assert target.tokens[0, 1:].tolist() == source.tokens[1, :49].tolist()
    with pytest.raises(ValueError, match="not enough for 10 batches of 400"):
        text.batches(10, 400)


def test_machine_line():
    about = machine.describe()
    line = machine.line(about)
    assert about["cpu"] in line
    assert f"torch {torch.__version__}" in line
    assert machine.differences(about, dict(about)) == []
    (difference,) = machine.differences(about, about | {"threads": -1})
    assert difference.startswith("threads is ")
    fast = about | {"cpu": "Fast(R) CPU @ 3.00GHz", "isa": None, "cpu_isa": None, "threads": 2}
    assert machine.slug(fast) == "fast-pure-2-threads"
    told = fast | {"cpu": "Fast(R) CPU @ 3.00GHz, family 6"}
    assert machine.slug(told) == "fast-family-6-pure-2-threads"
    assert machine.forced_isa(fast) is None
    assert machine.peaks_line(fast) == ""
    rates = {"fp32": 491.7, "bf16": 7600.0}
    assert machine.peaks_line(fast | {"peaks": rates}) == (
        "Measured peaks in Gflop/s: fp32 492, bf16 7600."
    )


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("AMD EPYC", "AMD EPYC, family 25, model 17"),
        (
            "Intel(R) Xeon(R) Processor @ 2.70GHz",
            "Intel(R) Xeon(R) Processor @ 2.70GHz, family 25, model 17",
        ),
        ("AMD EPYC 9354 32-Core Processor",) * 2,
    ],
)
def test_a_name_without_a_number_is_not_the_processors(name, told, monkeypatch):
    """Virtual machines hide it, and results of two generations would be one machine's."""
    one = f"cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: {name}\nstepping\t: 1\n"
    monkeypatch.setattr(machine.Path, "read_text", lambda *_, **__: one + "\n" + one)
    assert machine.cpu_model() == told


def test_one_instruction_set_of_several_is_another_machine():
    whole = machine.describe() | {"cpu": "Fast", "isa": "amx", "cpu_isa": "amx", "threads": 2}
    held = whole | {"isa": "avx2", "torch_isa": "avx2"}
    assert machine.slug(whole) == "fast-amx-2-threads"
    assert machine.slug(held) == "fast-amx-2-threads-avx2"
    assert machine.forced_isa(whole) is None
    assert "held to avx2, PyTorch to avx2 (the CPU has amx)" in machine.line(held)
    assert machine.differences(whole, held) == ["isa is 'amx' in one and 'avx2' in the other"]
    # Results from before this was recorded.
    before = {k: v for k, v in whole.items() if k not in ("cpu_isa", "torch_isa")}
    assert machine.slug(before) == machine.slug(whole)
    assert " · amx · " in machine.line(before)
