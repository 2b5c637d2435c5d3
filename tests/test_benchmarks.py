"""Benchmark suites, peers, result files, and what is derived: slow-downs, the report, README's
figures.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import math
import os
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ISAS, python

from benchmarks import __main__ as command
from benchmarks import compare as comparing
from benchmarks import findings, peers, readme, report
from benchmarks import test_speed as speed
from benchmarks.__main__ import SCALING, SUITES, main
from benchmarks.peers import PEERS, Remote
from benchmarks.suites import Directions, Scope, models, ops
from benchmarks.suites import text as encoders
from transformer_fast.cli import form
from transformer_fast.measure import machine
from transformer_fast.measure.benchmark_case import Row, run_case
from transformer_fast.measure.calls import forced
from transformer_fast.measure.cases import Size, twins
from transformer_fast.measure.clock import Plan, speed_up, summarise

pytest.importorskip("matplotlib", reason="the report needs matplotlib")
pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("threads")]

FAST = Plan(rounds=3, seconds=0.01, least=2, sample=1e-5)


def _translators() -> tuple[Any, Any]:
    size = Size(32, 4, 64, layers=2, vocabulary=40)
    return twins(lambda nn: models.Translator(nn, size, 20), torch.float32, "cpu")


def test_all_translators_decode_the_same_tokens():
    ours, theirs = _translators()
    source = torch.randint(3, 40, (3, 7))
    oracle = copy.deepcopy(theirs).double()
    checker = models.GreedyJudge(oracle, forced(ours.logits, "reference"), 5)
    runs = [models.cached(ours, 5), models.recomputing(theirs, 5)]
    with torch.no_grad():
        for run_one in runs:
            parity = checker(run_one(source), (source,))
            assert parity.ok, str(parity)
        right = runs[0](source)
        for place in ((0, 0), (2, 4)):
            wrong = right.clone()
            wrong[place] = (wrong[place] + 7) % 37 + 3
            assert not checker(wrong, (source,)).ok
        assert not checker(right[:, :4], (source,)).ok


def test_missing_or_broken_peers_have_a_reason():
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no licence\nsecond line")

    missing = types.SimpleNamespace(name="a", why_not=lambda: "it is not installed", op=broken)
    failing = types.SimpleNamespace(name="b", why_not=lambda: None, op=broken)
    silent = types.SimpleNamespace(name="c", why_not=lambda: None, op=lambda *a: None)
    without = types.SimpleNamespace(name="d", why_not=lambda: None)
    found = peers.candidates([missing, failing, silent, without], "op", "linear", ())
    assert [(c.name, c.run, c.reason) for c in found] == [
        ("a", None, "it is not installed"),
        ("b", None, "RuntimeError: no licence"),
    ]
    with pytest.raises(ValueError, match="there is no peer 'nobody'"):
        peers.load(["nobody"])


def test_embeddings_are_compared_by_direction():
    true = torch.tensor([[3.0, 4.0], [1.0, 0.0]], dtype=torch.float64)
    for precision, angle, ok in (
        *(("float32", 1e-7, True), ("float32", 1e-5, False), ("bfloat16", 1e-2, True)),
        *(("int8", 0.04, True), ("int8", 0.05, False)),
    ):
        checker = Directions(lambda: true, lambda: true, precision)
        turned = torch.tensor([[math.cos(angle), math.sin(angle)]], dtype=torch.float64)
        parity = checker(torch.cat((true[:1] * 2, turned)), ())
        assert parity.error == pytest.approx(angle, rel=1e-3)
        assert parity.ok == ok
        assert not checker(true[:1], ()).ok


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_sentence_encoders_are_right_in_every_precision(precision):
    case = encoders._case(Scope(quick=True), encoders.Case("MiniLM, small", precision, 1, True))
    rows = run_case(case, FAST)
    for one in rows:
        assert one.ok, one
        assert one.items == 12
    # Other precisions also have a row of PyTorch's float32, which may be faster.
    assert ("torch eager, float32" in [one.candidate for one in rows]) == (precision != "float32")


def test_the_score_is_the_rank_of_the_right_text(monkeypatch):
    work = object.__new__(encoders.Work)
    work.model, work._exact = "exact", None
    exact = torch.eye(3, dtype=torch.float64).repeat(2, 1)
    # The second question is closer to the first text; the third vector is turned by 60 degrees.
    wrong = exact.clone()
    wrong[1] = torch.tensor([0.8, 0.6, 0.0])
    wrong[2] = torch.tensor([0.0, 0.75**0.5, 0.5])
    vectors = {"exact": exact, "right": exact, "wrong": wrong}
    monkeypatch.setattr(encoders.Work, "_vectors", lambda self, run: vectors[run])
    assert work.scores("int8", "peer", "right") == {"reciprocal rank": 1.0, "worst cosine": 1.0}
    assert work.scores("int8", "torch eager, float32", "right") == {}
    scores = work.scores("float32", "torch eager", "wrong")
    assert scores["reciprocal rank"] == pytest.approx((1 + 1 / 2 + 1 / 2) / 3)
    assert scores["worst cosine"] == pytest.approx(0.5)


@pytest.mark.parametrize("name", [*SUITES, *SCALING])
def test_cases_of_a_suite_have_distinct_names(name):
    if name in ("third-party", "text encoders", "half precision"):
        pytest.importorskip("transformers")
    if name == "released text encoder":
        pytest.importorskip(encoders.Released.PACKAGE)
    for quick in (True, False):
        work = list((SUITES | SCALING)[name](Scope(quick=quick)))
        assert work
        assert len({label for label, _ in work}) == len(work)


def test_a_quick_run_end_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "QUICK", FAST)
    monkeypatch.setattr(ops, "_QUICK_FLOPS", 1e6)
    monkeypatch.setattr(form, "fallbacks", lambda case: [f"why {case.op} runs on another backend"])
    path = tmp_path / "m.json"
    options = ["--quick", "--suite", "overhead", "backward", "--op", "layer_norm", "--peer"]
    assert main([*options, "--json", str(path)]) == 0
    found = findings.read(path)
    assert list(found) == ["overhead", "backward"]
    assert json.loads(path.read_text())["suites"]["overhead"]["quick"] is True
    for suite in found.values():
        timed = {one.candidate for one in suite["rows"] if one.time is not None}
        assert {"reference", "torch"} <= timed
        assert any(one.chosen and one.time for one in suite["rows"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"written to {path}" in shown
    assert "Not run by a kernel of ours - why layer_norm runs" in shown
    options = ["--quick", "--suite", "backward", "--op", "rms_norm", "--peer", "--json", str(path)]
    assert main(options) == 0
    kept = {one.op for one in findings.read(path)["backward"]["rows"]}
    assert kept == {"layer_norm", "rms_norm"}


def test_an_interrupted_run_keeps_its_cases(tmp_path, monkeypatch):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "QUICK", FAST)
    first = next(iter(SUITES["overhead"](Scope(quick=True))))
    monkeypatch.setitem(SUITES, "overhead", lambda scope: [first, ("stopped", stop)])
    path = tmp_path / "m.json"
    assert main(["--quick", "--suite", "overhead", "--peer", "--json", str(path)]) != 0
    assert {row.case for row in findings.read(path)["overhead"]["rows"]} == {first[0].split()[-1]}


class _Stopwatch:
    """Replaces pytest-benchmark's fixture: calls the function once."""

    stats = None

    def __init__(self) -> None:
        self.extra_info: dict[str, Any] = {}
        self.calls = 0

    def __call__(self, call):
        self.calls += 1
        call()


