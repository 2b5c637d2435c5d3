"""Replaces modules of existing models: `accelerate` and `restore`.

``transformer_fast.accelerate`` is the function; the other names are its attributes, too, so that
``transformer_fast.accelerate.register_converter`` works without an import of this package.
"""

from .report import Entry, Report
from .swap import accelerate, accelerated, register_converter, restore

__all__ = ["Entry", "Report", "accelerate", "accelerated", "register_converter", "restore"]

for _public in (Entry, Report, accelerated, register_converter, restore):
    setattr(accelerate, _public.__name__, _public)
