"""`headrace models`: the aliases, and which of them are here."""

from __future__ import annotations

from headrace.cli import options as o
from headrace.cli.errors import guarded
from headrace.units import format_bytes


@guarded
def models(as_json: o.AsJson = False) -> None:
    """List the models that have an alias."""
    from headrace.config import Config
    from headrace.weights.sources import list_models

    states = list_models(Config.from_environment())
    if as_json:
        from headrace.cli.output import write_json

        write_json(
            [
                {
                    "alias": state.source.alias,
                    "description": state.source.description,
                    "licence": state.source.licence,
                    "size_bytes": state.size_bytes,
                    "present": state.present,
                    "path": state.path,
                }
                for state in states
            ]
        )
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("alias", "size", "here", "licence", "what it is"):
        table.add_column(heading, justify="right" if heading == "size" else "left", overflow="fold")
    for state in states:
        source = state.source
        here = "yes" if state.present else "no"
        table.add_row(source.alias, format_bytes(state.size_bytes), here, source.licence, source.description)
    console = Console(highlight=False)
    console.print(table)
    console.print("\nAny other model: a path to a .gguf file, or hf:owner/repo/file.gguf.", markup=False, soft_wrap=True)
