"""``pytest benchmarks``: ops, layers and decoding under pytest-benchmark, for use with its tools.

Each case is a group of tests: the reference, PyTorch and every kernel backend. The tests run one
after the other, so their ratios are less precise than those of ``python -m benchmarks``, which
interleaves the candidates.
"""

from __future__ import annotations

import itertools
from typing import Any, NoReturn

import pytest
import torch

from transformer_fast import dispatch
from transformer_fast.cli.compare import DTYPES
from transformer_fast.measure import machine
from transformer_fast.measure.benchmark_case import BenchmarkCase, Row, Trial

from .suites import Maker, Scope, Suite, models, ops

#: The candidate that the dispatcher chooses; its row names the backends that ran.
OURS = "transformer_fast"
#: Fields of a row that are stored with its time.
STORED = ("chosen", "roof_share", "split_share", "bound", "error", "error_ratio")
#: Suite -> its cases, and the candidates that are tests of a case.
SUITES: dict[str, tuple[Suite, tuple[str, ...]]] = {
    "ops": (ops.table, dispatch.BACKENDS),
    "layers": (models.layers, (OURS, "reference", "torch eager", "torch fast path")),
    "decode": (models.decoding, (OURS, "reference", "torch eager")),
}
#: Group -> maker of its case. Test parameters are strings, because pytest-benchmark stores them.
MAKERS: dict[str, Maker] = {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    quick, dtype = map(metafunc.config.getoption, ("quick", "dtype"))
    suffix = "" if dtype == "float32" else f", {dtype}"
    tests = []
    for suite, (cases, names) in SUITES.items():
        for label, make in cases(Scope(quick=quick, dtype=DTYPES[dtype])):
            group = label + suffix
            MAKERS[group] = make
            tests += [pytest.param(group, one, id=f"{suite}: {group}: {one}") for one in names]
    metafunc.parametrize(("case", "name"), tests, indirect=["case"], scope="module")


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> tuple[str, BenchmarkCase]:
    """Returns a group and its case, which is built once for all candidates."""
    return request.param, MAKERS[request.param]()


def give_no_speed(row: Row) -> NoReturn:
    """Fails the test if a result of ours is wrong; skips it for PyTorch and for unsupported calls."""
    reason = row.reason or "no reason given"
    if row.failed:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # parity is checked first
@torch.no_grad()
def test_speed(benchmark: Any, case: tuple[str, BenchmarkCase], name: str) -> None:
    (benchmark.group, benchmark_case), benchmark.name = case, name
    wanted = benchmark_case.chosen if name == OURS else name
    candidate = next(one for one in benchmark_case.candidates if one.name == wanted)
    trial = Trial(benchmark_case, candidate)
    row = trial.row
    if not trial.able:
        give_no_speed(row)
    turns = itertools.cycle(range(len(benchmark_case.inputs)))
    benchmark(lambda: trial(next(turns)))
    if benchmark.stats is not None:  # None with --benchmark-disable
        trial.finish(benchmark.stats.stats.data, trial.probe())
    if not row.ok:
        benchmark.has_error = True
        give_no_speed(row)
    about = machine.describe()
    benchmark.extra_info |= {
        "backend": row.candidate,
        **{name: getattr(row, name) for name in STORED},
        **{name: about[name] for name in ("threads", "isa", "commit")},
    }
