"""Bounds of the scheduler, and what it knows of a request that is running."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.engine.waiting import Ticket
from headrace.errors import OptionError


@dataclass(frozen=True)
class Limits:
    """What a step and the engine can hold.

    A step computes at most `max_step_tokens`, of them at most `max_rows` for requests that decode; at most `max_steps` of
    decode rows alone are run in one go, and no longer than `ahead_s`. At most `max_running` requests are admitted at a time
    and `max_waiting` wait. Memory has `total_pages` of `page_tokens` each; with `may_spill` a request that is alone can hold
    more, on disk. `itl_s` bounds the time between tokens of those that decode; None: 4 times what it is undisturbed.

    Raises:
        OptionError: `itl_s` is no time.
    """

    total_pages: int
    max_step_tokens: int = 256
    max_rows: int = 64
    max_running: int = 64
    max_waiting: int = 1024
    page_tokens: int = 32
    itl_s: float | None = None
    max_steps: int = 8
    ahead_s: float = 0.03
    may_spill: bool = False

    def __post_init__(self) -> None:
        if self.itl_s is not None and not self.itl_s > 0:
            raise OptionError(f"itl_ms={1000 * self.itl_s:g} is no time between tokens: give a number above 0, or leave it out")
        assert min(self.total_pages, self.max_rows, self.max_running, self.max_waiting, self.max_steps) >= 1
        # Two steps take no more than one page for each row, and some prompt advances by a page beside all rows.
        assert self.page_tokens >= 2
        assert self.max_step_tokens >= self.max_rows + self.page_tokens

    def pages(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_tokens)


@dataclass(eq=False, slots=True)
class Running:
    """A request that has been named to the loop for admission, or was admitted.

    `prompt_tokens` of it are a prompt, its answer before a preemption included. `num_tokens` are computed, in `held_pages`,
    and `room_tokens` more fit before it needs another page (a negative number: so many tokens are copied into that page, as
    others share the one that they lie in).
    """

    ticket: Ticket
    prompt_tokens: int
    was_preempted: bool
    needed_pages: int
    is_admitted: bool = False
    is_reading: bool = False
    is_paused: bool = False
    is_leaving: bool = False
    has_generated: bool = False
    prompt_left: int = 0
    num_tokens: int = 0
    held_pages: int = 0
    room_tokens: int = 0
    served_s: float = -math.inf

    @property
    def computes(self) -> bool:
        """Whether it takes part in steps."""
        return self.is_admitted and not (self.is_reading or self.is_paused or self.is_leaving)

    @property
    def victim_order(self) -> tuple[bool, float, float, int]:
        """Sorts by who is preempted first."""
        ticket = self.ticket
        return not self.is_paused, ticket.priority, -ticket.arrived_s, -ticket.request_id

    @property
    def may_be_preempted(self) -> bool:
        """Whether its preemption costs no progress that it was promised."""
        return self.is_paused or self.has_generated or not self.was_preempted

    @property
    def tokens_to_end(self) -> int:
        """Decode steps after which it has all tokens that it may generate."""
        return self.ticket.prompt_tokens + self.ticket.max_tokens - self.num_tokens - 1

    def admit(self, prompt_left: int, held_pages: int, page_tokens: int) -> None:
        """The loop has found what is known of its prompt."""
        self.is_admitted, self.prompt_left, self.held_pages = True, prompt_left, held_pages
        self.num_tokens = self.prompt_tokens - prompt_left
        whole, part = divmod(self.num_tokens, page_tokens)
        self.room_tokens = max(0, held_pages - whole - (part > 0)) * page_tokens - part

    def hold(self, tokens: int, held_pages: int, page_tokens: int) -> None:
        """Tokens were computed; it holds pages now."""
        self.num_tokens += tokens
        if held_pages == self.held_pages and tokens <= self.room_tokens:
            self.room_tokens -= tokens
            return
        self.held_pages = held_pages
        pages = -(-self.num_tokens // page_tokens)
        self.room_tokens = max(pages, held_pages) * page_tokens - self.num_tokens

    def pages_for(self, tokens: int, page_tokens: int) -> int:
        """Pages that it needs besides those that it holds, to compute so many tokens more."""
        return 0 if tokens <= self.room_tokens else -((self.room_tokens - tokens) // page_tokens)
