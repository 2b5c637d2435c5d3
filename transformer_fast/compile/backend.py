"""``torch.compile(model, backend="transformer_fast")``: applies all rewrites to a graph."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from .. import _native, functional
from . import run_time
from .attention import rewrite_attention, rewrite_softmax, share_heads
from .canonicalize import canonicalize
from .editor import Editor
from .feed_forward import (
    canonicalize_linear,
    quantize_products,
    rewrite_activations,
    rewrite_convolutions,
    rewrite_feed_forward,
    rewrite_linear,
    rewrite_patches,
)
from .graph_report import GraphReport, keep_report
from .inner import compile_rest, why_not
from .modes import GraphModes, Modes
from .nodes import rank
from .norm import rewrite_add_norm, rewrite_norms
from .ops import read
from .sublayers import Sublayers, find_stacks, nodes_of, rewrite_sublayers
from .tape import tape

_log = logging.getLogger("transformer_fast")
Steps = tuple[Callable[[Editor], None], ...]

# PyTorch's functions that run a whole module of torch.nn. They are private: None if this PyTorch
# lacks one. No node has None as its target.
_ONE_ATTENTION = getattr(torch, "_native_multi_head_attention", None)
_ONE_LAYER = getattr(torch, "_transformer_encoder_layer_fwd", None)

#: Default of the option ``inner``.
INNER: Callable[..., Any] | None = compile_rest


def compile_backend(
    module: GraphModule,
    example_inputs: list[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend: replaces recognised ops of a captured graph; PyTorch runs the rest.

    Recognised, in all common spellings: attention around a softmax, feed-forward networks, norms
    with the residual sum before them, linear maps, and calls of F.scaled_dot_product_attention.
    Results equal those of the original program up to rounding. In training, dropout draws other
    random numbers. Query rows in which every key is masked keep their result if it is a number
    (with a finite fill like -1e9, all keys get equal weights). Where the result would be NaN (a
    fill of -inf), they return 0.

    Args:
        module, example_inputs: the arguments that torch.compile passes to a backend.

    Options of ``torch.compile(..., options={...})``:
        inner: backend (name or function) that compiles the rewritten graph; None runs it eagerly.
            The default is inductor for inference on a CPU if a C++ compiler is found, except for
            programs with attention masks, because these are read at run time, and for programs
            that run most of their ops in calls of several sub-layers.
        report: a function that receives each `GraphReport`.
        quantize: "int8": linear maps and feed-forward networks whose weights are parameters run on
            8-bit products, where no gradients are needed; None: in the weights' dtype.

    `transformer_fast.compile_reports` returns the reports, and the log at level INFO prints them.

    Raises:
        ValueError: if an option is unknown, or a mode is given.
    """
    inner, on_report, last = _options(options, mode)
    if _native.unannounced:
        _native.warn_of_absence()
    reason: str | None = None

    def stack(editor: Editor) -> None:
        """Takes the place of `rewrite_sublayers`, and joins sub-layers only if no compiler runs.

        A compiler could no longer fuse the joined nodes with others.
        """
        nonlocal inner, reason
        chooses = inner is compile_rest and editor.graph is module.graph
        if inner is not None and not chooses:
            return
        stacks = find_stacks(editor)
        if chooses:
            module.recompile()
            reason = why_not(module, example_inputs, nodes_of(stacks))
            inner = compile_rest if reason is None else None
        if inner is None:
            rewrite_sublayers(editor, stacks)

    report = rewrite(module, stack=stack, last=last)
    if reason is not None:
        report.rest = f"left to eager PyTorch ({reason})"
    elif inner is compile_rest:
        report.rest = "compiled by inductor"
    keep_report(report)
    _log.info("%s", report)
    if on_report is not None:
        on_report(report)
    if inner is None:
        for each in module.modules():
            if isinstance(each, GraphModule):
                run_checkpoints_eagerly(each)
        return tape(module)
    compiled: Callable[..., Any] = inner(module, example_inputs)
    return compiled


def _options(
    options: dict[str, Any] | None, mode: str | None
) -> tuple[Callable[..., Any] | None, Callable[[GraphReport], Any] | None, Steps]:
    if mode is not None:
        raise ValueError(f'backend "transformer_fast" takes no mode, but got mode={mode!r}')
    given = dict(options or {})
    inner, on_report = given.pop("inner", INNER), given.pop("report", None)
    scheme = given.pop("quantize", None)
    if given:
        raise ValueError(
            'backend "transformer_fast" takes the options inner, report and quantize, not '
            + ", ".join(given)
        )
    if scheme not in (None, "int8"):
        raise ValueError(f"quantize must be None or int8, not {scheme!r}")
    if isinstance(inner, str):
        inner = torch._dynamo.lookup_backend(inner)
    return inner, on_report, () if scheme is None else (quantize_products,)


