"""README, CONTRIBUTING and the pages of the site say what is so."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

from transformer_fast import _native
from transformer_fast.specs import OPS

ROOT = Path(__file__).resolve().parents[1]
SITE = tuple(sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")))
PAGES = ("README.md", "CONTRIBUTING.md", *SITE)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def sections() -> dict[str, list[str]]:
    """The Python of README and the site by the heading above it, on the site by page and heading.

    On the site the snippets below a heading of the third level continue those before them.
    """
    found: dict[str, list[str]] = {}
    for name in ("README.md", *SITE):
        of_readme = name == "README.md"
        for part in re.split(r"(?m)^(?=###? )" if of_readme else r"(?m)^(?=## )", text_of(name)):
            blocks = re.findall(r"```python\n(.*?)```", part, re.DOTALL)
            if blocks:
                heading = part.partition("\n")[0].strip("# ")
                found[heading if of_readme else f"{name}: {heading}"] = blocks
    return found


#: What a section's code prints, each way in with something that shows it went in.
SHOWN = {
    "transformer_fast": "torch.Size([2, 10, 512])",
    "Accelerate a model that exists": "modules swapped, 0 left as they were",
    "Code that somebody wrote by hand": "rewritten: 1 attention.",
    "Whole models, and decoding": "torch.Size([2, ",
    "The ops themselves": "attention runs on '",
    "docs/guides/accelerate.md: Accelerate a model": "modules swapped, 0 left as they were",
    "docs/guides/accelerate.md: Hugging Face": "attention of transformer_fast",
    "docs/guides/accelerate.md: Compile hand-written code": "rewritten: 1 attention.",
    "docs/guides/backends.md: Ask why": "attention runs on '",
    "docs/guides/masks.md: Packed sequences": "torch.Size([17, 8, 64])",
    "docs/guides/training.md: A run": " steps, loss ",
    "docs/index.md: transformer_fast": "torch.Size([2, 10, 512])",
}


def test_no_way_in_is_missing():
    assert set(SHOWN) <= set(sections())


def test_what_the_build_needs_is_told():
    """The versions where pip may not bring them: an older setuptools cannot read pyproject.toml."""
    tomllib = pytest.importorskip("tomllib")
    requires = tomllib.loads(text_of("pyproject.toml"))["build-system"]["requires"]
    (paragraph,) = [p for p in text_of("README.md").split("\n\n") if "--no-build-isolation" in p]
    assert "`pip install .`" in paragraph
    for requirement in requires:
        name, _, version = requirement.partition(">=")
        assert name == "wheel" or f"`{name}`" in paragraph  # setuptools has wheel's part since 70.1
        assert name != "setuptools" or f"`setuptools` {version} or later" in " ".join(
            paragraph.split()
        )


# Libraries other than ours have warnings of their own.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("section", sections())
def test_snippets_run(section, capsys, tmp_path, monkeypatch):
    """Each section by itself, as somebody would copy it."""
    monkeypatch.chdir(tmp_path)
    code = sections()[section]
    for extra, word in (("transformers", "from transformers "), ("matplotlib", "viz")):
        if any(word in block for block in code):
            pytest.importorskip(extra, reason=f"{extra} is not installed")
    wants_kernels = re.search(r"enable_sdpa|strict\(|batch_invariant\(", "".join(code))
    if wants_kernels and _native.why_not is not None:
        pytest.skip(f"there is no CPU kernel: {_native.why_not}")
    torch.compiler.reset()
    names: dict[str, object] = {}
    for block in code:
        exec(compile(block, section, "exec"), names)
    assert SHOWN.get(section, "") in capsys.readouterr().out


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
    """Ops that stand in another's files."""
    other = {"add_layer_norm": "layer_norm", "linear_cross_entropy": "cross_entropy"}.get(op)
    return other is not None and (ROOT / path.replace("<op>", other)).exists()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])  # MkDocs looks at the site's
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", text_of(page)):
        if not target.startswith("http") and "report.md" not in target:
            assert (ROOT / target).exists(), target


@pytest.mark.parametrize(
    "module", ["", ".accelerate", ".functional", ".models", ".nn", ".training", ".viz"]
)
def test_the_site_describes_every_public_name(module):
    if module == ".viz":
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    found = importlib.import_module(f"transformer_fast{module}")
    # Neither submodules nor what is torch's.
    public = {
        name
        for name in found.__all__
        if getattr(getattr(found, name), "__module__", "").startswith("transformer_fast")
    }
    text = "".join(text_of(page) for page in SITE if page.startswith("docs/api/"))
    assert public <= set(re.findall(r"(?m)^::: transformer_fast\.(?:\w+\.)*(\w+)$", text))
