"""Validation records: the file, its use by the dispatcher, and the commands that write it.

The commands are `prove` and `python -m benchmarks.gpu`. Their stages and processes run
on the CPU here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import kernel_of, python
from torch._subclasses import FakeTensorMode

from benchmarks import gpu
from transformer_fast import _native, dispatch, functional, proof, reference
from transformer_fast.__main__ import main
from transformer_fast.cli import info, prove
from transformer_fast.cli.info import state
from transformer_fast.dispatch import Call, select
from transformer_fast.measure import accuracy, clock
from transformer_fast.measure import device as on_device
from transformer_fast.measure.clock import DeviceClock, Times
from transformer_fast.measure.device import class_of
from transformer_fast.ops.arguments import LayerArguments, LinearArguments
from transformer_fast.proof import Machine, Proof, Verdict, shape_class
from transformer_fast.reference import DIFFERENTIABLE
from transformer_fast.specs import OPS
from transformer_fast.specs.attention import _gpu_case, _packed_case
from transformer_fast.specs.spec import case

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[1]
MACHINE = Machine("NVIDIA Test", "sm_90, driver 13000", "2.13.0", "3.7.1", "0.1")
ROWS = "up to 64 rows"


CPU = torch.device("cpu")
#: A GPU case that is small enough for a CPU.
SMALL = case(
    "timed", lambda draw: (draw.normal(33, 8), draw.weight(6, 8), None, None, None), True, "linear"
)


def wrong_linear(*arguments: Any) -> torch.Tensor:
    return reference.linear(*arguments) + 1e-3


def fake_clock(times: tuple[Times, ...]) -> Callable[..., Times]:
    """Returns a clock whose times depend on the order in which calls first come: kernels, then
    PyTorch.
    """
    known: dict[Any, int] = {}

    def clock(call: Any, inputs: int, repeats: int, host: float = 0.0) -> Times:
        for i in range(repeats):
            call(i % inputs)
        return times[known.setdefault(call, len(known))]

    return clock


#: Replaces a worker process: each item says what the process does.
PROCESS = """
import json, os, sys, time
for item in json.loads(sys.argv[1]):
    if item.get("dies"):
        os.kill(os.getpid(), 11)
    if item.get("raises"):
        1 / 0
    time.sleep(item.get("sleeps", 0))
    print(json.dumps(item.get("line", {"result": item.get("says", "done")})), flush=True)
