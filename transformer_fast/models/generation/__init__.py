"""Decoding: greedy, sampling and beam search, with a key-value cache."""

from .generate import generate, stream
from .methods import BeamSearch, Generated, Greedy, Method, Sampling

__all__ = ["BeamSearch", "Generated", "Greedy", "Method", "Sampling", "generate", "stream"]
