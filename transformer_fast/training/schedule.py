"""Learning rates: the paper's warm-up, and a warm-up with a linear end."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def _check_warmup(warmup_steps: int) -> None:
    if warmup_steps < 1:
        raise ValueError(f"warmup_steps must be at least 1, not {warmup_steps}")


def paper_schedule(
    optimizer: Optimizer, d_model: int | None = None, warmup_steps: int = 4000
) -> LambdaLR:
    """``lr * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5)`` at step 1, 2, ...

    ``lr`` is what the optimiser was made with: 1.0 gives the paper's rates.

    Args:
        d_model: size M of the model; None: ``lr`` is the highest rate, reached at warmup_steps.
        warmup_steps: steps of linear increase; after them the rate falls with the root of the step.

    Raises:
        ValueError: d_model or warmup_steps below 1.

    Source: "Attention Is All You Need", section 5.3.
    """
    _check_warmup(warmup_steps)
    if d_model is not None and d_model < 1:
        raise ValueError(f"d_model must be at least 1, or None, not {d_model}")
    scale = warmup_steps**0.5 if d_model is None else d_model**-0.5

    def factor(done: int) -> float:
        step = done + 1
        return scale * min(step**-0.5, step * warmup_steps**-1.5)

    return LambdaLR(optimizer, factor)


def linear_schedule(optimizer: Optimizer, total_steps: int, warmup_steps: int = 1) -> LambdaLR:
    """``lr * min(step / warmup_steps, (total_steps + 1 - step) / (total_steps + 1 - warmup_steps))``.

    For runs whose length is known: the highest rate ``lr`` at warmup_steps, near 0 at the end.

    Raises:
        ValueError: warmup_steps below 1 or above total_steps.
    """
    _check_warmup(warmup_steps)
    if warmup_steps > total_steps:
        raise ValueError(
            f"warmup_steps must be at most total_steps, {total_steps}, not {warmup_steps}"
        )

    def factor(done: int) -> float:
        step = done + 1
        down = (total_steps + 1 - step) / (total_steps + 1 - warmup_steps)
        return max(0.0, min(step / warmup_steps, down))

    return LambdaLR(optimizer, factor)
