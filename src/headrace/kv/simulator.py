"""Replays a request trace against the real prefix tree and the real rule, with pages that hold no data.

A block of the trace is one page of one token. A block counts as found if all blocks before it were found too; the blocks
of a request are known to the next ones. Beside the policy asked for, two references are replayed on the same capacity:
least recently used first, and the best possible, which knows when each block is needed next and gives up the one that is
needed last (an upper bound for any policy).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from headrace.errors import OptionError
from headrace.kv.placement import Placement
from headrace.kv.residency import LeastRecent, Prices, Residency, Rule
from headrace.kv.trace import TraceRequest
from headrace.kv.tree import PrefixTree

Policy = Literal["headrace", "lru", "best"]
POLICIES: tuple[Policy, ...] = ("headrace", "lru", "best")
COLD_FETCH_SHARE = 0.1
"""Seconds to fetch a block from a tier below the first, over those to compute it; the order within a tier ignores it."""


@dataclass(frozen=True)
class SimulationResult:
    """What a replay found. Blocks count once per request; `tier_hit_blocks` says which tier held them."""

    policy: Policy
    num_requests: int
    num_blocks: int
    tier_hit_blocks: tuple[int, ...]
    promoted_blocks: int
    written_blocks: int
    dropped_blocks: int

    @property
    def hit_rate(self) -> float:
        """Blocks found over all blocks."""
        return sum(self.tier_hit_blocks) / self.num_blocks

    @property
    def tier_hit_rates(self) -> tuple[float, ...]:
        """Blocks found in each tier over all blocks."""
        return tuple(blocks / self.num_blocks for blocks in self.tier_hit_blocks)


def simulate(requests: Sequence[TraceRequest], capacities: Sequence[int], policy: Policy) -> SimulationResult:
    """Replays a trace on tiers of so many blocks each, the nearest first.

    Raises:
        OptionError: a capacity is not positive, the policy is unknown, or the trace has no blocks.
    """
    if not capacities or min(capacities) < 1:
        raise OptionError(f"{list(capacities)} are no capacities: give 1 block or more for each tier")
    if not any(request.block_ids for request in requests):
        raise OptionError("the trace has no blocks: nothing can be found in it")
    if policy == "best":
        return _replay_best(requests, capacities)
    if policy == "lru":
        return _replay(requests, capacities, policy, LeastRecent())
    if policy == "headrace":
        fetch_s = (0.0,) + (COLD_FETCH_SHARE,) * (len(capacities) - 1)
        return _replay(requests, capacities, policy, Residency(Prices(fetch_s, page_bytes=(1,) * len(capacities))))
    raise OptionError(f"{policy!r} is not a policy: use one of {', '.join(POLICIES)}")


def _replay(requests: Sequence[TraceRequest], capacities: Sequence[int], policy: Policy, rule: Rule) -> SimulationResult:
    tree = PrefixTree(1)
    placement = Placement(tree, capacities, rule)
    hits = [0] * len(capacities)
    num_blocks = promoted = written = dropped = 0
    for request in requests:
        ids = request.block_ids
        match = tree.match(ids)
        found = match.num_pages
        num_blocks += len(ids)
        moves, _ = placement.record(
            ids,
            match,
            [None] * (len(ids) - found),
            num_answer_tokens=request.num_answer_tokens,
            now_s=request.time_s,
        )
        hits[0] += found
        for move in moves:
            hits[move.from_tier] += len(move.pages)
            hits[0] -= len(move.pages)
            promoted += len(move.pages)
        for move in placement.make_room(request.time_s):
            if move.to_tier is None:
                dropped += len(move.pages)
            else:
                written += len(move.pages)
    return SimulationResult(policy, len(requests), num_blocks, tuple(hits), promoted, written, dropped)


def _replay_best(requests: Sequence[TraceRequest], capacities: Sequence[int]) -> SimulationResult:
    """The best for each number of tiers together; a tier's share is what it adds to those before. Moves are not counted."""
    ids, num_known = _dense(requests)
    next_uses = _next_uses(ids, num_known)
    totals = [_count_best(ids, next_uses, num_known, capacity) for capacity in np.cumsum(capacities).tolist()]
    tiers = tuple(int(blocks) for blocks in np.diff([0, *totals]))
    return SimulationResult("best", len(requests), sum(map(len, ids)), tiers, 0, 0, 0)


def _dense(requests: Sequence[TraceRequest]) -> tuple[list[npt.NDArray[np.int64]], int]:
    """Block ids of each request as indices from 0 on, and how many there are."""
    lengths = [len(request.block_ids) for request in requests]
    flat = np.fromiter((block for request in requests for block in request.block_ids), np.int64, sum(lengths))
    known, dense = np.unique(flat, return_inverse=True)
    return np.split(dense.astype(np.int64), np.cumsum(lengths)[:-1]), len(known)


def _next_uses(ids: Sequence[npt.NDArray[np.int64]], num_known: int) -> list[npt.NDArray[np.int64]]:
    """For each block of each request the index of the next request that has it, or the number of requests."""
    following = np.full(num_known, len(ids))
    found = []
    for index in range(len(ids) - 1, -1, -1):
        found.append(following[ids[index]])
        following[ids[index]] = index
    return found[::-1]


def _count_best(
    ids: Sequence[npt.NDArray[np.int64]], next_uses: Sequence[npt.NDArray[np.int64]], num_known: int, capacity: int
) -> int:
    """Blocks found if the block needed last is given up first, the deeper of two.

    Blocks that follow each other on a path and are needed next by the same request stay or go together from their end on,
    so the heap holds such runs: (-next use, -start, request, end). Runs whose next use has passed sink to its bottom.
    """
    here = np.zeros(num_known, np.bool_)
    heap: list[tuple[int, int, int, int]] = []
    held = hits = 0
    for index, (blocks, following) in enumerate(zip(ids, next_uses, strict=True)):
        if not len(blocks):
            continue
        resident = here[blocks]
        hits += len(blocks) if resident.all() else int(resident.argmin())
        held += len(blocks) - int(resident.sum())
        here[blocks] = True
        starts = [0, *(np.flatnonzero(np.diff(following)) + 1).tolist()]
        for start, end in zip(starts, [*starts[1:], len(blocks)], strict=True):
            heapq.heappush(heap, (-int(following[start]), -start, index, end))
        while held > capacity:
            negative, start, owner, end = heapq.heappop(heap)
            keep = max(-start, end - (held - capacity))
            here[ids[owner][keep:end]] = False
            held -= end - keep
            if keep > -start:
                heapq.heappush(heap, (negative, start, owner, keep))
    return hits


def timed(
    requests: Sequence[TraceRequest], capacities: Sequence[int], policy: Policy, clock: Callable[[], float]
) -> tuple[SimulationResult, float]:
    """`simulate`, and the requests per second that it replayed, by the caller's clock."""
    start_s = clock()
    result = simulate(requests, capacities, policy)
    return result, len(requests) / max(clock() - start_s, 1e-9)
