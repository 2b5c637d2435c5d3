"""The Transformer itself: whole models of `transformer_fast.nn`, and decoding for any decoder.

model = models.Transformer(8000, 6000, pad_token=0, start_token=1, end_token=2)
logits = model(source, target)
found = model.generate(source, models.BeamSearch(4))
"""

from .attention_weights import attention_weights
from .embedding import LearnedPositions, OutputProjection, SinusoidalPositions, TokenEmbedding
from .generation import BeamSearch, Generated, Greedy, Sampling, generate, stream
from .hand_written import HandWritten
from .transformer import AnnotatedLayerNorm, Decoder, Encoder, LanguageModel, Transformer
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
