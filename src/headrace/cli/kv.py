"""`headrace kv`: the past that is kept on disk, looked at and tidied without loading a model.

What another process has in memory cannot be seen from here; what it has counted can, once it has ended.
"""

from __future__ import annotations

import difflib
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli import options as o
from headrace.cli.errors import guarded
from headrace.cli.kv_simulate import simulate
from headrace.errors import OptionError, StorageError
from headrace.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.kv.inventory import Inventory, KeyInventory, SessionInventory

DAMAGE_FOUND = 1
"""Exit code of `verify` when something is damaged."""

SessionName = Annotated[str, typer.Argument(metavar="NAME", help="A session; [cyan]headrace kv list[/] shows their names.")]
OfModel = Annotated[
    str | None,
    typer.Option("-m", "--model", metavar="NAME", help="Of models whose name contains this only.", show_default=False),
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
        _write([kv_show.session_document(session, found) for session in found.sessions])
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
    record = find_session(found, name, model).record
    if not SessionFiles(found.folder, record.model_digest).delete(name):
        raise StorageError(f"session {name!r} cannot be deleted in {found.folder}: delete its file by hand")
    if as_json:
        _write({"name": name, "deleted": True})
    else:
        sys.stdout.write(f"session {name!r} is forgotten\n")


@kv.command()
@guarded
def clear(
    model: OfModel = None,
    sessions: Annotated[bool, typer.Option("--sessions", help="Forget the sessions as well.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    kv_dir: o.KvDir = None,
    as_json: o.AsJson = False,
) -> None:
    """Delete the pages that are kept; what is needed again is computed again."""
    from headrace.kv.inventory import clear as remove_all

    found = _inventory(kv_dir)
    keys = select_keys(found.keys, model)
    digests = {key.key.model_digest for key in keys if key.key is not None}
    num_sessions = sum(model is None or each.record.model_digest in digests for each in found.sessions) if sessions else 0
    what = format_bytes(found.total_bytes if model is None else sum(key.total_bytes for key in keys))
    what += f" and {_sessions(num_sessions)}" if num_sessions else ""
    if not yes and at_terminal() and not typer.confirm(f"Delete {what} of the past in {found.folder}?", err=True):
        raise typer.Exit
    freed_bytes = remove_all(found.folder, model=model, with_sessions=sessions)
    if as_json:
        _write({"kv_dir": found.folder, "freed_bytes": freed_bytes, "deleted_sessions": num_sessions})
    else:
        sys.stdout.write(f"freed {format_bytes(freed_bytes)}{f', forgot {_sessions(num_sessions)}' if num_sessions else ''}\n")


@kv.command()
@guarded
def verify(
    repair: Annotated[bool, typer.Option("--repair", help="Cut off damaged pages, and remove what is of no use.")] = False,
    kv_dir: o.KvDir = None,
    as_json: o.AsJson = False,
) -> None:
    """Read everything that is kept and check it; exit code 1 if something is damaged."""
    from headrace.cli.progress import ConsoleProgress
    from headrace.kv.inventory import verify as check

    folder = _folder(kv_dir)
    read_bytes = 0
    with ConsoleProgress() as progress:

        def advance(done: int, total: int) -> None:
            nonlocal read_bytes
            if not read_bytes:
                progress.start("checking pages", total)
            progress.advance(done - read_bytes)
            read_bytes = done

        damages = check(folder, repair=repair, on_progress=advance)
    if as_json:
        _write({"kv_dir": folder, "repaired": repair and bool(damages), "damages": [asdict(each) for each in damages]})
    else:
        for each in damages:
            page = "" if each.page is None else f", page {each.page}"
            sys.stdout.write(f"{each.path}{page}: {each.what}\n")
        places = "1 place is" if len(damages) == 1 else f"{len(damages)} places are"
        remedy = ", and repaired" if repair else "; headrace kv verify --repair keeps what is sound"
        sys.stdout.write(f"{places} damaged{remedy}\n" if damages else f"everything in {folder} is sound\n")
    if damages:
        raise typer.Exit(DAMAGE_FOUND)


kv.command()(simulate)


def at_terminal() -> bool:
    """Whether there is somebody to ask."""
    return sys.stdin.isatty()


def find_session(found: Inventory, name: str, model: str | None = None) -> SessionInventory:
    """The session of this name.

    Raises:
        OptionError: there is none, or several models have one.
    """
    from headrace.cli.kv_show import model_name

    named = [each for each in found.sessions if each.record.name == name]
    if model is not None:
        named = [each for each in named if _goes_by(model_name(each, found), model)]
    if not named:
        of_model = "" if model is None else f" of a model like {model!r}"
        near = _near(name, (each.record.name for each in found.sessions))
        raise OptionError(
            f"no session{of_model} has the name {name!r} in {found.folder}: {near or 'headrace kv list shows all'}"
        )
    if len(named) > 1:
        models = ", ".join(model_name(each, found) for each in named)
        raise OptionError(f"session {name!r} is there for several models: say which with --model ({models})")
    return named[0]


def select_keys(keys: Iterable[KeyInventory], model: str | None) -> list[KeyInventory]:
    """The keys of models that go by this name; all without one.

    Raises:
        OptionError: there is none.
    """
    listed = list(keys)
    selected = [key for key in listed if model is None or _goes_by(key.model, model)]
    if model is not None and not selected:
        near = _near(model, {key.model for key in listed}) or "headrace kv status shows the models"
        raise OptionError(f"nothing is kept of a model like {model!r}: {near}")
    return selected


def _set_pinned(name: str, model: str | None, kv_dir: Path | None, *, pinned: bool, as_json: bool) -> None:
    from headrace.kv.sessions import SessionFiles, SessionRecord

    found = _inventory(kv_dir)
    digest = find_session(found, name, model).record.model_digest

    def change(current: SessionRecord | None, _is_there: bool) -> SessionRecord | None:
        return None if current is None else replace(current, pinned=pinned)

    reason = SessionFiles(found.folder, digest).update(name, change)
    if reason is not None:
        raise StorageError(f"session {name!r} cannot be written ({reason}): make room there, or give yourself the right")
    if as_json:
        _write({"name": name, "pinned": pinned})
    else:
        sys.stdout.write(f"session {name!r} is {'pinned' if pinned else 'no longer pinned'}\n")


def _folder(kv_dir: Path | None) -> Path:
    from headrace.config import Config

    return Config.from_environment().kv_dir if kv_dir is None else kv_dir.expanduser()


def _inventory(kv_dir: Path | None) -> Inventory:
    from headrace.kv.inventory import inventory

    return inventory(_folder(kv_dir))


def _near(name: str, names: Iterable[str]) -> str:
    """'did you mean 'plan' or 'plan B'?', or nothing when no name is like it."""
    near = difflib.get_close_matches(name, sorted(set(names)), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def _goes_by(name: str, wanted: str) -> bool:
    """Whether a model's name contains what is asked for: 'smollm2' means 'SmolLM2 135M Instruct'."""
    plain, plain_wanted = (re.sub(r"[^a-z0-9]+", "", text.lower()) for text in (name, wanted))
    return bool(plain_wanted) and plain_wanted in plain


def _sessions(count: int) -> str:
    return "1 session" if count == 1 else f"{count} sessions"


def _write(document: object) -> None:
    from headrace.cli.output import write_json

    write_json(document)
