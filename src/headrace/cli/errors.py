"""How a verb ends: an error raised on purpose is one sentence and exit code 2, Ctrl-C is 130, a closed pipe is 141."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable
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
            say(error)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            say_interrupted()
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # What is left in the buffer goes nowhere, so that the interpreter's own flush at exit stays silent.
            with contextlib.suppress(io.UnsupportedOperation, OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(CLOSED_PIPE) from None
        return result

    return guard


def say(message: object) -> None:
    """One line on standard error, under the program's name."""
    sys.stderr.write(f"headrace: {' '.join(str(message).split())}\n")
    sys.stderr.flush()


def say_interrupted() -> None:
    """What Ctrl-C ends with: below what stands on the terminal's line, an answer or the ^C itself."""
    if sys.stderr.isatty():
        sys.stderr.write("\n")
    say("interrupted")


def prepare_streams() -> None:
    """Lets a character that the terminal cannot show become a question mark instead of an exception."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
