"""The rest of a rewritten graph runs as it is written: inductor takes seconds for each graph."""

import pytest

from transformer_fast.accelerate.graph import backend


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "INNER", None)
