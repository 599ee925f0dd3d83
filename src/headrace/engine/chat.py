"""Conversations: a chat lives as long as its object, a session has a name and goes on after a restart.

Between its turns a conversation is its messages and its exact tokens; what was computed of it lies in the memory of the
past (`kv/cache.py`), which every turn asks anew. So a fork is a copy of two lists, and text that would be split into other
tokens when it is read back is still found.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack, overload

from headrace.engine.generation import Generation
from headrace.engine.sampler import SamplingOptions, SamplingParams, sampling_params
from headrace.errors import OptionError
from headrace.kv.residency import DEFAULT_STANDING, Standing
from headrace.kv.sessions import MAX_NAME_CHARACTERS, SessionFiles, SessionRecord
from headrace.text.chat_template import Message
from headrace.text.detokenizer import Stop

if TYPE_CHECKING:
    from typing import Self

    from headrace.engine.model import Model

_MOST_COPIES = 100
"""Numbers that are tried for the name of a session that parts from what another process has made of it."""


class Chat:
    """A conversation. What an earlier turn computed is never computed again."""

    def __init__(self, model: Model, system: str | None) -> None:
        self._model, self._system = model, system
        self._messages: list[Message] = [] if system is None else [Message("system", system)]
        self._token_ids: list[int] = []
        self._answer: Generation | None = None
        self._standing = DEFAULT_STANDING

    @property
    def messages(self) -> tuple[Message, ...]:
        """All turns so far, the system message included."""
        return tuple(self._messages)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far, the template's included."""
        return tuple(self._token_ids)

    def send(
        self,
        text: str,
        *,
        max_tokens: int = 256,
        sampling: SamplingParams | None = None,
        stop: Stop = (),
        logprobs: int = 0,
        **overrides: Unpack[SamplingOptions],
    ) -> Generation:
        """The answer to `text`; options as for `Model.generate`. A cancelled answer stays as far as it got.

        An answer that is still coming ends here: a conversation has one at a time.

        Raises:
            OptionError: an option cannot be used.
            ContextOverflowError: the conversation leaves no room for an answer; it is as it was before.
        """
        self.end_answer()
        template = self._model.chat_template
        messages = [*self._messages, Message("user", text)]
        added = template.encode_turn(messages, self._token_ids) if self._token_ids else None
        ids = template.encode(messages) if added is None else [*self._token_ids, *added]
        params = sampling_params(sampling, overrides, logprobs)

        def remember(generation: Generation) -> None:
            result = generation.result
            if generation.failed and not result.token_ids:
                return  # an error that left no answer leaves no turn
            self._messages = [*messages, Message("assistant", result.text)]
            self._token_ids = [*ids, *result.token_ids]
            self._changed()

        self._answer = self._model.answer(ids, max_tokens, params, stop, remember, standing=lambda: self._standing)
        return self._answer

    def reset(self) -> None:
        """Forgets all turns, the system message excepted; an answer that is still coming ends."""
        self.end_answer()
        self._messages = [] if self._system is None else [Message("system", self._system)]
        self._token_ids = []
        self._changed()

    @overload
    def fork(self, name: None = None) -> Chat: ...

    @overload
    def fork(self, name: str) -> Session: ...

    def fork(self, name: str | None = None) -> Chat:
        """A copy that shares the past so far, with a name a session; no page is copied.

        Raises:
            OptionError: there is a session of this name.
        """
        self.end_answer()
        copy = Chat(self._model, self._system) if name is None else self._model.new_session(name, self._system)
        copy._messages, copy._token_ids = list(self._messages), list(self._token_ids)
        copy._changed()
        return copy

    def pin(self, pinned: bool = True) -> None:  # reads as what it does: pin(), pin(False)
        """Keeps its past longer than that of all others, within the same bounds; or no longer does."""
        self._ask(pinned=pinned)

    def prioritise(self, priority: float) -> None:
        """What keeping its past is worth, against 1 for that of others.

        Raises:
            OptionError: the priority is not a number above 0.
        """
        if not 0 < priority < math.inf:
            raise OptionError(f"priority={priority} is not a priority: use a number above 0, 1 is everybody's")
        self._ask(priority=priority)

    def expire(self, in_s: float | None) -> None:
        """Its past is worth nothing in so many seconds; None: no such time.

        Raises:
            OptionError: the time is negative.
        """
        if in_s is not None and not in_s >= 0:
            raise OptionError(f"in_s={in_s} has passed already: give seconds from now on, or None")
        self._ask(expires_s=math.inf if in_s is None else self._model.cache.now_s() + in_s)

    def expect(self, in_s: float = 0.0) -> None:
        """A turn will come in about so many seconds: what of its past lies on disk is read ahead meanwhile."""
        self._model.expect(self._token_ids, in_s, self._standing)

    def release(self) -> None:
        """Its past may go first when room is needed: neither pinned nor expected any more."""
        self._ask(pinned=False, priority=1.0, expires_s=0.0)

    def close(self, keep: bool = True) -> None:
        """Ends an answer that is still coming. Without `keep`, the past may go first when room is needed."""
        self.end_answer()
        if not keep:
            self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _ask(self, **wishes: float | bool) -> None:
        self._standing = replace(self._standing, **wishes)  # type: ignore[arg-type] # fields by name
        if self._token_ids:
            self._model.set_standing(self._token_ids, self._standing)
        self._changed()

    def _changed(self) -> None:
        """Something that a session keeps is different now."""

    def end_answer(self) -> None:
        """Ends an answer that is still coming; what was read of it is part of the conversation."""
        if self._answer is not None:
            self._answer.close()
            self._answer = None