def test_parity_is_checked_before_timing():
    make = dict(ops.table(Scope(quick=True, ops=("layer_norm",))))["layer_norm 32x512"]
    benchmark_case, watch = make(), _Stopwatch()
    speed.test_speed(watch, ("layer_norm 32x512", benchmark_case), "reference")
    assert (watch.group, watch.calls) == ("layer_norm 32x512", 1)
    wrong = [
        dataclasses.replace(one, run=lambda x, *rest: torch.zeros_like(x))
        for one in benchmark_case.candidates
    ]
    spoilt, watch = dataclasses.replace(benchmark_case, candidates=wrong), _Stopwatch()
    with pytest.raises(pytest.fail.Exception, match="outside the error budget"):
        speed.test_speed(watch, ("x", spoilt), "reference")
    assert not watch.calls


@pytest.mark.skipif("avx2" not in ISAS, reason="there is no avx2 here")
def test_peers_use_the_same_instruction_set(monkeypatch):
    """In a subprocess, since the peers read their variables when they are loaded."""
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    program = (
        "import benchmarks, os, torch\n"
        "from benchmarks.peers import PEERS\n"
        "print(torch.backends.cpu.get_cpu_capability(), os.environ.get('ONEDNN_MAX_CPU_ISA'),\n"
        "      'cannot be limited' in str(PEERS['onnx_runtime'].why_not()))\n"
    )
    shown = python("-c", program, TRANSFORMER_FAST_CPU_ISA="avx2")
    capability, onednn, refused = shown.stdout.split()
    assert (capability.lower(), onednn) == ("avx2", "AVX2")
    assert refused == str(all(map(importlib.util.find_spec, PEERS["onnx_runtime"].packages)))


