"""What one step is asked to do: for each sequence of a batch, `num_tokens` new tokens follow `past_tokens` known ones.

Rows of the step are the new tokens of all sequences, one sequence after the other. Sequences that share their beginning
lie next to each other, so that attention can read what they share once; results are handed out in the order that was
asked for. What the kernels read of all this is `tables.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from headrace.kernels.page_formats import FORMAT_BITS
from headrace.model.step import PAGE_TOKENS, SequenceStep

if TYPE_CHECKING:
    from headrace.engine.tables import Blocks

Words = npt.NDArray[np.int64]
_PAGINGS_KEPT = 8


class ColdSource(Protocol):
    """Where cold pages are read from: called by one thread at a time, which is not the one that runs steps."""

    def expect_layer(self, layer: int, first: int) -> None:
        """Says that one layer of all cold pages from number `first` on is read next; a disk can be asked for them at once.

        May do nothing.
        """

    def read_layer(self, layer: int, number: int, target: npt.NDArray[np.uint8]) -> str | None:
        """Reads one layer of the number-th cold page into all of `target`; why not, if it fails."""


@dataclass(frozen=True, eq=False)
class ColdPages:
    """Pages of a sequence that are not in memory: whole ones, before the page that new tokens go to.

    `indices` are their places in the sequence, int64 [num_cold], ascending; `formats` their format codes, all exact if
    None. Steps with the same object are cheaper than with an equal one.
    """

    indices: Words
    source: ColdSource
    formats: Words | None = None


class Arriving(Protocol):
    """Pages of a sequence that are read, layer by layer, into memory of theirs while a step runs."""

    def wait_for(self, layer: int) -> None:
        """Waits until one layer of all of them is there; raises if it will never be."""


class RowSampling(Protocol):
    """How the token of a row of logits is drawn, as the step's kernels read it."""

    def write(self, words: Words, position: int) -> None:
        """Fills the row's record, int64 [SAMPLE_WORDS], for the token at `position`, the one that follows the row's."""


@dataclass(frozen=True)
class Slice:
    """New tokens of one sequence: their ids, how many tokens are known before them, and the addresses of its pages.

    `num_outputs` logits rows are wanted, for the last tokens of the slice: none for a part of a prompt that is not its end.
    The addresses of `cold` pages, if there are any, are not used; those of pages that are `arriving` are. The array of
    addresses is never changed: who moves pages makes a new one. `sampling` says how tokens are drawn; None: the likeliest.
    """

    token_ids: Sequence[int]
    past_tokens: int
    page_addresses: Words
    num_outputs: int = 1
    cold: ColdPages | None = None
    arriving: Arriving | None = None
    sampling: RowSampling | None = None


@dataclass(frozen=True, eq=False)
class Paging:
    """The page tables of a batch: what stays the same from step to step, until a sequence gets a page.

    `order` gives the number of the slice that comes first, second, ...; None where that is the order asked for. In that
    order, `starts` says where each page table begins in `words`, and `shared_pages` how many leading pages each has in
    common with the one before it (None: nobody shares any).
    """

    addresses: tuple[Words, ...]
    words: Words
    starts: Words
    order: Words | None
    shared_pages: Words | None
    blocks: dict[tuple[int, bytes], Blocks] = field(default_factory=dict)

    @classmethod
    def of(cls, addresses: tuple[Words, ...], *, may_share: bool) -> Paging:
        """Lays page tables one behind the other; those that share their first pages next to each other, if they may."""
        lengths = np.array([len(each) for each in addresses], np.int64)
        if not may_share or len({int(each[0]) for each in addresses}) == len(addresses):
            return cls(addresses, np.concatenate(addresses), np.cumsum(lengths) - lengths, None, None)
        # equal beginnings are neighbours in any order of the tables' bytes
        order = np.array(sorted(range(len(addresses)), key=lambda number: addresses[number].tobytes()), np.int64)
        lengths = lengths[order]
        words = np.concatenate([addresses[number] for number in order])
        padded: Words = np.zeros((len(order), int(lengths.max())), np.int64)
        inside = np.arange(padded.shape[1]) < lengths[:, None]
        padded[inside] = words
        differ = (padded[1:] != padded[:-1]) | ~inside[1:] | ~inside[:-1]
        shared: Words = np.zeros(len(order), np.int64)
        shared[1:] = np.where(differ.any(axis=1), differ.argmax(axis=1), padded.shape[1])
        return cls(addresses, words, np.cumsum(lengths) - lengths, order, shared)


