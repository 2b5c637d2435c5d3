"""The page that shows all pictures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from matplotlib import image

from examples import pictures


def test_all_pictures_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "pictures"
    pictures.main(["--out", str(folder), "--steps", "2"])
    files = sorted(folder.glob("*.png"))
    names = [file.stem for file in files]
    for start in ("attention_cross", "layers_", "positions", "masks_"):
        assert any(name.startswith(start) for name in names), start
    for file in files:
        pixels = image.imread(file)
        assert min(pixels.shape[:2]) > 200
        assert pixels[..., :3].std() > 0.01, f"{file.name} shows nothing"
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'<figure id="(\w+)">', page) != []
    assert sorted(re.findall(r'<figure id="(\w+)">', page)) == names
    # It holds all it shows.
    assert page.count("data:image/png;base64,") == len(names) == page.count("<img ")
    assert f"{len(names)} pictures" in capsys.readouterr().out


def test_the_command_it_tells() -> None:
    assert "python examples/pictures.py --out build/pictures" in pictures.__doc__
