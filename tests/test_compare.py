"""``python -m transformer_fast compare``."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
from harness import kernel_of

from transformer_fast import _native, dispatch
from transformer_fast.__main__ import main
from transformer_fast.cli import compare, form
from transformer_fast.measure import machine
from transformer_fast.measure.benchmark_case import Row
from transformer_fast.measure.cases import VOCABULARY, Size, op_case
from transformer_fast.measure.clock import Summary
from transformer_fast.specs import OPS

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def _short(monkeypatch, threads):
    """Parity checks are complete; sizes are small and timing is as short as possible."""
    monkeypatch.setenv("COLUMNS", "160")  # wide enough that no name wraps, on any machine
    monkeypatch.setattr(compare, "QUICK", dataclasses.replace(compare.QUICK, seconds=0.01, least=2))
    torch.set_num_threads(1)
    monkeypatch.setattr(compare, "_LONGEST", 96)
    monkeypatch.setattr(compare, "_MODEL_LONGEST", 40)
    monkeypatch.setattr(compare, "_MODEL", Size(48, 4, 96, layers=2, vocabulary=VOCABULARY))


def run(*options: str) -> int:
    return main(["compare", "--quick", *options])


def test_compare_of_an_op_prints_a_table_and_writes_json(capsys, tmp_path):
    path = tmp_path / "found.json"
    assert run("--op", "layer_norm", "attention", "--json", str(path)) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert re.search(r"\nright in all \d+; [\d.]+ to [\d.]+ times PyTorch; worst: ", shown.out)
    assert "English text, 1 batch of 8 paragraphs" in shown.out
    found = json.loads(path.read_text())
    assert found["machine"]["torch"] == torch.__version__
    assert found["options"]["op"] == ["layer_norm", "attention"]
    rows = {(row["op"], row["case"], row["candidate"]): row for row in found["rows"]}
    assert {op for op, _, _ in rows} == {"layer_norm", "attention"}
    for (_, _, candidate), row in rows.items():
        if candidate in ("reference", "torch"):
            assert row["ok"]
            assert row["time"]["low"] <= row["time"]["median"] <= row["time"]["high"]
            assert row["vs_reference"]["value"] > 0
    assert rows["attention", "causal", "reference"]["vs_reference"]["value"] == 1.0
    assert sum(row["chosen"] for row in found["rows"]) == 5
    if _native.module is not None:
        assert 0 < rows["attention", "causal", "reference"]["roof_share"] < 1.5


def test_compare_of_layers_and_a_model_in_low_precision(capsys):
    assert run("--op", "linear", "encoder_layer", "transformer", "--dtype", "bfloat16") == 0
    shown = capsys.readouterr().out
    for name in ("bfloat16 on cpu", "torch eager", "torch fast path", "base, 2+2 layers"):
        assert name in shown


def test_wrong_kernels_fail_the_run(capsys, monkeypatch):
    right = kernel_of("layer_norm", "reference")
    wrong = dataclasses.replace(
        right, backend="cpu", function=lambda arguments: right.function(arguments) + 1e-3
    )
    before = dispatch.kernels("layer_norm")
    monkeypatch.setitem(dispatch.registry.kernels, "layer_norm", before)
    dispatch.register(wrong)
    assert run("--op", "layer_norm") == 1
    shown = capsys.readouterr().out
    assert "outside the error budget" in shown
    assert "1 of 2 results are wrong" in shown


def test_a_named_backend_is_compared_with_pytorch_and_the_reference(tmp_path):
    path = tmp_path / "found.json"
    options = ("--op", "feed_forward", "encoder_layer", "--backend", "reference")
    assert run(*options, "--json", str(path)) == 0
    names = {row["candidate"] for row in json.loads(path.read_text())["rows"]}
    assert names == {"reference", "torch", "torch eager", "torch fast path"}


@pytest.mark.sampled(20, 50)
@pytest.mark.parametrize("op", dispatch.OPS)
def test_every_op_is_checked(tmp_path, op):
    path = tmp_path / "found.json"
    assert run("--op", op.upper(), "--json", str(path)) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["op"] for row in rows} == {op}
    ready = {k.backend for k in dispatch.kernels(op) if not k.unavailable and k.proven is None}
    for backend in ready - {"torch"}:
        assert any(row["candidate"] == backend and row["ok"] for row in rows), backend


def test_unchecked_ops_fail_the_run(capsys, monkeypatch):
    monkeypatch.setattr(compare, "CASES", [case for case in compare.CASES if case[0] != "linear"])
    assert run("--op", "linear") == 1
    assert "no result was checked for linear" in capsys.readouterr().out


def test_a_backend_without_kernels_fails_with_its_reason(capsys):
    assert run("--op", "linear_cross_entropy", "encoder_layer", "--backend", "CUDA") == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "no result was checked for cuda, which was named" in shown
    assert "cuda: it has no kernel for this op (linear_cross_entropy 512" in shown
    assert "backend 'cuda' does not support this call of linear: it supports cuda tensors" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--op", "softmax"], "argument --op: invalid choice: 'softmax' (choose from"),
        (["--backend", "tpu"], "argument --backend: invalid choice: 'tpu'"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--device", "warp"], "argument --device: 'warp' cannot be used here:"),
        (["--device", "meta"], "argument --device: 'meta' cannot be used here:"),
        (["--device", "cuda:99"], "argument --device: 'cuda:99' cannot be used here:"),
        (["--threads", "0"], "argument --threads: must be at least 1, not 0"),
        (["--threads", "two"], "argument --threads: invalid int value: 'two'"),
        (["--json", "/nowhere/x.json"], "argument --json: there is no folder /nowhere"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_invalid_options_are_rejected(capsys, options, message):
    with pytest.raises(SystemExit) as stopped:
        main(["compare", *options])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [["info"], ["compare"]])
def test_ctrl_c_exits_with_status_130(capsys, monkeypatch, command):
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "describe", interrupted)
    monkeypatch.setattr(compare, "run", interrupted)
    assert main(command) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_noisy_times_are_reported():
    rows = [Row("attention", "causal", name, True, False) for name in ("cpu", "torch", "peer")]
    rows[0].time = rows[1].time = Summary(0.0124, 0.0121, 0.0129, 25)
    assert form.busy(rows) is None
    assert form.busy([]) is None
    rows[0].time = rows[2].time = Summary(0.01, 0.009, 0.013, 25)
    assert "quartiles of a typical time are 40 % apart" in str(form.busy(rows))


def test_fallbacks_give_the_reason_of_the_devices_backend(monkeypatch):
    """Covers an op that runs on PyTorch, and the ops inside a module."""
    for op in ("layer_norm", "linear"):
        monkeypatch.setitem(dispatch.registry.kernels, op, dispatch.kernels(op))
        for backend, devices in (("cpu", ("cpu",)), ("triton", ("cuda",))):
            dispatch.register(
                dataclasses.replace(
                    kernel_of(op, "reference"), backend=backend, devices=devices,
                    unavailable=f"there is no {backend} here",
                )
            )  # fmt: skip
    arguments = OPS["layer_norm"].cases[0].build(torch.float32, "cpu", None)
    case = op_case("layer_norm", "x", [[arguments]])
    message = "because cpu: there is no cpu here"
    assert form.fallbacks(case) == [f"layer_norm x runs on '{case.chosen}', {message}"]
    inside = {("layer_norm", "torch"): case.inside["layer_norm", str(case.chosen)]}
    inside |= {("linear", "torch"): inside["layer_norm", "torch"], ("attention", "cpu"): {}}
    module = dataclasses.replace(case, op="encoder_layer", inside=inside)
    assert form.fallbacks(module) == [
        f"layer_norm, linear in encoder_layer run on 'torch', {message}"
    ]
    far = {("layer_norm", "torch"): {"cuda": ["it supports cuda tensors"], "cpu": []}}
    (line,) = form.fallbacks(dataclasses.replace(case, inside=far))
    assert line.endswith("because cuda: it supports cuda tensors")
