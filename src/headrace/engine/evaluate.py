"""What a model says of tokens that are given: their logits, and the perplexity of a text.

Drives a sequence of its own, which the caller makes; knows neither sampling nor answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.engine.sequence import Sequence as TokenSequence

_ROWS = 64
"""Logits of so many tokens are held at a time."""


def logits_of(sequence: TokenSequence, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """Logits after each token, float32 [T, V]; the sequence is closed afterwards."""
    try:
        return sequence.append_all(token_ids)
    finally:
        sequence.close()


def perplexity_of(sequence: TokenSequence, token_ids: Sequence[int]) -> float:
    """e to the mean negative log-probability of each token but the first, given those before it; closes the sequence.

    Raises:
        ContextOverflowError: they do not fit into the context.
    """
    ids = list(token_ids)
    total, at = 0.0, 0
    try:
        for rows in sequence.steps(ids[:-1], outputs=_ROWS):
            scores = rows.astype(np.float64)
            top = scores.max(axis=1)
            spread = np.log(np.exp(scores - top[:, None]).sum(axis=1)) + top
            chosen = scores[np.arange(len(rows)), ids[at + 1 : at + 1 + len(rows)]]
            total += float((spread - chosen).sum())
            at += len(rows)
    finally:
        sequence.close()
    return float(np.exp(total / at))
