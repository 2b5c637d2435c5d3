"""The commands of ``python -m transformer_fast``."""
