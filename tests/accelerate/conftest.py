"""What every test here starts from."""

import pytest

from transformer_fast.accelerate import swap
from transformer_fast.compile import backend


@pytest.fixture(autouse=True)
def as_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """No converters but ours. The rest of a rewritten graph runs as it is written: inductor takes
    seconds for each graph."""
    monkeypatch.setattr(swap, "_converters", {})
    monkeypatch.setattr(backend, "INNER", None)
