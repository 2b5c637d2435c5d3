"""Common state of the tests in this folder."""

from collections.abc import Iterator

import pytest

from transformer_fast.accelerate import swap
from transformer_fast.compile import backend


@pytest.fixture(autouse=True)
def as_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes user converters, and runs the rest of a rewritten graph eagerly.

    Inductor takes seconds for each graph.
    """
    monkeypatch.setattr(swap, "_converters", {})
    monkeypatch.setattr(backend, "INNER", None)


@pytest.fixture
def quiet_transformers() -> Iterator[None]:
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)
