"""Curves of the loss: what is drawn is what the history says."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from transformer_fast import training, viz


def history(scale: float = 1.0) -> training.History:
    found = training.History()
    found.loss = [8.0 * scale, 4.0 * scale, 6.0 * scale]
    found.seconds = [0.5, 0.25, 0.25]
    found.validation = [(2, {"loss": 5.0}), (3, {"error": 0.1})]
    return found


def test_what_is_drawn() -> None:
    figure = viz.loss_curves({"one": history(), "$two$": history(0.5)}, window=2, title="a $ b")
    over_steps, over_time = figure.axes
    single, mean, dots = over_steps.lines[:3]
    assert single.get_xdata().tolist() == [1, 2, 3]
    assert single.get_ydata().tolist() == [8.0, 4.0, 6.0]
    assert mean.get_ydata().tolist() == [8.0, 6.0, 5.0]
    assert (dots.get_xdata().tolist(), dots.get_ydata().tolist()) == ([2], [5.0])
    assert over_time.lines[0].get_xdata().tolist() == [0.5, 0.75, 1.0]
    assert over_time.lines[2].get_xdata().tolist() == [0.75]
    assert len({line.get_color() for line in over_steps.lines}) == 2
    figure.canvas.draw()


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="histories must be a dict of History, not History"):
        viz.loss_curves(history())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"histories\['one'\] must be a History, not list"):
        viz.loss_curves({"one": []})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"histories\['one'\] has no steps"):
        viz.loss_curves({"one": training.History()})
    with pytest.raises(ValueError, match="histories must have 1 to 6 runs, not 0"):
        viz.loss_curves({})
    with pytest.raises(ValueError, match="window must be at least 1, not 0"):
        viz.loss_curves({"one": history()}, window=0)
