"""Conversations with a name: how one is opened, and what is said about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import OptionError

if TYPE_CHECKING:
    from headrace.cli.protocols import ModelLike, SessionLike


def open_session(model: ModelLike, name: str, system: str | None) -> SessionLike:
    """The conversation of this name, as it was left, or a new one.

    Raises:
        OptionError: it began with another system message than `system`.
    """
    session = model.session(name, system)
    if system is not None and [(first.role, first.content) for first in session.messages[:1]] != [("system", system)]:
        session.close(keep=True)
        raise OptionError(f"session {name!r} began without this system message: leave out --system, or take another name")
    return session


def opening_line(session: SessionLike) -> str:
    """What a session starts with: 'session 'plan' goes on with 6 messages, 1,234 tokens'."""
    num_messages = len(session.messages)
    if not session.token_ids:
        return f"session {session.name!r} is new"
    return f"session {session.name!r} goes on with {num_messages:,} messages, {len(session.token_ids):,} tokens"
