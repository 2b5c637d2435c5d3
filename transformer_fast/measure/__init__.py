"""Measurement: text inputs, interleaved timing, measured rooflines, machine description.

Shared by ``python -m transformer_fast compare`` and the benchmark suite.
"""