"""


def stand_in(stage, items):
    return [sys.executable, "-c", PROCESS, json.dumps(items)]


def verdict(**changes):
    known = Verdict("linear", "triton", "bfloat16", ROWS, False, True, 1e-5, 2e-5)
    return known._replace(**changes)


#: Fields of a kernel that could not be timed.
UNTIMED = {"time": None, "torch_time": None}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Sets an empty cache folder and a fixed `Machine`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(proof, "machine_of", lambda device: MACHINE)
    proof._record.cache_clear()
    yield tmp_path
    proof._record.cache_clear()


def write_record(*verdicts):
    return proof.write(Proof(MACHINE, "2026-11-22T12:00:00+00:00", 840.0, verdicts))


def test_the_file_is_read_back():
    verdicts = verdict(), verdict(right=False, **UNTIMED, problem="NaN")
    path = write_record(*verdicts)
    found, problem = proof.read(MACHINE)
    assert problem is None
    assert found == Proof(MACHINE, "2026-11-22T12:00:00+00:00", 840.0, verdicts)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_cpu_is_described_with_its_instruction_set_and_threads(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(_native, "cpu_model", lambda: "Neoverse V1")
    monkeypatch.setattr(_native, "module", SimpleNamespace(isa=lambda: "neon_dot"))
    for threads, words in ((1, "1 thread"), (4, "4 threads")):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        found = proof.machine_of(CPU)
        assert found[:2] == ("Neoverse V1", f"neon_dot, {words}")


def changed(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


DAMAGE = {
    "no JSON": lambda path: path.write_text("{"),
    "a list": lambda path: path.write_text("[]"),
    "an older format": lambda path: changed(path, lambda c: c.update(format=4)),
    "no verdicts": lambda path: changed(path, lambda c: c.pop("verdicts")),
    "a field too many": lambda path: changed(path, lambda c: c["verdicts"][0].update(x=1)),
    "a wrong type": lambda path: changed(path, lambda c: c["verdicts"][0].update(time="fast")),
    "a foreign machine": lambda path: changed(path, lambda c: c["machine"].update(device="other")),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_and_foreign_files_are_ignored_with_a_sentence(damage):
    path = write_record(verdict())
    DAMAGE[damage](path)
    found, problem = proof.read(MACHINE)
    assert found is None
    assert problem.startswith(f"{path} is ignored")
    assert problem.endswith(f"; `{proof.COMMAND}` replaces it")
    assert damage != "an older format" or "of format 4 and this version's is 5" in problem


def kernels_of(op, monkeypatch):
    """Registers kernels of an op that are validated nowhere, and PyTorch's; returns Triton's."""
    run = dispatch.unpacked(OPS[op].reference)
    kernels = (
        dispatch.Kernel(op, "cuda", run, gradients=True, proven=frozenset()),
        dispatch.Kernel(op, "triton", run, gradients=True, proven=frozenset()),
        dispatch.Kernel(op, "torch", run, gradients=True),
        dispatch.Kernel(op, "reference", run, gradients=True),
    )
    monkeypatch.setitem(dispatch.registry.kernels, op, kernels)
    return kernels[1]


@pytest.fixture
def triton(monkeypatch):
    return kernels_of("linear", monkeypatch)


#: Arguments for tests in which only the tensors matter.
PLAIN = LinearArguments(None, None)


def call(rows=32, dtype=torch.bfloat16, needs_grad=False, device="cuda"):
    with FakeTensorMode():
        return Call(
            "linear", (torch.empty(rows, 8, device=device, dtype=dtype),), needs_grad, PLAIN
        )


def test_validated_faster_kernels_are_selected(triton):
    write_record(
        verdict(),
        verdict(dtype="float16", time=3e-5),
        verdict(dtype="float32", right=False, problem="error 0.5"),
        verdict(gradients=True, **UNTIMED, problem="no memory"),
    )
    assert select(call()).backend == "triton"
    assert dispatch.explain_call(call()).reasons["triton"] == []
    expected = {
        call(dtype=torch.float16): "not faster than PyTorch on this machine: 30 us, PyTorch 20 us "
        "(float16, up to 64 rows)",
        call(dtype=torch.float32): "its results were wrong on this machine (float32, up to 64 "
        "rows: error 0.5)",
        call(needs_grad=True): "it could not be timed on this machine (bfloat16, up to 64 rows, "
        "with gradients: no memory)",
        call(rows=65): "no call like this one was measured on this machine (bfloat16, up to 1024 "
        "rows), so PyTorch's op is preferred; `python -m transformer_fast prove` measures most, in "
        f"{proof.DURATION}",
    }
    for other, why in expected.items():
        assert select(other).backend == "torch"
        assert dispatch.explain_call(other).reasons["triton"] == [why]
        assert select(other, "triton").backend == "triton"


def test_cpu_kernels_of_a_set_never_timed_are_selected_by_the_record(monkeypatch):
    """Until then PyTorch's op runs, also for whole layers; a named backend needs no record."""
    run = dispatch.unpacked(reference.linear)
    options = {"gradients": True, "devices": ("cpu",), "proven": frozenset()}
    kernels = (
        dispatch.Kernel("linear", "cpu", run, **options),
        dispatch.Kernel("linear", "torch", run, gradients=True),
        dispatch.Kernel("linear", "reference", run, gradients=True),
    )
    monkeypatch.setitem(dispatch.registry.kernels, "linear", kernels)
    layer = dispatch.Kernel("argmax", "cpu", torch.argmax, **options)
    monkeypatch.setitem(dispatch.registry.kernels, "argmax", (layer,))
    of_layer = Call("argmax", (torch.zeros(2, 3),), False, LayerArguments())
    one = call(device="cpu", dtype=torch.float32)
    assert select(one).backend == "torch"
    assert select(one, "cpu").backend == "cpu"
    [why] = dispatch.explain_call(one).reasons["cpu"]
    assert why.startswith("not validated on this machine yet (nothing was measured on this machine")
    assert proof.COMMAND in why
    assert state(kernels[0]) == "if named"
    assert dispatch.only_pytorch_runs("linear", one.tensors[0])
    write_record(verdict(backend="cpu", dtype="float32"))
    assert select(one).backend == "cpu"
    assert state(kernels[0]) == "ready"
    assert select(call(device="cpu", dtype=torch.bfloat16)).backend == "torch"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    monkeypatch.setattr(proof, "machine_of", lambda device: MACHINE._replace(target="other"))
    assert select(one).backend == "torch"  # the record is for another number of threads
    assert dispatch.find(of_layer) is None
    with dispatch.use_backend("cpu"):
        assert dispatch.find(of_layer) is layer