def test_candidates_can_run_in_a_subprocess():
    elsewhere = Remote(functools.partial, os.getpid)
    assert elsewhere() not in (os.getpid(), None)
    power = Remote(functools.partial, pow, 2)
    assert [power(exponent) for exponent in (5, 6)] == [32, 64]
    with pytest.raises(TypeError):
        power("five")
    assert power(7) == 128
    with pytest.raises(ValueError, match="invalid literal"):
        Remote(int, "nothing to call")


# Results


def row(candidate: str, *times: float, case: str = "x", **values: Any) -> Row:
    """Returns a row with these samples, in milliseconds."""
    ours = candidate in ("cpu", "reference")
    made = Row("linear", case, candidate, ours, candidate == "cpu", ok=True, **values)
    if times:
        made.samples = [time / 1e3 for time in times]
        made.time = summarise(made.samples)
        made.error, made.error_ratio = 1e-6, 0.5
    return made


def suites(*rows: Row, name: str = "ops", **about: Any) -> dict[str, Any]:
    """Returns the content of a result file; each row is compared with the torch row of its case."""
    timed = [one for one in rows if one.samples]
    for one in timed:
        torch_row = next((r for r in timed if (r.case, r.candidate) == (one.case, "torch")), None)
        if torch_row is not None:
            one.vs_torch = speed_up(torch_row.samples, one.samples)
            one.best_torch = "torch"
    return {name: {"machine": machine.describe() | about, "rows": list(rows)}}


NOISE = (1.0, 1.02, 0.99, 1.01, 0.98, 1.0, 1.01)


def noisy(time: float) -> list[float]:
    return [time * factor for factor in NOISE]


def test_the_rival_is_the_fastest_right_candidate():
    (found,) = findings.findings(
        [
            row("cpu", *noisy(10.0)),
            row("reference", *noisy(50.0)),
            row("torch", *noisy(20.0)),
            row("peer", *noisy(8.0)),
            dataclasses.replace(row("quick and wrong", *noisy(1.0)), ok=False),
        ]
    )
    assert found.rival is not None
    assert found.against is not None
    assert found.rival.candidate == "peer"
    assert found.against.value == pytest.approx(0.8)
    assert findings.losses([found]) == [found]


