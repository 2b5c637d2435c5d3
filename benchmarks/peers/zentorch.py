"""AMD's plugin for torch.compile, with its weights frozen."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from .. import named_isa
from . import Offer, torch_compile

NAME = "zentorch"
PACKAGES = ("zentorch",)

_SETTINGS = {
    # Without this it packs weights where they are, which are those of the other candidates, too.
    **torch_compile.FROZEN,
    # It sets a pass of its own when it compiles, for all that inductor compiles from then on.
    "joint_custom_post_pass": None,
}


def available() -> str | None:
    if importlib.util.find_spec("zentorch") is None:
        return "zentorch is not installed (pip install zentorch; x86-64 only)"
    version = importlib.metadata.version("zentorch")
    if version.split(".")[:2] != torch.__version__.split(".")[:2]:
        return f"zentorch {version} is not for torch {torch.__version__}"
    if not torch.cpu._is_avx512_supported():
        return "without AVX-512 it leaves everything to inductor"
    if (name := named_isa()) is not None:
        return f"it cannot be held to {name}"
    return torch_compile.available()


def _compiled(model: torch.nn.Module, adapt: Callable[..., Any] | None = None) -> Offer:
    importlib.import_module("zentorch")
    return torch_compile.frozen(model, _SETTINGS, adapt, backend="zentorch")


def encoder_layer(layer: torch.nn.Module, arguments: tuple[Any, ...]) -> Offer:
    return _compiled(layer)


encoder = transformer = encoder_layer
hand_written = _compiled
