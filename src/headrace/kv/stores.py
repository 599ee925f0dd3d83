"""What the memory of the past asks of a place outside of memory: files on this machine now, other machines later.

Pages come and go as *runs*, stretches of consecutive pages of one path (`runs.py`). A store never raises for what happens to
its contents: a page is there, gone or damaged; a run is written or refused. Methods may be called from two threads, that of
the requests and that of the mover. `store.py` is the store on disk; whatever has these methods can stand in its place.

What is counted and measured goes to a *journal*, which need not lie where the pages do: `journal.py` keeps it in a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.kv.budget import Refusal
from headrace.kv.keys import Difference
from headrace.kv.readers import Failure
from headrace.kv.runs import Place, Run, RunDraft


class PageStore(Protocol):
    """Runs of pages of one key."""

    @property
    def used_bytes(self) -> int:
        """Bytes of everything that the bound covers."""

    @property
    def room_bytes(self) -> int:
        """Bytes that may still be written."""

    @property
    def num_layers(self) -> int:
        """Layers of a page."""

    def page_bytes(self, page_format: int) -> int:
        """Bytes that a page of a format takes."""

    def header_bytes(self, num_pages: int) -> int:
        """Bytes that a run of so many pages takes beside them."""

    def scan(self) -> list[Run]:
        """Runs that are there and were not named before, parents before children."""

    def known_elsewhere(self, tokens: Sequence[int]) -> Difference | None:
        """How the pages differ that another key has for these tokens; None if none has any."""

    def write(self, draft: RunDraft) -> Run | Refusal:
        """Writes a run, or says why not."""

    def read_many(
        self, places: Sequence[Place], targets: Sequence[npt.NDArray[np.uint8]], layers: range | None = None
    ) -> list[Failure | None]:
        """Reads pages, or some consecutive layers of each, each into its view; what failed, or None, for each."""

    def read_layer(self, place: Place, layer: int, target: npt.NDArray[np.uint8]) -> Failure | None:
        """Reads one layer of a page."""

    def prefetch_layer(self, places: Iterable[Place], layer: int) -> None:
        """Says that one layer of these pages will be read next."""

    def repair(self, place: Place, page: npt.NDArray[np.uint8]) -> bool:
        """Writes a page over its damaged copy if it is the same to the bit; False if that cannot be done."""

    def drop(self, places: Iterable[Place]) -> None:
        """Gives up the last pages of their runs."""

    def close(self) -> None:
        """Lets go of everything; what was written stays."""


class Journal(Protocol):
    """JSON by name, kept for the processes that come after."""

    def read(self, name: str) -> object:
        """What is kept under a name; None if there is nothing that makes sense."""

    def merge(self, name: str, change: Callable[[object], object]) -> bool:
        """Puts what `change` makes of the content in its place, while no other process does; False if it is not kept."""
