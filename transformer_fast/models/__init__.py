"""Whole Transformer models, built from `transformer_fast.nn`, and generation for any decoder.

model = models.Transformer(8000, 6000, pad_token=0, start_token=1, end_token=2)
logits = model(source, target)
found = model.generate(source, models.BeamSearch(4))
"""

from .attention_weights import *
from .embedding import *
from .generation import *
from .hand_written import *
from .transformer import *
from .weights import *

#: All classes and functions imported above.
__all__ = sorted(
    n for n, x in globals().items() if getattr(x, "__module__", "").startswith(__name__)
)


def __dir__() -> list[str]:
    return list(__all__)
