"""Result files, what became slower between two of them, findings, the report, and README's figures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from bench_rows import noisy, row, suites

from benchmarks import compare as comparing
from benchmarks import findings, readme, report, store
from benchmarks.__main__ import main

pytest.importorskip("matplotlib", reason="the report needs matplotlib")


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
    assert found.rival.candidate == "peer"
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
    )
    store.write(folder / "m.json", ordinary)
    scaled = [row("cpu", *noisy(float(n)), case=str(n), roof_share=0.5) for n in (32, 64, 128)]
    store.write(folder / "m-scaling.json", suites(*scaled, name="scaling: linear, rows"))
    return folder


def test_the_report_has_losses_first(results, capsys):
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
    assert "| linear a\\|b | 10.0 ms | 2.00x" in text
    assert "2 cases timed" in text
    assert "another is faster in 1." in text
    assert "as fast as the fastest other software" in readme.headline_part(results)
    assert "make figures" in readme.figures(results / "nothing")
    with pytest.raises(ValueError, match="no place for"):
        readme.generated("# nothing here")
    names = ("headline", "ops", "figures", "other")
    marked = "".join(f"<!-- generated: {name} -->\n<!-- end -->" for name in names)
    with pytest.raises(ValueError, match="no generated part 'other'"):
        readme.generated(marked)


def test_an_instruction_set_of_its_own_is_another_machine(results):
    held = suites(
        *(row("cpu", *noisy(10.0), case="held"), row("torch", *noisy(30.0), case="held")),
        isa="avx2",
        cpu_isa="amx",
        torch_isa="avx2",
    )
    store.write(results / "m-avx2.json", held)
    first, second = report.machines(results)
    assert (first.slug, second.slug) == ("m", "m-avx2")
    assert set(second.suites) == {"ops"}
    text = readme.figures(results)
    assert text.index("linear a\\|b") < text.index("held to avx2, PyTorch to avx2")
    assert "1 case timed, on average 3.00x" in text
    assert "| linear held" not in text


def test_scaling_alone_is_a_report_and_no_table(tmp_path):
    scaled = [row("cpu", *noisy(float(n)), case=str(n)) for n in (1, 4)]
    scaled += [row("torch", *noisy(2.0 * n), case=str(n)) for n in (1, 4)]
    name = "scaling: linear, rows"
    store.write(tmp_path / "m-scaling.json", suites(*scaled, name=name))
    assert main(["report", "--results", str(tmp_path)]) == 0
    assert "Only how time grows" in (tmp_path / "report.md").read_text()
    picture = (tmp_path / "plots" / "m-scaling--linear--rows.svg").read_text()
    for text in ("linear: time by rows", ">torch<", "as PyTorch", ">1 ms<"):
        assert text in picture, text
    assert "make figures" in readme.figures(tmp_path)


def test_fp32s_second_roof_is_told_and_drawn(tmp_path):
    shares = {"roof_share": 1.13, "split_share": 0.44}
    store.write(tmp_path / "m.json", suites(row("cpu", *noisy(10.0), **shares)))
    scaled = [row("cpu", *noisy(float(n)), case=str(n), **shares) for n in (32, 64)]
    store.write(tmp_path / "m-scaling.json", suites(*scaled, name="scaling: linear, rows"))
    assert main(["report", "--results", str(tmp_path)]) == 0
    assert "113 % (44 %)" in (tmp_path / "report.md").read_text()
    picture = (tmp_path / "plots" / "m-scaling--linear--rows.svg").read_text()
    assert ">roof of bf16 pieces<" in picture
    assert "six products of bfloat16 pieces" in readme.figures(tmp_path)


@pytest.mark.parametrize("plan", [{}, {"rest": 0.1}])
def test_figures_from_before_candidates_waited_say_so(tmp_path, plan):
    folder = tmp_path / "results"
    rows = row("cpu", *noisy(10.0)), row("OpenVINO", *noisy(20.0))
    store.write(folder / "m.json", {k: v | {"plan": plan} for k, v in suites(*rows).items()})
    assert main(["report", "--results", str(folder)]) == 0
    for text in ((folder / "report.md").read_text(), readme.figures(folder)):
        assert ("waited for one another's threads" in text) == (not plan)


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
        assert (other.candidate, other.reason) == (one.candidate, one.reason)
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


def compare(tmp_path: Path, old: dict[str, Any], new: dict[str, Any], *options: str) -> int:
    for name, found in (("old", old), ("new", new)):
        (tmp_path / f"{name}.json").unlink(missing_ok=True)
        store.write(tmp_path / f"{name}.json", found)
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
            2, ["no timed rows in common"],
        ),
    ],
    ids=["slower", "machine slower", "machine faster", "noise", "another machine", "other cases"],
)  # fmt: skip
def test_what_is_a_slow_down(tmp_path, capsys, old, new, status, said):
    assert compare(tmp_path, old, new) == status
    shown = capsys.readouterr().out
    assert all(words in shown for words in said), shown


def test_a_slow_down_within_the_tolerance(tmp_path):
    assert compare(tmp_path, pair(10.0, 20.0), pair(12.0, 20.0), "--tolerance", "0.3") == 0


def test_another_machine_is_refused_before_anything_is_timed(tmp_path, monkeypatch, capsys):
    def never(*arguments: Any) -> Any:
        raise AssertionError("it was timed")

    monkeypatch.setattr(comparing, "_time", never)
    store.write(tmp_path / "old.json", suites(row("cpu", *noisy(10.0)), cpu="Other"))
    assert main(["compare", str(tmp_path / "old.json")]) == 2
    assert "cpu is 'Other' in one" in " ".join(capsys.readouterr().out.split())


def test_what_has_no_speed_any_more_counts_as_a_slow_down(tmp_path, capsys):
    wrong = suites(row("cpu", reason="its result is wrong"), row("torch", *noisy(20.0)))
    assert compare(tmp_path, pair(10.0, 20.0), wrong) == 1
    assert "ops linear x cpu: its result is wrong" in capsys.readouterr().out
    assert compare(tmp_path, wrong, pair(10.0, 20.0)) == 2
    without = suites(row("cpu", *noisy(10.0), case="y"), row("torch", *noisy(20.0), case="y"))
    both = {
        "ops": without["ops"] | {"rows": without["ops"]["rows"] + pair(9.0, 18.0)["ops"]["rows"]}
    }
    assert compare(tmp_path, both, without) == 0


def test_another_choice_of_the_dispatcher_is_compared_with_the_one_before():
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
def test_passes_go_on_while_they_agree(tmp_path, monkeypatch, times, taken, status):
    store.write(tmp_path / "old.json", pair(10.0, 20.0))
    timed = iter(times)
    seen = []

    def time(tree: Path, options: Any, path: Path) -> dict[str, Any]:
        seen.append(path)
        return pair(next(timed), 20.0)

    monkeypatch.setattr(comparing, "_time", time)
    assert main(["compare", str(tmp_path / "old.json")]) == status
    assert len(seen) == taken


def test_an_unknown_revision(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["compare", "no-such-revision"])
    assert stopped.value.code == 2
    assert "'no-such-revision' is no result file, and as a revision:" in capsys.readouterr().err