@dataclass(frozen=True, eq=False)
class Batch:
    """The slices of a step, as arrays in the order of their rows: new, known and wanted tokens, int64 [B].

    `output_rows` says which row each wanted row of logits is of, in the order asked for.
    """

    slices: Sequence[Slice]
    paging: Paging
    new_tokens: Words
    past_tokens: Words
    outputs: Words
    token_ids: Words
    output_rows: Words
    positions: Words

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return len(self.token_ids)

    @property
    def num_outputs(self) -> int:
        """Rows of logits."""
        return len(self.output_rows)

    @property
    def decodes(self) -> bool:
        """Whether each sequence has one new token."""
        return len(self.new_tokens) == len(self.token_ids)

    @cached_property
    def owners(self) -> Words:
        """The sequence of each row, int64 [T]."""
        return np.repeat(np.arange(len(self.new_tokens)), self.new_tokens)

    def shared_pages(self, ahead: int = 0) -> Words | None:
        """Whole pages of the past that each sequence shares with the one before it, `ahead` steps from now."""
        shared = self.paging.shared_pages
        if shared is None:
            return None
        whole = (self.past_tokens + ahead) // PAGE_TOKENS
        limited = shared.copy()
        limited[1:] = np.minimum(shared[1:], np.minimum(whole[1:], whole[:-1]))
        return limited

    def sequence_steps(self, ahead: int = 0) -> tuple[SequenceStep, ...]:
        """The step as the ledger has it, `ahead` steps from now."""
        shared = self.shared_pages(ahead)
        formats = self.paging.words & FORMAT_BITS
        any_formats = bool(formats.any())
        steps = []
        for number, (new, past, outputs) in enumerate(
            zip(self.new_tokens.tolist(), self.past_tokens.tolist(), self.outputs.tolist(), strict=True)
        ):
            start = int(self.paging.starts[number])
            named = tuple(formats[start : start + (past + ahead) // PAGE_TOKENS].tolist()) if any_formats else ()
            pages = int(shared[number]) if shared is not None else 0
            steps.append(SequenceStep(new, past + ahead, outputs, chosen=True, page_formats=named, shared_pages=pages))
        return tuple(steps)


class BatchMaker:
    """Makes batches of slices; page tables that it has seen lately cost nothing."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Paging] = {}

    def make(self, slices: Sequence[Slice]) -> Batch:
        """A batch of slices that all have a token."""
        new: Words = np.array([len(part.token_ids) for part in slices], np.int64)
        decodes = int(new.max()) == 1
        paging = self._paging(slices, may_share=decodes and len(slices) > 1)
        outputs: Words = np.array([part.num_outputs for part in slices], np.int64)
        ordered = slices if paging.order is None else [slices[number] for number in paging.order.tolist()]
        past: Words = np.array([part.past_tokens for part in ordered], np.int64)
        if decodes:
            ids: Words = np.array([part.token_ids[0] for part in ordered], np.int64)
            rows = np.arange(len(slices))
            positions = past
            if paging.order is not None:
                rows[paging.order] = np.arange(len(slices))
            output_rows = rows[outputs > 0]
        else:
            ids = np.concatenate([np.asarray(part.token_ids, np.int64) for part in slices])
            ends = np.cumsum(new)
            positions = np.arange(len(ids)) + np.repeat(past - ends + new, new)
            wanted = np.cumsum(outputs)
            output_rows = np.arange(int(outputs.sum())) + np.repeat(ends - wanted, outputs)
        if paging.order is not None:
            outputs = outputs[paging.order]
        return Batch(slices, paging, new, past, outputs, ids, output_rows, positions)

    def _paging(self, slices: Sequence[Slice], *, may_share: bool) -> Paging:
        key = (may_share, *[id(part.page_addresses) for part in slices])
        paging = self._known.get(key)
        if paging is None:
            if len(self._known) >= _PAGINGS_KEPT:
                del self._known[next(iter(self._known))]
            # keeps the addresses alive, so that their identity cannot be taken by others
            paging = Paging.of(tuple(part.page_addresses for part in slices), may_share=may_share)
            self._known[key] = paging
        return paging