def test_plain_calls_do_not_bypass_the_record(monkeypatch):
    """The fast path calls no kernel that needs validation."""
    x = torch.randn(600, 512)
    kernel = kernel_of("layer_norm")
    calls = []
    mine = dataclasses.replace(kernel, function=lambda given: calls.append(given) or x)
    for proven, count in ((None, 1), (frozenset(), 0)):
        dispatch.register(dataclasses.replace(mine, proven=proven))
        try:
            functional.layer_norm(x, (512,), x[0], x[1])
        finally:
            dispatch.register(kernel)
        assert len(calls) == count
        calls.clear()


def test_gains_are_of_right_timed_kernels():
    assert (verdict().gain, verdict().chosen) == (2.0, True)
    assert not verdict(torch_time=1.03e-5).chosen  # within noise
    assert verdict(right=False).gain == verdict(time=None).gain == 0.0


def test_the_fastest_backend_is_selected(triton, monkeypatch):
    """The fastest backend that supports the call, in any order of backends."""
    faster, slower = verdict(torch_time=9e-5), verdict(backend="cuda", torch_time=3e-5)
    write_record(faster, slower, *(one._replace(dtype="float16") for one in (faster, slower)))
    assert select(call()).backend == "triton"
    found = dispatch.explain_call(call())
    assert found.backend == "triton"
    assert found.reasons["triton"] == []
    assert found.reasons["cuda"] == [
        "on this machine it is 3 times as fast as PyTorch's op, and 'triton' 9 times"
    ]
    assert select(call(), "cuda").backend == "cuda"
    refusing = dataclasses.replace(triton, refuses=lambda call: "not this")
    kernels = dispatch.kernels("linear")
    monkeypatch.setitem(dispatch.registry.kernels, "linear", (kernels[0], refusing, *kernels[2:]))
    assert select(call()).backend == "cuda"
    monkeypatch.setitem(dispatch.registry.kernels, "linear", kernels)
    write_record(verdict(torch_time=3e-5), verdict(backend="cuda", torch_time=9e-5))
    assert select(call()).backend == "cuda"


def test_without_a_record_the_reason_names_the_command(triton):
    assert select(call()).backend == "torch"
    [why] = dispatch.explain_call(call()).reasons["triton"]
    assert f"`python -m transformer_fast prove` does it, in {proof.DURATION}" in why


