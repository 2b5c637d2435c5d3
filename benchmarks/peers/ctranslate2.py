"""CTranslate2: whole translation models, converted beforehand."""

from __future__ import annotations

import importlib.util
from typing import Any

from . import Offer

NAME = "CTranslate2"


def available() -> str | None:
    if importlib.util.find_spec("ctranslate2") is None:
        return "ctranslate2 is not installed (pip install ctranslate2)"
    return None


def encoder_layer(layer: Any, arguments: tuple[Any, ...]) -> Offer:
    return "it runs whole models from token ids; it has no single layer"
