"""Decoding: greedy, sampling and beam search, with a cache of keys and values."""

from .generate import generate, stream
from .methods import BeamSearch, Generated, Greedy, Method, Sampling

__all__ = ["BeamSearch", "Generated", "Greedy", "Method", "Sampling", "generate", "stream"]