def test_committed_results_apply_without_a_record(triton, monkeypatch):
    proven = dataclasses.replace(triton, proven=frozenset({90}))
    kernels = dispatch.kernels("linear")
    monkeypatch.setitem(dispatch.registry.kernels, "linear", (kernels[0], proven, *kernels[2:]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert select(call()).backend == "triton"


def test_traced_programs_use_the_record(triton):
    write_record(verdict())

    @torch.compile(backend="eager", fullgraph=True)
    def asked(x):
        why, gain = proof._decide("linear", "triton", "bfloat16", ROWS, False, x.device)
        other, _ = proof._decide("linear", "triton", "float32", ROWS, False, x.device)
        return x + (why is None) + (other is None) + (gain == 2.0)

    assert torch.equal(asked(torch.zeros(2)), torch.full((2,), 2.0))


def test_cases_cover_the_common_shape_classes():
    classes = {(one.op, class_of(one)) for spec in OPS.values() for one in spec.gpu_cases}
    assert {op for op, _ in classes} == set(DIFFERENTIABLE)
    for size in (64, 128):
        for seen in ("no mask", "key lengths"):
            for batch in (4, 5):
                wanted = {
                    class_of(_gpu_case(batch, 16, queries, keys, size, seen))
                    for queries, keys in (
                        *itertools.product((1, 2, 4, 512, 513), (1, 512, 513, 2048)),
                        *itertools.product((1, 4), (2049, 4096)),
                        *((1, keys) for keys in (4097, 8192)),
                    )
                }
                assert len(wanted) == 4 * 2 + 2 + 1
                assert wanted <= {name for _, name in classes}, wanted
    for rows in (64, 65, 1025, 8193):
        call = Call("layer_norm", (torch.empty(rows, 512, device="meta"),), False, PLAIN)
        assert ("layer_norm", shape_class(call)) in classes
    trials = sum(len(list(on_device.trials(op))) for op in OPS)
    assert f"{trials:,} trials" in " ".join(
        (ROOT / "docs" / "guides" / "gpu.md").read_text().split()
    )
    packed = [class_of(_packed_case(1, 2, longest, 64)) for longest in (512, 513)]
    assert ["up to 512 keys" in packed[0], "up to 2048 keys" in packed[1]] == [True, True]


#: Times of a kernel, and of two implementations of PyTorch.
SOME = Times(1e-5, 2e-5), Times(3e-5, 2e-5), Times(1e-5, 4e-5)


def checked(*runs, gradients=False, times=SOME):
    kernels = [
        dispatch.Kernel("linear", backend, dispatch.unpacked(run), gradients=True)
        for backend, run in zip(("cuda", "triton"), runs, strict=False)
    ]
    found = on_device.checker(SMALL, torch.float32, gradients, CPU, fake_clock(times), kernels)
    # through JSON, the format in which the process of an op prints its results
    return [Verdict(*one) for one in json.loads(json.dumps(found))]


@pytest.mark.parametrize("gradients", [False, True])
def test_right_kernels_are_timed(gradients):
    [found] = checked(reference.linear, gradients=gradients)
    about = "linear", "cuda", "float32", ROWS, gradients
    assert found == Verdict(*about, True, 2e-5, 3e-5)
    assert found.chosen


def test_wrong_kernels_are_not_timed():
    def broken(*arguments):
        raise RuntimeError("no such tile")

    right, wrong = checked(reference.linear, wrong_linear)
    [raises] = checked(broken)
    assert right.right
    said = "output[", "RuntimeError in broken: no such tile"
    for found, problem in zip((wrong, raises), said, strict=True):
        assert not found.right
        assert problem in found.problem
        assert found.time is None


def test_backends_are_timed_on_the_same_inputs():
    seen = {}

    def keeping(name):
        def run(*arguments):
            seen.setdefault(name, {})[arguments[0].data_ptr()] = None
            return reference.linear(*arguments)

        return run

    times = Times(1e-5, 1e-6), Times(2e-5, 1e-6), Times(3e-5, 1e-6), Times(4e-5, 1e-6)
    cuda, triton = checked(keeping("cuda"), keeping("triton"), times=times)
    assert (cuda.gain, triton.gain) == (pytest.approx(3.0), pytest.approx(1.5))
    assert list(seen["cuda"]) == list(seen["triton"])
    assert len(seen["cuda"]) > 1


@pytest.mark.parametrize("gradients", [False, True])
def test_timed_calls_are_checked(gradients):
    """Detects a kernel that is wrong only at the timed size, or only in later calls."""
    calls = []

    def later(*arguments):
        calls.append(arguments)
        return reference.linear(*arguments) * (1.0 if len(calls) < 5 else 1.001)

    def of_many_rows(*arguments):
        return reference.linear(*arguments) * (1.0 if arguments[0].shape[0] < 33 else 1.001)

    for run in (later, of_many_rows):
        [found] = checked(run, gradients=gradients)
        assert not found.right
        assert "error" in found.problem


@pytest.mark.parametrize("seen", ["causal", "key lengths", "documents", "bias"])
@pytest.mark.parametrize("gradients", [False, True])
def test_the_truth_of_attention_does_not_depend_on_chunks(gradients, seen, monkeypatch):
    drawn = _gpu_case(2, 3, 7, 9, 4, seen).build(
        torch.float32, CPU, torch.Generator().manual_seed(0)
    )
    packed = _packed_case(3, 2, 9, 4).build(torch.float32, CPU, torch.Generator().manual_seed(0))
    for arguments in (drawn, packed):
        whole = accuracy.truth("attention", arguments, gradients)
        with monkeypatch.context() as patch:
            patch.setattr(accuracy, "SCORES_AT_ONCE", 1)
            parts = accuracy.truth("attention", arguments, gradients)
        for one, other in zip(whole, parts, strict=True):
            assert len(one) == len(other)
            for a, b in zip(one, other, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(b, a)


def test_refused_calls_give_no_verdict():
    kernel = dispatch.Kernel(
        "linear", "triton", dispatch.unpacked(reference.linear), refuses=lambda call: "not this"
    )
    assert on_device.checker(SMALL, torch.float32, False, CPU, fake_clock(()), [kernel]) == []


def test_an_ops_process_reports_each_trial(capsys, monkeypatch, a_gpu):
    """Calls that run out of memory have no verdict."""

    def too_large(*arguments):
        raise torch.OutOfMemoryError

    asked = []
    kernel = dispatch.Kernel("linear", "triton", too_large, proven=frozenset())
    monkeypatch.setitem(dispatch.registry.kernels, "linear", (kernel,))
    trial = SMALL, torch.float32, False
    monkeypatch.setattr(on_device, "trials", lambda *given: asked.append(given) or [trial] * 2)
    assert main(prove._command("linear", CPU)[3:]) == 0
    assert capsys.readouterr().out == "[]\n[]\n"
    assert asked == [("linear", "cpu")]


def test_cpu_kernels_are_checked_and_timed(capsys, monkeypatch):
    """Runs the process of one op on the CPU, with a real kernel and the host's clock."""
    if (kernel := kernel_of("layer_norm")).unavailable is not None:
        pytest.skip(kernel.unavailable)
    smallest = min(
        (case for case, *_ in on_device.trials("layer_norm", "cpu")),
        key=lambda one: one.build(torch.float32, "meta", None)[0].numel(),
    )
    monkeypatch.setattr(on_device, "trials", lambda *given: [(smallest, torch.float32, True)])
    others = [
        one for one in dispatch.kernels("layer_norm") if one.backend in ("torch", "reference")
    ]
    mine = dataclasses.replace(kernel, proven=frozenset())
    monkeypatch.setitem(dispatch.registry.kernels, "layer_norm", (mine, *others))
    assert main(prove._command("layer_norm", CPU)[3:]) == 0
    [[found]] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = Verdict(*found)
    assert (found.op, found.backend, found.dtype) == ("layer_norm", "cpu", "float32")
    assert (found.gradients, found.right, found.problem) == (True, True, None)
    assert found.shape == class_of(smallest)
    assert 0.0 < found.time < 1.0
    assert 0.0 < found.torch_time < 1.0


def test_every_op_has_cases_for_cpus():
    for op in OPS:
        assert list(on_device.trials(op, "cpu"))


class Device:
    """A GPU on a simulated clock: a queue of launches that are executed in order."""

    DEPTH = 1024

    def __init__(self, monkeypatch):
        self.now = 0.0  # time on the host
        self.ends = []  # end of each launch, in order
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.launch(cycles / 2e9))
        monkeypatch.setattr(clock.time, "perf_counter", lambda: self.now)

    def launch(self, seconds, host=0.0):
        self.now += host
        if len(self.ends) >= self.DEPTH:  # the host waits until the queue has space
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
        (1e-3, 1, 20),  # slower than expected
        (2e-4, 20, 200),  # more launches than the queue holds
        (0.05, 3, 5),
    ],
)
def test_timing_keeps_the_device_queue_full(host, launches, repeats, monkeypatch):
    device = Device(monkeypatch)

    def call(i):
        for _ in range(launches):
            device.launch(2e-6 / launches, host / launches)

    found = DeviceClock(torch.device("cuda"))(call, 2, repeats)
    assert found.device == pytest.approx(2e-6)
    assert found.host == pytest.approx(host)


