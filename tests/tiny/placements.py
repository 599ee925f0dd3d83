"""Placements of pages that hold one token each and are that token: uses of them, and what is known."""

from __future__ import annotations

from headrace.kv.placement import Placement
from headrace.kv.residency import Prices, Residency, Rule
from headrace.kv.tree import PrefixTree

TWO_TIERS = Prices(fetch_s=(0.0, 0.1), page_bytes=(1, 1))


def new_placement(*capacities: int, rule: Rule | None = None) -> Placement:
    """An empty placement of so many pages in each tier."""
    return Placement(PrefixTree(1), capacities, rule or Residency(TWO_TIERS if len(capacities) > 1 else None))


def record_use(placement: Placement, tokens: tuple[int, ...], now_s: float, **options: object) -> list[object]:
    """One request; its moves."""
    match = placement.tree.match(tokens)
    pages = list(tokens[len(match.nodes) :])
    moves, _ = placement.record(tokens, match, pages, num_answer_tokens=5, now_s=now_s, **options)  # type: ignore[arg-type]
    return [*moves, *placement.make_room(now_s)]


def known_tokens(placement: Placement, tokens: tuple[int, ...]) -> int:
    """Tokens, from the first on, whose pages are in some tier."""
    return placement.tree.match(tokens).num_tokens
