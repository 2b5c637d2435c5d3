"""README and CONTRIBUTING say what is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from transformer_fast.specs import OPS

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_quick_start_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", text_of("README.md"), re.DOTALL)
    assert len(blocks) >= 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    shown = capsys.readouterr().out
    assert "torch.Size([2, 10, 512])" in shown
    assert "attention runs on '" in shown


def test_generated_parts_are_up_to_date():
    pytest.importorskip("matplotlib", reason="the report needs matplotlib")
    from benchmarks import readme

    assert readme.main(["--check"]) == 0


def test_the_table_has_every_op():
    text = text_of("README.md")
    for op in OPS:
        assert re.search(rf"(?m)^\| `{op}` \|", text)


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page):
    makefile = text_of("Makefile")
    for target in set(re.findall(r"`?make ([a-z][a-z-]*)", text_of(page))):
        assert re.search(rf"(?m)^{target}:", makefile), target


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page):
    named = re.findall(r"`((?:transformer_fast|csrc|benchmarks|tests)/[\w/.<>-]*)`", text_of(page))
    for path in named:
        for op in OPS if "<op>" in path else ("",):
            # What a command writes may not have been written yet.
            if "<" in path.replace("<op>", "") or path.startswith("benchmarks/results/"):
                continue
            assert list(ROOT.glob(path.replace("<op>", op).rstrip("/"))) or _shared(path, op), path


def _shared(path: str, op: str) -> bool:
    """add_layer_norm stands in layer_norm's files."""
    return op == "add_layer_norm" and (ROOT / path.replace("<op>", "layer_norm")).exists()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", text_of(page)):
        if not target.startswith("http") and "report.md" not in target:
            assert (ROOT / target).exists(), target
