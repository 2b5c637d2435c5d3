"""The package does not need matplotlib, and says what does."""

from __future__ import annotations

import subprocess
import sys

HIDDEN = """
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
import transformer_fast
from transformer_fast import models, nn
try:
    from transformer_fast import viz
except ImportError as error:
    print(error)
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_missing_matplotlib_is_named() -> None:
    assert run(HIDDEN) == (
        "transformer_fast.viz needs matplotlib, which is not installed: "
        "pip install transformer_fast[viz]"
    )


def test_importing_the_package_does_not_import_matplotlib() -> None:
    code = "import sys, transformer_fast; from transformer_fast import models, nn; "
    assert run(code + "print('matplotlib' in sys.modules)") == "False"
