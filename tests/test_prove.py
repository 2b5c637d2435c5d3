"""What a GPU was measured to do: the file, what the dispatcher makes of it, and the command."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode

from transformer_fast import dispatch, proof, reference
from transformer_fast.__main__ import main
from transformer_fast.cli import info, prove
from transformer_fast.dispatch import Call, select
from transformer_fast.measure import device as on_device
from transformer_fast.proof import Machine, Proof, Verdict, shape_class
from transformer_fast.specs import OPS
from transformer_fast.specs.gpu import GPU_CASES, GpuCase, _attention_case, _packed_case
from transformer_fast.specs.spec import case
from transformer_fast.testing import call_of

MACHINE = Machine("NVIDIA Test", 90, "13000", "2.13.0", "3.7.1", "0.1")
ROWS = "up to 64 rows"


def verdict(**changes):
    known = Verdict("linear", "triton", "bfloat16", ROWS, False, True, 1e-5, 2e-5)
    return known._replace(**changes)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and a GPU that can be asked for its name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(proof, "machine_of", lambda device=None: MACHINE)
    proof.known.cache_clear()
    yield tmp_path
    proof.known.cache_clear()


def prove_that(*verdicts):
    return proof.write(Proof(MACHINE, "2026-11-22T12:00:00+00:00", verdicts))


def test_what_is_written_is_read():
    path = prove_that(verdict(), verdict(right=False, seconds=None, problem="NaN"))
    found, problem = proof.read(MACHINE)
    assert problem is None
    assert found == Proof(
        MACHINE,
        "2026-11-22T12:00:00+00:00",
        (verdict(), verdict(right=False, seconds=None, problem="NaN")),
    )
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
    "a wrong type": lambda path: changed(path, lambda c: c["verdicts"][0].update(seconds="fast")),
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
    """A kernel of linear whose numbers are proven nowhere, and PyTorch's."""
    run = reference.linear
    kernels = (
        dispatch.Kernel("linear", "triton", run, gradients=True, proven=frozenset()),
        dispatch.Kernel("linear", "torch", run, gradients=True),
        dispatch.Kernel("linear", "reference", run, gradients=True),
    )
    monkeypatch.setitem(dispatch._state.kernels, "linear", kernels)
    return kernels[0]


def call(rows=32, dtype=torch.bfloat16, needs_grad=False):
    with FakeTensorMode():
        return Call("linear", (torch.empty(rows, 8, device="cuda", dtype=dtype),), needs_grad)


