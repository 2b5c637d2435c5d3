"""Pictures of models, their attention weights and their training, as matplotlib Figures.

    from transformer_fast import viz

    viz.model_diagram(model).savefig("model.png")

Needs matplotlib (``pip install matplotlib``). The figures do not use pyplot, so no backend is chosen and
no window opens. ``savefig`` works everywhere, and notebooks show the figures.
"""

try:
    import matplotlib as _matplotlib  # noqa: F401
except ModuleNotFoundError as missing:
    if missing.name != "matplotlib":
        raise
    raise ImportError(
        "transformer_fast.viz needs matplotlib, which is not installed: pip install matplotlib"
    ) from missing

from .curves import loss_curves, positional_encoding
from .diagram import model_diagram
from .maps import attention_maps, masks, model_attention

__all__ = [
    "attention_maps", "loss_curves", "masks", "model_attention", "model_diagram",
    "positional_encoding",
]  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)
