"""Attention's memory: it grows with the tokens, not with their square."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_fast import _native

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))

# MiB of each call at its highest, in a process of their own. A matrix of scores would be 256 MiB.
CODE = """
import json, torch, transformer_fast
from transformer_fast.functional.attention import attend
from transformer_fast.measure.memory import peak
torch.set_num_threads(2)

n = 8192
q, k, v = (torch.randn(1, 1, n, 8) for _ in range(3))
calls = {
    "plain": {},
    "causal": {"is_causal": True},
    "key lengths": {"key_lengths": torch.tensor([n - 5])},
    "key mask": {"mask": torch.rand(1, 1, 1, n) < 0.9},
    "expanded mask": {"mask": (torch.rand(1, 1, 1, n) < 0.9).expand(1, 1, n, n)},
    "float mask": {"mask": torch.randn(1, 1, 1, n)},
    "dropout": {"dropout_p": 0.1},
}

def attended(**options):
    def call():
        with torch.no_grad():
            output, _ = attend(q, k, v, backend="cpu", **options)
        assert output.isfinite().all()
    found = peak(call)
    return None if found is None else found / 2**20

print(json.dumps({name: attended(**options) for name, options in calls.items()}))
"""


@pytest.fixture(scope="module")
def grown():
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=ROOT,
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "kind",
    ["plain", "causal", "key lengths", "key mask", "expanded mask", "float mask", "dropout"],
)
def test_attention_needs_no_square(grown, kind):
    if grown[kind] is None:
        pytest.skip("this system does not tell the peak of a call's memory")
    # The output is a quarter of a MiB; huge pages round up.
    assert grown[kind] < 48
