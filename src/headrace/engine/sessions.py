"""The conversations with names that a model knows: those that are open here, and those that are kept on disk.

Makes no conversation itself: whoever asks for one says how it is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.errors import OptionError
from headrace.kv.residency import Standing
from headrace.kv.sessions import SessionFiles, SessionRecord, check_name

if TYPE_CHECKING:
    from headrace.engine.chat import Session
    from headrace.kv.cache import PageCache


class Sessions:
    """Open sessions by name, and the files of all, if sessions are kept on disk."""

    def __init__(self, files: SessionFiles | None) -> None:
        self.files = files
        self._open: dict[str, Session] = {}

    def open(self, name: str, make: Callable[[SessionRecord | None], Session]) -> Session:
        """The session of this name: the one that is open, or what `make` gives for what is kept of it, if anything is.

        Raises:
            OptionError: the name cannot be used.
        """
        check_name(name)
        if name not in self._open:
            self._open[name] = make(None if self.files is None else self.files.load(name))
        return self._open[name]

    def check_new(self, name: str) -> None:
        """Refuses a name that cannot be used, or that a session has already.

        Raises:
            OptionError: so it is.
        """
        if check_name(name) in self._open or (self.files is not None and self.files.load(name) is not None):
            raise OptionError(f"there is a session {name!r} already: take another name")

    def names(self) -> list[str]:
        """Names of the sessions that can be gone on with, sorted."""
        kept = [] if self.files is None else [record.name for record in self.files.all()]
        here = [name for name, each in self._open.items() if self.files is None or each.problem is None]
        return sorted({*kept, *here})

    def rename(self, name: str, new_name: str) -> None:
        """A session goes on under another name."""
        if name in self._open:
            self._open[new_name] = self._open.pop(name)

    def end_answers(self) -> None:
        """Ends the answers that are still coming; what was read of them is part of their sessions."""
        for session in list(self._open.values()):
            session.end_answer()

    def drop(self, name: str) -> None:
        """Forgets the object of a session that was closed."""
        self._open.pop(name, None)

    def apply_standings(self, cache: PageCache) -> None:
        """What the owners of sessions asked for in earlier runs holds on."""
        for record in [] if self.files is None else self.files.all():
            if record.pinned or record.priority != 1.0 or record.expires_s is not None:
                expires_s = math.inf if record.expires_s is None else record.expires_s
                cache.set_standing(record.token_ids, Standing(record.priority, record.pinned, expires_s))
