"""The benchmark suite: peers, result files, findings, report, and what became slower."""

from __future__ import annotations

import copy
import dataclasses
import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from transformer_fast.measure import machine
from transformer_fast.measure.calls import forced
from transformer_fast.measure.clock import Plan
from transformer_fast.measure.contest import Row, run_contest
from transformer_fast.measure.modules import twins
from transformer_fast.measure.summary import speed_up, summarise
from transformer_fast.measure.transformers import Size
from transformer_fast.specs import OPS

pytest.importorskip("matplotlib", reason="the report needs matplotlib")

from benchmarks import findings, peers, readme, regression, report, run, store
from benchmarks.__main__ import main
from benchmarks.scope import Scope
from benchmarks.suites import SCALING, SUITES, backward, decode, layers, ops, training

ROOT = Path(__file__).resolve().parents[1]
FAST = Plan(rounds=3, seconds=0.01, least=2, sample=1e-5)


@pytest.fixture(autouse=True)
def _one_thread(threads):
    torch.set_num_threads(1)


def row(contender: str, *times: float, case: str = "x", **values: Any) -> Row:
    """A row with these samples, in milliseconds."""
    ours = contender in ("cpu", "reference")
    made = Row("linear", case, contender, ours, contender == "cpu", ok=True, **values)
    if times:
        made.samples = [time / 1e3 for time in times]
        made.time = summarise(made.samples)
        made.error, made.error_ratio = 1e-6, 0.5
    return made


def suites(*rows: Row, name: str = "ops", **about: Any) -> dict[str, Any]:
    """As a result file has them; every row measured against the torch row of its case."""
    timed = [one for one in rows if one.samples]
    for one in timed:
        torch_row = next((r for r in timed if (r.case, r.contender) == (one.case, "torch")), None)
        if torch_row is not None:
            one.vs_torch = speed_up(torch_row.samples, one.samples)
            one.best_torch = "torch"
    return {name: {"machine": machine.describe() | about, "rows": list(rows)}}


NOISE = (1.0, 1.02, 0.99, 1.01, 0.98, 1.0, 1.01)


def noisy(time: float) -> list[float]:
    return [time * factor for factor in NOISE]


# Result files.


def test_results_survive_the_file(tmp_path):
    path = tmp_path / "sub" / "m.json"
    before = suites(
        row("cpu", 1.0, 2.0, 4.0), row("torch", 3.0, 3.0, 3.0), row("peer", reason="no")
    )
    store.write(path, before)
    after = store.read(path)
    assert after["ops"]["machine"] == before["ops"]["machine"]
    for one, other in zip(before["ops"]["rows"], after["ops"]["rows"], strict=True):
        assert other.samples == pytest.approx(one.samples)
        assert other.time == one.time
        assert (other.vs_torch is None) == (one.vs_torch is None)
        assert other.vs_torch is None or other.vs_torch == pytest.approx(one.vs_torch, rel=1e-4)
        assert (other.contender, other.reason) == (one.contender, one.reason)
    assert all(len(line) < 2000 for line in path.read_text().splitlines())


def test_a_run_replaces_its_own_suites_only(tmp_path):
    path = tmp_path / "m.json"
    store.write(path, suites(row("cpu", 1.0)) | suites(row("cpu", 2.0), name="layers"))
    store.write(path, suites(row("cpu", 3.0)))
    found = store.read(path)
    assert list(found) == ["ops", "layers"]
    assert found["ops"]["rows"][0].time.median == pytest.approx(3e-3)
    assert found["layers"]["rows"][0].time.median == pytest.approx(2e-3)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 99, "suites": {}}', '{"format": 1, "suites": {"a": {}}}']
)
def test_a_file_that_is_not_ours(tmp_path, text):
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(store.ResultsError, match=r"m\.json"):
        store.read(path)


# What became slower.


def compare(tmp_path: Path, old: dict[str, Any], new: dict[str, Any], *options: str) -> int:
    for name, found in (("old", old), ("new", new)):
        (tmp_path / f"{name}.json").unlink(missing_ok=True)
        store.write(tmp_path / f"{name}.json", found)
    return main(["compare", str(tmp_path / "old.json"), str(tmp_path / "new.json"), *options])


