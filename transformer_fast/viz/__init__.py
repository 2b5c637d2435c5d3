"""Pictures of models and of what happens in them, as matplotlib Figures.

    from transformer_fast import viz

    viz.model_diagram(model).savefig("model.png")

Needs matplotlib (``pip install transformer_fast[viz]``). The figures are not pyplot's: no backend
is chosen and no window opened; ``savefig`` works anywhere, and notebooks show them.
"""

try:
    import matplotlib as _matplotlib  # noqa: F401
except ModuleNotFoundError as missing:
    if missing.name != "matplotlib":
        raise
    raise ImportError(
        "transformer_fast.viz needs matplotlib, which is not installed: "
        "pip install transformer_fast[viz]"
    ) from missing

from .curves import loss_curves, positional_encoding
from .diagram import model_diagram
from .maps import attention_maps, masks, model_attention

__all__ = [
    "attention_maps",
    "loss_curves",
    "masks",
    "model_attention",
    "model_diagram",
    "positional_encoding",
]
