"""`headrace pull`: fetches a model now, so that a later start need not."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headrace.cli import options as o
from headrace.cli.errors import guarded
from headrace.cli.progress import ConsoleProgress


@guarded
def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=o.MODEL_HELP)],
    as_json: o.AsJson = False,
) -> None:
    """Fetch a model and print where its file lies."""
    from headrace.config import Config
    from headrace.weights.sources import resolve

    with ConsoleProgress() as progress:
        path = resolve(model, Config.from_environment(), progress)
    if as_json:
        from headrace.cli.output import write_json

        write_json({"model": model, "path": path, "size_bytes": path.stat().st_size})
    else:
        sys.stdout.write(f"{path}\n")