def test_the_dispatcher_takes_what_was_right_and_faster(triton):
    prove_that(
        verdict(),
        verdict(dtype="float16", seconds=3e-5),
        verdict(dtype="float32", right=False, problem="error 0.5"),
        verdict(gradients=True, seconds=None, torch_seconds=None, problem="no memory"),
    )
    assert select(call()).backend == "triton"
    assert dispatch.explain_call(call()).reasons["triton"] == []
    expected = {
        call(dtype=torch.float16): "on this GPU PyTorch's own took 20 microseconds and it 30 "
        "(float16, up to 64 rows)",
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


def test_without_a_proof_the_command_is_named(triton):
    assert select(call()).backend == "torch"
    [why] = dispatch.explain_call(call()).reasons["triton"]
    assert "`python -m transformer_fast prove` does it, in minutes" in why


def test_committed_results_count_without_a_proof(triton, monkeypatch):
    proven = dataclasses.replace(triton, proven=frozenset({90}))
    monkeypatch.setitem(dispatch._state.kernels, "linear", (proven,))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert select(call()).backend == "triton"


def test_a_traced_program_obeys_the_proof(triton):
    prove_that(verdict())

    @torch.compile(backend="eager", fullgraph=True)
    def asked(x):
        why = proof._decide("linear", "triton", "bfloat16", ROWS, False, 0)
        other = proof._decide("linear", "triton", "float32", ROWS, False, 0)
        return x + (why is None) + (other is None)

    assert torch.equal(asked(torch.zeros(2)), torch.ones(2))


def test_two_sizes_of_a_case_are_of_one_class():
    for one in GPU_CASES:
        checked, timed = (
            shape_class(call_of(one.op, each.build(torch.bfloat16, "meta", None)))
            for each in (one.checked, one.timed)
        )
        assert checked == timed, one.name
    assert {one.op for one in GPU_CASES} == set(OPS)


def class_of(case):
    return shape_class(call_of("attention", case.build(torch.bfloat16, "meta", None)))


def test_attention_is_measured_at_few_and_at_many_keys():
    measured = {class_of(one.timed) for one in GPU_CASES if one.op == "attention"}
    for size in (64, 128):
        for seen in ("no mask", "key lengths"):
            classes = {
                class_of(_attention_case(2, 1, queries, keys, size, seen))
                for queries in (4, 5, 512, 513)
                for keys in (1, 512, 513)
            }
            assert len(classes) == 6
            assert classes <= measured, classes - measured
    packed = [class_of(_packed_case(1, 2, longest, 64)) for longest in (512, 513)]
    assert ["up to 512 keys" in packed[0], "more than 512 keys" in packed[1]] == [True, True]


def test_a_proof_of_an_older_version_is_ignored_with_a_sentence():
    path = prove_that(verdict())
    changed(path, lambda content: content.update(format=1))
    found, problem = proof.read(MACHINE)
    assert found is None
    assert problem == (
        f"{path} is ignored, since it is of format 1 and this version's is 2; "
        f"`{proof.COMMAND}` replaces it"
    )


def fake_clock(times):
    """Seconds by the order in which calls come: what a kernel takes, then PyTorch's ways."""
    known = {}

    def clock(call, inputs, repeats):
        for i in range(repeats):
            call(i % inputs)
        return times[known.setdefault(call, len(known))]

    return clock


SMALL = GpuCase(
    "linear",
    case("checked", lambda draw: (draw.normal(9, 8), draw.weight(6, 8), None, None, None)),
    case("timed", lambda draw: (draw.normal(33, 8), draw.weight(6, 8), None, None, None)),
)


def judged(kernel, gradients=False, times=(1e-5, 2e-5, 3e-5), monkeypatch=None):
    monkeypatch.setattr(on_device, "cache_bytes", lambda device: 1)
    clock = fake_clock(times)
    return on_device.judge(SMALL, kernel, torch.float32, gradients, torch.device("cpu"), clock)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_right_kernel_is_timed(gradients, monkeypatch):
    kernel = dispatch.Kernel("linear", "triton", reference.linear, gradients=True)
    found = judged(kernel, gradients, monkeypatch=monkeypatch)
    assert found == Verdict("linear", "triton", "float32", ROWS, gradients, True, 1e-5, 2e-5, None)
    assert found.chosen


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    def wrong(*arguments):
        return reference.linear(*arguments) + 1e-3

    def broken(*arguments):
        raise RuntimeError("no such tile")

    for run, said in ((wrong, "output["), (broken, "RuntimeError in broken: no such tile")):
        found = judged(dispatch.Kernel("linear", "triton", run), monkeypatch=monkeypatch)
        assert not found.right
        assert said in found.problem
        assert found.seconds is None


def test_a_call_that_a_kernel_refuses_is_no_verdict(monkeypatch):
    kernel = dispatch.Kernel("linear", "triton", reference.linear, refuses=lambda call: "not this")
    assert judged(kernel, monkeypatch=monkeypatch) is None


def test_the_worst_case_of_a_class_counts():
    slower = verdict(seconds=1.5e-5)
    wrong = verdict(right=False, seconds=None)
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
        "linear": program(verdict(), None, verdict(seconds=1.2e-5)),
        "attention": program(verdict(op="attention"), then="os.kill(os.getpid(), 11)"),
        "layer_norm": program(verdict(op="layer_norm", right=False, problem="error 7"), then="1/0"),
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(prove, "_command", commands.__getitem__)
    monkeypatch.setenv("COLUMNS", "300")
    prove_that(verdict(op="cross_entropy"), verdict(seconds=5.0))
    assert main(["prove", "--op", *commands]) == 1
    text = capsys.readouterr().out
    assert "attention: its process ended before it was done (signal 11)" in text
    assert "(status 1: ZeroDivisionError: division by zero)" in text
    assert "layer_norm, triton, bfloat16, up to 64 rows: error 7" in text
    found, _ = proof.read(MACHINE)
    assert {(v.op, v.seconds, v.right) for v in found.verdicts} == {
        ("cross_entropy", 1e-5, True),  # from before
        ("linear", 1.2e-5, True),
        ("attention", 1e-5, True),
        ("layer_norm", 1e-5, False),
    }
    assert main(["prove", "--op", "linear"]) == 0
    assert info.proof_state().endswith("3 of 4 are right and faster than PyTorch")
    assert main(["prove", "--forget"]) == 0
    assert "removed" in capsys.readouterr().out
    assert proof.read(MACHINE)[0] is None
    assert main(["prove", "--forget"]) == 0
    assert "nothing to forget" in capsys.readouterr().out
