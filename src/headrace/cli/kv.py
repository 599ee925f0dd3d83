"""`headrace kv`: the past that is kept on disk, looked at and tidied without loading a model.

Knows nothing of what pages hold. What another process has in memory cannot be seen from here; what it has counted can, once
it has ended.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headrace.cli import options as o
from headrace.cli.errors import guarded

DAMAGE_FOUND = 1
"""Exit code of `verify` when something is damaged."""

SessionName = Annotated[str, typer.Argument(metavar="NAME", help="A session; [cyan]headrace kv list[/] shows their names.")]
OfModel = Annotated[
    str | None, typer.Option("-m", "--model", metavar="NAME", help="Only what belongs to this model.", show_default=False)
]

kv = typer.Typer(
    no_args_is_help=True,
    help="Look at the past that is kept on disk, and tidy it. Every verb of it takes --json.",
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@kv.command()
@guarded
def status(kv_dir: o.KvDir = None, as_json: o.AsJson = False) -> None:
    """Show what is kept on disk by model, and how often it was found."""
    from headrace.cli import kv_show
    from headrace.config import Config

    config = Config.from_environment()
    found = _inventory(kv_dir)
    if as_json:
        _write(kv_show.status_document(found, config))
    else:
        kv_show.print_status(found, config)


@kv.command(name="list")
@guarded
def list_sessions(kv_dir: o.KvDir = None, as_json: o.AsJson = False) -> None:
    """List the sessions that are kept, the last used first."""
    from headrace.cli import kv_show

    found = _inventory(kv_dir)
    if as_json:
        _write([kv_show.session_document(session) for session in kv_show.last_used_first(found)])
    else:
        kv_show.print_sessions(found)


@kv.command()
@guarded
def pin(name: SessionName, model: OfModel = None, kv_dir: o.KvDir = None, as_json: o.AsJson = False) -> None:
    """Keep a session's past before that of others."""
    _set_pinned(name, model, kv_dir, pinned=True, as_json=as_json)


@kv.command()
@guarded
def release(
    name: SessionName,
    model: OfModel = None,
    delete: Annotated[bool, typer.Option("--delete", help="Forget the session itself as well.")] = False,
    kv_dir: o.KvDir = None,
    as_json: o.AsJson = False,
) -> None:
    """Keep a session's past no longer before that of others."""
    if not delete:
        _set_pinned(name, model, kv_dir, pinned=False, as_json=as_json)
        return
    from headrace.kv.sessions import SessionFiles

    found = _inventory(kv_dir)
    session = find_session(found, name, model)
    deleted = SessionFiles(found.folder, session.record.model_digest).delete(name)
    if as_json:
        _write({"name": name, "model": session.model, "deleted": deleted})
    else:
        sys.stdout.write(f"session {name!r} is forgotten\n")
