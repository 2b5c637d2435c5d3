"""Grapheme to phoneme on the CMU Pronouncing Dictionary; ``python -m examples.pronunciation``."""