def pair(ours: float, theirs: float) -> dict[str, Any]:
    return suites(
        row("cpu", *noisy(ours)), row("torch", *noisy(theirs)), row("reference", *noisy(9.0))
    )


def test_a_slow_down_ends_with_status_1(tmp_path, capsys):
    assert compare(tmp_path, pair(10.0, 20.0), pair(12.0, 20.0)) == 1
    shown = capsys.readouterr().out
    assert "1.200" in shown
    assert "slower" in shown
    assert "1 rows, 1 slower by more than 5 %" in shown
    assert compare(tmp_path, pair(10.0, 20.0), pair(12.0, 20.0), "--tolerance", "0.3") == 0


def test_a_machine_that_is_slower_today_is_no_slow_down(tmp_path, capsys):
    assert compare(tmp_path, pair(10.0, 20.0), pair(30.0, 60.0)) == 0
    assert "1 rows, 0 slower" in capsys.readouterr().out


def test_the_same_time_is_a_slow_down_if_the_machine_is_faster_today(tmp_path):
    assert compare(tmp_path, pair(10.0, 20.0), pair(10.0, 10.0)) == 1


def test_noise_is_no_slow_down(tmp_path):
    wide = (8.0, 15.0, 9.0, 14.0, 11.0, 8.5, 16.0)
    old = suites(row("cpu", *wide), row("torch", *noisy(20.0)))
    new = suites(row("cpu", *[1.07 * t for t in wide]), row("torch", *noisy(20.0)))
    assert compare(tmp_path, old, new) == 0


def test_another_machine_is_refused(tmp_path, capsys):
    other = suites(row("cpu", *noisy(10.0)), row("torch", *noisy(20.0)), cpu="Other", threads=64)
    assert compare(tmp_path, pair(10.0, 20.0), other) == 2
    shown = capsys.readouterr().out
    assert "different machines" in shown
    assert "threads is 1 in one and 64 in the other" in shown


def test_nothing_in_common(tmp_path, capsys):
    other = suites(row("cpu", 1.0, case="y"), row("torch", 2.0, case="y"))
    assert compare(tmp_path, pair(10.0, 20.0), other) == 2
    assert "no timed rows in common" in capsys.readouterr().out


def test_every_pass_must_show_it():
    slow, same = (regression.Change(v, v - 0.01, v + 0.01, False) for v in (1.2, 1.0))
    assert regression.slower([slow, slow], 0.05)
    assert not regression.slower([slow, same], 0.05)
    assert not regression.slower([slow], 0.25)


def test_an_unknown_revision(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["compare", "no-such-revision"])
    assert stopped.value.code == 2
    assert "'no-such-revision' is no result file, and as a revision:" in capsys.readouterr().err


# Findings and the report.


def test_the_rival_is_the_fastest_other_and_right():
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
    assert found.rival.contender == "peer"
    assert found.against.value == pytest.approx(0.8)
    assert found.lost


def test_losses_come_worst_first_and_doubtful_ones_not_at_all():
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
    """A folder with the results of one machine."""
    folder = tmp_path / "results"
    ordinary = suites(
        *(row("cpu", *noisy(10.0), case="a|b"), row("torch", *noisy(20.0), case="a|b")),
        *(row("cpu", *noisy(9.0), case="<lost>"), row("torch", *noisy(3.0), case="<lost>")),
        row("peer", case="<lost>", reason="it is not installed"),
    )
    store.write(folder / "m.json", ordinary)
    scaled = [row("cpu", *noisy(float(n)), case=str(n), roof_share=0.5) for n in (32, 64, 128)]
    store.write(folder / "m-scaling.json", suites(*scaled, name="scaling: linear, rows"))
    return folder


