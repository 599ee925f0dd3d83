"""Whether a model fits: weights, keys and values of the context, and working memory, against what is free."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import MemoryLimitError, OptionError
from headrace.kv.pages import page_bytes, pages_for
from headrace.model.config import ModelConfig
from headrace.model.step import MAX_STEP_TOKENS, PAGE_TOKENS
from headrace.units import format_bytes

WORKING_BYTES = 250 * 10**6
"""What the process needs beside weights and pages: interpreter, libraries, activations, scratch."""
_MOST_CONTEXTS = 4
FEWEST_PAGES = 2 * MAX_STEP_TOKENS // PAGE_TOKENS
"""Pages that must fit: those that the largest step writes, and as many for the past that it reads from disk meanwhile."""


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes decided before anything is loaded. `num_pages` can hold several contexts where there is room."""

    context_tokens: int
    num_pages: int
    weights_bytes: int
    kv_bytes_per_token: int
    kv_memory_bytes: int


def plan_memory(
    config: ModelConfig, weights_bytes: int, context: int | None, free_bytes: int | None, kv_memory_bytes: int | None = None
) -> MemoryPlan:
    """Chooses the context, or checks the one that was asked for.

    Args:
        config: shape of the model.
        weights_bytes: packed weights.
        context: tokens asked for, or None for as many as the model was made for and memory allows.
        free_bytes: free memory, None if nobody knows.
        kv_memory_bytes: the bound of pages in memory, or None for room for a few contexts. A context longer than this is
            read from disk in part.

    Raises:
        OptionError: the context is not positive or longer than the model was made for.
        MemoryLimitError: it does not fit; says what is needed, what is free, and which context would fit.
    """
    if context is not None and not 1 <= context <= config.context_tokens:
        raise OptionError(
            f"context={context} is out of range: {config.name} was made for contexts of 1 to {config.context_tokens} tokens",
            arguments=("context",),
        )
    wanted = context or config.context_tokens
    size = page_bytes(config)
    if kv_memory_bytes is not None:
        _check_bound(config, weights_bytes, kv_memory_bytes, free_bytes)
        return MemoryPlan(wanted, kv_memory_bytes // size, weights_bytes, size // PAGE_TOKENS, kv_memory_bytes)
    room = None if free_bytes is None else max(0, free_bytes - weights_bytes - WORKING_BYTES) // size
    if room is not None and room < pages_for(wanted):
        if context is not None or room < 1:
            raise MemoryLimitError(
                _refusal(config, weights_bytes, wanted, free_bytes or 0, room * PAGE_TOKENS), arguments=("context",)
            )
        wanted = room * PAGE_TOKENS
    most = _MOST_CONTEXTS * pages_for(wanted)
    num_pages = most if room is None else min(most, room)
    return MemoryPlan(wanted, num_pages, weights_bytes, size // PAGE_TOKENS, num_pages * size)


def _check_bound(config: ModelConfig, weights_bytes: int, kv_memory_bytes: int, free_bytes: int | None) -> None:
    fewest = FEWEST_PAGES * page_bytes(config)
    if kv_memory_bytes < fewest:
        raise OptionError(
            f"kv_memory={format_bytes(kv_memory_bytes)} is too small for {config.name}: give it {format_bytes(fewest)} or more",
            arguments=("kv_memory",),
        )
    needed = weights_bytes + kv_memory_bytes + WORKING_BYTES
    if free_bytes is not None and needed > free_bytes:
        possible = free_bytes - weights_bytes - WORKING_BYTES
        advice = f"kv_memory={possible // 10**6}MB would fit" if possible >= fewest else "free memory or use a smaller model"
        raise MemoryLimitError(
            f"{config.name} with kv_memory={format_bytes(kv_memory_bytes)} needs {format_bytes(needed)} and "
            f"{format_bytes(free_bytes)} are free: {advice}",
            arguments=("kv_memory",),
        )


def _refusal(config: ModelConfig, weights_bytes: int, context: int, free_bytes: int, possible: int) -> str:
    kv = pages_for(context) * page_bytes(config)
    needed = weights_bytes + kv + WORKING_BYTES
    advice = f"context={possible} would fit" if possible else "no context fits: free memory or use a smaller model"
    return (
        f"{config.name} with a context of {context} tokens needs {format_bytes(needed)} "
        f"(weights {format_bytes(weights_bytes)}, "
        f"keys and values {format_bytes(kv)}, working memory {format_bytes(WORKING_BYTES)}) and {format_bytes(free_bytes)} "
        f"are free: {advice}"
    )
