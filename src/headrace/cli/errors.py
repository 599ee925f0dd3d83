"""How a verb ends: an error raised on purpose or a full disk is one sentence and exit code 2, Ctrl-C 130, a closed pipe 141."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import typer

from headrace.errors import HeadraceError

INTERRUPTED = 130
CLOSED_PIPE = 141

P = ParamSpec("P")
R = TypeVar("R")


def guarded(verb: Callable[P, R]) -> Callable[P, R]:
    """A verb whose expected endings are exit codes. Any other exception is a mistake of ours and keeps its traceback."""

    @functools.wraps(verb)
    def guard(*args: P.args, **kwargs: P.kwargs) -> R:
        prepare_streams()
        try:
            result = verb(*args, **kwargs)
            sys.stdout.flush()
        except HeadraceError as error:
            say(sentence(error, verb))
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            say_interrupted()
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _drop_output()
            raise typer.Exit(CLOSED_PIPE) from None
        except OSError as error:
            _drop_output()
            say(f"{error.filename or 'standard output'}: {error.strerror or error}; make room there, or use another place")
            raise typer.Exit(HeadraceError.exit_code) from None
        return result

    return guard


_OPTION_OF = {
    "as_json": "--json",
    "cache": "--no-cache",
    "prompt_tokens": "--prompt",
    "gen_tokens": "--gen",
    "depth_tokens": "--depth",
    "num_tokens": "--kv-tokens",
    "text": "--kv-text",
}
"""Arguments of the library whose option has another name."""


def sentence(error: HeadraceError, verb: Callable[..., object]) -> str:
    """What an error says, with the options of a verb that set what it speaks of: '... or raise the context (--context)'."""
    known = {f"--{name.replace('_', '-')}" for name in inspect.signature(verb).parameters}
    options = [_OPTION_OF.get(name, f"--{name.replace('_', '-')}") for name in error.arguments]
    named = ", ".join(option for option in options if option in known)
    return f"{error} ({named})" if named else str(error)


def say(message: object) -> None:
    """One line on standard error, under the program's name."""
    sys.stderr.write(f"headrace: {' '.join(str(message).split())}\n")
    sys.stderr.flush()


def say_interrupted() -> None:
    """What Ctrl-C ends with: below what stands on the terminal's line, an answer or the ^C itself."""
    if sys.stderr.isatty():
        sys.stderr.write("\n")
    say("interrupted")


def _drop_output() -> None:
    """Lets what is left in the buffer go nowhere, so that the interpreter's own flush at exit stays silent."""
    with contextlib.suppress(io.UnsupportedOperation, OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def prepare_streams() -> None:
    """Lets a character that the terminal cannot show become a question mark, and a closed stream be an empty one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the process was started with it closed
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115, open for as long as we run
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