def rewrite(
    module: GraphModule,
    start: Modes | None = None,
    stack: Callable[[Editor], None] | None = rewrite_sublayers,
    last: Steps = (),
) -> GraphReport:
    """Replaces recognised ops with calls of this library, in place; leaves the others unchanged.

    ``module`` is a graph as torch.compile passes it to a backend: ``meta["example_value"]`` of each
    node holds the value from the capture. ``start``: the modes in which the graph runs; None: the
    current modes. ``stack``: the step that joins sub-layers; None: no step. ``last``: further steps.
    """
    report = GraphReport()
    modes = GraphModes(module.graph, start)
    editor = Editor(module.graph, report, modes, canonicalize(module.graph, modes))
    for step in (*STEPS, *([] if stack is None else [stack]), *STEPS_AFTER_STACKS, *last):
        step(editor)
    _report_unsupported_calls(editor)
    report.others = Counter(
        str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", ""))
        for node in module.graph.nodes
        if node.op == "call_method"
        or (node.op == "call_function" and not _is_library_call(node.target))
    )
    module.graph.lint()
    module.recompile()
    # Bodies of checkpoints and branches are graphs within the graph.
    children = dict(module.named_children())
    for node in module.graph.nodes:
        is_child = node.op in ("get_attr", "call_module")
        child = children.pop(str(node.target), None) if is_child else None
        # Bodies of selective checkpointing are not rewritten: its policies choose among PyTorch's
        # operators.
        inner = None
        if isinstance(child, Sublayers):
            inner = rewrite(child.body, modes.at(node), None, last)
        elif isinstance(child, GraphModule) and node.users and run_time.CONTEXT not in child.meta:
            inner = rewrite(child, modes.of_body(next(iter(node.users))), stack, last)
        if inner is not None:
            report.rewritten += inner.rewritten
            report.left += inner.left
            report.others += inner.others
            report.stacks += inner.stacks
    return report


def _report_unsupported_calls(editor: Editor) -> None:
    """Reports calls that have an equivalent op in this library but cannot be replaced."""
    for node in editor.graph.nodes:
        if node.target is _ONE_ATTENTION:
            reason = "it is a torch.nn module, which transformer_fast.accelerate(model) replaces"
            editor.report_left("attention", node, reason)
        op = read(node)
        if op is not None and op.name in ("matmul", "addmm"):
            weight = op["mat2" if op.name == "addmm" else "other"]
            if isinstance(weight, Node) and weight.op == "placeholder" and rank(weight) == 2:
                reason = "its weight is stored as (in, out), and the kernels read (out, in)"
                editor.report_left("linear", node, reason)


def run_checkpoints_eagerly(module: GraphModule) -> None:
    """Replaces the operator that Dynamo captures for `torch.utils.checkpoint.checkpoint`, in place.

    That operator only tags the graph for AOTAutograd. If it runs eagerly, it recomputes with a
    different random state.
    """
    for node in module.graph.nodes:
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            node.target = run_time.checkpoint
    module.recompile()


def _is_library_call(target: object) -> bool:
    return (getattr(target, "__module__", "") or "").startswith("transformer_fast.")


def rewrite_pytorch_calls(editor: Editor) -> None:
    """Replaces `F.scaled_dot_product_attention` and functions that run a whole module."""
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
        elif node.target is _ONE_LAYER:
            op, function = "encoder_layer", run_time.encoder_layer
            schema = torch.ops.aten._transformer_encoder_layer_fwd.default._schema
            names = [argument.name for argument in schema.arguments]
            args, kwargs = (), {**dict(zip(names, args, strict=False)), **kwargs}
        elif node.target is not F.scaled_dot_product_attention:
            continue
        else:
            reason = editor.refusal(node, function, *args, **kwargs)
            if reason is not None:
                editor.report_left(op, node, reason)
                continue
        node.target, node.args, node.kwargs = function, args, kwargs
        editor.report_rewritten(op, node)


#: Rewrite steps, in order of execution: before sub-layers are joined, and after.
STEPS: Steps = (
    rewrite_softmax,
    rewrite_attention,
    share_heads,
    rewrite_pytorch_calls,
    rewrite_norms,
    rewrite_activations,
    rewrite_convolutions,
    rewrite_patches,
    canonicalize_linear,
    rewrite_feed_forward,
)
STEPS_AFTER_STACKS: Steps = (rewrite_add_norm, rewrite_linear)
