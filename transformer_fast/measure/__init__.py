"""Measurement: text inputs, interleaved timing, measured rooflines, machine description.

Used by ``python -m transformer_fast compare`` and by the benchmark suite.
"""
