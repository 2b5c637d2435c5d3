"""What a GPU was measured to do: the file, what the dispatcher makes of it, and the command."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from transformer_fast import dispatch, proof, reference
from transformer_fast.__main__ import main
from transformer_fast.cli import info, prove
from transformer_fast.dispatch import Call, select
from transformer_fast.measure import device as on_device
from transformer_fast.measure import torch_ops
from transformer_fast.proof import Machine, Proof, Verdict, shape_class
from transformer_fast.specs import OPS
from transformer_fast.specs.gpu import GPU_CASES, GpuCase, _attention_case, _packed_case
from transformer_fast.specs.layer_norm import _bench
from transformer_fast.specs.spec import case
from transformer_fast.testing import call_of

ROOT = Path(__file__).resolve().parents[1]
MACHINE = Machine("NVIDIA Test", 90, "13000", "2.13.0", "3.7.1", "0.1")
ROWS = "up to 64 rows"
TIMES = on_device.Times


def verdict(**changes):
    known = Verdict("linear", "triton", "bfloat16", ROWS, False, True, 1e-5, 2e-6, 2e-5, 1e-6)
    return known._replace(**changes)


#: Of a kernel that could not be timed.
UNTIMED = dict.fromkeys(("device", "host", "torch_device", "torch_host"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and a GPU that can be asked for its name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(proof, "machine_of", lambda device=None: MACHINE)
    proof.known.cache_clear()
    yield tmp_path
    proof.known.cache_clear()


def prove_that(*verdicts):
    return proof.write(Proof(MACHINE, "2026-11-22T12:00:00+00:00", 840.0, verdicts))


def test_what_is_written_is_read():
    verdicts = verdict(), verdict(right=False, **UNTIMED, problem="NaN")
    path = prove_that(*verdicts)
    found, problem = proof.read(MACHINE)
    assert problem is None
    assert found == Proof(MACHINE, "2026-11-22T12:00:00+00:00", 840.0, verdicts)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_another_machine_has_another_file():
    prove_that(verdict())
    for field in Machine._fields:
        other = 100 if field == "capability" else "another"
        found, problem = proof.read(MACHINE._replace(**{field: other}))
        assert found is None
        assert problem.startswith("nothing was measured on this GPU yet")


def changed(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


DAMAGE = {
    "no JSON": lambda path: path.write_text("{"),
    "a list": lambda path: path.write_text("[]"),
    "another format": lambda path: changed(path, lambda c: c.update(format=99)),
    "no verdicts": lambda path: changed(path, lambda c: c.pop("verdicts")),
    "a field too many": lambda path: changed(path, lambda c: c["verdicts"][0].update(x=1)),
    "a wrong type": lambda path: changed(path, lambda c: c["verdicts"][0].update(device="fast")),
    "a foreign machine": lambda path: changed(path, lambda c: c["machine"].update(gpu="other")),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_and_foreign_files_are_ignored_with_a_sentence(damage):
    path = prove_that(verdict())
    DAMAGE[damage](path)
    found, problem = proof.read(MACHINE)
    assert found is None
    assert "is ignored, since it is" in problem
    assert proof.COMMAND in problem


@pytest.fixture
def triton(monkeypatch):
    """Kernels of linear whose numbers are proven nowhere, and PyTorch's."""
    run = reference.linear
    kernels = (
        dispatch.Kernel("linear", "cuda", run, gradients=True, proven=frozenset()),
        dispatch.Kernel("linear", "triton", run, gradients=True, proven=frozenset()),
        dispatch.Kernel("linear", "torch", run, gradients=True),
        dispatch.Kernel("linear", "reference", run, gradients=True),
    )
    monkeypatch.setitem(dispatch._state.kernels, "linear", kernels)
    return kernels[1]


def call(rows=32, dtype=torch.bfloat16, needs_grad=False):
    with FakeTensorMode():
        return Call("linear", (torch.empty(rows, 8, device="cuda", dtype=dtype),), needs_grad)


