"""Result files, and what became slower between two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bench_rows import noisy, row, suites

pytest.importorskip("matplotlib", reason="the report needs matplotlib")

from benchmarks import compare as comparing
from benchmarks import store
from benchmarks.__main__ import main


@pytest.fixture(autouse=True)
def _one_thread(threads):
    torch.set_num_threads(1)


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
    assert "1 row, 1 slower by more than 5 %" in shown
    assert compare(tmp_path, pair(10.0, 20.0), pair(12.0, 20.0), "--tolerance", "0.3") == 0


def test_a_machine_that_is_slower_today_is_no_slow_down(tmp_path, capsys):
    assert compare(tmp_path, pair(10.0, 20.0), pair(30.0, 60.0)) == 0
    assert "1 row, 0 slower" in capsys.readouterr().out


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


def test_nothing_in_common(tmp_path, capsys):
    other = suites(row("cpu", 1.0, case="y"), row("torch", 2.0, case="y"))
    assert compare(tmp_path, pair(10.0, 20.0), other) == 2
    assert "no timed rows in common" in capsys.readouterr().out


def test_every_pass_must_show_it():
    slow, same = (comparing.Change(v, v - 0.01, v + 0.01, False) for v in (1.2, 1.0))
    assert comparing.slower([slow, slow], 0.05)
    assert not comparing.slower([slow, same], 0.05)
    assert not comparing.slower([slow], 0.25)


def test_an_unknown_revision(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["compare", "no-such-revision"])
    assert stopped.value.code == 2
    assert "'no-such-revision' is no result file, and as a revision:" in capsys.readouterr().err