def test_a_class_has_the_verdict_of_its_worst_case():
    slower = verdict(time=1.5e-5)
    wrong = verdict(right=False, **UNTIMED)
    assert on_device.worst([verdict(), slower]) == (slower,)
    assert on_device.worst([wrong, verdict(), slower]) == (wrong,)
    assert len(on_device.worst([verdict(), verdict(dtype="float32")])) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_commands_without_a_gpu_say_so(capsys, tmp_path):
    path = tmp_path / "gpu.json"
    assert main(["prove"]) == gpu.main(["env", "--json", str(path)]) == 2
    prove_said, gpu_said = capsys.readouterr().err.splitlines()
    assert prove_said.startswith("prove needs an NVIDIA GPU")
    assert gpu_said.startswith("benchmarks.gpu needs an NVIDIA GPU")
    assert not path.exists()


def program(*verdicts, **then):
    """Replaces an op's process: prints the verdicts of each trial."""
    lines = [{"line": of_trial} for of_trial in verdicts]
    return stand_in("", [*lines, *([then] if then else [])])


@pytest.fixture
def a_gpu(monkeypatch):
    """A fake GPU; the processes' outputs are prescribed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: MACHINE.device)
    monkeypatch.setenv("COLUMNS", "300")


def test_prove_from_end_to_end(capsys, monkeypatch, a_gpu):
    commands = {
        "linear": program([verdict()], [], [verdict(time=1.2e-5)]),
        "attention": program([verdict(op="attention")], dies=True),
        "layer_norm": program(
            [verdict(op="layer_norm", right=False, problem="error 7")], raises=True
        ),
    }
    monkeypatch.setattr(prove, "_command", lambda op, *_: commands[op])
    write_record(verdict(op="cross_entropy"), verdict(time=5.0))
    assert main(["prove", "--op", *commands]) == 1
    text = capsys.readouterr().out
    assert "attention: its process ended before it was done (signal 11)" in text
    assert "(status 1: ZeroDivisionError: division by zero)" in text
    assert "layer_norm, triton, bfloat16, up to 64 rows: error 7" in text
    found, _ = proof.read(MACHINE)
    assert {(v.op, v.time, v.right) for v in found.verdicts} == {
        ("cross_entropy", 1e-5, True),  # an earlier verdict
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


def verdicts_of_file():
    found, _ = proof.read(MACHINE)
    return set(found.verdicts) if found else None


@pytest.fixture
def proving(monkeypatch, a_gpu, triton):
    """Runs ``prove``; ``commands`` replace the processes of the ops."""
    kernels_of("layer_norm", monkeypatch)

    def run(commands):
        monkeypatch.setattr(prove, "_command", lambda op, device: commands[op])
        return main(["prove", "--op", *commands])

    return run


def test_earlier_verdicts_are_kept_or_replaced():
    """Replaces verdicts on the same class and kernel; drops those of ops whose process crashed."""
    of_attention, slower = verdict(op="attention"), verdict(time=9.0)
    before, found = (Proof(MACHINE, "", 1.0, one) for one in ((of_attention, slower), (verdict(),)))
    assert set(proof.merged(None, found).verdicts) == {verdict()}
    assert set(proof.merged(before, found).verdicts) == {of_attention, verdict()}
    assert set(proof.merged(before, found, ["attention"]).verdicts) == {verdict()}


def test_results_are_kept_after_ctrl_c(proving, monkeypatch, capsys):
    """Simulates Ctrl-C after the first trial of linear, before its class is finished in float32."""
    lines_of = prove.lines_of
    [(case, *_), *_] = on_device.trials("linear")
    unfinished = verdict(dtype="float32", shape=class_of(case))

    def until_linear(process, take, *rest):
        if process != "linear":
            return lines_of(process, take, *rest)
        take([verdict(shape="a class"), unfinished])
        raise KeyboardInterrupt

    monkeypatch.setattr(prove, "lines_of", until_linear)
    of_norm = verdict(op="layer_norm")
    assert proving({"layer_norm": program([of_norm]), "linear": "linear"}) == 130
    shown = capsys.readouterr()
    assert shown.err == "interrupted\n"
    assert "linear: its process ended before it was done (interrupted)" in shown.out
    assert verdicts_of_file() == {of_norm, verdict(shape="a class")}


# `python -m benchmarks.gpu`


@pytest.fixture
def processes(monkeypatch):
    """A fake GPU, and worker processes that need none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "_command", stand_in)


