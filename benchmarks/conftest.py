"""Options and header of ``pytest benchmarks``, and the machine description stored with its results."""

from __future__ import annotations

from typing import Any

import pytest

from transformer_fast.cli.compare import DTYPES
from transformer_fast.measure import machine


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("transformer_fast")
    group.addoption("--quick", action="store_true", help="only the small cases")
    group.addoption("--dtype", choices=DTYPES, default="float32", help="default: float32")


def pytest_report_header() -> str:
    return machine.line(machine.describe())


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """Adds the fields that must be equal: --benchmark-compare warns if any of them differs."""
    about = machine.describe()
    compared = *machine.IDENTITY, "torch"
    machine_info["transformer_fast"] = {name: about[name] for name in compared}
