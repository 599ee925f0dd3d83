"""`headrace chat`: a conversation in the terminal, or turns piped in."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self

from headrace.cli import options as o
from headrace.cli.errors import guarded, say, sentence
from headrace.cli.loading import loaded_model
from headrace.cli.report import (
    Speeds,
    closing_line,
    kept_line,
    miss_lines,
    print_line,
    print_operations,
    result_document,
    seed_lines,
)
from headrace.cli.session import open_session, opening_line
from headrace.cli.turns import TurnReader, parse_command, save_conversation
from headrace.errors import HeadraceError, OptionError, StorageError

if TYPE_CHECKING:
    from headrace.cli.protocols import ChatLike, GenerationLike, ModelLike, SessionLike

HELP = '''\
/reset        forget the conversation
/save FILE    write it to FILE, as JSON when that ends in .json, else as Markdown
/stats        speed, bytes and operations of the last answer, and how full the context is
/sessions     names of the sessions that are kept
/fork NAME    go on in a copy of this session
/pin, /unpin  keep the past of this session before that of others, or no longer
/help         this list
/exit         leave, as Ctrl-D does
A backslash at the end of a line continues the message; """ starts and ends a message of several lines.
Ctrl-C stops an answer, and drops a message that is being typed.'''


@guarded
def chat(
    model: o.Model = o.DEFAULT_MODEL,
    max_tokens: o.MaxTokens = 1024,
    temperature: o.Temperature = o.TEMPERATURE,
    top_k: o.TopK = o.TOP_K,
    top_p: o.TopP = o.TOP_P,
    min_p: o.MinP = o.MIN_P,
    repeat_penalty: o.RepeatPenalty = o.REPEAT_PENALTY,
    presence_penalty: o.PresencePenalty = o.PRESENCE_PENALTY,
    frequency_penalty: o.FrequencyPenalty = o.FREQUENCY_PENALTY,
    seed: o.Seed = o.SEED,
    stop: o.Stop = None,
    system: o.System = None,
    threads: o.Threads = None,
    context: o.Context = None,
    no_cache: o.NoCache = False,
    session: o.Session = None,
    kv_memory: o.KvMemory = None,
    kv_disk: o.KvDisk = None,
    kv_formats: o.KvFormats = None,
    kv_dir: o.KvDir = None,
    stats: o.Stats = False,
    as_json: o.AsJson = False,
) -> None:
    """Talk with a model; each turn computes only what is new in it. /help lists the commands."""
    loading = o.LoadOptions.checked(
        model,
        threads,
        context,
        no_cache=no_cache,
        kv_memory=kv_memory,
        kv_disk=kv_disk,
        kv_formats=kv_formats,
        kv_dir=kv_dir,
    )
    if session is not None:
        loading.check_session(session)
    answering = o.AnswerOptions.checked(
        max_tokens=max_tokens,
        stop=stop,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
    )
    with (
        loaded_model(loading) as loaded,
        TurnReader.of_process(quiet=as_json) as reader,
        Conversation(loaded, session, system, answering, show_stats=stats, as_json=as_json) as conversation,
    ):
        conversation.greet(interactive=reader.interactive)
        conversation.run(reader)
        if as_json:
            conversation.print_document()


class Conversation:
    """The turns of one run of `headrace chat`, and its commands. With a name it is a session, which is kept at the end."""

    def __init__(
        self,
        model: ModelLike,
        name: str | None,
        system: str | None,
        answering: o.AnswerOptions,
        *,
        show_stats: bool,
        as_json: bool,
    ) -> None:
        self._model = model
        self._session: SessionLike | None = None if name is None else open_session(model, name, system)
        self._chat: ChatLike = self._session or model.chat(system)
        self._answering = answering
        self._show_stats = show_stats
        self._as_json = as_json
        self._last: GenerationLike | None = None
        self._turns: list[dict[str, object]] = []
        self._show = _drop if as_json else _write

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._session is not None:
            self._session.close(keep=True)
            self._say_notices()

    def _say_notices(self) -> None:
        """Says once what has become of the session: that it is not kept, or goes on under another name."""
        for notice in [] if self._session is None else self._session.take_notices():
            say(notice)

    def greet(self, *, interactive: bool) -> None:
        """Says what this is to somebody at a terminal, and in any case that a session goes on."""
        if interactive:
            print_line(f"{self._model.name}: /help lists the commands, Ctrl-D leaves")
        if self._session is not None and not self._as_json and (interactive or self._session.token_ids):
            print_line(opening_line(self._session))

    def run(self, reader: TurnReader) -> None:
        """Turn after turn until the input ends or says so. At a terminal an error is said and the next turn goes on."""
        while (text := reader.read()) is not None:
            try:
                if (command := parse_command(text)) is not None:
                    if command[0] in ("/exit", "/quit"):
                        return
                    self.command(*command)
                elif text.strip():
                    self.turn(text)
            except HeadraceError as error:
                if not reader.interactive:
                    raise
                say(sentence(error, chat))

    def turn(self, text: str) -> None:
        """One answer, streamed. Ctrl-C ends it early; a second one ends the program."""
        options = self._answering
        generation = self._chat.send(
            text, max_tokens=options.max_tokens, stop=options.stop, logprobs=options.logprobs, **options.sampling
        )
        with _stopped_by_ctrl_c(generation):
            for piece in generation:
                if piece.text:
                    self._show(piece.text)
        self._last = generation
        result = generation.result
        self._say_notices()
        if self._as_json:
            self._turns.append(result_document(result, self._speeds(generation)))
            return
        self._show("\n")
        if result.finish_reason == "context":
            say("the context is full: /reset starts a new conversation")
        if result.finish_reason == "length":
            say(f"stopped after {options.max_tokens} tokens: --max-tokens allows more")
        if self._show_stats:
            self._print_stats(generation)

    def command(self, name: str, argument: str) -> None:
        """Carries out a command.

        Raises:
            OptionError: there is no such command, it lacks its argument, or it needs a session.
            StorageError: the file, or the session, cannot be written.
        """
        if name == "/reset":
            self._chat.reset()
            self._last = None
        elif name == "/save":
            path = save_conversation(argument, self._chat.messages)
            print_line(f"saved {len(self._chat.messages)} messages to {path}")
        elif name == "/stats":
            print_line(f"context: {len(self._chat.token_ids):,} of {self._model.context_tokens:,} tokens")
            print_line(kept_line(self._model.kept()))
            if self._last is not None:
                self._print_stats(self._last)
        elif name == "/sessions":
            unkept = self._session.name if self._session is not None and self._session.problem is not None else None
            names = [name for name in self._model.session_names() if name != unkept]
            print_line("\n".join(names) or "no session is kept yet")
        elif name in {"/fork", "/pin", "/unpin"}:
            self._session_command(name, argument)
        elif name == "/help":
            print_line(HELP)
        else:
            raise OptionError(f"{name} is no command: /help lists them; begin with a space to send it as text")

    def _session_command(self, name: str, argument: str) -> None:
        session = self._session
        if session is None:
            raise OptionError(f"{name} needs a session, and this conversation has no name: start with --session NAME")
        if name != "/fork":
            session.pin(name == "/pin")
            session.take_notices()
            if session.problem is not None:
                raise StorageError(f"session {session.name!r} is not kept: {session.problem}")
            print_line(f"session {session.name!r} is {'pinned' if name == '/pin' else 'no longer pinned'}")
            return
        from headrace.kv.sessions import check_name

        if not argument:
            raise OptionError("/fork needs the name of the copy: /fork NAME")
        check_name(argument, "/fork")
        copy = session.fork(argument)
        if copy.problem is not None:
            copy.close(keep=True)
            raise StorageError(f"there is no copy {argument!r}, as it cannot be kept: {copy.problem}")
        session.close(keep=True)
        self._session = self._chat = copy
        print_line(f"this is session {copy.name!r} now, a copy of {session.name!r}")

    def print_document(self) -> None:
        """The conversation as one JSON document on standard output."""
        from headrace.cli.output import write_json

        session = {} if self._session is None else {"session": self._session.name}
        write_json(
            {
                "model": self._model.name,
                **session,
                "messages": [{"role": message.role, "content": message.content} for message in self._chat.messages],
                "token_ids": list(self._chat.token_ids),
                "turns": self._turns,
            }
        )

    def _print_stats(self, generation: GenerationLike) -> None:
        print_line(closing_line(generation.result, self._speeds(generation)))
        for line in (*seed_lines(generation.result), *miss_lines(generation.result.reuse)):
            print_line(line)
        print_operations(generation.operations())

    def _speeds(self, generation: GenerationLike) -> Speeds:
        return Speeds.of(generation.result, self._model.read_bandwidth)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _drop(_text: str) -> None:
    pass


@contextmanager
def _stopped_by_ctrl_c(generation: GenerationLike) -> Iterator[None]:
    """Inside, the first Ctrl-C cancels the generation instead of raising; the next one does what it did before."""

    def cancel(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        generation.cancel()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
