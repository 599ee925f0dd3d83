"""What is asked of the engine: a frozen value that whoever submits it and the loop share.

A request says what to compute and what it is worth; where it has got to is the loop's (`live.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.engine.sampler import SamplingParams
from headrace.kv.residency import DEFAULT_STANDING, Standing

OUTBOX_TOKENS = 256
"""Tokens that wait for their reader before a request pauses: an answer of the usual length never has to."""


@dataclass(frozen=True, eq=False)
class Request:
    """One answer that somebody wants.

    Attributes:
        prompt_ids: tokens of the prompt, at least one.
        max_tokens: tokens to generate at most.
        params: how tokens are chosen.
        stop: texts that end the answer and are left out of it.
        end_ids: tokens that end it.
        context_tokens: prompt and answer together at most.
        recalls: the answer begins with what is known of the prompt and is known itself afterwards; otherwise it lives in a
            sequence of its owner's, which the memory of the past has no part in.
        priority: what serving it is worth against 1 of others: higher is served first.
        client: whom it is for; clients are served in turn.
        deadline_s: when its first token should be there, in seconds of the loop's clock.
        outbox_tokens: tokens that may wait for their reader.
        standing: asked at the end for what the owner of this past wishes of the memory of the past.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    params: SamplingParams
    stop: tuple[str, ...]
    end_ids: frozenset[int]
    context_tokens: int
    recalls: bool = True
    priority: float = 1.0
    client: str = ""
    deadline_s: float | None = None
    outbox_tokens: int = OUTBOX_TOKENS
    standing: Callable[[], Standing] = lambda: DEFAULT_STANDING