def test_the_dispatcher_takes_what_was_right_and_faster(triton):
    prove_that(
        verdict(),
        verdict(dtype="float16", device=3e-5),
        verdict(dtype="float32", right=False, problem="error 0.5"),
        verdict(gradients=True, **UNTIMED, problem="no memory"),
    )
    assert select(call()).backend == "triton"
    assert dispatch.explain_call(call()).reasons["triton"] == []
    expected = {
        call(dtype=torch.float16): "on this GPU PyTorch's own took 20 microseconds and 1 "
        "of the host's, and it 30 and 2 (float16, up to 64 rows)",
        call(dtype=torch.float32): "on this GPU it was found wrong (float32, up to 64 rows: "
        "error 0.5)",
        call(needs_grad=True): "on this GPU it could not be timed (bfloat16, up to 64 rows, with "
        "gradients: no memory)",
        call(rows=65): "`python -m transformer_fast prove` did not measure calls like this one on "
        "this GPU (bfloat16, up to 1024 rows)",
    }
    for other, why in expected.items():
        assert select(other).backend == "torch"
        assert dispatch.explain_call(other).reasons["triton"] == [why]
        assert select(other, "triton").backend == "triton"


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ((1e-5, 2e-6, 2e-5, 1e-6), True),
        ((5e-6, 7e-5, 9e-6, 3.5e-5), False),  # a norm whose Python takes longer than PyTorch's
        ((1e-4, 7e-5, 2e-4, 3.5e-5), True),  # which a larger one hides
        ((5e-6, 2e-5, 9e-6, 3.5e-5), True),
        ((1.00e-5, 2e-6, 1.03e-5, 1e-6), False),  # no more than noise
    ],
)
def test_the_longer_of_both_times_counts(times, chosen):
    found = verdict(**dict(zip(UNTIMED, times, strict=True)))
    assert found.chosen is chosen
    assert found.gain == max(times[2:]) / max(times[:2])
    assert verdict(right=False).gain == verdict(host=None).gain == 0.0


def test_the_fastest_of_all_backends_is_taken(triton, monkeypatch):
    """Whatever their order, of those that take the call."""
    faster, slower = verdict(torch_device=9e-5), verdict(backend="cuda", torch_device=3e-5)
    prove_that(faster, slower, *(one._replace(dtype="float16") for one in (faster, slower)))
    assert select(call()).backend == "triton"
    found = dispatch.explain_call(call())
    assert found.backend == "triton"
    assert found.reasons["triton"] == []
    assert found.reasons["cuda"] == [
        "on this GPU it is 3 times as fast as PyTorch's own, and 'triton' 9 times"
    ]
    assert select(call(), "cuda").backend == "cuda"
    refusing = dataclasses.replace(triton, refuses=lambda call: "not this")
    kernels = dispatch.kernels("linear")
    monkeypatch.setitem(dispatch._state.kernels, "linear", (kernels[0], refusing, *kernels[2:]))
    assert select(call()).backend == "cuda"
    monkeypatch.setitem(dispatch._state.kernels, "linear", kernels)
    prove_that(verdict(torch_device=3e-5), verdict(backend="cuda", torch_device=9e-5))
    assert select(call()).backend == "cuda"


def test_without_a_proof_the_command_is_named(triton):
    assert select(call()).backend == "torch"
    [why] = dispatch.explain_call(call()).reasons["triton"]
    assert f"`python -m transformer_fast prove` does it, in {proof.DURATION}" in why


