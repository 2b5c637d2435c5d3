"""Every op of the op table on calls drawn at random, against its definition in fp64.

The ordinary run draws the same few thousand calls each time. ``TRANSFORMER_FAST_FUZZ=50000`` draws
so many in all, others in each run; ``--hypothesis-seed`` repeats one.
"""

from __future__ import annotations

import os

import pytest
import torch
from calls import DTYPES, Drawn
from fuzz_checks import check_kernels, check_reference
from hypothesis import Phase, given, settings
from ops import ROWS

from transformer_fast.specs import OPS

MORE = int(os.environ.get("TRANSFORMER_FAST_FUZZ", "0"))
CALLS = MORE or 2100
#: Attention has the most ways to go wrong. Others share what it leaves.
SHARES = {"attention": 0.5, "linear": 0.12, "feed_forward": 0.1}


def share_of(op: str) -> int:
    rest = (1.0 - sum(SHARES.values())) / (len(OPS) - len(SHARES))
    return max(1, round(CALLS * SHARES.get(op, rest) / len(DTYPES)))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("op", OPS)
def test_calls(op: str, dtype: torch.dtype) -> None:
    # Calls are not shrunk: it takes minutes, and the first one that fails tells as much.
    @settings(max_examples=share_of(op), derandomize=not MORE, phases=[Phase.generate])
    @given(ROWS[op].drawn(dtype))
    def check_drawn(drawn: Drawn) -> None:
        check_reference(op, drawn.arguments, drawn.names)
        check_kernels(op, *drawn)

    check_drawn()
