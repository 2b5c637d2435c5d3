"""Pictures of position vectors show the model's own table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from viz_ruler import assert_legible, legend, maps, shown

from transformer_fast import models, viz

POSITIONS = models.SinusoidalPositions(60, 32)


def test_the_table_and_its_curves() -> None:
    figure = viz.positional_encoding(POSITIONS, 50, dimensions=[3, 8])
    data, _ = shown(maps(figure)[0])
    torch.testing.assert_close(data.float(), POSITIONS.table[:50].T)
    curves = figure.axes[1]
    assert [len(line.get_ydata()) for line in curves.lines] == [50, 50]
    for line, dimension in zip(curves.lines, (3, 8), strict=True):
        found = torch.tensor(line.get_ydata(), dtype=torch.float32)
        torch.testing.assert_close(found, POSITIONS.table[:50, dimension])
    # Curves differ in more than colour.
    assert len({line.get_linestyle() for line in curves.lines}) == 2
    assert legend(figure)[0].startswith("dimension 3: cos, period 11.17")
    period = 2 * torch.pi * 10000 ** (8 / 32)
    assert legend(figure)[1] == f"dimension 8: sin, period {period:.4g}"
    assert figure.get_suptitle() == "Sinusoidal positions: 50 of 60, d_model = 32"
    assert_legible(figure)


def test_the_periods_told_are_the_curves() -> None:
    table = models.SinusoidalPositions(700, 32).table
    period = 2 * torch.pi * 10000 ** (16 / 32)  # 628.3
    place = round(period)
    torch.testing.assert_close(table[place, 16], table[0, 16], atol=1e-2, rtol=0)
    figure = viz.positional_encoding(table, dimensions=[16])
    assert legend(figure) == ["dimension 16"]  # nothing is known of a bare table
    told = viz.positional_encoding(models.SinusoidalPositions(700, 32), dimensions=[16])
    assert legend(told) == [f"dimension 16: sin, period {period:.4g}"]


def test_from_models() -> None:
    model = models.LanguageModel(9, 16, 2, 1, 24, positions="learned", max_len=12)
    figure = viz.positional_encoding(model)
    expected = model.encoder.embedding.positions.table.detach()
    torch.testing.assert_close(shown(maps(figure)[0])[0].float(), expected.T)
    low, high = maps(figure)[0].images[0].get_clim()
    assert low == -high == -float(expected.abs().max())
    assert figure.get_suptitle() == "Learned positions: 12 of 12, d_model = 16"
    assert_legible(viz.positional_encoding(torch.zeros(1, 2), title="One"))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"positions": torch.nn.Linear(2, 2)}, TypeError, "or models.LearnedPositions, not Linear"),
        ({"positions": 3}, TypeError, "not int"),
        ({"positions": torch.zeros(2, 2, 2)}, ValueError, r"shape \(L, M\), not \[2, 2, 2\]"),
        ({"length": 61}, ValueError, r"length must be an int in \[1, 60\], not 61"),
        ({"length": 0}, ValueError, "not 0"),
        ({"dimensions": [32]}, IndexError, r"dimensions must be in \[0, 32\), not 32"),
        ({"dimensions": []}, ValueError, "dimensions must name 1 to 6, not 0"),
        ({"dimensions": list(range(7))}, ValueError, "dimensions must name 1 to 6, not 7"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        viz.positional_encoding(**({"positions": POSITIONS} | options))
