"""`python -m benchmarks.gpu`: its stages, its budget, its file, and what its processes do, on a CPU."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from bench_rows import CPU, SMALL, fake_clock, wrong_linear
from harness import python

from benchmarks import gpu
from transformer_fast import dispatch, reference
from transformer_fast.specs.attention import arrange
from transformer_fast.specs.gpu import BENCH_CASES, GPU_CASES, GpuCase
from transformer_fast.specs.spec import case

#: Stands for a process: each item says what becomes of it.
PROCESS = """
import json, os, sys, time
for item in json.loads(sys.argv[1]):
    if item.get("dies"):
        os.kill(os.getpid(), 11)
    if item.get("raises"):
        1 / 0
    time.sleep(item.get("sleeps", 0))
    print(json.dumps({"result": item.get("says", "done")}), flush=True)
"""


def stand_in(stage, items):
    return [sys.executable, "-c", PROCESS, json.dumps(items)]


@pytest.fixture
def processes(monkeypatch):
    """A GPU, and processes that need none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "_command", stand_in)


def session(tmp_path, seconds=60.0, stage="parity"):
    found = gpu.Session(seconds, tmp_path / "gpu.json", 2)
    found.begin(stage)
    return found


def written(tmp_path):
    return json.loads((tmp_path / "gpu.json").read_text())["stages"]


