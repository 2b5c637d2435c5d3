"""`accelerate` and `restore`: replace modules of existing models, and undo it.

``transformer_fast.accelerate`` is the function. The other public names are its attributes as well,
so
that ``transformer_fast.accelerate.register_converter`` works without importing this package.
"""

from types import ModuleType

from .._on_import import when_imported
from .converters import register_converter
from .report import Entry, Report
from .swap import accelerate, accelerated, restore

__all__ = ["Entry", "Report", "accelerate", "accelerated", "register_converter", "restore"]

for _public in (Entry, Report, accelerated, register_converter, restore):
    setattr(accelerate, _public.__name__, _public)


def _register_attention(_: ModuleType) -> None:
    from . import hugging_face

    if hugging_face.version_reason() is None:
        hugging_face.register()


when_imported("transformers.modeling_utils", _register_attention)
