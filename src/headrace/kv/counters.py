"""What the memory of the past has done: counted while a process runs, added up on disk over all of them.

Knows nothing of what is counted, nor when.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from headrace.kv.stores import Journal

_NAME = "counters"


@dataclass
class Counters:
    """Sums since a process started, or over all processes that used a key.

    Tokens of prompts are `memory_tokens` found in memory (`compressed_tokens` of them in compressed pages) + `disk_tokens` read
    from disk + `missed_tokens` by reason.
    `saved_s` is what computing the found ones would have taken, less what finding them took.
    """

    lookups: int = 0
    prompt_tokens: int = 0
    memory_tokens: int = 0
    compressed_tokens: int = 0
    disk_tokens: int = 0
    missed_tokens: dict[str, int] = field(default_factory=dict)
    read_bytes: int = 0
    written_bytes: int = 0
    compressed_bytes: int = 0
    demoted_pages: int = 0
    dropped_pages: int = 0
    refused_pages: int = 0
    saved_s: float = 0.0

    def miss(self, reason: str, num_tokens: int) -> None:
        """Counts tokens that were not found."""
        self.missed_tokens[reason] = self.missed_tokens.get(reason, 0) + num_tokens

    def add(self, other: Counters) -> None:
        """Adds what another process counted."""
        for each in fields(self):
            if each.name != "missed_tokens":
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        for reason, num_tokens in other.missed_tokens.items():
            self.miss(reason, num_tokens)


def read_counters(journal: Journal) -> Counters:
    """The sums over all processes that used a key and have ended; zeros if there are none, or what is there is damaged."""
    return _decode(journal.read(_NAME))


def merge_counters(journal: Journal, counters: Counters) -> bool:
    """Adds a process's counts to those that are kept, whole or not at all; False if they are not kept."""

    def add(content: object) -> object:
        total = _decode(content)
        total.add(counters)
        return {each.name: getattr(total, each.name) for each in fields(total)}

    return journal.merge(_NAME, add)


def _decode(content: object) -> Counters:
    found = Counters()
    if isinstance(content, dict):
        for each in fields(Counters):
            value = content.get(each.name)
            if each.name == "missed_tokens":
                if isinstance(value, dict):
                    for reason, number in value.items():
                        if _is_count(number):
                            found.miss(reason.replace(" ", "_"), number)  # as earlier versions wrote them
            elif _is_count(value):
                setattr(found, each.name, value)
    return found


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