def test_without_a_gpu_it_says_so(capsys, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    path = tmp_path / "gpu.json"
    assert gpu.main(["env", "--json", str(path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("benchmarks.gpu needs an NVIDIA GPU")
    assert not path.exists()


@pytest.mark.parametrize("options", [["speed"], ["--seconds", "0"], ["--jobs", "0"]])
def test_wrong_options(options, capsys):
    with pytest.raises(SystemExit) as ended:
        gpu.main(options)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_stages_run_in_order_and_tell_what_was_wrong(processes, tmp_path, monkeypatch, capsys):
    plans = {
        "env": [{"says": {"gpu": "NVIDIA Test"}}],
        "smoke": [{"op": "linear", "says": {"forward": "wrong: error 7", "gradients": "right"}}],
        "bench": [{"op": "linear", "says": {"triton": {"why_not": "wrong: x", "wrong": True}}}],
    }
    for stage, items in plans.items():
        monkeypatch.setitem(
            gpu._PLANS, stage, lambda s, stage=stage, items=items: s.do(stage, [items], 1)
        )
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal, where there is a progress bar
    monkeypatch.setenv("COLUMNS", "100")
    given = ["bench", "smoke", "env", "--json", str(tmp_path / "gpu.json")]
    assert gpu.main(given) == 1
    found = written(tmp_path)
    assert list(found) == ["env", "smoke", "bench"]
    assert found["env"]["results"][0]["result"] == {"gpu": "NVIDIA Test"}
    shown = capsys.readouterr()
    text = " ".join(shown.out.split())
    bars = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.err)
    for stage in plans:
        assert re.search(rf"{stage} .* 1/1 ", bars)
    assert "env: 1 results, 0 skipped" in text
    assert "wrong: error 7" in text
    assert "wrong: x" in text
    assert gpu.main(["env", "--json", str(tmp_path / "gpu.json")]) == 0
    assert list(written(tmp_path)) == ["env"]


def test_a_crash_costs_one_piece_of_work(processes, tmp_path):
    items = [{"n": 0}, {"n": 1, "dies": True}, {"n": 2}, {"n": 3, "raises": True}, {"n": 4}]
    found = session(tmp_path).do("parity", [items, [{"n": 5}]], 2)
    told = {one["n"]: one.get("problem", one.get("result")) for one in found}
    assert told == {
        **dict.fromkeys((0, 2, 4, 5), "done"),
        1: "signal 11",
        3: "status 1: ZeroDivisionError: division by zero",
    }
    assert sorted(one["n"] for one in written(tmp_path)["parity"]["results"]) == list(range(6))


def test_a_process_that_hangs_is_given_up(processes, tmp_path, monkeypatch):
    monkeypatch.setitem(gpu.LIMITS, "smoke", 1.0)
    found = session(tmp_path, stage="smoke").do("smoke", [[{"sleeps": 60}, {"n": 1}]], 1)
    assert [one.get("problem") for one in found] == ["it said nothing for 1 seconds", None]


def test_what_does_not_fit_is_skipped(processes, tmp_path):
    start = time.monotonic()
    one = session(tmp_path, seconds=3.0)
    one.do("parity", [[{"n": 0}, {"n": 1, "sleeps": 60}, {"n": 2}]], 1)
    assert time.monotonic() - start < 20
    assert one.do("parity", [[{"n": 3}]], 1) == []
    found = written(tmp_path)["parity"]
    assert [entry["n"] for entry in found["results"]] == [0]
    assert [entry["n"] for entry in found["skipped"]] == [1, 2, 3]


def test_a_killed_run_keeps_what_it_had(tmp_path):
    path = tmp_path / "gpu.json"
    script = f"""
import pathlib, sys
sys.path.insert(0, "tests")
from benchmarks import gpu
from test_benchmarks_gpu import stand_in
gpu._command = stand_in
session = gpu.Session(60.0, pathlib.Path({str(path)!r}), 1)
session.begin("parity")
session.do("parity", [[{{"n": 0}}, {{"n": 1, "sleeps": 60}}]], 1)
"""
    with subprocess.Popen([sys.executable, "-c", script], start_new_session=True) as process:
        try:
            for _ in range(600):
                if path.exists() and written(tmp_path)["parity"]["results"]:
                    break
                time.sleep(0.1)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert written(tmp_path)["parity"]["results"] == [{"n": 0, "result": "done"}]
    assert list(tmp_path.iterdir()) == [path]


def test_a_process_of_its_own_prints_nothing_but_its_results():
    script = """
import torch
from benchmarks import gpu
def noisy(item, device, clock):
    print("hello")
    return 1 / item["n"]
gpu.WORK["smoke"] = noisy
raise SystemExit(gpu.alone("smoke", [{"n": 2}, {"n": 0}, {"n": 4}], torch.device("cpu")))
"""
    assert [json.loads(line) for line in python("-c", script).stdout.splitlines()] == [
        {"result": 0.5},
        {"problem": "ZeroDivisionError in noisy: division by zero"},
        {"result": 0.25},
    ]


def test_the_environment_is_told():
    found = gpu.environment({}, CPU, None)
    assert found["torch"] == torch.__version__
    json.dumps(found)


def test_what_is_asked_for_first_comes_first():
    ranks = [gpu.rank(gpu._CASES[item["op"], item["case"]]) for item in gpu.bench_items()]
    of_one_dtype = ranks[: len(ranks) // 3]
    assert of_one_dtype == sorted(of_one_dtype)
    assert set(of_one_dtype) == set(range(7))
    cases = (*GPU_CASES, *BENCH_CASES)
    assert len(ranks) == 3 * sum(2 if one.gradients else 1 for one in cases)
    assert gpu.bench_items()[0]["dtype"] == "bfloat16"


def test_every_op_dtype_and_backend_is_checked():
    every = {
        (op, kernel.backend)
        for op in dispatch.OPS
        for kernel in dispatch.kernels(op)
        if kernel.backend in gpu.BACKENDS
    }
    for first_and_last in (True, False):
        groups = gpu._checks(first_and_last)
        assert len(groups) == 3 * len(every)
        assert {(one["op"], one["backend"]) for group in groups for one in group} == every
    checked = {(one["op"], one["case"]) for group in groups for one in group}
    assert checked == {(one.op, one.name) for one in GPU_CASES}


def unmasked(draw):
    return arrange(*(draw.normal(1, 2, 17, 8) for _ in range(3)), causal=True)


CASES = SMALL, GpuCase("attention", case("timed", unmasked))


@pytest.fixture
def small(monkeypatch):
    """Cases that a CPU has time for, and kernels of linear that run on it."""
    for one in CASES:
        monkeypatch.setitem(gpu._CASES, (one.op, "timed"), one)
    monkeypatch.setattr(gpu.on_device, "cache_bytes", lambda device: 1)
    kernels = (
        dispatch.Kernel("linear", "triton", reference.linear, gradients=True),
        dispatch.Kernel("linear", "torch", reference.linear),
    )
    monkeypatch.setitem(dispatch._state.kernels, "linear", kernels)
    return kernels


def change_triton(monkeypatch, small, run):
    changed = (dataclasses.replace(small[0], run=run), small[1])
    monkeypatch.setitem(dispatch._state.kernels, "linear", changed)


def item(op="linear", **rest):
    return {"op": op, "case": "timed", "dtype": "float32", "gradients": False, **rest}


def test_a_check_tells_right_from_wrong_and_refused(small, monkeypatch):
    assert gpu.check(item(backend="triton"), CPU, None) == {
        "forward": "right",
        "gradients": "right",
    }
    assert gpu.check(item(backend="torch"), CPU, None)["gradients"].startswith(
        "refused: it has no backward"
    )
    change_triton(monkeypatch, small, wrong_linear)
    assert gpu.check(item(backend="triton"), CPU, None)["forward"].startswith("wrong: output")


def clock(*seconds):
    return fake_clock([gpu.Times(device, 2 * device) for device in seconds])


@pytest.mark.parametrize("gradients", [False, True])
def test_bench_times_what_is_right_on_the_device_and_on_the_host(small, monkeypatch, gradients):
    found = gpu.bench(item(gradients=gradients), CPU, clock(1e-5, 2e-5, 3e-5))
    assert found["triton"] == {"device": [1e-5] * 7, "host": [2e-5] * 7}
    second = {"device": [2e-5] * 7, "host": [4e-5] * 7}
    assert found["by hand" if gradients else "torch"] == second
    if gradients:
        assert "no backward" in found["torch"]["why_not"]
    change_triton(monkeypatch, small, wrong_linear)
    if not gradients:
        found = gpu.bench(item(), CPU, clock(2e-5, 3e-5))
        assert found["triton"]["wrong"]
        assert found["triton"]["why_not"].startswith("wrong: output")
        assert "device" in found["by hand"]


def test_what_torch_drops_is_timed_unchecked(monkeypatch):
    def dropping(draw):
        x = draw.normal(64, 32)
        return x, draw.normal(64, 32), (32,), None, None, 1e-5, 0.5, draw.seed()

    one = GpuCase("add_layer_norm", case("timed", dropping))
    monkeypatch.setitem(gpu._CASES, ("add_layer_norm", "timed"), one)
    monkeypatch.setattr(gpu.on_device, "cache_bytes", lambda device: 1)
    found = gpu.bench(item("add_layer_norm"), CPU, clock(*[1e-5] * 9))
    assert set(found["by hand"]) == {"device", "host"}
    meta = dispatch.Call("add_layer_norm", (torch.empty(2, 2, device="meta"),), False, 0.5)
    [torchs] = [k for k in dispatch.kernels("add_layer_norm") if k.backend == "torch"]
    assert gpu._reasons(torchs, meta).startswith("PyTorch drops other elements")


def test_everybody_has_a_row_for_attention(small):
    found = gpu.bench(item("attention", dtype="bfloat16"), CPU, clock(*[1e-5] * 9))
    assert set(found) == {
        *("cuda", "triton", "torch", "by hand", "flash", "cuDNN", "efficient"),
        *("FlexAttention, mask known", "FlexAttention, mask new"),
    }
    assert found["triton"]["why_not"].startswith("it supports cuda tensors")
    assert found["FlexAttention, mask known"]["why_not"] == "it is measured on cuda tensors"
    assert "device" in found["by hand"]
    assert "RuntimeError" in found["cuDNN"]["why_not"]


class TestTiles:
    """With Triton, whose tables are what `tune` is about."""

    @pytest.fixture(autouse=True)
    def config(self):
        pytest.importorskip("triton", reason="Triton is not installed")
        from transformer_fast.backends.triton import config

        return config

    def test_what_is_tuned_is_there(self, config):
        for op, name, forward, backward in gpu.TUNED:
            assert (op, name) in gpu._CASES
            assert forward or backward
        items = gpu.tune_items()
        assert items[0]["tile"] is None
        assert {one["function"] for one in items} == set(config._KINDS) - {
            *("attention_bias", "attention_weights")
        }
        ranks = [gpu.rank(gpu._CASES[op, name]) for op, name, *_ in gpu.TUNED]
        assert ranks == sorted(ranks)

    def test_a_tile_is_used_within_the_block_only(self, config):
        before = {arch: config.attention_granule(arch, 64, True) for arch in (80, 90)}
        now = config.attention("attention_forward", 90, 64, True, False)
        assert now in config.alternatives("attention_forward", True, 64)
        with config.use_tile("attention_forward", [16, 16, 2, 1]):
            for arch in (80, 90, 120):
                for heavy in (False, True):
                    tile = config.attention("attention_forward", arch, 128, True, heavy)
                    assert tile == (16, 16, 2, 1)
                assert config.attention_granule(arch, 64, True) == (16, 16)
        assert config.attention("attention_forward", 90, 64, True, False) == now
        assert before == {arch: config.attention_granule(arch, 64, True) for arch in (80, 90)}
        product = config.matmul(90, 4096, 1024, True)
        with config.use_tile("matmul", [16, 16, 16, 1, 1, 1]):
            assert config.matmul(90, 1, 1, False) == config.ProductTile(16, 16, 16, 1, 1, 1)
        assert config.matmul(90, 4096, 1024, True) == product

    def test_tiles_are_tried_then_timed(self, small, monkeypatch, config):
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
        found = gpu.tune({**known, "tiles": tiles[:2]}, CPU, clock(2e-5, 1e-5))
        assert list(found.items()) == [(json.dumps(tiles[1]), 1e-5), ("null", 2e-5)]
        assert 16 in seen

    def test_only_right_tiles_are_timed(self, processes, tmp_path, monkeypatch):
        script = """
import json, os, sys
for item in json.loads(sys.argv[1]):
    if "tile" in item and item["tile"] == [3]:
        os.kill(os.getpid(), 11)
    says = item.get("tiles") or ("wrong: x" if item["tile"] == [1] else "right")
    print(json.dumps({"result": says}), flush=True)
"""
        monkeypatch.setattr(
            gpu, "_command", lambda stage, items: [sys.executable, "-c", script, json.dumps(items)]
        )
        known = {"op": "linear", "function": "matmul"}
        tiles = [{**known, "tile": tile} for tile in (None, [1], [2], [3])]
        monkeypatch.setattr(
            gpu, "tune_items", lambda: [*tiles, {**known, "op": "attention", "tile": [1]}]
        )
        gpu._tune(session(tmp_path, stage="tune"))
        found = written(tmp_path)["tune"]["results"]
        assert [one["problem"] for one in found if "problem" in one] == ["signal 11"]
        assert [one["result"] for one in found if "tiles" in one] == [[None, [2]]]
