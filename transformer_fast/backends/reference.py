"""The reference as a backend: takes every call."""

from __future__ import annotations

from .. import reference
from ..dispatch import OPS, VARIANTS, Kernel, register

for _op in (*OPS, *VARIANTS):
    register(
        Kernel(
            _op,
            "reference",
            getattr(reference, _op),
            gradients=True,
            mask_gradient=True,
            dropout=True,
            query_lengths=True,
        )
    )
