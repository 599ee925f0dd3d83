'''How turns of a conversation are read, and how a conversation is saved.

A turn is one line, or several: a backslash at the end of a line continues it, and """ starts and ends a block whose lines
are taken as they are. At a terminal there is line editing and a history that the next run finds again.
'''

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from headrace.cli.errors import say
from headrace.errors import OptionError, StorageError

if TYPE_CHECKING:
    from headrace.cli.protocols import MessageLike

PROMPT = ">>> "
CONTINUATION = "... "
BLOCK = '"""'
MAX_HISTORY_LINES = 1000


class TurnReader:
    """Turns out of lines. `read_line` is given the prompt to show and raises EOFError at the end."""

    def __init__(self, read_line: Callable[[str], str], *, interactive: bool, history: Path | None = None) -> None:
        self.interactive = interactive
        self._read_line = read_line
        self._history = history

    @classmethod
    def of_process(cls, *, quiet: bool) -> TurnReader:
        """Reads from standard input; at a terminal with line editing, unless standard output must stay clean (`quiet`)."""
        if not sys.stdin.isatty():
            return cls(lambda prompt: _piped_line(), interactive=False)
        if quiet or not sys.stdout.isatty():
            return cls(_prompted_line, interactive=True)
        from headrace.config import Config

        return cls(input, interactive=True, history=Config.from_environment().home / "chat_history")

    def __enter__(self) -> Self:
        if self._history is not None:
            _read_history(self._history)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._history is not None:
            _write_history(self._history)

    def read(self) -> str | None:
        """The next turn, or None at the end of input. At a terminal, Ctrl-C drops what was typed and asks anew."""
        while True:
            try:
                return self._read_turn()
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                sys.stderr.write("\n")
                say("Ctrl-D or /exit leaves")
            except EOFError:
                if self.interactive:
                    sys.stderr.write("\n")
                return None

    def _read_turn(self) -> str:
        line = self._read_line(PROMPT)
        if line.lstrip().startswith(BLOCK):
            return self._read_block(line.lstrip().removeprefix(BLOCK))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(self._read_line(CONTINUATION))
            except EOFError:
                break
        return "\n".join(lines)

    def _read_block(self, first: str) -> str:
        lines = [first]
        while not lines[-1].rstrip().endswith(BLOCK):
            try:
                lines.append(self._read_line(CONTINUATION))
            except EOFError:
                break
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        return "\n".join(lines).strip("\n")


def parse_command(text: str) -> tuple[str, str] | None:
    """'/save  notes.md' -> ('/save', 'notes.md'); None when the turn is a message. A path such as /etc/hosts is one too."""
    name, _, argument = text.partition(" ")
    word = name.removeprefix("/")
    if "\n" in text or name == word or not (word.isascii() and word.isalpha() and word.islower()):
        return None
    return name, argument.strip()


def save_conversation(name: str, messages: Sequence[MessageLike]) -> Path:
    """Writes the messages to a file in one move: JSON when its name ends in .json, else Markdown.

    Raises:
        OptionError: no name is given.
        StorageError: the file cannot be written.
    """
    if not name:
        raise OptionError("/save needs the name of a file: /save conversation.md")
    path = Path(name).expanduser()
    if path.suffix.lower() == ".json":
        import json

        turns = [{"role": message.role, "content": message.content} for message in messages]
        text = json.dumps({"messages": turns}, indent=2, ensure_ascii=False) + "\n"
    else:
        text = "".join(f"## {message.role}\n\n{message.content}\n\n" for message in messages)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8", errors="replace")
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise StorageError(f"cannot write {path}: {error.strerror or error}; name another file") from None
    return path


def _piped_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def _prompted_line(prompt: str) -> str:
    sys.stderr.write(prompt)
    sys.stderr.flush()
    return _piped_line()


def _read_history(path: Path) -> None:
    """Gives `input` line editing; without the readline module, as on Windows, the terminal's own has to do."""
    with contextlib.suppress(ImportError, OSError):
        import readline

        readline.set_history_length(MAX_HISTORY_LINES)
        readline.read_history_file(path)


def _write_history(path: Path) -> None:
    """Keeps the history for this user alone; a folder that cannot be written costs the history, not the conversation."""
    with contextlib.suppress(ImportError, OSError):
        import readline

        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.write_history_file(path)
