"""requirements.txt is the one list of pins: it has what make installs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


def _pins() -> dict[str, Requirement]:
    """Those for this interpreter."""
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


@pytest.mark.parametrize("extra", ["test", "bench", "viz", "example", "peers", "docs", "dev"])
def test_what_make_installs_is_pinned(extra):
    pins = _pins()
    for wanted in _extra(extra):
        pin = pins[canonicalize_name(wanted.name)]
        (exact,) = pin.specifier
        assert exact.operator == "=="
        assert wanted.specifier.contains(exact.version), f"{pin} is not {wanted}"


def test_make_peers_is_the_extra():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(r"^peers:.*\n\t\$\(PIP\) (.*)$", text, re.MULTILINE)
    assert found is not None
    listed = {str(Requirement(one.strip("'"))) for one in found[1].split()}
    assert listed == {str(one) for one in _extra("peers")}
