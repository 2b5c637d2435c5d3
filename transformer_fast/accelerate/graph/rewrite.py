"""All that is done to one captured graph."""

from __future__ import annotations

from collections import Counter

import torch
from torch.fx import GraphModule, Node

from ... import functional
from .activation import rewrite_activations
from .attention import rewrite_attention
from .canonicalize import canonicalize
from .conv import rewrite_convolutions, rewrite_patches
from .editor import Editor
from .feed_forward import name_linear, rewrite_feed_forward, rewrite_linear
from .modules import rewrite_modules
from .nodes import rank
from .norm import rewrite_add_norm, rewrite_norms
from .ops import read
from .report import GraphReport
from .softmax import rewrite_softmax


def rewrite(module: GraphModule) -> GraphReport:
    """Put our ops in for what is recognised, in place; what is not stays as it is.

    ``module`` is a graph as torch.compile gives it to a backend: every node knows the value it had
    while the graph was captured (``meta["example_value"]``).
    """
    report = GraphReport()
    canonicalize(module.graph)
    editor = Editor(module.graph, report)
    rewrite_softmax(editor)
    rewrite_attention(editor)
    _rewrite_calls_of_torchs(editor)
    rewrite_modules(editor)
    rewrite_norms(editor)
    rewrite_activations(editor)
    rewrite_convolutions(editor)
    rewrite_patches(editor)
    name_linear(editor)
    rewrite_feed_forward(editor)
    rewrite_add_norm(editor)
    rewrite_linear(editor)
    _tell_of_the_rest(editor)
    report.others = Counter(
        str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", ""))
        for node in module.graph.nodes
        if node.op == "call_method" or (node.op == "call_function" and not _is_ours(node.target))
    )
    module.graph.lint()
    module.recompile()
    for child in module.children():
        # What is checkpointed or branched over is a graph within the graph.
        if isinstance(child, GraphModule):
            inner = rewrite(child)
            report.rewritten += inner.rewritten
            report.left += inner.left
            report.others += inner.others
    return report


def _tell_of_the_rest(editor: Editor) -> None:
    """Calls that do what our ops do, and that stay nevertheless."""
    for node in editor.graph.nodes:
        if node.target is torch._native_multi_head_attention:
            reason = "it is a module of torch.nn, which transformer_fast.accelerate(model) swaps"
            editor.left("attention", node, reason)
        op = read(node)
        if op is not None and op.name in ("matmul", "addmm"):
            weight = op["mat2" if op.name == "addmm" else "other"]
            if isinstance(weight, Node) and weight.op == "placeholder" and rank(weight) == 2:
                reason = "it is a product with a (in, out) matrix, and our kernels read (out, in)"
                editor.left("linear", node, reason)


def _is_ours(target: object) -> bool:
    return (getattr(target, "__module__", "") or "").startswith("transformer_fast.")


def _rewrite_calls_of_torchs(editor: Editor) -> None:
    """`F.scaled_dot_product_attention`, where the user calls it already."""
    for node in list(editor.graph.nodes):
        op = read(node)
        if (
            op is None
            or op.name != "attention"
            or node.target is functional.scaled_dot_product_attention
        ):
            continue
        with editor.graph.inserting_before(node):
            new = editor.graph.call_function(
                functional.scaled_dot_product_attention, node.args, node.kwargs
            )
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        editor.graph.erase_node(node)
        editor.found("attention", node)
