"""torch.compile at its best on the CPU: weights frozen, C++ templates for products, autotuned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import named_isa
from . import Offer, torch_compile

NAME = "inductor tuned"

_SETTINGS = {
    **torch_compile.FROZEN,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP,ATEN",
    # What another run found to be fastest may have had other threads.
    "autotune_local_cache": False,
    # No tables on stderr.
    "autotune_num_choices_displayed": 0,
    "max_autotune_report_choices_stats": False,
}


def available() -> str | None:
    if (name := named_isa()) is not None:
        return f"its templates cannot be held to {name}"
    return torch_compile.available()


def _compiled(model: torch.nn.Module, adapt: Callable[..., Any] | None = None) -> Offer:
    # The settings are options as well: dynamo keeps what it compiled by module and backend, and
    # without them this one would be equal to plain torch.compile's.
    return torch_compile.frozen(model, _SETTINGS, adapt, options=_SETTINGS)


def encoder_layer(layer: torch.nn.Module, arguments: tuple[Any, ...]) -> Offer:
    return _compiled(layer)


encoder = transformer = encoder_layer
hand_written = _compiled
