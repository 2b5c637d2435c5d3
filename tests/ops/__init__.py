"""What tests know of each op beside the op table: `<op>.py` has its row, which all tables follow."""

from __future__ import annotations

import importlib
import pkgutil

from transformer_fast.specs import OPS

from .row import Row

_MODULES = [
    importlib.import_module(f"{__name__}.{one.name}") for one in pkgutil.iter_modules(__path__)
]
_ROWS: dict[str, Row] = {
    op: row for one in _MODULES for op, row in getattr(one, "ROWS", {}).items()
}
ROWS: dict[str, Row] = {op: _ROWS[op] for op in OPS}