def test_losses_are_sorted_and_exclude_noise():
    rows = [
        *(row("cpu", *noisy(10.0), case="bad"), row("torch", *noisy(5.0), case="bad")),
        *(row("cpu", *noisy(10.0), case="worse"), row("torch", *noisy(2.0), case="worse")),
        *(row("cpu", 10, 11, 9, case="even"), row("torch", 9.9, 10.5, 9.5, case="even")),
        *(row("cpu", *noisy(1.0), case="won"), row("torch", *noisy(5.0), case="won")),
    ]
    lost = findings.losses(findings.findings(rows))
    assert [finding.chosen.case for finding in lost] == ["worse", "bad"]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Returns a folder with the results of one machine."""
    folder = tmp_path / "results"
    ordinary = suites(
        *(row("cpu", *noisy(10.0), case="a|b"), row("torch", *noisy(20.0), case="a|b")),
        *(row("cpu", *noisy(9.0), case="<lost>"), row("torch", *noisy(3.0), case="<lost>")),
    )
    findings.write(folder / "m.json", ordinary)
    scaled = [row("cpu", *noisy(float(n)), case=str(n), roof_share=0.5) for n in (32, 64, 128)]
    findings.write(folder / "m-scaling.json", suites(*scaled, name="scaling: linear, rows"))
    return folder


def test_the_report_lists_losses_first(results):
    assert main(["report", "--results", str(results)]) == 0
    text = (results / "report.md").read_text()
    assert text.index("### Losses") < text.index("### ops")
    assert text.index("<lost>") < text.index("a\\|b")
    assert "| ops | linear | <lost> | cpu | 9.00 ms |" in text
    assert main(["report", "--results", str(results)]) == 0
    assert (results / "report.md").read_text() == text


def encoded(
    name: str, time: float, case: str, ours: bool = False, items: int | None = 30, **values: Any
) -> Row:
    one = row(name, *noisy(time), case=case, items=items, **values)
    one.op, one.ours, one.chosen = "text_encoder", ours, ours
    return one


def readme_results(folder: Path, worst: float | None = None) -> Path:
    """Writes results with all rows of README's table; ``worst``: time of a case beside 1 ms.

    Without such a case PyTorch's float32 is twice as fast as our bfloat16 and int8.
    """
    rows = []
    for text, suite, case in readme.LINES:
        precision = readme.precision_of(text)
        others = {"int8": {"quantize_dynamic": 60.0, "torchao": 50.0}}.get(
            precision, {"torch eager": 40.0}
        )
        if precision != "float32":
            others["torch eager, float32"] = 45.0 if worst else 5.0
        made = [encoded(name, time, case) for name, time in (others | {"OpenVINO": 30.0}).items()]
        rows.append((suite, [encoded("accelerated", 10.0, case, ours=True), *made]))
    found: dict[str, Any] = {}
    for suite, made in rows:
        found.setdefault(suite, suites(name=suite)[suite])["rows"] += made
    bad = [row("cpu", *noisy(3.0), case="bad"), row("torch", *noisy(2.0), case="bad")]
    bad += [row("cpu", *noisy(worst or 1.0), case="worse"), row("torch", *noisy(1.0), case="worse")]
    bad += [row("reference", *noisy(0.1), case="worse")]
    findings.write(folder / "m.json", found | suites(*bad))
    return folder


def test_a_row_of_readme_has_one_precision(tmp_path):
    """PyTorch's float32 is faster than our int8 and bfloat16 here, but is an alternative only."""
    text = readme.figures(readme_results(tmp_path))["table"]
    assert "| MiniLM-size encoder, float32 | 750 /s | 3,000 /s | 4x | OpenVINO 1,000 /s |" in text
    assert (
        "| MiniLM-size encoder, bfloat16 | 750 /s | 3,000 /s | 4x | PyTorch in float32 6,000 /s |"
        in text
    )
    assert (
        "| MiniLM-size encoder, int8 | 600 /s | 3,000 /s | 5x | PyTorch in float32 6,000 /s |"
        in text
    )
    rows = [encoded("accelerated", 1.0, "x", ours=True), encoded("torch eager, float32", 9.0, "x")]
    with pytest.raises(StopIteration):
        readme.cells(rows, "int8")


def test_the_last_row_of_readme_is_the_worst(tmp_path):
    for worst, shown in (
        (2.0, "worse | 1.00 ms | 2.00 ms | 0.5x"),
        (1.2, "bad | 2.00 ms | 3.00 ms | 0.67x"),
    ):
        found = readme.figures(readme_results(tmp_path, worst))
        assert shown in found["table"].splitlines()[-1]
        assert shown[:3] in found["losses"].splitlines()[0]
        assert found["count"] == "2"


