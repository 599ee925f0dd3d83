"""Requests that wait to be admitted, in the order in which that is done.

Who is next: of the highest priority, first those that were preempted, whose readers have begun (earliest arrival first);
then the earliest deadline that has not passed; then whoever's client has had the fewest prompt tokens admitted; of one
client the shortest prompt; then the earliest arrival.

Nobody starves: each `OLDEST_EVERY`-th admission goes to the request that arrived first of all, and nobody passes it while
it waits for memory then. While older ones are admitted k times, a request is admitted as number OLDEST_EVERY x (k + 1) at
the latest.

Nothing here walks the queue: each order is a heap, and an entry that has left stays in its heaps until it comes to the top
or until they are half full of such entries.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

OLDEST_EVERY = 8
"""Each so many choices one goes to whoever arrived first."""
_SMALL = 64
_MANY_CLIENTS = 1024
_MANY_LANES = 64


@dataclass(frozen=True)
class Ticket:
    """What the scheduler knows of a request. Times are on the clock of `Scheduler.plan`.

    Of two requests that wait, the one of higher `priority` is served first. `client` says whose it is, for fairness.
    `deadline_s` is when its first token is wanted.
    """

    request_id: int
    prompt_tokens: int
    max_tokens: int
    arrived_s: float
    priority: float = 1.0
    client: str = ""
    deadline_s: float | None = None

    @property
    def age_order(self) -> tuple[float, int]:
        """Sorts by arrival."""
        return self.arrived_s, self.request_id


def is_late(ticket: Ticket, now_s: float) -> bool:
    """Whether its deadline has passed: it counts no more then, or one late request would make the next one late as well."""
    return ticket.deadline_s is not None and ticket.deadline_s <= now_s


@dataclass(eq=False)
class Entry:
    """A request that waits, with a prompt of `prompt_tokens`: for one that was preempted, its answer so far included."""

    ticket: Ticket
    prompt_tokens: int
    resumes: bool = False
    has_left: bool = False


class FairShare:
    """Tokens that each client has had, so that whoever had the fewest is next.

    A client that comes, or comes back, begins at what the others have had by then: what it left unused while nobody
    competed gives it no claim. What it had beyond that counts on.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._floor = 0.0
        self._prune_at = _MANY_CLIENTS

    def of(self, client: str) -> float:
        """Tokens that count for a client."""
        return self._tokens.get(client, self._floor)

    def join(self, client: str) -> None:
        """A client competes from now on."""
        self._tokens[client] = max(self.of(client), self._floor)
        if len(self._tokens) >= self._prune_at:  # who has had no more than the floor would begin there anyway
            self._tokens = {name: tokens for name, tokens in self._tokens.items() if tokens > self._floor}
            self._prune_at = max(_MANY_CLIENTS, 2 * len(self._tokens))

    def charge(self, client: str, tokens: int, *, as_fewest: bool) -> None:
        """A client has had tokens; `as_fewest`: because it had had the fewest."""
        before = self.of(client)
        if as_fewest:
            self._floor = max(self._floor, before)
        self._tokens[client] = before + tokens


class _EntryHeap:
    """Entries by a key; those that have left are dropped when they come to the top."""

    def __init__(self) -> None:
        self._items: list[tuple[Any, int, Entry]] = []
        self._pushes = 0  # tells an entry from one of the same request that has left
        self._compact_at = _SMALL

    def push(self, key: tuple[float, ...], entry: Entry) -> None:
        heapq.heappush(self._items, (key, self._pushes, entry))
        self._pushes += 1
        if len(self._items) >= self._compact_at:
            self._items = [item for item in self._items if not item[2].has_left]
            heapq.heapify(self._items)
            self._compact_at = max(_SMALL, 2 * len(self._items))

    def first(self) -> Entry | None:
        items = self._items
        while items and items[0][2].has_left:
            heapq.heappop(items)
        return items[0][2] if items else None

    def drop_first(self) -> None:
        heapq.heappop(self._items)


