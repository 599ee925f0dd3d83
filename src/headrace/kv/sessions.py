"""Sessions on disk: the name, the tokens and the messages of each, in a file of its own.

A session does not depend on kernels or on formats of pages, so it outlives them; its pages are found by its tokens. A file
is replaced as a whole, so a session is as it was before a turn or as it is after it. What cannot be read counts as absent.
Whoever changes a session looks at it first, under a lock of all sessions: what another process has kept is never overwritten
unseen.

    <kv folder>/sessions/<digest of the model, 32 hex>/<beginning of the name>-<digest of the name>.json

Knows nothing of pages, and no conversation beyond its parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import OptionError
from headrace.kv import folder as files
from headrace.units import format_bytes

MAX_NAME_CHARACTERS = 200
FORMAT_VERSION = 1
_UNCOUNTED_SHARE = 512
"""Sessions of a process grow by one in so many bytes of the bound before all files are counted anew. The store leaves one in 64
free for them."""
_JSON = ".json"


@dataclass(frozen=True)
class SessionRecord:
    """A session: `token_ids` are its exact history, `messages` (role, content) what people see of it.

    `expires_s` is when it may be forgotten, None for never; it and `updated_s` are in seconds since 1970.
    """

    name: str
    model_digest: str
    token_ids: tuple[int, ...]
    messages: tuple[tuple[str, str], ...]
    pinned: bool
    priority: float
    expires_s: float | None
    updated_s: float


Change = Callable[[SessionRecord | None, bool], SessionRecord | None]
"""What becomes of a session: given it as it is now (None if it cannot be read), and whether it has a file; None leaves it."""


class SessionFiles:
    """The sessions of one model. `limit_bytes` bounds the whole kv folder, as the store's does."""

    def __init__(self, folder: Path, model_digest: str, *, limit_bytes: int | None = None) -> None:
        assert model_digest.isalnum(), "a digest is hex digits"
        self.model_digest = model_digest
        self._kv_folder, self._limit_bytes = folder, limit_bytes
        self._folder = sessions_folder(folder, model_digest)
        # All files are counted once; then sessions may grow by a part of what the store leaves free for them.
        self._uncounted_bytes = 0

    def load(self, name: str) -> SessionRecord | None:
        """The session of this name; None if there is none, or its file is damaged.

        Raises:
            OptionError: no session can have this name.
        """
        record = read_session(self._path(name))
        return record if record is not None and (record.name, record.model_digest) == (name, self.model_digest) else None

    def save(self, record: SessionRecord) -> bool:
        """Keeps a session as it is now; False, and as it was before, if the disk is full or cannot be written.

        Raises:
            OptionError: no session can have this name.
        """
        return self.update(record.name, lambda _current, _is_there: record) is None

    def update(self, name: str, change: Change) -> str | None:
        """Replaces a session by what `change` makes of it, while no other process does.

        Returns:
            None, or why it stays as it was: the end of a sentence such as "the session is not kept: ...".

        Raises:
            OptionError: no session can have this name.
        """
        path = self._path(name)
        try:
            with sessions_locked(self._kv_folder) as held:
                if not held:
                    return f"another process has held the lock of {self._folder.parent} for too long; try again"
                record = change(self.load(name), os.path.lexists(path))
                if record is None:
                    return None
                assert record.model_digest == self.model_digest, "a session belongs to one model"
                return self._write(path, encode_session(record))
        except OSError as error:
            return f"{error.strerror or error}: {self._kv_folder}"

    def _write(self, path: Path, content: bytes) -> str | None:
        files.make_private(self._folder)
        grows_bytes = max(0, files.file_bytes(len(content)) - _file_bytes(path))
        limit_bytes = self._limit_bytes
        if limit_bytes is not None and grows_bytes > self._uncounted_bytes:
            used_bytes = files.folder_bytes(self._kv_folder)
            if used_bytes + files.file_bytes(len(content)) + files.SMALL_FILES_BYTES > limit_bytes:
                return f"{format_bytes(used_bytes)} of {format_bytes(limit_bytes)} for the past on disk are used"
            self._uncounted_bytes = max(grows_bytes, limit_bytes // _UNCOUNTED_SHARE)
        files.replace_file(path, content)
        self._uncounted_bytes -= grows_bytes
        return None

    def delete(self, name: str) -> bool:
        """Forgets a session; False if there was none, or it cannot be removed.

        Raises:
            OptionError: no session can have this name.
        """
        path = self._path(name)
        try:
            with sessions_locked(self._kv_folder):  # also without it, if others keep it: nobody waits to forget
                return files.remove_file(path)
        except OSError:
            return files.remove_file(path)

    def all(self) -> list[SessionRecord]:
        """All sessions of the model, the last updated first."""
        found = [record for record in _records(self._folder) if record.model_digest == self.model_digest]
        return sorted(found, key=lambda record: (-record.updated_s, record.name))

    def _path(self, name: str) -> Path:
        return self._folder / f"{_file_name(name)}{_JSON}"


@contextlib.contextmanager
def sessions_locked(folder: Path) -> Iterator[bool]:
    """The lock of all sessions of a kv folder, for a while: False, without it, if others have had it for two seconds on end.

    Raises:
        OSError: there can be no lock.
    """
    lock = files.FolderLock(folder / files.SESSIONS_FOLDER)
    try:
        with lock.held() as held:
            yield held
    finally:
        lock.close()


def _file_bytes(path: Path) -> int:
    try:
        return files.file_bytes(path.lstat().st_size)
    except OSError:
        return 0


def sessions_folder(folder: Path, model_digest: str) -> Path:
    """Where the sessions of a model lie in a kv folder."""
    return folder / files.SESSIONS_FOLDER / model_digest[:32]


def all_sessions(folder: Path) -> list[SessionRecord]:
    """The sessions of all models in a kv folder, the last updated first."""
    found = [record for each in session_folders(folder) for record in _records(each)]
    return sorted(found, key=lambda record: (-record.updated_s, record.name))


def session_folders(folder: Path) -> list[Path]:
    """The folders of sessions in a kv folder, one for each model."""
    try:
        return sorted(each for each in (folder / files.SESSIONS_FOLDER).iterdir() if each.is_dir() and not each.is_symlink())
    except OSError:
        return []


def session_paths(folder: Path) -> list[Path]:
    """The files in a folder of sessions."""
    try:
        return [folder / name for name in sorted(files.list_names(folder, _JSON))]
    except OSError:
        return []


def encode_session(record: SessionRecord) -> bytes:
    """What a session's file says."""
    return files.encode_json(
        {
            "version": FORMAT_VERSION,
            "name": record.name,
            "model_digest": record.model_digest,
            "updated_s": record.updated_s,
            "expires_s": record.expires_s,
            "pinned": record.pinned,
            "priority": record.priority,
            "messages": record.messages,
            "token_ids": record.token_ids,
        }
    )


def read_session(path: Path) -> SessionRecord | None:
    """The session in a file; None if there is none that makes sense."""
    says = files.read_json(path)
    try:
        return _decode(says) if isinstance(says, dict) and says["version"] == FORMAT_VERSION else None
    except (KeyError, TypeError, ValueError):
        return None


def _records(folder: Path) -> list[SessionRecord]:
    return [record for path in session_paths(folder) if (record := read_session(path)) is not None]


def _decode(says: dict[str, Any]) -> SessionRecord:
    """Makes a record, if every field is what it should be.

    Raises:
        KeyError, TypeError, ValueError: one is not.
    """
    token_ids, messages = says["token_ids"], tuple((role, content) for role, content in says["messages"])
    expires_s, name, digest = says["expires_s"], says["name"], says["model_digest"]
    if not all(type(token) is int and 0 <= token < 1 << 32 for token in token_ids):
        raise ValueError("token ids")
    if not all(isinstance(text, str) for text in (name, digest, *(part for message in messages for part in message))):
        raise TypeError("texts")
    return SessionRecord(
        name=name,
        model_digest=digest,
        token_ids=tuple(token_ids),
        messages=messages,
        pinned=says["pinned"] is True,
        priority=_finite(says["priority"]),
        expires_s=None if expires_s is None else _finite(expires_s),
        updated_s=_finite(says["updated_s"]),
    )


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("a number")
    return float(value)


def check_name(name: str, what: str = "session") -> str:
    """A name that a session can have.

    Args:
        name: the name.
        what: how the message names it, such as the option that it was given by.

    Raises:
        OptionError: it is empty, blank or too long.
    """
    if not name.strip() or len(name) > MAX_NAME_CHARACTERS:
        shown = name if len(name) <= 40 else name[:40] + "..."
        raise OptionError(
            f"{what}={shown!r} has {len(name)} characters: a session's name has 1 to {MAX_NAME_CHARACTERS}, not all blank"
        )
    return name


def _file_name(name: str) -> str:
    """Any name as a file's: the digest keeps names apart that differ in case, in what is not quoted, or far behind.

    Raises:
        OptionError: the name cannot be used.
    """
    check_name(name)
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    beginning = re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-")
    return f"{beginning}-{digest}" if beginning else digest