def test_readme_and_results_have_the_same_figures():
    values = {"a": "1", "table": "| x |"}
    text = "<!--= a -->9<!--/-->, <!--= table -->\nold\n\n<!--/-->"
    assert (
        readme.generated(text, values) == "<!--= a -->1<!--/-->, <!--= table -->\n| x |\n<!--/-->"
    )
    for wrong in ({"a": "1"}, values | {"other": "2"}):
        with pytest.raises(
            ValueError, match=r"not both in README and in the results: (table|other)"
        ):
            readme.generated(text, wrong)


def test_the_weights_of_sentence_encoders_are_named(tmp_path):
    case = "MiniLM, sorted, int8, 2 threads"
    one = encoded("accelerated", 2.0, case, ours=True)
    one.error = 1e-2
    text = report.texts([one])
    assert "| MiniLM, sorted, int8, 2 threads | 15000 (0.99995) |" in text
    assert "**The weights are random**" in text
    one.scores = {"reciprocal rank": 0.5764, "worst cosine": 0.998}
    text = report.texts([one])
    assert "| MiniLM, sorted, int8, 2 threads | accelerated | 0.5764 | 0.9980 |" in text
    assert "random" not in text
    assert "The weights are those of all-MiniLM-L6-v2" in text
    assert "**Their weights are random**" in readme.README.read_text(encoding="utf-8")


def test_half_precision_is_never_slower_than_float32():
    """README states this for CPUs without such instructions; checks the committed results."""
    able = [one for one in findings.machines() if readme.HALF in one.suites]
    assert able
    for rows in findings.by_case(able[0].suites[readme.HALF]["rows"]).values():
        times = {row.candidate: row.time.median for row in rows}
        plain = times.get("torch eager, float32", times["torch eager"])
        assert times["accelerated"] <= plain, rows[0].case


@pytest.mark.parametrize("cpu", ["Intel Xeon", "AMD EPYC"])
def test_doubtful_rows_are_marked(tmp_path, cpu):
    rows = row("cpu", *noisy(1.0)), row("CTranslate2", *noisy(2.0))
    findings.write(tmp_path / "m.json", suites(*rows, cpu=cpu))
    (one,) = findings.machines(tmp_path)
    text = "\n".join(report.page(one, [one]))
    assert ("| CTranslate2 (under review) |" in text) == (cpu == "Intel Xeon")
    assert ("| CTranslate2 |" in text) == (cpu == "AMD EPYC")


def test_a_run_replaces_only_its_suites(tmp_path):
    path = tmp_path / "m.json"
    findings.write(path, suites(row("cpu", 1.0)) | suites(row("cpu", 2.0), name="layers"))
    findings.write(path, suites(row("cpu", 3.0)))
    found = findings.read(path)
    assert list(found) == ["ops", "layers"]
    assert found["ops"]["rows"][0].time.median == pytest.approx(3e-3)
    assert found["layers"]["rows"][0].time.median == pytest.approx(2e-3)
    for time in (4.0, 5.0):
        findings.write(path, suites(row("cpu", time, case="y")), partial=True)
    times = {one.case: one.time.median for one in findings.read(path)["ops"]["rows"]}
    assert times == pytest.approx({"x": 3e-3, "y": 5e-3})


def test_cases_that_a_run_did_not_take_keep_their_date_and_commit(tmp_path):
    path = tmp_path / "m.json"
    for day, cases in ((1, "abc"), (2, "b"), (3, "c")):
        about = {"date": f"2026-01-0{day}T10:00:00", "commit": f"c{day}"}
        rows = [row("cpu", 1.0, case=case) for case in cases]
        findings.write(path, suites(*rows, **about), partial=day > 1)
    suite = findings.read(path)["ops"]
    assert {one.case: one.taken for one in suite["rows"]} == {
        "a": "2026-01-01, c1", "b": "2026-01-02, c2", "c": None
    }  # fmt: skip
    assert findings.taken(suite) == {f"2026-01-0{day}, c{day}": 1 for day in (1, 2, 3)}


@pytest.mark.parametrize("text", ["", "{}", '{"format": 1, "suites": {"a": {}}}'])
def test_other_files_are_rejected(tmp_path, text):
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(findings.ResultsError, match=r"m\.json"):
        findings.read(path)