def test_committed_results_count_without_a_proof(triton, monkeypatch):
    proven = dataclasses.replace(triton, proven=frozenset({90}))
    kernels = dispatch.kernels("linear")
    monkeypatch.setitem(dispatch._state.kernels, "linear", (kernels[0], proven, *kernels[2:]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert select(call()).backend == "triton"


def test_a_traced_program_obeys_the_proof(triton):
    prove_that(verdict())

    @torch.compile(backend="eager", fullgraph=True)
    def asked(x):
        why = proof._decide("linear", "triton", "bfloat16", ROWS, False, 0)
        other = proof._decide("linear", "triton", "float32", ROWS, False, 0)
        gain = proof._gain("linear", "triton", "bfloat16", ROWS, False, 0)
        return x + (why is None) + (other is None) + (gain == 2.0)

    assert torch.equal(asked(torch.zeros(2)), torch.full((2,), 2.0))


def class_of(one):
    return shape_class(call_of(one.op, one.case.build(torch.bfloat16, "meta", None)))


def test_what_is_measured():
    classes = {(one.op, class_of(one)) for one in GPU_CASES}
    assert {op for op, _ in classes} == set(OPS)
    for size in (64, 128):
        for seen in ("no mask", "key lengths"):
            for batch in (4, 5):
                wanted = {
                    class_of(_attention_case(batch, 16, queries, keys, size, seen))
                    for queries, keys in (
                        *itertools.product((1, 2, 4, 512, 513), (1, 512, 513, 2048)),
                        *itertools.product((1, 4), (2049, 4096)),
                        *((1, keys) for keys in (4097, 8192)),
                    )
                }
                assert len(wanted) == 4 * 2 + 2 + 1
                assert wanted <= {name for _, name in classes}, wanted
    for rows in (64, 65, 1025, 8193):
        call = Call("layer_norm", (torch.empty(rows, 512, device="meta"),), False)
        assert ("layer_norm", shape_class(call)) in classes
    trials = sum(len(list(on_device.trials(op))) for op in OPS)
    assert f"{trials:,} trials" in " ".join(
        (ROOT / "docs" / "guides" / "gpu.md").read_text().split()
    )
    packed = [class_of(_packed_case(1, 2, longest, 64)) for longest in (512, 513)]
    assert ["up to 512 keys" in packed[0], "up to 2048 keys" in packed[1]] == [True, True]


@pytest.mark.parametrize("which", ["one query", "few", "heads of 96", "keys", "heads", "rows"])
def test_what_is_not_alike_is_of_two_classes(which):
    attention, linear = _attention_case, lambda rows: GpuCase("layer_norm", _bench(rows, 512))
    one, other = {
        "one query": (attention(1, 1, 1, 64, 64, "causal"), attention(1, 1, 2, 64, 64, "causal")),
        "few": (attention(1, 1, 4, 64, 64, "causal"), attention(1, 1, 5, 64, 64, "causal")),
        "heads of 96": (attention(1, 1, 9, 9, 96, "bias"), attention(1, 1, 9, 9, 128, "bias")),
        "keys": (attention(1, 1, 9, 4096, 8, "bias"), attention(1, 1, 9, 4097, 8, "bias")),
        "heads": (attention(8, 8, 9, 9, 8, "bias"), attention(5, 13, 9, 9, 8, "bias")),
        "rows": (linear(1024), linear(1025)),
    }[which]
    assert class_of(one) != class_of(other)


def test_a_proof_of_an_older_version_is_ignored_with_a_sentence():
    path = prove_that(verdict())
    changed(path, lambda content: content.update(format=2))
    found, problem = proof.read(MACHINE)
    assert found is None
    assert problem == (
        f"{path} is ignored, since it is of format 2 and this version's is 3; "
        f"`{proof.COMMAND}` replaces it"
    )


def fake_clock(times):
    """Times by the order in which calls come: what kernels take, then PyTorch's ways."""
    known = {}

    def clock(call, inputs, repeats, host=0.0):
        for i in range(repeats):
            call(i % inputs)
        return times[known.setdefault(call, len(known))]

    return clock


SMALL = GpuCase(
    "linear",
    case("timed", lambda draw: (draw.normal(33, 8), draw.weight(6, 8), None, None, None)),
)
CPU = torch.device("cpu")


#: Of a kernel, and of two ways of PyTorch's.
SOME = TIMES(1e-5, 2e-5), TIMES(3e-5, 2e-5), TIMES(1e-5, 4e-5)


def judged(*runs, gradients=False, times=SOME):
    kernels = [
        dispatch.Kernel("linear", backend, run, gradients=True)
        for backend, run in zip(("cuda", "triton"), runs, strict=False)
    ]
    return on_device.judge(SMALL, torch.float32, gradients, CPU, fake_clock(times), kernels)


@pytest.fixture
def small_cache(monkeypatch):
    monkeypatch.setattr(on_device, "cache_bytes", lambda device: 1)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_right_kernel_is_timed(gradients, small_cache):
    [found] = judged(reference.linear, gradients=gradients)
    about = "linear", "cuda", "float32", ROWS, gradients
    assert found == Verdict(*about, True, 1e-5, 2e-5, 3e-5, 2e-5)
    assert found.chosen


def test_backends_are_timed_on_the_same_inputs(small_cache):
    seen = {}

    def keeping(name):
        def run(*arguments):
            seen.setdefault(name, {})[arguments[0].data_ptr()] = None
            return reference.linear(*arguments)

        return run

    times = TIMES(1e-5, 1e-6), TIMES(2e-5, 1e-6), TIMES(3e-5, 1e-6), TIMES(4e-5, 1e-6)
    cuda, triton = judged(keeping("cuda"), keeping("triton"), times=times)
    assert (cuda.gain, triton.gain) == (pytest.approx(3.0), pytest.approx(1.5))
    assert list(seen["cuda"]) == list(seen["triton"])
    assert len(seen["cuda"]) > 1


def test_a_wrong_kernel_is_not_timed(small_cache):
    def wrong(*arguments):
        return reference.linear(*arguments) + 1e-3

    def broken(*arguments):
        raise RuntimeError("no such tile")

    for run, said in ((wrong, "output["), (broken, "RuntimeError in broken: no such tile")):
        [found] = judged(run)
        assert not found.right
        assert said in found.problem
        assert found.device is None


@pytest.mark.parametrize("gradients", [False, True])
def test_what_is_timed_is_checked(gradients, small_cache):
    """A kernel that does something else at the size that is timed, or in later calls."""
    calls = []

    def later(*arguments):
        calls.append(arguments)
        return reference.linear(*arguments) * (1.0 if len(calls) < 5 else 1.001)

    def of_many_rows(*arguments):
        return reference.linear(*arguments) * (1.0 if arguments[0].shape[0] < 33 else 1.001)

    for run in (later, of_many_rows):
        [found] = judged(run, gradients=gradients)
        assert not found.right
        assert "error" in found.problem


@pytest.mark.parametrize("seen", ["causal", "key lengths", "documents", "bias"])
@pytest.mark.parametrize("gradients", [False, True])
def test_attention_by_heads_has_the_same_truth(gradients, seen, monkeypatch):
    drawn = _attention_case(2, 3, 7, 9, 4, seen).case.build(
        torch.float32, CPU, torch.Generator().manual_seed(0)
    )
    packed = _packed_case(3, 2, 9, 4).case.build(
        torch.float32, CPU, torch.Generator().manual_seed(0)
    )
    for arguments in (drawn, packed):
        whole = on_device._truth("attention", arguments, gradients)
        with monkeypatch.context() as patch:
            patch.setattr(on_device, "MOST_SCORES", 1)
            parts = on_device._truth("attention", arguments, gradients)
        for one, other in zip(whole, parts, strict=True):
            assert len(one) == len(other)
            for a, b in zip(one, other, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(b, a)


def test_a_call_that_a_kernel_refuses_is_no_verdict(small_cache):
    kernel = dispatch.Kernel("linear", "triton", reference.linear, refuses=lambda call: "not this")
    assert on_device.judge(SMALL, torch.float32, False, CPU, fake_clock(()), [kernel]) == []


def test_what_does_not_fit_into_memory_is_no_verdict(capsys, monkeypatch):
    def too_large(*arguments):
        raise torch.OutOfMemoryError

    kernel = dispatch.Kernel("linear", "triton", too_large, proven=frozenset())
    monkeypatch.setitem(dispatch._state.kernels, "linear", (kernel,))
    monkeypatch.setattr(on_device, "trials", lambda op: [(SMALL, torch.float32, False)] * 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "device", lambda *place: CPU)
    assert prove._alone("linear") == 0
    assert capsys.readouterr().out == "[]\n[]\n"


def test_with_dropout_the_rival_is_sdpa(small_cache, monkeypatch):
    given = []
    sdpa = F.scaled_dot_product_attention

    def keeping(query, key, value, mask, dropout_p, *rest, **options):
        given.append((mask, dropout_p))
        return sdpa(query, key, value, mask, dropout_p, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", keeping)
    one = _attention_case(2, 3, 7, 9, 4, "no mask", 0.5)
    trial = on_device.Trial(one, torch.float32, False, CPU)
    trial.torchs()["by hand"](*trial.inputs[0])
    assert given == [(None, 0.5)]
    for op, arguments in (
        ("add_layer_norm", (torch.ones(2, 4), torch.ones(2, 4), (4,), None, None, 1e-5, 1.0, None)),
        (
            "feed_forward",
            (*[torch.ones(4, 4)] * 2, None, torch.ones(4, 4), None, "relu", 1.0, None),
        ),
    ):
        found = torch_ops.OPS[op](*arguments)
        dropped = found[1] - 1 if isinstance(found, tuple) else found
        assert torch.equal(dropped, torch.zeros_like(dropped))


class Device:
    """A GPU by the clock of this machine: a queue of launches that it works off in order."""

    DEPTH = 1024

    def __init__(self, monkeypatch):
        self.now = 0.0  # of the host
        self.ends = []  # of each launch, in order
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.launch(cycles / 2e9))
        monkeypatch.setattr(on_device.time, "perf_counter", lambda: self.now)

    def launch(self, seconds, host=0.0):
        self.now += host
        if len(self.ends) >= self.DEPTH:  # the host waits for a place in the queue
            self.now = max(self.now, self.ends[-self.DEPTH])
        last = self.ends[-1] if self.ends else 0.0
        self.ends.append(max(self.now, last) + seconds)


class Event:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.at = max(self.device.now, self.device.ends[-1])

    def query(self):
        return self.at <= self.device.now

    def synchronize(self):
        self.device.now = max(self.device.now, self.at)

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


@pytest.mark.parametrize(
    ("host", "launches", "repeats"),
    [
        (1e-5, 1, 200),
        (1e-3, 1, 20),  # slower than is expected
        (2e-4, 20, 200),  # more launches than a queue holds
        (0.05, 3, 5),
    ],
)
def test_the_device_never_waits_for_the_host(host, launches, repeats, monkeypatch):
    device = Device(monkeypatch)

    def call(i):
        for _ in range(launches):
            device.launch(2e-6 / launches, host / launches)

    found = on_device.DeviceClock(torch.device("cuda"))(call, 2, repeats)
    assert found.device == pytest.approx(2e-6)
    assert found.host == pytest.approx(host)


def test_a_call_that_waits_for_the_device_has_the_time_of_both(monkeypatch):
    device = Device(monkeypatch)

    def call(i):
        device.launch(2e-6, 1e-5)
        device.now = max(device.now, device.ends[-1])

    assert on_device.DeviceClock(torch.device("cuda"))(call, 2, 20).device >= 2e-6


def test_inputs_are_drawn_on_the_device(small_cache, monkeypatch):
    devices = []
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda d="none": devices.append(d) or generator("cpu"))
    on_device.Trial(SMALL, torch.float32, False, torch.device("cpu", 0))
    assert devices == [torch.device("cpu", 0)]


def test_the_worst_case_of_a_class_counts():
    slower = verdict(device=1.5e-5)
    wrong = verdict(right=False, **UNTIMED)
    assert on_device.worst([verdict(), slower]) == (slower,)
    assert on_device.worst([wrong, verdict(), slower]) == (wrong,)
    assert len(on_device.worst([verdict(), verdict(dtype="float32")])) == 2


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["prove"]) == 2
    assert capsys.readouterr().err.startswith("prove needs an NVIDIA GPU")


def program(*verdicts, then=""):
    """What stands for an op's process."""
    lines = [json.dumps(one) for one in verdicts]
    return [sys.executable, "-c", f"import os\nprint({chr(10).join(lines)!r}, flush=True)\n{then}"]


def test_the_command_from_end_to_end(capsys, monkeypatch):
    commands = {
        "linear": program([verdict()], [], [verdict(device=1.2e-5)]),
        "attention": program([verdict(op="attention")], then="os.kill(os.getpid(), 11)"),
        "layer_norm": program(
            [verdict(op="layer_norm", right=False, problem="error 7")], then="1/0"
        ),
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(prove, "_command", commands.__getitem__)
    monkeypatch.setenv("COLUMNS", "300")
    prove_that(verdict(op="cross_entropy"), verdict(device=5.0))
    assert main(["prove", "--op", *commands]) == 1
    text = capsys.readouterr().out
    assert "attention: its process ended before it was done (signal 11)" in text
    assert "(status 1: ZeroDivisionError: division by zero)" in text
    assert "layer_norm, triton, bfloat16, up to 64 rows: error 7" in text
    found, _ = proof.read(MACHINE)
    assert {(v.op, v.device, v.right) for v in found.verdicts} == {
        ("cross_entropy", 1e-5, True),  # from before
        ("linear", 1.2e-5, True),
        ("attention", 1e-5, True),
        ("layer_norm", 1e-5, False),
    }
    assert main(["prove", "--op", "linear"]) == 0
    state = info.proof_state()
    assert state.endswith(", in 0 minutes: 3 of 4 are right and faster than PyTorch")
    assert main(["prove", "--forget"]) == 0
    assert "removed" in capsys.readouterr().out
    assert proof.read(MACHINE)[0] is None
    assert main(["prove", "--forget"]) == 0
    assert "No results to remove" in capsys.readouterr().out
