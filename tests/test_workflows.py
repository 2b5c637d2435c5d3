"""The workflows run what .ci/run does, with the versions that the package names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def load(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    found["on"] = found.pop(True)  # YAML 1.1's `on`
    return found


def commands(workflow: dict[str, Any]) -> str:
    steps = [step for job in workflow["jobs"].values() for step in job.get("steps", [])]
    return "\n".join(step.get("run", "") for step in steps)


def targets(text: str) -> set[str]:
    """The targets that the commands make, and those that these make in turn."""
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


def test_workflows_make_what_ci_makes():
    assert targets(text_of(".ci/run")) <= targets("\n".join(commands(load(p)) for p in WORKFLOWS))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_documents_start_no_job_that_compiles(path):
    workflow = load(path)
    compiles = workflow.get("env", {}).get("TRANSFORMER_FAST_BUILD") == "require"
    for event in ("pull_request", "push") if compiles else ():
        assert {"**.md", "docs/**"} <= set(workflow["on"][event]["paths-ignore"])
    without = path.stem in ("docs", "lint", "release")  # the last on tags only
    # wheels.yml names the paths that start it, gpu.yml the label.
    assert compiles or without or {"paths", "types"} & set(workflow["on"]["pull_request"])


def test_the_matrix_is_what_is_supported():
    project = text_of("pyproject.toml")
    matrix = load(ROOT / ".github/workflows/test.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert f'requires-python = ">={matrix["python"][0]}"' in project
    oldest = Version(matrix["torch"][0]["torch"])
    assert f'"torch>={oldest.major}.{oldest.minor}"' in project
    assert matrix["torch"][1] == {}  # the pinned one


def test_gpu_figures_are_kept():
    workflow = load(ROOT / ".github/workflows/gpu.yml")
    (file,) = re.findall(r'make gpu-check ARGS="--json (\S+)"', commands(workflow))
    kept = workflow["jobs"]["gpu-check"]["steps"][-1]
    assert (kept["if"], kept["with"]["path"]) == ("always()", file)


def test_pre_commit_runs_the_pinned_versions():
    pins = dict(re.findall(r"(?m)^(ruff|clang-format)==(\S+)$", text_of("requirements.txt")))
    config = yaml.safe_load(text_of(".pre-commit-config.yaml"))
    found = {repo["hooks"][0]["id"].removesuffix("-check"): repo["rev"] for repo in config["repos"]}
    assert found == {name: f"v{version}" for name, version in pins.items()}
