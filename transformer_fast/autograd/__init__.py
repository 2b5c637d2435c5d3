"""One `torch.autograd.Function` per op, shared by all backends that have a backward.

A backend registers a pair of functions per op under its name (`register`). Both take and return
plain tensors; neither is differentiated. ``wants`` tells which gradients are asked for, in the
order of the results; what is not wanted may come back as anything.

    cross_entropy     forward(input, target, ignore_index, label_smoothing) -> (losses, known);
                          known: what backward wants to know of the rows
                      backward(grad, input, target, known, ignore_index, label_smoothing, wants)
                          -> gradient of input
    linear_cross_entropy
                      forward(input, weight, bias, target, ignore_index, label_smoothing)
                          -> (losses, known)
                      backward(grad, input, weight, bias, target, known, ignore_index,
                          label_smoothing, wants) -> gradients of input, weight, bias

Saved is what the gradients that are asked for need. In place of what they do not need backward gets
a tensor of the right shape (columns of a weight that was not saved either: any number) with
anything in it; a weight of a norm is None then.

Kernels have first derivatives only. With ``create_graph=True`` a backward differentiates the
reference's formula instead, which can be differentiated again; tensors with tangents, and calls
inside torch.func's transforms, never get here (`dispatch.select`).
"""

from .cross_entropy import CrossEntropy, LinearCrossEntropy
from .function import differentiates_again, needs_function, pairs, register, savable, vjp

__all__ = [
    "CrossEntropy",
    "LinearCrossEntropy",
    "differentiates_again",
    "needs_function",
    "pairs",
    "register",
    "savable",
    "vjp",
]
