"""Operators that no function of `functional` stands for: parts of modules and of generation."""

from __future__ import annotations

from ._operator import Operator, Rule

DROPOUT = Operator(
    "dropout(Tensor input, float p, Tensor? seed) -> Tensor", Rule("input:...", "...", ".")
)
#: Of a table of so many rows, from the gradient of the rows looked up.
EMBEDDING_BACKWARD = Operator(
    "embedding_backward(Tensor grad, Tensor tokens, int rows, int padding) -> Tensor",
    Rule("grad:...m tokens:... rows:v", "vm", ".m"),
)
#: The place of each row's largest value, the first of equals.
ARGMAX = Operator("argmax(Tensor input) -> Tensor", Rule("input:rc", "r:int64", "r"))