def test_the_report_has_losses_first_and_needs_nothing_else(results, capsys):
    assert main(["report", "--results", str(results)]) == 0
    text = (results / "report.md").read_text()
    assert (
        text.index("### Losses") < text.index("### ops") < text.index("### scaling: linear, rows")
    )
    assert text.index("<lost>") < text.index("a\\|b")
    assert "| linear | <lost> | cpu | torch | 9.00 ms | 3.00 ms | 0.333x" in text
    for name in ("m-ops.svg", "m-scaling--linear--rows.svg"):
        assert f"plots/{name}" in text
        assert "<svg" in (results / "plots" / name).read_text()
    page = (results / "report.html").read_text()
    assert "<svg" in page
    assert "&lt;lost&gt;" in page
    assert "it is not installed" in page
    assert 'src="' not in page
    assert "<link" not in page
    assert "2 cases timed" in capsys.readouterr().out
    assert main(["report", "--results", str(results)]) == 0
    assert (results / "report.md").read_text() == text


def test_no_results_to_report(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["report", "--results", str(tmp_path)])
    assert stopped.value.code == 2
    assert "run `make bench` first" in capsys.readouterr().err


def test_the_readme_gets_its_figures_from_results(results):
    text = readme.figures(results)
    assert "| linear a\\|b | cpu | 10.0 ms | 2.00x" in text
    assert "2 cases in all; in 1 of them another is faster" in text
    assert "make figures" in readme.figures(results / "nothing")
    with pytest.raises(ValueError, match="no place for"):
        readme.generated("# nothing here")
    with pytest.raises(ValueError, match="no generated part 'other'"):
        readme.generated("<!-- generated: ops -->\n<!-- end --><!-- generated: figures -->\n"
                         "<!-- end --><!-- generated: other -->\n<!-- end -->")  # fmt: skip


# Peers and suites.


@pytest.mark.parametrize("peer", peers.load(), ids=lambda peer: peer.__name__.rpartition(".")[2])
def test_a_peer_does_the_same_work_or_says_why_not(peer):
    if peer.__name__.endswith("torch_compile"):
        pytest.skip("compiling takes long; torch's own tests are about it")
    reason = peer.available()
    if reason is not None:
        pytest.skip(reason)
    if hasattr(peer, "op"):
        for op in ("linear", "feed_forward"):
            arguments = OPS[op].cases[0].build(torch.float32, "cpu", None)
            for offered in peers.contenders([peer], "op", op, arguments):
                if offered.run is not None:
                    right = OPS[op].reference(*arguments)
                    torch.testing.assert_close(offered.run(*arguments), right)
    if hasattr(peer, "encoder_layer"):
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True).eval()
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        for hidden in (None, padding):
            arguments = torch.randn(2, 5, 32), None, hidden
            (offered,) = peers.contenders([peer], "encoder_layer", layer, arguments)
            assert not offered.ours
            if offered.run is None:
                assert offered.reason
                continue
            with torch.no_grad():
                real = slice(None) if hidden is None else ~hidden
                got, right = offered.run(*arguments), layer(*arguments)
            torch.testing.assert_close(got[real], right[real], rtol=1e-4, atol=1e-5)


def _translators() -> tuple[Any, Any]:
    size = Size(32, 4, 64, layers=2, vocabulary=40)
    return twins(lambda nn: decode.Translator(nn, size, 20), torch.float32, "cpu")


def test_everyone_decodes_alike_and_wrong_tokens_are_found():
    ours, theirs = _translators()
    source = torch.randint(3, 40, (3, 7))
    oracle = copy.deepcopy(theirs).double()
    judge = decode.GreedyJudge(oracle, forced(ours.logits, "reference"), 5)
    offered = peers.contenders(peers.load(), "decode", theirs, (source,), 5)
    runs = [decode.cached(ours, 5), decode.recomputing(theirs, 5)]
    runs += [contender.run for contender in offered if contender.run is not None]
    with torch.no_grad():
        for run_one in runs:
            parity = judge(run_one(source), (source,))
            assert parity.ok, str(parity)
        right = runs[0](source)
        for place in ((0, 0), (2, 4)):
            wrong = right.clone()
            wrong[place] = (wrong[place] + 7) % 37 + 3
            assert not judge(wrong, (source,)).ok
        assert not judge(right[:, :4], (source,)).ok


