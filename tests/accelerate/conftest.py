"""Common state of the tests in this folder."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from transformer_fast.accelerate import converters, formula, generation, packing, padded_positions
from transformer_fast.compile import backend


@pytest.fixture(autouse=True)
def as_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes user converters, and runs the rest of a rewritten graph eagerly.

    Inductor takes seconds for each graph.
    """
    monkeypatch.setattr(converters, "_converters", {})
    monkeypatch.setattr(backend, "INNER", None)


@pytest.fixture
def quiet_transformers() -> Iterator[None]:
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the number of tokens in each packed call of attention, or of a whole layer.

    Calls of the trials in `accelerate` do not count.
    """
    found: list[int] = []
    attend, compared = packing.Rows.attend, generation._difference

    def not_counted(*given: Any) -> str | None:
        before = found[:]
        reason = compared(*given)
        found[:] = before
        return reason

    def counted(self: Any, function: Any, module: Any, query: Tensor, *args: Any, **kw: Any) -> Any:
        found.extend([query.shape[2]] * (padded_positions.trial() is None))
        return attend(self, function, module, query, *args, **kw)

    def counted_layer(self: Any, layer: Any, x: Tensor, starts: Tensor | None, *rest: Any) -> Any:
        output = run(self, layer, x, starts, *rest)
        if output is not None and starts is not None and padded_positions.trial() is None:
            found.append(x.shape[1])
        return output

    run = formula.Formula.run
    monkeypatch.setattr(formula.Formula, "run", counted_layer)
    monkeypatch.setattr(packing.Rows, "attend", counted)
    monkeypatch.setattr(generation, "_difference", not_counted)
    return found
