"""What tells the model where a token stands: sinusoids or learned vectors."""

from __future__ import annotations

import torch
from torch import Tensor


class Positions(torch.nn.Module):
    """A table (max_len, M) of position vectors; ``forward(length, start)`` gives (length, M).

    Raises:
        ValueError: start + length exceeds max_len.
    """

    table: Tensor

    def __init__(
        self,
        max_len: int,
        d_model: int,
        *,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if max_len < 1:
            raise ValueError(f"max_len must be at least 1, not {max_len}")
        self.max_len, self.d_model = max_len, d_model
        self._keep(torch.empty((max_len, d_model), device=device, dtype=dtype))
        self.reset_parameters()

    def _keep(self, table: Tensor) -> None:
        """For the two classes below; others set ``table`` themselves."""

    def reset_parameters(self) -> None:
        """For those whose table is computed or drawn."""

    def forward(self, length: int, start: int = 0) -> Tensor:
        if start + length > self.max_len:
            raise ValueError(
                f"a sequence of {start + length} tokens is longer than max_len={self.max_len}"
            )
        return self.table[start : start + length]

    def extra_repr(self) -> str:
        return f"max_len={self.max_len}, d_model={self.d_model}"


class SinusoidalPositions(Positions):
    """``PE(p, 2i) = sin(p / 10000^(2i/M))``, ``PE(p, 2i+1) = cos(p / 10000^(2i/M))``.

    The table is computed in fp64 and rounded once; it is no parameter and not in the state_dict.

    Source: "Attention Is All You Need", section 3.5.
    """

    def _keep(self, table: Tensor) -> None:
        self.register_buffer("table", table, persistent=False)

    def reset_parameters(self) -> None:
        """Compute the table (again, after ``to_empty`` on a model that was built on "meta")."""
        if self.table.is_meta:
            return
        place = torch.arange(self.max_len, dtype=torch.float64)[:, None]
        even = torch.arange(0, self.d_model, 2, dtype=torch.float64)
        angle = place * 10000.0 ** (-even / self.d_model)
        waves = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)
        self.table.copy_(waves[:, : self.d_model])


class LearnedPositions(Positions):
    """A trained vector for each position.

    Source: "Attention Is All You Need", section 3.5, the alternative to the sinusoids.
    """

    def _keep(self, table: Tensor) -> None:
        self.table = torch.nn.Parameter(table)

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.table, std=0.02)


def make_positions(
    kind: str | None,
    max_len: int,
    d_model: int,
    device: torch.types.Device,
    dtype: torch.dtype | None,
) -> Positions | None:
    """The module for ``positions="sinusoidal"``, ``"learned"`` or None."""
    if kind is None:
        return None
    kinds = {"sinusoidal": SinusoidalPositions, "learned": LearnedPositions}
    if kind not in kinds:
        raise ValueError(f"positions must be one of {', '.join(kinds)}, or None, not {kind!r}")
    return kinds[kind](max_len, d_model, device=device, dtype=dtype)