class _Lane:
    """Entries of one priority."""

    def __init__(self) -> None:
        self.share = FairShare()
        self._resuming, self._with_deadline = _EntryHeap(), _EntryHeap()
        self._clients: dict[str, _EntryHeap] = {}
        self._order: list[tuple[float, int, str]] = []  # clients by tokens admitted, or fewer, then by when they came
        self._joins = 0

    def add(self, entry: Entry) -> None:
        ticket = entry.ticket
        if entry.resumes:
            self._resuming.push(ticket.age_order, entry)
        elif ticket.deadline_s is not None:
            self._with_deadline.push((ticket.deadline_s, *ticket.age_order), entry)
        else:
            self._add_to_client(entry)

    def first(self, now_s: float) -> tuple[Entry, bool] | None:
        """The entry that is next, and whether that is because its client has had the fewest tokens."""
        if (entry := self._resuming.first()) is not None:
            return entry, False
        while (entry := self._with_deadline.first()) is not None:
            if not is_late(entry.ticket, now_s):
                return entry, False
            self._with_deadline.drop_first()
            self._add_to_client(entry)
        while self._order:
            tokens, joined, client = self._order[0]
            if (entry := self._clients[client].first()) is None:
                heapq.heappop(self._order)
                del self._clients[client]
            elif tokens < self.share.of(client):
                heapq.heapreplace(self._order, (self.share.of(client), joined, client))
            else:
                return entry, True
        return None

    def _add_to_client(self, entry: Entry) -> None:
        client = entry.ticket.client
        if client not in self._clients:
            self._clients[client] = _EntryHeap()
            self.share.join(client)
            self._joins += 1
            heapq.heappush(self._order, (self.share.of(client), self._joins, client))
        self._clients[client].push((entry.prompt_tokens, *entry.ticket.age_order), entry)


class WaitingQueue:
    """Requests that wait. Bounded by its owner."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._by_age = _EntryHeap()
        self._lanes: dict[float, _Lane] = {}
        self._falling: list[float] = []  # minus the priorities that may have entries, ascending
        self._since_oldest = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._entries

    def add(self, entry: Entry) -> None:
        """A request waits from now on."""
        ticket = entry.ticket
        self._entries[ticket.request_id] = entry
        self._by_age.push(ticket.age_order, entry)
        at = bisect_left(self._falling, -ticket.priority)
        if at == len(self._falling) or self._falling[at] != -ticket.priority:
            if len(self._lanes) >= _MANY_LANES:  # those without entries; what their clients have had is forgotten
                self._lanes = {-each: self._lanes[-each] for each in self._falling}
            self._falling.insert(at, -ticket.priority)
        self._lanes.setdefault(ticket.priority, _Lane()).add(entry)

    def remove(self, request_id: int) -> Entry | None:
        """Takes a request out, if it waits."""
        if (entry := self._entries.pop(request_id, None)) is not None:
            entry.has_left = True
        return entry

    def first(self, now_s: float) -> Entry | None:
        """The request to be admitted next."""
        if self._since_oldest >= OLDEST_EVERY - 1:
            return self._by_age.first()
        found = self._in_order(now_s)
        return None if found is None else found[0]

    def admit_first(self, now_s: float) -> Entry:
        """Takes out what `first` names, and charges its client with it. There is one."""
        oldest, found = self._by_age.first(), self._in_order(now_s)
        assert oldest is not None
        assert found is not None
        entry, as_fewest = found
        if self._since_oldest >= OLDEST_EVERY - 1:
            entry, as_fewest = oldest, False
        self._since_oldest = 0 if entry is oldest else self._since_oldest + 1
        if not entry.resumes:  # it was charged when it was admitted first
            ticket = entry.ticket
            self._lanes[ticket.priority].share.charge(ticket.client, entry.prompt_tokens, as_fewest=as_fewest)
        self.remove(entry.ticket.request_id)
        return entry

    def _in_order(self, now_s: float) -> tuple[Entry, bool] | None:
        while self._falling:
            if (found := self._lanes[-self._falling[0]].first(now_s)) is not None:
                return found
            del self._falling[0]
        return None
