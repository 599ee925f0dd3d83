"""How the prefix tree stores pages: in stretches, which are split and joined beneath whoever looks at a page.

A stretch is pages that follow each other on one path, of one use and in one tier. Branches begin behind its last page only:

    root ─ [page 1 | page 2 | page 3] ─┬─ [page 4 | page 5]
                                       └─ [page 4, partly filled]

A `Node` is one page of a stretch, made when somebody asks for it and the same object from then on. What is done to many
pages in a row is done to stretches; so it costs as much per page as copying a list does.

Keeps the books of one path and its branches; what may be done to them is the tree's to say (`tree.py`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

Tokens = tuple[int, ...]


class Node:
    """One page of a known past. Made, moved and removed by its tree only; `page` and `use` are the caller's.

    One that was removed keeps its tokens, page, tier and use, and has no parent. `holds` counts its pins, and the pages right
    behind it that are held: what is held stays where it is.
    """

    __slots__ = ("depth_pages", "holds", "pins", "stretch")

    def __init__(self, stretch: Stretch, depth_pages: int) -> None:
        self.stretch = stretch
        self.depth_pages = depth_pages
        self.pins = self.holds = 0

    @property
    def tokens(self) -> Tokens:
        """Its own tokens."""
        start = (self.depth_pages - 1 - self.stretch.start) * self.stretch.page_tokens
        return tuple(self.stretch.tokens[max(0, start) : start + self.stretch.page_tokens])

    @property
    def page(self) -> Any:
        """What the caller gave."""
        return self.stretch.pages[self.depth_pages - 1 - self.stretch.start] if self.depth_pages else None

    @page.setter
    def page(self, page: Any) -> None:
        self.stretch.pages[self.depth_pages - 1 - self.stretch.start] = page

    @property
    def use(self) -> Any:
        """What the caller gave, to this page or to a path through it."""
        return self.stretch.use

    @use.setter
    def use(self, use: Any) -> None:
        self.isolate().use = use

    @property
    def tier(self) -> int:
        """Where it lies."""
        return self.stretch.tier

    @property
    def parent(self) -> Node | None:
        """The page before; the root before the first one, None before the root."""
        stretch = self.stretch
        return stretch.node(self.depth_pages - 1) if stretch.parent is not None else None

    @property
    def children(self) -> dict[Tokens, Node]:
        """The pages behind by their tokens, the newest last."""
        stretch = self.stretch
        if self.depth_pages < stretch.end:
            child = stretch.node(self.depth_pages + 1)
            return {child.tokens: child}
        return {key: each.node(self.depth_pages + 1) for key, each in stretch.children.items()}

    @property
    def num_tier_children(self) -> int:
        """Children in the same tier."""
        return 1 if self.depth_pages < self.stretch.end else self.stretch.num_tier_children

    @property
    def may_leave(self) -> bool:
        """Whether nothing keeps it in its tier: neither pins nor a child there."""
        return not self.pins and self.depth_pages == self.stretch.end and not self.stretch.num_tier_children

    @property
    def fingerprint(self) -> int:
        """A hash of all tokens up to here."""
        return self.stretch.fingerprints[self.depth_pages - 1 - self.stretch.start] if self.depth_pages else 0

    def path(self) -> list[Node]:
        """The nodes from the first page to this one."""
        runs = []
        stretch, end = self.stretch, self.depth_pages
        while stretch.parent is not None:
            runs.append([stretch.node(depth) for depth in range(stretch.start + 1, end + 1)])
            stretch, end = stretch.parent, stretch.start
        return [node for run in reversed(runs) for node in run]

    def isolate(self) -> Stretch:
        """Splits until this page is a stretch of its own."""
        if self.depth_pages < self.stretch.end:
            self.stretch.split(self.depth_pages)
        if self.depth_pages - 1 > self.stretch.start:
            self.stretch.split(self.depth_pages - 1)
        return self.stretch


class Stretch:
    """Pages (start, end] of a path, counted from 1. The root is one of no pages."""

    __slots__ = (
        "children",
        "fingerprints",
        "nodes",
        "num_tier_children",
        "order",
        "page_tokens",
        "pages",
        "parent",
        "start",
        "tier",
        "tokens",
        "use",
    )

    def __init__(
        self, page_tokens: int, start: int, tier: int, use: Any, tokens: list[int], pages: list[Any], fingerprints: list[int]
    ) -> None:
        self.page_tokens = page_tokens
        self.start = start
        self.tier = tier
        self.use = use
        self.tokens = tokens
        self.pages = pages
        self.fingerprints = fingerprints
        self.parent: Stretch | None = None  # also None once it was removed
        self.children: dict[Tokens, Stretch] = {}  # by the tokens of their first page
        self.order: list[Tokens] | None = None  # keys of the children, sorted; made when there are two
        self.num_tier_children = 0  # children in the same tier
        self.nodes: dict[int, Node] = {}  # by depth: those that were asked for

    @property
    def end(self) -> int:
        """The depth of its last page."""
        return self.start + len(self.pages)

    @property
    def key(self) -> Tokens:
        """The tokens of its first page."""
        return tuple(self.tokens[: self.page_tokens])

    def node(self, depth_pages: int) -> Node:
        """A page of the stretch, or the one before it."""
        if depth_pages == self.start and self.parent is not None:
            return self.parent.node(depth_pages)
        node = self.nodes.get(depth_pages)
        if node is None:
            node = self.nodes[depth_pages] = Node(self, depth_pages)
        return node

    def num_unpinned(self, most: int) -> int:
        """How many pages from the last one on are not pinned, up to a number."""
        most = min(most, len(self.pages))
        if most > 1:
            return min(most, self.end - max((depth for depth, node in self.nodes.items() if node.pins), default=self.start))
        return most

    def attach(self, child: Stretch) -> None:
        """A stretch that begins here from now on."""
        key = child.key
        child.parent = self
        self.children[key] = child
        self.num_tier_children += child.tier == self.tier
        if self.page_tokens > 1:  # pages of one token have no parts to find
            if self.order is not None:
                insort(self.order, key)
            elif len(self.children) > 1:
                self.order = sorted(self.children)

    def detach(self, child: Stretch) -> None:
        """A stretch that begins here no longer."""
        key = child.key
        child.parent = None
        del self.children[key]
        self.num_tier_children -= child.tier == self.tier
        if self.order is not None:
            del self.order[bisect_left(self.order, key)]

    def split(self, depth_pages: int) -> Stretch:
        """Keeps the pages up to a depth; the rest, with what is behind it, becomes a stretch that begins here."""
        at = depth_pages - self.start
        tokens_at = at * self.page_tokens
        rest = Stretch(
            self.page_tokens,
            depth_pages,
            self.tier,
            self.use,
            self.tokens[tokens_at:],
            self.pages[at:],
            self.fingerprints[at:],
        )
        del self.tokens[tokens_at:], self.pages[at:], self.fingerprints[at:]
        rest._adopt(self)
        for depth in _inside(self.nodes, depth_pages, rest.end):
            node = rest.nodes[depth] = self.nodes.pop(depth)
            node.stretch = rest
        self.children, self.order, self.num_tier_children = {rest.key: rest}, None, 1
        rest.parent = self
        return rest

    def join(self) -> Stretch:
        """Becomes one with the stretch behind it, if that is the only one and of the same use and tier.

        The larger of the two takes the pages of the other. Returns the one that has them, or this one if they stay two.
        """
        if len(self.children) != 1 or self.parent is None:
            return self
        (child,) = self.children.values()
        if child.use is not self.use or child.tier != self.tier:
            return self
        if len(self.pages) >= len(child.pages):
            self.tokens += child.tokens
            self.pages += child.pages
            self.fingerprints += child.fingerprints
            self._adopt(child)
            self._show(child.nodes)
            return self
        child.tokens[:0] = self.tokens
        child.pages[:0] = self.pages
        child.fingerprints[:0] = self.fingerprints
        child.start, child.parent = self.start, self.parent
        self.parent.children[self.key] = child
        child._show(self.nodes)
        return child

    def set_tier(self, tier: int) -> None:
        """The pages now lie in another tier."""
        parent = self.parent
        assert parent is not None
        parent.num_tier_children += (parent.tier == tier) - (parent.tier == self.tier)
        self.tier = tier
        self.num_tier_children = sum(child.tier == tier for child in self.children.values())

    def cut(self, count: int) -> tuple[list[Any], list[int]]:
        """Removes the last pages, behind which there are none; gives them back with their fingerprints."""
        at = len(self.pages) - count
        pages, fingerprints = self.pages[at:], self.fingerprints[at:]
        for depth in _inside(self.nodes, self.start + at, self.end):
            node = self.nodes.pop(depth)
            index = depth - 1 - self.start
            alone = Stretch(
                self.page_tokens, depth - 1, self.tier, self.use, list(node.tokens), [node.page], [self.fingerprints[index]]
            )
            alone.nodes[depth], node.stretch = node, alone
        if not at:
            assert self.parent is not None
            self.parent.detach(self)
        del self.tokens[at * self.page_tokens :], self.pages[at:], self.fingerprints[at:]
        return pages, fingerprints

    def check(self) -> None:
        """Asserts that the stretch agrees with itself, its parent and those that begin here."""
        size, most = len(self.tokens), len(self.pages) * self.page_tokens
        assert most - self.page_tokens < size <= most or size == most == 0
        assert size == most or not self.children, "only a leaf may be partly filled"
        assert len(self.fingerprints) == len(self.pages)
        keys = list(self.children)
        assert self.order is None or self.order == sorted(keys)
        assert self.order is not None or len(keys) < 2 or self.page_tokens == 1
        assert self.num_tier_children == sum(child.tier == self.tier for child in self.children.values())
        for key, child in self.children.items():
            assert child.key == key
            assert child.parent is self
            assert child.start == self.end
            assert child.tier >= self.tier
            assert child.pages
        fingerprint = self.parent.fingerprints[-1] if self.parent is not None and self.parent.fingerprints else 0
        assert self.fingerprints == chain(fingerprint, paged(self.tokens, self.page_tokens))
        for depth, node in self.nodes.items():
            assert node.stretch is self
            assert node.depth_pages == depth
            assert self.start < depth <= self.end or (self.parent is None and depth == 0)
            assert node.pins >= 0
            behind = node.children.values() if node.holds else ()
            assert node.holds == node.pins + sum(each.holds > 0 for each in behind)
            assert not node.holds or node.parent is None or node.parent.holds

    def _adopt(self, other: Stretch) -> None:
        """What begins behind another stretch begins here."""
        self.children, self.order, self.num_tier_children = other.children, other.order, other.num_tier_children
        for child in self.children.values():
            child.parent = self

    def _show(self, nodes: dict[int, Node]) -> None:
        """Pages that were another stretch's are seen here."""
        for node in nodes.values():
            node.stretch = self
        self.nodes.update(nodes)


def _inside(nodes: dict[int, Node], start: int, end: int) -> list[int]:
    """The depths in (start, end] that there are nodes of."""
    if end - start < len(nodes):
        return [depth for depth in range(start + 1, end + 1) if depth in nodes]
    return [depth for depth in nodes if start < depth <= end]


def paged(tokens: Sequence[int], page_tokens: int) -> list[Tokens]:
    """The tokens page by page; the last may be partly filled."""
    pages = list(zip(*[iter(tokens)] * page_tokens, strict=False))
    whole = len(pages) * page_tokens
    if whole < len(tokens):
        pages.append(tuple(tokens[whole:]))
    return pages


def chain(fingerprint: int, pages: Sequence[Tokens]) -> list[int]:
    """The fingerprints of pages behind one with this fingerprint."""
    return [fingerprint := hash((fingerprint, page)) for page in pages]


def common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    one, other = list(one), list(other)  # slices of a list and a tuple are never equal
    known, end = 0, min(len(one), len(other))
    while known < end:  # the first `known` agree, what is from `end` on need not
        half = (known + end + 1) // 2
        if one[known:half] == other[known:half]:
            known = half
        else:
            end = half - 1
    return known