def compare(tmp_path: Path, old: dict[str, Any], new: dict[str, Any], *options: str) -> int:
    for name, found in (("old", old), ("new", new)):
        (tmp_path / f"{name}.json").unlink(missing_ok=True)
        findings.write(tmp_path / f"{name}.json", found)
    return main(["compare", str(tmp_path / "old.json"), str(tmp_path / "new.json"), *options])


def pair(ours: float, theirs: float) -> dict[str, Any]:
    return suites(
        row("cpu", *noisy(ours)), row("torch", *noisy(theirs)), row("reference", *noisy(9.0))
    )


WIDE = (8.0, 15.0, 9.0, 14.0, 11.0, 8.5, 16.0)
THEIRS = row("torch", *noisy(20.0))


@pytest.mark.parametrize(
    ("old", "new", "status", "said"),
    [
        (pair(10.0, 20.0), pair(12.0, 20.0), 1, ["1.200", "1 row, 1 slower by more than 5 %"]),
        (pair(10.0, 20.0), pair(30.0, 60.0), 0, ["1 row, 0 slower"]),
        (pair(10.0, 20.0), pair(10.0, 10.0), 1, ["slower"]),
        (
            suites(row("cpu", *WIDE), THEIRS),
            suites(row("cpu", *[1.07 * t for t in WIDE]), THEIRS),
            0, ["0 slower"],
        ),
        (
            pair(10.0, 20.0), suites(row("cpu", *noisy(10.0)), THEIRS, cpu="Other", threads=64),
            2, ["different machines", "threads is 1 in one and 64 in the other"],
        ),
        (
            pair(10.0, 20.0), suites(row("cpu", 1.0, case="y"), row("torch", 2.0, case="y")),
            2, ["No timed rows in common"],
        ),
    ],
    ids=["slower", "machine slower", "machine faster", "noise", "another machine", "other cases"],
)  # fmt: skip
def test_slow_downs_are_detected(tmp_path, capsys, old, new, status, said):
    assert compare(tmp_path, old, new) == status
    shown = capsys.readouterr().out
    assert all(words in shown for words in said), shown


def test_failing_candidates_count_as_slow_downs(tmp_path, capsys):
    wrong = suites(row("cpu", reason="its result is wrong"), row("torch", *noisy(20.0)))
    assert compare(tmp_path, pair(10.0, 20.0), wrong) == 1
    assert "ops linear x cpu: its result is wrong" in capsys.readouterr().out
    assert compare(tmp_path, wrong, pair(10.0, 20.0)) == 2
    without = suites(row("cpu", *noisy(10.0), case="y"), row("torch", *noisy(20.0), case="y"))
    both = {
        "ops": without["ops"] | {"rows": without["ops"]["rows"] + pair(9.0, 18.0)["ops"]["rows"]}
    }
    assert compare(tmp_path, both, without) == 0


def test_a_changed_backend_is_compared_with_the_earlier_one():
    old = [row("cpu+torch", *noisy(10.0)), row("torch", *noisy(20.0))]
    new = [row("cpu", *noisy(20.0)), row("torch", *noisy(20.0))]
    old[0].ours = old[0].chosen = True
    seen = comparing.change(old, new, "cpu")
    assert seen is not None
    assert seen.value == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("times", "taken", "status"),
    [((10.0,), 1, 0), ((12.0, 10.0), 2, 0), ((12.0, 12.0, 12.0), 3, 1), ((8.0, 8.0, 8.0), 3, 0)],
    ids=("as before", "a passing slow-down", "slower", "faster"),
)
def test_passes_repeat_until_the_result_is_clear(tmp_path, monkeypatch, times, taken, status):
    findings.write(tmp_path / "old.json", pair(10.0, 20.0))
    timed = iter(times)
    seen = []

    def time(tree: Path, options: Any, path: Path) -> dict[str, Any]:
        seen.append(path)
        return pair(next(timed), 20.0)

    monkeypatch.setattr(comparing, "_time", time)
    assert main(["compare", str(tmp_path / "old.json")]) == status
    assert len(seen) == taken
