"""`generate` and `stream` for decoders of torch.nn and of this package; checks of their arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ...nn.fusion import Unreadable
from ..tokens import check_ids, check_padding_mask
from .decoders import CachedDecoder, Embed, Project, RecomputedDecoder, StepDecoder, read_stack
from .methods import BeamSearch, Generated, Greedy, Method, Sampling
from .search import Task, beam_search, generate_incrementally, one_by_one

_P = ParamSpec("_P")
_R = TypeVar("_R")


def with_signature_of(other: Callable[_P, Any]) -> Callable[[Callable[..., _R]], Callable[_P, _R]]:
    """Decorator: the function has the signature of ``other`` and gets all arguments as keywords."""
    signature = inspect.signature(other)

    def decorate(function: Callable[..., _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return function(**given.arguments)

        result = inspect.signature(function).return_annotation
        called.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
        return called

    return decorate


def check_method(method: Method | None) -> Method:
    if method is None:
        return Greedy()
    if not isinstance(method, (Greedy, Sampling, BeamSearch)):
        raise TypeError(
            "method must be Greedy(), Sampling(...), BeamSearch(...) or None, not "
            f"{type(method).__name__}"
        )
    return method


def check_prompt(name: str, prompt: Any) -> Tensor:
    check_ids(name, prompt)
    if prompt.dim() != 2 or prompt.shape[1] == 0:
        raise ValueError(
            f"{name} must have shape (batch, length) with at least one token, not "
            f"{list(prompt.shape)}"
        )
    return prompt.long()  # type: ignore[no-any-return]


def check_lengths(name: str, lengths: Any, prompt_name: str, prompt: Tensor) -> Tensor | None:
    """Returns the lengths of the prompts, on the CPU; None if all are as long as the tensor."""
    if lengths is None:
        return None
    if (
        not isinstance(lengths, Tensor)
        or lengths.is_floating_point()
        or lengths.dtype == torch.bool
    ):
        kind = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
        raise TypeError(f"{name} must be an integer Tensor, not {kind}")
    if tuple(lengths.shape) != (prompt.shape[0],):
        raise ValueError(
            f"{name} must have shape [{prompt.shape[0]}], one length per row of {prompt_name}, not "
            f"{list(lengths.shape)}"
        )
    lengths = lengths.cpu().long()
    if lengths.numel() == 0 or bool((lengths == prompt.shape[1]).all()):
        return None
    if int(lengths.min()) < 1 or int(lengths.max()) > prompt.shape[1]:
        raise ValueError(
            f"{name} must lie in [1, {prompt.shape[1]}], the length of {prompt_name}, but has "
            f"{int(lengths.min())} to {int(lengths.max())}"
        )
    return lengths


def check_source_rows(name: str, padding: Tensor | None) -> None:
    """Raise if a row of a source is all padding."""
    if padding is not None and padding.numel():
        empty = padding.all(dim=1).nonzero().flatten().tolist()
        if empty:
            raise ValueError(f"{name} is empty: row {empty[0]} has nothing but padding")


def check_new_tokens(max_new_tokens: Any) -> None:
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool):
        raise TypeError(f"max_new_tokens must be an int, not {type(max_new_tokens).__name__}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")


def _nothing(method: Method, prompt: Tensor) -> Generated:
    """Returns the result for an empty batch."""
    shape: tuple[int, ...] = (0,)
    if isinstance(method, BeamSearch) and method.n_best is not None:
        shape = (0, method.n_best)
    scores = (
        prompt.new_zeros(shape, dtype=torch.float32) if isinstance(method, BeamSearch) else None
    )
    return Generated(prompt.new_zeros((*shape, 0)), prompt.new_zeros(shape), scores)


def _stack_of(decoder: Any) -> tuple[torch.nn.Module, bool]:
    """Returns the stack of layers, and whether it is batch_first."""
    if isinstance(decoder, torch.nn.Transformer):
        return decoder.decoder, decoder.batch_first
    if not isinstance(decoder, torch.nn.Module) or not hasattr(decoder, "layers"):
        raise TypeError(
            "decoder must be a torch.nn.Transformer, TransformerDecoder or TransformerEncoder, or "
            f"one of ours, not {type(decoder).__name__}"
        )
    first: Any = next(iter(decoder.layers), None)  # type: ignore[arg-type]
    attention = getattr(first, "self_attn", decoder)
    return decoder, bool(getattr(attention, "batch_first", False))


@torch.no_grad()
def _prepare(
    decoder: torch.nn.Module,
    memory: Tensor | None,
    method: Method | None,
    embed: Embed,
    project: Project,
    prefix: int | Tensor,
    prefix_lengths: Tensor | None,
    max_new_tokens: int,
    end_token: int,
    pad_token: int | None,
    memory_key_padding_mask: Tensor | None,
    use_cache: bool | None,
) -> tuple[StepDecoder, Task, Method]:
    chosen = check_method(method)
    check_new_tokens(max_new_tokens)
    stack, batch_first = _stack_of(decoder)
    if end_token is None:
        raise ValueError("end_token must be a token id, or -1 if nothing ends a sequence, not None")
    if memory is not None:
        if memory.dim() != 3:
            layout = "(batch, length, d_model)" if batch_first else "(length, batch, d_model)"
            raise ValueError(f"memory must have shape {layout}, not {list(memory.shape)}")
        memory = memory if batch_first else memory.transpose(0, 1)
        if memory.shape[1] == 0:
            raise ValueError("memory is empty: each source must have at least one position")
    if isinstance(prefix, int):
        if memory is None:
            raise ValueError("prefix must be a Tensor (batch, length) where there is no memory")
        prompt = torch.full((memory.shape[0], 1), prefix, device=memory.device)
    else:
        prompt = check_prompt("prefix", prefix)
        if memory is not None and prompt.shape[0] != memory.shape[0]:
            raise ValueError(
                f"prefix must have a row for each of the {memory.shape[0]} sources, not "
                f"{prompt.shape[0]}"
            )
    if memory_key_padding_mask is not None:
        if memory is None:
            raise ValueError("memory_key_padding_mask must be None where there is no memory")
        shape = tuple(memory.shape[:2])
        check_padding_mask("memory_key_padding_mask", memory_key_padding_mask, "memory", shape)
        check_source_rows("memory", memory_key_padding_mask)
    lengths = check_lengths("prefix_lengths", prefix_lengths, "prefix", prompt)
    longest = prompt.shape[1] if lengths is None else int(lengths.max())
    prompt = prompt[:, :longest]
    if pad_token is None:
        pad_token = max(end_token, 0)
    task = Task(prompt, lengths, max_new_tokens, end_token, pad_token)
    around = embed, project, memory, memory_key_padding_mask
    if use_cache is not False:
        try:
            weights = read_stack(stack, crossed=memory is not None)
            return CachedDecoder(weights, *around, longest + max_new_tokens), task, chosen
        except Unreadable as reason:
            if use_cache:
                raise ValueError(f"use_cache=True, but there can be no cache: {reason}") from None
    return RecomputedDecoder(stack, batch_first, *around), task, chosen


def generate(
    decoder: torch.nn.Module,
    memory: Tensor | None,
    method: Method | None = None,
    *,
    embed: Embed,
    project: Project,
    prefix: int | Tensor,
    max_new_tokens: int,
    end_token: int,
    pad_token: int | None = None,
    prefix_lengths: Tensor | None = None,
    memory_key_padding_mask: Tensor | None = None,
    use_cache: bool | None = None,
) -> Generated:
    """Generates tokens with any torch.nn.TransformerDecoder and a key-value cache, which torch.nn lacks.

        found = generate(
            model.transformer, memory, BeamSearch(4),
            embed=lambda tokens, start: model.embed(tokens, start), project=model.out,
            prefix=BOS, end_token=EOS, max_new_tokens=100,
        )

    Runs without gradients and without dropout in the decoder, even in training mode. ``embed`` and
    ``project``, if they are modules, are put in evaluation mode only if there is no cache.

    Args:
        decoder: a Transformer or TransformerDecoder of torch.nn or transformer_fast.nn; or a
            TransformerEncoder, which runs with a causal mask and without memory (decoder-only).
        memory: the encoder's output, (S, B, M), or (B, S, M) if the decoder is batch_first; None
            for a decoder-only model.
        method: `Greedy()` (the default), `Sampling(...)` or `BeamSearch(...)`.
        embed: function of tokens (B, T) and the position of the first that returns vectors (B, T, M).
        project: function of vectors (B, T, M) that returns logits (B, T, V); a torch.nn.Linear runs on
            this package's kernels.
        prefix: the first token of each sequence, or tokens (B, P); not part of the result.
        max_new_tokens: maximum number of tokens to generate, including the end token.
        end_token: token that ends a sequence; -1: none.
        pad_token: token after the end; None: the end token.
        prefix_lengths: int (B,), number of prefix tokens of each row; the rest is ignored. None: all.
            Beam search requires equal lengths.
        memory_key_padding_mask: bool (B, S), True at memory positions to ignore; None: no padding.
        use_cache: None: use a cache if the layers are of torch.nn or transformer_fast.nn, without hooks
            and replaced parts; else compute all tokens again at each step. True: raise ValueError with
            the reason if there can be no cache. False: always compute all tokens.

    Raises:
        TypeError, ValueError: an argument is invalid, there are more beams than tokens in the
            vocabulary, the memory is empty, or there is no end token.
    """
    steps, task, chosen = _prepare(**locals())
    if task.prompt.shape[0] == 0:
        return _nothing(chosen, task.prompt)
    if not isinstance(chosen, BeamSearch):
        return generate_incrementally(steps, task, chosen)
    if task.lengths is not None:
        raise ValueError("beam search needs prompts of one length")
    return beam_search(steps, task, chosen)


@with_signature_of(generate)
def stream(**given: Any) -> Iterator[Tensor]:
    """Yields the tokens of `generate`, (B,) at a time, as soon as each step has computed them.

    Rows that have ended, or whose prefix is longer, yield pad_token. Not for beam search, whose tokens
    are final only at the end.

    Arguments and errors: as in `generate`.
    """
    if isinstance(given["method"], BeamSearch):
        raise ValueError("beam search cannot stream: its tokens are known at the end only")
    steps, task, chosen = _prepare(**given)
    return one_by_one(steps, task, chosen) if task.prompt.shape[0] else iter(())
