"""``python -m transformer_fast info``."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
from harness import kernel_of, python

from transformer_fast import _native, dispatch
from transformer_fast.__main__ import main
from transformer_fast.cli import info


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def shown(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["info", *options]) == 0
    return capsys.readouterr().out


def test_info_lists_versions_and_kernels(capsys):
    text = shown(capsys)
    assert f"torch {torch.__version__}" in " ".join(text.split())
    assert f"{torch.get_num_threads()} of " in text
    for op in dispatch.OPS:
        for kernel in dispatch.kernels(op):
            assert op in text
            assert kernel.backend in text
    if _native.module is not None:
        assert f"{_native.module.isa()} in use" in text
        assert _native.module.build_info()["compiler"] in text


def test_backends_without_kernels_are_listed(capsys):
    present = {kernel.backend for op in dispatch.OPS for kernel in dispatch.kernels(op)}
    text = shown(capsys)
    for name in dispatch.BACKENDS:
        assert (f"{name}: it has no kernels yet" in text) == (name not in present)


def test_info_gives_the_reason_of_unavailable_kernels(capsys):
    cpu = kernel_of("linear")
    dispatch.register(dataclasses.replace(cpu, unavailable="the compiler is on strike"))
    text = shown(capsys)
    assert "cpu: the compiler is on strike (linear)" in text
    assert "cannot run" in text


def test_environment_variables_are_listed(capsys, monkeypatch):
    monkeypatch.setenv("TRANSFORMER_FAST_STRICT", "1")
    assert "TRANSFORMER_FAST_STRICT" in shown(capsys)
    monkeypatch.delenv("TRANSFORMER_FAST_STRICT")
    assert "TRANSFORMER_FAST_STRICT" not in shown(capsys)


@pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))
def test_info_names_the_entries_or_why_there_are_none(capsys, monkeypatch):
    if _native.autograd is not None:
        assert f"entries in C++, for torch {_native.autograd.torch_version}" in shown(capsys)
    monkeypatch.setattr(_native, "autograd", None)
    monkeypatch.setattr(_native, "why_no_autograd", "built for torch 2.99")
    assert "checked in Python: built for torch 2.99" in shown(capsys)


@pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))
def test_probes_print_peaks(capsys):
    text = shown(capsys, "--probe")
    assert f"fp32 multiply-add, {_native.module.supported_isas()[0]}" in text
    assert "copy, 64 MiB per thread" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_has_a_reason():
    assert info.gpu_state().startswith("none: torch")


def test_unsupported_gpus_are_reported(monkeypatch):
    monkeypatch.setattr(_native, "cuda_why_not", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(_native, "why_no_code", lambda *given: f"none for {given}")
    assert dispatch.STATES["cuda"]() == "none for (7, 5)"


def test_triton_is_detected_without_an_import(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert dispatch.STATES["triton"]().startswith("not installed")


_COMPILE_ONE = """
from transformer_fast.__main__ import main
from transformer_fast.backends.triton import compile_ahead

one = next(case for case in compile_ahead.cases() if case.name.startswith("layer_norm"))
compile_ahead.cases = lambda: [one]
main(["info", "--kernels", "80", "90"])
"""


@pytest.mark.thorough
def test_triton_kernels_are_compiled_ahead():
    pytest.importorskip("triton", reason="Triton is not installed")
    # In a subprocess, because kernels in this process may be interpreted.
    output = python("-c", _COMPILE_ONE).stdout
    assert "layer_norm_forward_kernel" in output
    assert output.count("sm_80") == output.count("sm_90") > 1


def test_compiling_without_triton_is_reported(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "none: Triton is not installed" in shown(capsys, "--kernels")


def test_unsupported_architectures_are_rejected(capsys):
    with pytest.raises(SystemExit):
        main(["info", "--kernels", "75"])
    assert "argument --kernels: invalid choice: 75" in capsys.readouterr().err
