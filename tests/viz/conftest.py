"""Pictures are tested without a screen, and only where matplotlib is installed."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("matplotlib") is None:
    collect_ignore_glob = ["test_viz_[!w]*.py"]
