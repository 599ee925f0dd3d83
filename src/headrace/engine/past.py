"""What a result says of the past of its request: where it came from, what that saved, and why the rest was computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engine.recall import Recalled
from headrace.engine.results import MissReason, MissReport, Reuse
from headrace.kv.cache import PageCache
from headrace.kv.counters import Counters
from headrace.kv.tree import Miss
from headrace.model.step import PAGE_TOKENS
from headrace.text.tokenizer import Tokenizer
from headrace.units import format_seconds

_SHOWN_TOKENS = 8
"""Tokens shown on either side of a place where a prompt parts from what is known."""
_TIERS = ("memory", "disk")


@dataclass(frozen=True)
class Past:
    """The past of one request: what was recalled for it, and when."""

    recalled: Recalled
    asked_s: float


def reuse_of(past: Past, prompt_ids: Sequence[int], tokenizer: Tokenizer, cache: PageCache) -> Reuse:
    """What to report of a request with this prompt."""
    recalled = past.recalled
    known = recalled.memory_tokens + recalled.disk_tokens
    compute_s = cache.prices.compute_s(known, 0) if known else None
    misses = [MissReport(reason, first, count, _known_but_computed(reason)) for reason, first, count in recalled.misses]
    miss = recalled.found.miss
    if miss is not None:
        missing = len(prompt_ids) - 1 - recalled.num_tokens
        if missing > 0:
            reason, detail = _explain(miss, past, prompt_ids, tokenizer, cache)
            misses.append(MissReport(reason, recalled.num_tokens, missing, detail))
    return Reuse(
        memory_tokens=recalled.memory_tokens,
        compressed_tokens=recalled.compressed_tokens,
        disk_tokens=recalled.disk_tokens,
        computed_tokens=len(prompt_ids) - known,
        load_s=recalled.load_s,
        saved_s=0.0 if compute_s is None else max(0.0, compute_s - recalled.load_s),
        misses=tuple(misses),
    )


def lost_reports(lost: Sequence[tuple[str, int, int]]) -> list[MissReport]:
    """What to report of pages that were left on disk and could not be read for a step: (reason, first token, tokens)."""
    return [
        MissReport(
            "damaged" if reason == "damaged" else "gone", first, count, "it was lost on disk while it was read for a step"
        )
        for reason, first, count in lost
    ]


def count_reuse(counters: Counters, reuse: Reuse) -> None:
    """Adds what a request could not reuse, and why, and what it saved, to the counts of this process."""
    for miss in reuse.misses:
        counters.miss(miss.reason, miss.num_tokens)
    counters.saved_s += reuse.saved_s


def _known_but_computed(reason: MissReason) -> str:
    return {
        "gone": "its file on disk is no longer there",
        "damaged": "its bytes on disk are not those that were written",
        "format_changed": "the page that goes on from it must begin exact, and it is compressed",
        "no_room": "memory has no room to read it into",
        "recompute_is_quicker": "computing it took less time than reading it from disk would have",
    }.get(reason, reason)


def _explain(
    miss: Miss, past: Past, prompt_ids: Sequence[int], tokenizer: Tokenizer, cache: PageCache
) -> tuple[MissReason, str]:
    if miss.reason == "evicted" and miss.evicted is not None:
        ago = format_seconds(max(0.0, past.asked_s - miss.evicted.time_s))
        return "evicted", f"it had to leave {_TIERS[miss.evicted.tier]} {ago} before, when room was needed"
    if miss.reason == "diverged":
        at = miss.at_token
        before = tokenizer.decode(prompt_ids[max(0, at - _SHOWN_TOKENS) : at], skip_special=False)
        here = tokenizer.decode(prompt_ids[at : at + _SHOWN_TOKENS], skip_special=False)
        known = tokenizer.decode(miss.known_tokens[:_SHOWN_TOKENS], skip_special=False)
        return "diverged", f"behind {before!r} comes {here!r}, where {known!r} is known"
    elsewhere = None
    if cache.disk is not None and miss.at_token < PAGE_TOKENS:  # behind that, other keys may know no more than this one
        elsewhere = cache.disk.store.known_elsewhere(prompt_ids)
    if elsewhere is not None:
        reason: MissReason = "model_changed" if elsewhere.what == "model" else "format_changed"
        return reason, f"the pages kept for these tokens are {elsewhere.text}"
    if miss.at_token:
        return "first_seen", "what is known ends there"
    return "first_seen", "nothing that begins like this is known"