def session(tmp_path, seconds=60.0, stage="bench"):
    found = gpu.Session(seconds, tmp_path / "gpu.json")
    found.begin(stage)
    return found


def written(tmp_path):
    return json.loads((tmp_path / "gpu.json").read_text())["stages"]


def test_stages_run_in_order_and_report_failures(processes, tmp_path, monkeypatch, capsys):
    plans = {
        "env": [{"says": {"gpu": "NVIDIA Test"}}],
        "warm": [{"n": 0, "raises": True}],
        "bench": [{"op": "linear", "says": {"triton": {"why_not": "wrong: x", "wrong": True}}}],
    }
    for stage, items in plans.items():

        def plan(session, stage=stage, items=items):
            session.do(stage, [items], 1)

        monkeypatch.setitem(gpu.STAGES, stage, gpu.STAGES[stage]._replace(plan=plan))
    monkeypatch.setenv("COLUMNS", "100")
    given = ["bench", "warm", "env", "--json", str(tmp_path / "gpu.json")]
    assert gpu.main(given) == 1
    found = written(tmp_path)
    assert list(found) == ["env", "warm", "bench"]
    assert found["env"]["results"][0]["result"] == {"gpu": "NVIDIA Test"}
    text = " ".join(capsys.readouterr().out.split())
    assert "ZeroDivisionError" in text
    assert "wrong: x" in text
    assert gpu.main(["env", "--json", str(tmp_path / "gpu.json")]) == 0
    assert list(written(tmp_path)) == ["env"]


