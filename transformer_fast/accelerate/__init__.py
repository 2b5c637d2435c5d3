"""Ways into this library for models that exist already.

`accelerate` and `restore` swap the classes of a living model's modules and back.
"""

from .report import Entry, Report
from .swap import accelerate, accelerated, register_converter, restore

__all__ = ["Entry", "Report", "accelerate", "accelerated", "register_converter", "restore"]
