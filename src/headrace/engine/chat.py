"""Conversations: a chat lives as long as its object, a session has a name and goes on after a restart.

Between its turns a conversation is its messages and its exact tokens; what was computed of it lies in the memory of the
past (`kv/cache.py`), which every turn asks anew. So a fork is a copy of two lists, and text that would be split into other
tokens when it is read back is still found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from headrace.engine.generation import Generation
from headrace.engine.sampler import SamplingOptions, SamplingParams, sampling_params
from headrace.errors import OptionError
from headrace.kv.residency import DEFAULT_STANDING
from headrace.kv.sessions import SessionFiles, SessionRecord
from headrace.text.chat_template import Message

if TYPE_CHECKING:
    from typing import Self

    from headrace.engine.model import Model


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
        stop: Sequence[str] = (),
        logprobs: int = 0,
        **overrides: Unpack[SamplingOptions],
    ) -> Generation:
        """The answer to `text`; options as for `Model.generate`. A cancelled answer stays as far as it got.

        An answer that is still coming ends here: a conversation has one at a time.

        Raises:
            OptionError: an option cannot be used.
            ContextOverflowError: the conversation leaves no room for an answer; it is as it was before.
        """
        self._end_answer()
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
        self._end_answer()
        self._messages = [] if self._system is None else [Message("system", self._system)]
        self._token_ids = []
        self._changed()

    def fork(self, name: str | None = None) -> Chat:
        """A copy that shares the past so far, with a name a session; no page is copied.

        Raises:
            OptionError: there is a session of this name.
        """
        self._end_answer()
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
        self._model.cache.expect(self._token_ids, in_s, self._standing)

    def release(self) -> None:
        """Its past may go first when room is needed: neither pinned nor expected any more."""
        self._ask(pinned=False, priority=1.0, expires_s=0.0)

    def close(self, keep: bool = True) -> None:
        """Ends an answer that is still coming. Without `keep`, the past may go first when room is needed."""
        self._end_answer()
        if not keep:
            self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _ask(self, **wishes: float | bool) -> None:
        self._standing = replace(self._standing, **wishes)  # type: ignore[arg-type] # fields by name
        if self._token_ids:
            self._model.cache.set_standing(self._token_ids, self._standing)
        self._changed()

    def _changed(self) -> None:
        """Something that a session keeps is different now."""

    def _end_answer(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None


class Session(Chat):
    """A conversation with a name. It is kept on disk after each turn, where there is a folder for it."""

    def __init__(
        self, model: Model, name: str, system: str | None, files: SessionFiles | None, record: SessionRecord | None
    ) -> None:
        super().__init__(model, system)
        self.name = name
        self._files = files
        if record is not None:
            self._messages = [Message(role, content) for role, content in record.messages]
            first = self._messages[:1]
            self._system = first[0].content if first and first[0].role == "system" else None
            self._token_ids = list(record.token_ids)
            expires_s = math.inf if record.expires_s is None else record.expires_s
            self._standing = replace(self._standing, pinned=record.pinned, priority=record.priority, expires_s=expires_s)

    def close(self, keep: bool = True) -> None:
        """Lets go of it. With `keep` it can be gone on with, in this process or the next; otherwise it is forgotten."""
        super().close(keep)
        self._model.drop_session(self.name)
        if not keep:
            if self._files is not None:
                self._files.delete(self.name)
            self._files = None

    def record(self) -> SessionRecord:
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

    def _changed(self) -> None:
        if self._files is not None:
            self._files.save(self.record())
