"""What a generation gives back: pieces while it runs, then usage, timings and ledger totals.

Knows nothing of kernels or the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headrace.errors import HeadraceError
from headrace.model.step import LedgerTotals

FinishReason = Literal["stop", "length", "context", "cancelled", "error"]
"""stop: an end token or a stop string; length: max_tokens reached; context: no room left; cancelled: by the user; error: see
`GenerationResult.error`."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its text, its natural log-probability, and the most likely tokens at the same place."""

    token_id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """A piece of text that is safe to show, with the tokens it was made of.

    `text` never ends inside a character or inside what may become a stop string; it can be empty.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens of one request. `cached_tokens` is the part of the prompt that was not computed again."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """Seconds, measured. `prefill_s` covers the uncached prompt tokens, `decode_s` all tokens after the first."""

    load_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    first_token_s: float = 0.0


MissReason = Literal[
    "first_seen",
    "diverged",
    "evicted",
    "format_changed",
    "model_changed",
    "damaged",
    "gone",
    "no_room",
    "recompute_is_quicker",
]


def reason_text(reason: str) -> str:
    """A reason as people read it: 'first_seen' -> 'first seen'."""
    return reason.replace("_", " ")


@dataclass(frozen=True)
class MissReport:
    """Why `num_tokens` tokens of a prompt, from `at_token` on, were computed and not found."""

    reason: MissReason
    at_token: int
    num_tokens: int
    detail: str


@dataclass(frozen=True)
class Reuse:
    """Where the past of a request came from, what that saved, and why the rest was computed.

    `compressed_tokens` are those of `memory_tokens` that were in compressed pages. `load_s` is what was waited for reading;
    `saved_s` what computing would have taken, less that. `streamed_bytes` were read from disk while decoding, because the
    past is longer than memory.
    """

    memory_tokens: int = 0
    disk_tokens: int = 0
    computed_tokens: int = 0
    load_s: float = 0.0
    saved_s: float = 0.0
    misses: tuple[MissReport, ...] = ()
    streamed_bytes: int = 0
    streamed_s: float = 0.0
    compressed_tokens: int = 0


@dataclass(frozen=True)
class KeptPast:
    """What a model keeps of the past now: pages in memory by format, and bytes of everything in memory and on disk.

    `disk_bytes` is None if nothing is kept on disk.
    """

    memory_pages: dict[str, int]
    memory_bytes: int
    memory_limit_bytes: int
    disk_bytes: int | None
    disk_limit_bytes: int


@dataclass(frozen=True)
class GenerationResult:
    """Everything known at the end of a generation.

    `seed` gives the same text again: the one that was asked for, or drawn; None if neither, since no token was drawn.
    `error` is why there is no more of it: only in results of `generate_all`, as all other calls raise it.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    prefill_ledger: LedgerTotals
    decode_ledger: LedgerTotals
    logprobs: tuple[TokenLogprob, ...] = field(default=())
    reuse: Reuse = field(default=Reuse())
    seed: int | None = None
    error: HeadraceError | None = None
