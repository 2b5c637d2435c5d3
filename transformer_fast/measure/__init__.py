"""How figures are taken: real text, alternating rounds, measured roofs, the machine line.

Shared by ``python -m transformer_fast compare`` and the benchmark suite.
"""
