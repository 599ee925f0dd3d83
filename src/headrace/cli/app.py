"""The verbs, and the app built of them. A command line that names its verb imports that verb's module alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated

import typer

VERBS = ("run", "chat", "batch", "bench", "pull", "models", "kv", "doctor")
"""Each is a module of this package, with a function of the same name, or an app where the verb has verbs of its own; listed in
the order of the help."""


def verbs_needed(arguments: Sequence[str]) -> tuple[str, ...]:
    """The verb that these arguments start with, or all of them when that takes a look at the help."""
    return (arguments[0],) if arguments and arguments[0] in VERBS else VERBS


def build_app(verbs: Iterable[str] = VERBS) -> typer.Typer:
    """The command line of these verbs."""
    app = typer.Typer(
        name="headrace",
        help="Run language models at the speed of memory, and see where every byte goes.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_options_of_all_verbs)
    for verb in verbs:
        entry = getattr(import_module(f"headrace.cli.{verb}"), verb)
        if isinstance(entry, typer.Typer):
            app.add_typer(entry, name=verb)
        else:
            app.command(verb)(entry)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        from headrace import __version__

        typer.echo(f"headrace {__version__}")
        raise typer.Exit


def _options_of_all_verbs(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass
