"""Findings, the report, and README's figures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from bench_rows import noisy, row, suites

pytest.importorskip("matplotlib", reason="the report needs matplotlib")

from benchmarks import findings, readme, report, store
from benchmarks.__main__ import main


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


def test_report_reads_machines_of_both_files(results):
    (one,) = report.machines(results)
    assert set(one.suites) == {"ops", "scaling: linear, rows"}


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
def test_figures_from_before_contenders_waited_say_so(tmp_path, plan):
    folder = tmp_path / "results"
    rows = row("cpu", *noisy(10.0)), row("OpenVINO", *noisy(20.0))
    store.write(folder / "m.json", {k: v | {"plan": plan} for k, v in suites(*rows).items()})
    assert main(["report", "--results", str(folder)]) == 0
    for text in ((folder / "report.md").read_text(), readme.figures(folder)):
        assert ("waited for one another's threads" in text) == (not plan)
