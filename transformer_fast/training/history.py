"""What a run of training did, step by step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class History:
    """One entry per step in each list, and what validation found."""

    loss: list[float] = field(default_factory=list)  #: mean per real token
    learning_rate: list[float] = field(default_factory=list)
    gradient_norm: list[float] = field(default_factory=list)  #: before clipping
    tokens: list[int] = field(default_factory=list)  #: real ones, of all processes
    seconds: list[float] = field(default_factory=list)  #: the step's own
    #: (step, {name: value})
    validation: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return len(self.loss)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, list(value))
