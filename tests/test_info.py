"""``python -m transformer_fast info``."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
from harness import kernel_of

from transformer_fast import _native, dispatch
from transformer_fast.__main__ import main


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
    assert "none: torch" in text or torch.cuda.is_available()


def test_info_gives_the_reason_of_unavailable_kernels(capsys):
    cpu = kernel_of("linear")
    dispatch.register(dataclasses.replace(cpu, unavailable="the compiler is on strike"))
    text = shown(capsys)
    assert "cpu: the compiler is on strike (linear)" in text
    assert "cannot run" in text


def test_unsupported_gpus_are_reported(monkeypatch):
    monkeypatch.setattr(_native, "cuda_why_not", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(_native, "why_no_code", lambda *given: f"none for {given}")
    assert dispatch.STATES["cuda"]() == "none for (7, 5)"


def test_triton_is_detected_without_an_import(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert dispatch.STATES["triton"]().startswith("not installed")