def test_a_crash_loses_only_one_job(processes, tmp_path):
    items = [{"n": 0}, {"n": 1, "dies": True}, {"n": 2}, {"n": 3, "raises": True}, {"n": 4}]
    found = session(tmp_path).do("bench", [items, [{"n": 5}]], 2)
    outcomes = {one["n"]: one.get("problem", one.get("result")) for one in found}
    assert outcomes == {
        **dict.fromkeys((0, 2, 4, 5), "done"),
        1: "signal 11",
        3: "status 1: ZeroDivisionError: division by zero",
    }
    assert sorted(one["n"] for one in written(tmp_path)["bench"]["results"]) == list(range(6))


def test_hanging_processes_are_terminated(processes, tmp_path, monkeypatch):
    monkeypatch.setitem(gpu.STAGES, "warm", gpu.STAGES["warm"]._replace(limit=9.0))
    found = session(tmp_path, stage="warm").do("warm", [[{"sleeps": 60}, {"n": 1}]], 1)
    assert [one.get("problem") for one in found] == ["no output for 9 seconds", None]


def test_jobs_beyond_the_time_limit_are_skipped(processes, tmp_path, monkeypatch):
    """The limit passes after the first result."""

    def monotonic():
        return 1000.0 if (tmp_path / "gpu.json").exists() and results() else 0.0

    def results():
        return written(tmp_path)["bench"]["results"]

    for module in (gpu, on_device):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic))
    one = session(tmp_path)
    one.do("bench", [[{"n": 0}, {"n": 1, "sleeps": 600}, {"n": 2}]], 1)
    assert one.do("bench", [[{"n": 3}]], 1) == []
    found = written(tmp_path)["bench"]
    assert [entry["n"] for entry in found["results"]] == [0]
    assert [entry["n"] for entry in found["skipped"]] == [1, 2, 3]


