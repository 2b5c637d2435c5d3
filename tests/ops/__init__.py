"""What tests know of each op beside the op table: `<op>.py` has its row, which all tables follow."""

from __future__ import annotations

import importlib
import pkgutil

from transformer_fast.specs import OPS

from .row import Row

_ROWS: dict[str, Row] = {}
for _one in pkgutil.iter_modules(__path__):
    _ROWS |= getattr(importlib.import_module(f"{__name__}.{_one.name}"), "ROWS", {})
ROWS: dict[str, Row] = {op: _ROWS[op] for op in OPS}
