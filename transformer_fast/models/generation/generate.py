"""Generation for torch.nn's decoders and ours, and what it is asked for, checked."""

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
    """Gives a function the signature of another one; it gets all arguments by their names."""
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
    """Lengths of the prompts, on the CPU; None if all are as long as the tensor."""
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
    """Raise where a row of a source is nothing but padding."""
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
    """The result for a batch of no sequences."""
    shape: tuple[int, ...] = (0,)
    if isinstance(method, BeamSearch) and method.n_best is not None:
        shape = (0, method.n_best)
    scores = (
        prompt.new_zeros(shape, dtype=torch.float32) if isinstance(method, BeamSearch) else None
    )
    return Generated(prompt.new_zeros((*shape, 0)), prompt.new_zeros(shape), scores)


def _stack_of(decoder: Any) -> tuple[torch.nn.Module, bool]:
    """The stack of layers, and whether it takes (B, T, M)."""
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
            raise ValueError("memory is empty: each source must have at least one place")
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
    """Tokens from any torch.nn.TransformerDecoder, with the key-value cache that torch lacks.

        found = generate(
            model.transformer, memory, BeamSearch(4),
            embed=lambda tokens, start: model.embed(tokens, start), project=model.out,
            prefix=BOS, end_token=EOS, max_new_tokens=100,
        )

    Works without gradients and without dropout in the decoder, in whatever mode it is; ``embed``
    and ``project``, if they are modules, are put in evaluation mode only where there is no cache.

    Args:
        decoder: a torch.nn.Transformer or TransformerDecoder, torch's or ours; or a
            TransformerEncoder, which is run with a causal mask and without memory (decoder-only).
        memory: the encoder's output, (S, B, M), or (B, S, M) if the decoder is batch_first; None
            for a decoder-only model.
        method: `Greedy()` (None means that), `Sampling(...)` or `BeamSearch(...)`.
        embed: function of tokens (B, T) and the position of the first, to vectors (B, T, M).
        project: function of vectors (B, T, M) to logits (B, T, V); a torch.nn.Linear runs on our
            kernels.
        prefix: the token each sequence begins with, or tokens (B, P). No part of the result.
        max_new_tokens: most tokens to generate, the end token included.
        end_token: token that ends a sequence; -1: none.
        pad_token: what follows the end; None: the end token.
        prefix_lengths: int (B,), how many tokens of each row are its prefix, the rest is not looked
            at; None: all. Beam search wants one length for all.
        memory_key_padding_mask: bool (B, S), True at places of the memory to ignore; None: none.
        use_cache: None: a cache wherever the layers are torch's or ours, not hooked and not
            replaced; else all tokens are computed again at each step. True: raise ValueError with
            the reason where there can be no cache. False: always compute again.

    Raises:
        TypeError, ValueError: an argument that does not fit, beams larger than the vocabulary, an
            empty memory, no end token.
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
    """The tokens of `generate`, (B,) at a time, as soon as each step knows them.

    Rows that have ended, or whose prefix goes on, give pad_token. Not for beam search, which knows
    nothing before the end.

    Arguments and errors: as in `generate`.
    """
    if isinstance(given["method"], BeamSearch):
        raise ValueError("beam search cannot stream: its tokens are known at the end only")
    steps, task, chosen = _prepare(**given)
    return one_by_one(steps, task, chosen) if task.prompt.shape[0] else iter(())
