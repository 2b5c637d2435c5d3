"""The Transformer itself: whole models of `transformer_fast.nn`, and decoding for any decoder.

model = models.Transformer(8000, 6000, pad_token=0, start_token=1, end_token=2)
logits = model(source, target)
found = model.generate(source, models.BeamSearch(4))
"""

from .annotated_layer_norm import AnnotatedLayerNorm
from .attention_weights import attention_weights
from .embedding import OutputProjection, TokenEmbedding
from .encoder_decoder import Decoder, Encoder
from .generation import BeamSearch, Generated, Greedy, Sampling, generate, stream
from .hand_written import HandWritten
from .language_model import LanguageModel
from .positions import LearnedPositions, SinusoidalPositions
from .transformer import Transformer
from .weights import load_weights

__all__ = [
    "AnnotatedLayerNorm",
    "BeamSearch",
    "Decoder",
    "Encoder",
    "Generated",
    "Greedy",
    "HandWritten",
    "LanguageModel",
    "LearnedPositions",
    "OutputProjection",
    "Sampling",
    "SinusoidalPositions",
    "TokenEmbedding",
    "Transformer",
    "attention_weights",
    "generate",
    "load_weights",
    "stream",
]