_Content = tuple[tuple[int, ...], tuple[tuple[str, str], ...]]


class Session(Chat):
    """A conversation with a name. It is kept on disk after each turn, where there is a folder for it.

    Other processes may change the same session meanwhile. What they ask for (a pin, a release) holds here too; a session that
    they delete stays deleted; and where they have added turns, this conversation goes on under a name of its own.
    """

    def __init__(
        self,
        model: Model,
        name: str,
        system: str | None,
        files: SessionFiles | None,
        record: SessionRecord | None,
        not_kept: str = "nothing is kept on disk",
    ) -> None:
        super().__init__(model, system)
        self.name = name
        self._files = files
        self.problem: str | None = not_kept if files is None else None
        """Why it is not kept, as the end of a sentence; None if it is, or will be after its first turn."""
        self._told: str | None = None  # the problem that its user has been told of
        self._notices: list[str] = []
        if record is not None:
            self._messages = [Message(role, content) for role, content in record.messages]
            first = self._messages[:1]
            self._system = first[0].content if first and first[0].role == "system" else None
            self._token_ids = list(record.token_ids)
            self._standing = self._standing_of(record)
        self._is_there = record is not None
        self._seen: tuple[_Content, Standing] = (_content(self._record()), self._standing)  # on disk, when last looked at

    def take_notices(self) -> list[str]:
        """What its user should know and has not been told: that it is not kept, or goes on under another name."""
        notices, self._notices = self._notices, []
        return notices

    def close(self, keep: bool = True) -> None:
        """Lets go of it. With `keep` it can be gone on with, in this process or the next; otherwise it is forgotten."""
        super().close(keep)
        self._model.drop_session(self.name)
        if not keep:
            if self._files is not None:
                self._files.delete(self.name)
            self._files = None

    def _record(self) -> SessionRecord:
        """What is kept of it."""
        standing = self._standing
        return SessionRecord(
            name=self.name,
            model_digest=self._model.digest,
            token_ids=tuple(self._token_ids),
            messages=tuple((message.role, message.content) for message in self._messages),
            pinned=standing.pinned,
            priority=standing.priority,
            expires_s=None if standing.expires_s == math.inf else standing.expires_s,
            updated_s=self._model.cache.now_s(),
        )

    def _standing_of(self, record: SessionRecord) -> Standing:
        expires_s = math.inf if record.expires_s is None else record.expires_s
        return replace(self._standing, pinned=record.pinned, priority=record.priority, expires_s=expires_s)

    def _changed(self) -> None:
        if self._files is None:
            if self.problem is not None and self._token_ids:
                self._tell(self.problem)
            return
        written: list[SessionRecord] = []
        lost: list[str] = []

        def merge(current: SessionRecord | None, is_there: bool) -> SessionRecord | None:
            mine = self._record()
            if current is not None:
                self._obey(self._standing_of(current))
                mine, theirs = self._record(), _content(current)
                if theirs != self._seen[0]:  # others have added turns
                    if _content(mine) != self._seen[0]:
                        lost.append("changed")
                        return None
                    mine = replace(mine, token_ids=current.token_ids, messages=current.messages)
            elif self._is_there and not is_there:
                lost.append("deleted")
                return None
            written.append(mine)
            return mine

        reason = self._files.update(self.name, merge)
        if reason is not None:
            self._tell(reason)
        elif lost == ["deleted"]:
            self._files = None
            self._tell("it was deleted by another process")
        elif lost:
            self._part()
        else:
            self.problem, self._told, self._is_there = None, None, True
            if _content(written[0]) == _content(self._record()):  # else the turns of others stay unseen here
                self._seen = (_content(written[0]), self._standing)
            else:
                self._seen = (self._seen[0], self._standing)

    def _obey(self, theirs: Standing) -> None:
        """Takes over what others have asked for since this was last on disk, where nothing else was asked for here."""
        mine, before = self._standing, self._seen[1]
        wishes: dict[str, float | bool] = {
            name: getattr(theirs, name)
            for name in ("pinned", "priority", "expires_s")
            if getattr(mine, name) == getattr(before, name) != getattr(theirs, name)
        }
        if wishes:
            self._standing = replace(mine, **wishes)  # type: ignore[arg-type] # fields by name
            self._model.set_standing(self._token_ids, self._standing)

    def _part(self) -> None:
        """Others have gone on with this session in another way: what was said here goes on under a name that is free."""
        assert self._files is not None
        before = self.name
        for number in range(2, _MOST_COPIES):
            copy = replace(self._record(), name=f"{before[: MAX_NAME_CHARACTERS - 4]}-{number}")
            put = _IfFree(copy)
            reason = self._files.update(copy.name, put)
            if reason is not None:
                self._tell(reason)
                return
            if put.was_free:
                self._model.rename_session(before, copy.name)
                self.name, self._is_there = copy.name, True
                self._seen = (_content(copy), self._standing)
                self._notices.append(f"session {before!r} was changed by another process: this goes on as {copy.name!r}")
                return
        self._tell(f"another process has changed it, and there are {_MOST_COPIES} copies already")

    def _tell(self, problem: str) -> None:
        if problem != self._told:
            self._notices.append(f"session {self.name!r} is not kept: {problem}")
        self.problem = self._told = problem


class _IfFree:
    """Puts a session where there is none of its name."""

    def __init__(self, record: SessionRecord) -> None:
        self._record, self.was_free = record, False

    def __call__(self, _current: SessionRecord | None, is_there: bool) -> SessionRecord | None:
        self.was_free = not is_there
        return None if is_there else self._record


def _content(record: SessionRecord) -> _Content:
    return record.token_ids, record.messages