def test_worker_processes_print_only_results():
    script = """
import torch
from benchmarks import gpu
def noisy(item, device, clock):
    print("hello")
    return 1 / item["n"]
gpu.STAGES["warm"] = gpu.STAGES["warm"]._replace(work=noisy)
raise SystemExit(gpu.alone("warm", [{"n": 2}, {"n": 0}, {"n": 4}], torch.device("cpu")))
"""
    assert [json.loads(line) for line in python("-c", script).stdout.splitlines()] == [
        {"result": 0.5},
        {"problem": "ZeroDivisionError in noisy: division by zero"},
        {"result": 0.25},
    ]


@pytest.fixture
def small(monkeypatch):
    """Uses cases small enough for a CPU, and kernels of linear that run on it."""
    monkeypatch.setitem(gpu._CASES, ("linear", "timed"), SMALL)
    kernels = (
        dispatch.Kernel("linear", "triton", dispatch.unpacked(reference.linear), gradients=True),
        dispatch.Kernel("linear", "torch", dispatch.unpacked(reference.linear)),
    )
    monkeypatch.setitem(dispatch.registry.kernels, "linear", kernels)
    return kernels


def change_triton(monkeypatch, small, run):
    changed = (dataclasses.replace(small[0], function=dispatch.unpacked(run)), small[1])
    monkeypatch.setitem(dispatch.registry.kernels, "linear", changed)


def item(**rest):
    return {"op": "linear", "case": "timed", "dtype": "float32", "gradients": False, **rest}


def ticks(*seconds):
    return fake_clock([Times(device, 2 * device) for device in seconds])


@pytest.mark.parametrize("gradients", [False, True])
def test_bench_times_right_kernels_on_device_and_host(small, monkeypatch, gradients):
    found = gpu.bench(item(gradients=gradients), CPU, ticks(1e-5, 2e-5, 3e-5))
    assert found["triton"] == {"device": [1e-5] * 7, "host": [2e-5] * 7}
    second = {"device": [2e-5] * 7, "host": [4e-5] * 7}
    assert found["by hand" if gradients else "torch"] == second
    if gradients:
        assert "no backward" in found["torch"]["why_not"]
    change_triton(monkeypatch, small, wrong_linear)
    if not gradients:
        found = gpu.bench(item(), CPU, ticks(2e-5, 3e-5))
        assert found["triton"]["wrong"]
        assert found["triton"]["why_not"].startswith("wrong: output")
        assert "device" in found["by hand"]


class TestTiles:
    """Requires Triton, whose tile tables `tune` is about."""

    @pytest.fixture(autouse=True)
    def config(self):
        pytest.importorskip("triton", reason="Triton is not installed")
        from transformer_fast.backends.triton import config

        return config

    def test_tiles_are_checked_before_timing(self, small, monkeypatch, config):
        seen = []

        def run(*arguments):
            tile = config.matmul(90, 4096, 1024, True)
            seen.append(tile.rows)
            if tile.rows == 32:
                raise RuntimeError("out of shared memory")
            return wrong_linear(*arguments) if tile.rows == 48 else reference.linear(*arguments)

        change_triton(monkeypatch, small, run)
        known = item(function="matmul")
        tiles = [None, *([rows, 64, 64, 8, 8, 3] for rows in (16, 32, 48))]
        assert [gpu.tune({**known, "tile": tile}, CPU, None)[:14] for tile in tiles] == [
            *("right", "right"),
            *("wrong: Runtime", "wrong: output["),
        ]
        found = gpu.tune({**known, "tiles": tiles[:2]}, CPU, ticks(2e-5, 1e-5))
        assert list(found.items()) == [(json.dumps(tiles[1]), 1e-5), ("null", 2e-5)]
        assert 16 in seen
