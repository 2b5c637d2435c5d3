"""``torch.compile(model, backend="transformer_fast")``, and all that is done to a captured graph."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from .. import functional
from . import run_time
from .attention import rewrite_attention, rewrite_softmax
from .canonicalize import canonicalize
from .editor import Editor
from .feed_forward import (
    name_linear,
    rewrite_activations,
    rewrite_convolutions,
    rewrite_feed_forward,
    rewrite_linear,
    rewrite_patches,
)
from .inner import compile_rest, why_not
from .modes import GraphModes, Modes
from .nodes import rank
from .norm import rewrite_add_norm, rewrite_norms
from .ops import read
from .report import GraphReport, remember

_log = logging.getLogger("transformer_fast")

#: The option ``inner`` that is not given.
INNER: Callable[..., Any] | None = compile_rest


def compile_backend(
    module: GraphModule,
    example_inputs: list[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend: rewrites a captured graph to our ops and runs the rest as PyTorch would.

    Recognised, however it is written: attention around a softmax, feed-forward networks,
    norms with the residual sum in front, linear maps, calls of F.scaled_dot_product_attention.
    The numbers stay the user's, up to rounding; in training, dropout draws other elements. Rows
    that see nothing keep their meaning where it is a number (a finite fill like -1e9: all keys
    alike) and give 0 where it is NaN (a fill of -inf).

    Args:
        module, example_inputs: what torch.compile passes to a backend.

    Options of ``torch.compile(..., options={...})``:
        inner: what compiles the rewritten graph: name or function of another backend, or None for
            nothing. By default inductor, for inference on a CPU where a C++ compiler is found, unless
            the program has attention masks, whose values are read at run time.
        report: a function that is given each `GraphReport`.

    What was done: `transformer_fast.compile_reports`, and the log at level INFO.

    Raises:
        ValueError: an unknown option, or a mode.
    """
    inner, tell = _options(options, mode)
    report = rewrite(module)
    if inner is compile_rest:
        reason = why_not(module, example_inputs)
        report.rest = (
            "compiled by inductor" if reason is None else f"left to eager PyTorch ({reason})"
        )
        inner = compile_rest if reason is None else None
    remember(report)
    _log.info("%s", report)
    if tell is not None:
        tell(report)
    if inner is None:
        for each in module.modules():
            if isinstance(each, GraphModule):
                run_checkpoints_eagerly(each)
        return module.forward
    compiled: Callable[..., Any] = inner(module, example_inputs)
    return compiled


def _options(
    options: dict[str, Any] | None, mode: str | None
) -> tuple[Callable[..., Any] | None, Callable[[GraphReport], Any] | None]:
    if mode is not None:
        raise ValueError(f'backend "transformer_fast" takes no mode, but got mode={mode!r}')
    given = dict(options or {})
    inner, tell = given.pop("inner", INNER), given.pop("report", None)
    if given:
        raise ValueError(
            f'backend "transformer_fast" takes the options inner and report, not {", ".join(given)}'
        )
    if isinstance(inner, str):
        inner = torch._dynamo.lookup_backend(inner)
    return inner, tell


def rewrite(module: GraphModule, start: Modes | None = None) -> GraphReport:
    """Put our ops in for what is recognised, in place; what is not stays as it is.

    ``module`` is a graph as torch.compile gives it to a backend: every node knows the value it had
    while the graph was captured (``meta["example_value"]``). ``start``: the modes in which it runs,
    by default the current ones.
    """
    report = GraphReport()
    modes = GraphModes(module.graph, start)
    canonicalize(module.graph, modes)
    editor = Editor(module.graph, report, modes)
    for step in _STEPS:
        step(editor)
    _tell_of_the_rest(editor)
    report.others = Counter(
        str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", ""))
        for node in module.graph.nodes
        if node.op == "call_method" or (node.op == "call_function" and not _is_ours(node.target))
    )
    module.graph.lint()
    module.recompile()
    # What is checkpointed or branched over is a graph within the graph.
    children = dict(module.named_children())
    for node in module.graph.nodes:
        child = children.pop(str(node.target), None) if node.op == "get_attr" else None
        # Policies of selective checkpointing choose among PyTorch's operators.
        if isinstance(child, GraphModule) and node.users and run_time.CONTEXT not in child.meta:
            inner = rewrite(child, modes.of_body(next(iter(node.users))))
            report.rewritten += inner.rewritten
            report.left += inner.left
            report.others += inner.others
    return report


def _tell_of_the_rest(editor: Editor) -> None:
    """Calls that do what our ops do, and that stay nevertheless."""
    for node in editor.graph.nodes:
        if node.target is torch._native_multi_head_attention:
            reason = "it is a torch.nn module, which transformer_fast.accelerate(model) replaces"
            editor.left("attention", node, reason)
        op = read(node)
        if op is not None and op.name in ("matmul", "addmm"):
            weight = op["mat2" if op.name == "addmm" else "other"]
            if isinstance(weight, Node) and weight.op == "placeholder" and rank(weight) == 2:
                reason = "its weight is stored as (in, out), and the kernels read (out, in)"
                editor.left("linear", node, reason)


def run_checkpoints_eagerly(module: GraphModule) -> None:
    """Replace the operator that Dynamo captures for `torch.utils.checkpoint.checkpoint`, in place.

    It only tags the graph for AOTAutograd: run eagerly, it recomputes with another random state.
    """
    for node in module.graph.nodes:
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            node.target = run_time.checkpoint
    module.recompile()


def _is_ours(target: object) -> bool:
    return (getattr(target, "__module__", "") or "").startswith("transformer_fast.")


def rewrite_calls_of_torchs(editor: Editor) -> None:
    """`F.scaled_dot_product_attention`, where the user calls it already, and modules in one call."""
    for node in editor.graph.nodes:
        op, args, kwargs = "attention", node.args, node.kwargs
        function: Callable[..., Any] = functional.scaled_dot_product_attention
        if node.target is F.multi_head_attention_forward:
            function = run_time.multi_head_attention_forward
            bound = inspect.signature(node.target).bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs = (), bound.arguments
            if kwargs.pop("static_k") is not None or kwargs.pop("static_v") is not None:
                continue
        elif node.target is torch._transformer_encoder_layer_fwd:
            op, function = "encoder_layer", run_time.encoder_layer
            schema = torch.ops.aten._transformer_encoder_layer_fwd.default._schema
            names = [argument.name for argument in schema.arguments]
            args, kwargs = (), {**dict(zip(names, args, strict=False)), **kwargs}
        elif node.target is not F.scaled_dot_product_attention:
            continue
        else:
            reason = editor.refusal(node, function, *args, **kwargs)
            if reason is not None:
                editor.left(op, node, reason)
                continue
        node.target, node.args, node.kwargs = function, args, kwargs
        editor.found(op, node)


#: In this order.
_STEPS: tuple[Callable[[Editor], None], ...] = (
    rewrite_softmax,
    rewrite_attention,
    rewrite_calls_of_torchs,
    rewrite_norms,
    rewrite_activations,
    rewrite_convolutions,
    rewrite_patches,
    name_linear,
    rewrite_feed_forward,
    rewrite_add_norm,
    rewrite_linear,
)