def test_a_missing_or_broken_peer_is_a_row_with_its_reason():
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no licence\nsecond line")

    missing = types.SimpleNamespace(NAME="a", available=lambda: "it is not installed", op=broken)
    failing = types.SimpleNamespace(NAME="b", available=lambda: None, op=broken)
    silent = types.SimpleNamespace(NAME="c", available=lambda: None, op=lambda *a: None)
    without = types.SimpleNamespace(NAME="d", available=lambda: None)
    found = peers.contenders([missing, failing, silent, without], "op", "linear", ())
    assert [(c.name, c.run, c.reason) for c in found] == [
        ("a", None, "it is not installed"),
        ("b", None, "RuntimeError: no licence"),
    ]
    with pytest.raises(ValueError, match="there is no peer 'nobody'"):
        peers.load(["nobody"])


@pytest.mark.parametrize("name", [*SUITES, *SCALING])
def test_every_suite_has_work_with_distinct_names(name):
    for quick in (True, False):
        work = list((SUITES | SCALING)[name](Scope(quick=quick)))
        assert work
        assert len({label for label, _ in work}) == len(work)


def test_inputs_of_a_case_share_weights_and_nothing_else():
    first, second = Scope().draw("feed_forward", OPS["feed_forward"].cases[0])
    named = [OPS["feed_forward"].named(calls[0]) for calls in (first, second)]
    assert named[0]["weight1"] is named[1]["weight1"]
    assert not torch.equal(named[0]["input"], named[1]["input"])


def test_lengths_have_the_share_that_they_say():
    for share in (0.1, 0.25, 0.5, 0.65, 0.9, 1.0):
        found = layers.lengths(16, 400, share)
        assert found.float().mean().item() / 400 == pytest.approx(share, abs=0.01)
        assert 1 <= int(found.min()) <= int(found.max()) <= 400


def test_a_quick_run_end_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "QUICK", FAST)
    monkeypatch.setattr(ops, "_QUICK_FLOPS", 1e6)
    path = tmp_path / "m.json"
    options = ["--quick", "--suite", "overhead", "backward", "--op", "layer_norm", "--peer"]
    assert main([*options, "--json", str(path)]) == 0
    found = store.read(path)
    assert list(found) == ["overhead", "backward"]
    assert json.loads(path.read_text())["suites"]["overhead"]["quick"] is True
    for suite in found.values():
        timed = {one.contender for one in suite["rows"] if one.time is not None}
        assert {"reference", "torch"} <= timed
        assert any(one.chosen and one.time for one in suite["rows"])
    assert f"written to {path}" in " ".join(capsys.readouterr().out.split())


def test_no_relu_is_near_its_kink_when_gradients_are_compared():
    case = OPS["feed_forward"].bench_cases[2]
    arguments = backward.away_from_the_kink("feed_forward", case.build(torch.float32, "cpu", None))
    x, weight1, bias1, *_ = arguments
    before = torch.nn.functional.linear(x, weight1, bias1)
    assert before.numel() > 500_000
    assert (before.abs() < 1e-4).sum() <= 2
    assert 0.4 < (before > 0).float().mean() < 0.6
    same = OPS["layer_norm"].bench_cases[-1].build(torch.float32, "cpu", None)
    assert all(
        a is b for a, b in zip(backward.away_from_the_kink("layer_norm", same), same, strict=True)
    )


def test_a_training_step_can_be_checked_again_and_again(monkeypatch):
    monkeypatch.setattr(training, "_QUICK", ((2, 6, 50, 1),))
    ((_, make),) = training.suite(Scope(quick=True))
    rows = {one.contender: one for one in run_contest(make(), FAST)}
    assert rows["torch eager"].ok
    assert rows["reference"].ok
    (chosen,) = (one for one in rows.values() if one.chosen)
    assert chosen.ok, chosen.reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--suite", "nothing"], "invalid choice: 'nothing'"),
        (["--peer", "nobody"], "there is no peer 'nobody'"),
        (["--threads", "0"], "argument --threads: must be at least 1, not 0"),
        (["--quick", "--thorough"], "not allowed with argument"),
        (["--device", "warp"], "warp"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options(capsys, options, message):
    with pytest.raises(SystemExit) as stopped:
        main(options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_report_reads_machines_of_both_files(results):
    (one,) = report.machines(results)
    assert list(one.suites) == ["scaling: linear, rows", "ops"] or set(one.suites) == {
        "ops",
        "scaling: linear, rows",
    }
