"""How something that takes long reports on itself, without knowing who shows it."""

from __future__ import annotations

import logging
from typing import Protocol

BYTES = "bytes"
"""The unit of most tasks; another one is a word for what is counted, in the plural."""


class Progress(Protocol):
    """Receives the course of one task after another: `start`, any number of `advance`, `done`.

    `done` is called however a task ends, failure and Ctrl-C included. `notice` can come at any time.
    """

    def start(self, label: str, total: int | None, unit: str = BYTES) -> None:
        """A task of `total` units begins; the total is None when nobody knows it."""

    def advance(self, amount: int) -> None:
        """That many more units are done; negative when a broken transfer starts over."""

    def done(self) -> None:
        """The task has ended."""

    def notice(self, text: str) -> None:
        """Something that the user has to be shown, such as a model's terms of use."""


class NullProgress:
    """Shows no progress. Notices go to the log as warnings, since terms of use must not get lost."""

    def start(self, label: str, total: int | None, unit: str = BYTES) -> None:
        """Nothing."""

    def advance(self, amount: int) -> None:
        """Nothing."""

    def done(self) -> None:
        """Nothing."""

    def notice(self, text: str) -> None:
        """Logs `text` at level WARNING, which Python shows on standard error unless told otherwise."""
        logging.getLogger("headrace").warning("%s", text)
