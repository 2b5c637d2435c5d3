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

# Growth of the process's peak memory, in MiB, call by call. A matrix of scores would be 256 MiB.
CODE = """
import json, resource, torch, transformer_fast
from transformer_fast.functional.attention import attend
torch.set_num_threads(2)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

n = 8192
q, k, v = (torch.randn(1, 1, n, 8) for _ in range(3))
attend(q[:, :, :300], k[:, :, :300], v[:, :, :300])
calls = {
    "plain": {},
    "causal": {"is_causal": True},
    "key lengths": {"key_lengths": torch.tensor([n - 5])},
    "key mask": {"mask": torch.rand(1, 1, 1, n) < 0.9},
    "expanded mask": {"mask": (torch.rand(1, 1, 1, n) < 0.9).expand(1, 1, n, n)},
    "float mask": {"mask": torch.randn(1, 1, 1, n)},
    "dropout": {"dropout_p": 0.1},
}
grown = {}
for name, options in calls.items():
    before = peak()
    try:
        with torch.no_grad():
            output, _ = attend(q, k, v, backend="cpu", **options)
    except NotImplementedError as error:
        grown[name] = str(error)
        continue
    assert output.isfinite().all()
    grown[name] = peak() - before
print(json.dumps(grown))
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
    if isinstance(grown[kind], str):
        pytest.skip(grown[kind])
    # Query, key, value and output are a quarter of a MiB each; huge pages round up.
    assert grown[kind] < 48
