"""``python -m transformer_fast info``."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from transformer_fast import _native, dispatch
from transformer_fast.__main__ import main
from transformer_fast.cli import compiled, info
from transformer_fast.cli.limits import dtype_names, kernel_row, reasons


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def shown(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["info", *options]) == 0
    return capsys.readouterr().out


def test_it_tells_what_there_is(capsys):
    text = shown(capsys)
    assert f"torch             {torch.__version__}" in text
    assert f"{torch.get_num_threads()} of " in text
    for op in dispatch.OPS:
        for kernel in dispatch.kernels(op):
            assert op in text
            assert kernel.backend in text
    if _native.module is not None:
        assert f"{_native.module.isa()} in use" in text
        assert _native.module.build_info()["compiler"] in text


def test_backends_without_a_kernel_are_told(capsys):
    present = {kernel.backend for op in dispatch.OPS for kernel in dispatch.kernels(op)}
    text = shown(capsys)
    for name in dispatch.BACKENDS:
        assert (f"{name}: it has no kernels yet" in text) == (name not in present)


def test_it_tells_why_a_kernel_cannot_run(capsys, monkeypatch):
    cpu = next(k for k in dispatch.kernels("linear") if k.backend == "cpu")
    monkeypatch.setitem(dispatch._state.kernels, "linear", dispatch.kernels("linear"))
    dispatch.register(dataclasses.replace(cpu, unavailable="the compiler is on strike"))
    text = shown(capsys)
    assert "cpu: the compiler is on strike (linear)" in text
    assert "cannot run" in text


def test_switches_are_shown(capsys, monkeypatch):
    monkeypatch.setenv("TRANSFORMER_FAST_STRICT", "1")
    assert "TRANSFORMER_FAST_STRICT" in shown(capsys)
    monkeypatch.delenv("TRANSFORMER_FAST_STRICT")
    assert "TRANSFORMER_FAST_STRICT" not in shown(capsys)


@pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))
def test_probes(capsys):
    text = shown(capsys, "--probe")
    assert "fp32 multiply-add, baseline" in text
    assert "copy, 64 MiB per thread" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_told_why():
    assert info.gpu_state().startswith("none: torch")


def test_triton_is_looked_for_without_importing_it(monkeypatch):
    monkeypatch.setattr(info.importlib.util, "find_spec", lambda name: None)
    assert info.triton_state().startswith("not installed")


def test_no_triton_kernels_is_told(capsys, monkeypatch):
    monkeypatch.setattr(compiled, "_launches", lambda *arguments: iter(()))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    text = shown(capsys, "--kernels")
    assert "none:" in text


def test_limits_in_words():
    run = dispatch.kernels("linear")[0].run
    kernel = dispatch.Kernel(
        "attention",
        "triton",
        run,
        devices=("cuda",),
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        gradients=True,
        proven=False,
    )
    assert kernel_row(kernel) == (
        "triton", "when named", "cuda", "float32 bfloat16", "not of masks", "no", ""
    )  # fmt: skip
    assert dtype_names(frozenset()) == "any"
    (reason,) = reasons([kernel])
    assert reason.startswith("triton: it is not yet proven on a GPU")
    assert reason.endswith("(all its ops)")
