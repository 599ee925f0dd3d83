"""Sessions on disk: any name, whole files or none, and nothing that is found there raises."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import OptionError
from headrace.kv import folder as files
from headrace.kv.sessions import MAX_NAME_CHARACTERS, SessionFiles, SessionRecord, all_sessions, encode_session

DIGEST = "ab" * 32
OTHER_DIGEST = "cd" * 32


def _record(name: str = "trip", **changes: object) -> SessionRecord:
    record = SessionRecord(
        name=name,
        model_digest=DIGEST,
        token_ids=(1, 2, 3, 4_000_000_000),
        messages=(("system", "Be brief."), ("user", "Where to? \n \x00 \ud800 🚲")),
        pinned=True,
        priority=2.5,
        expires_s=1_800_000_100.0,
        updated_s=1_800_000_000.25,
    )
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type] # fields by name


def _only_path(folder: Path) -> Path:
    (path,) = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return path


NAMES = [
    "trip",
    "Trip",
    "trip ",
    "a/b",
    "a\\b",
    "../../etc/passwd",
    "..",
    ".",
    "",
    "/",
    "con",
    "nul.json",
    "a\x00b",
    "a\nb",
    "naïve",
    "nai\u0308ve",
    "会議" * 100,
    "🚲" * 200,
    "x" * 200,
    "x" * 199 + "y",
    "\ud800",
    "%41",
    "A",
]


def test_names_of_all_sorts_are_kept_apart(tmp_path: Path) -> None:
    sessions = SessionFiles(tmp_path, DIGEST)
    names = [name for name in NAMES if name]
    for number, name in enumerate(names):
        assert sessions.save(_record(name, updated_s=float(number)))
    for number, name in enumerate(names):
        assert sessions.load(name) == _record(name, updated_s=float(number))
    assert [record.name for record in sessions.all()] == names[::-1]
    paths = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]
    assert len({path.name.lower() for path in paths}) == len(names)  # also where case makes no difference
    assert {path.parent for path in paths} == {tmp_path / "sessions" / DIGEST[:32]}
    assert max(len(path.name) for path in paths) < 80
    assert all(path.name.isascii() for path in paths)
    for name in names:
        assert sessions.delete(name)
        assert not sessions.delete(name)
        assert sessions.load(name) is None
    assert sessions.all() == []


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.text(st.characters(), min_size=1, max_size=MAX_NAME_CHARACTERS).filter(str.strip),
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=20).map(tuple),
    messages=st.lists(st.tuples(st.text(), st.text(st.characters())), max_size=4).map(tuple),
    pinned=st.booleans(),
    priority=st.floats(allow_nan=False, allow_infinity=False),
    expires_s=st.none() | st.floats(0, 1e12),
)
def test_session_round_trip(tmp_path: Path, name: str, tokens: object, messages: object, **changes: object) -> None:
    record = _record(name, token_ids=tokens, messages=messages, **changes)
    sessions = SessionFiles(tmp_path, DIGEST)
    assert sessions.save(record)
    assert SessionFiles(tmp_path, DIGEST).load(name) == record


@pytest.mark.parametrize("name", ["", "x" * 201])
def test_name_that_no_session_can_have_is_refused(tmp_path: Path, name: str) -> None:
    sessions = SessionFiles(tmp_path, DIGEST)
    for use in (sessions.load, sessions.delete, lambda name: sessions.save(_record(name))):
        with pytest.raises(OptionError, match="1 to 200"):
            use(name)
    assert list(tmp_path.iterdir()) == []


def test_sessions_of_models_are_kept_apart(tmp_path: Path) -> None:
    one, other = SessionFiles(tmp_path, DIGEST), SessionFiles(tmp_path, OTHER_DIGEST)
    assert one.save(_record(updated_s=1.0))
    assert other.load("trip") is None
    theirs = _record(model_digest=OTHER_DIGEST, updated_s=2.0)
    assert other.save(theirs)
    assert one.all() == [_record(updated_s=1.0)]
    assert all_sessions(tmp_path) == [theirs, _record(updated_s=1.0)]
    assert all_sessions(tmp_path / "nowhere") == SessionFiles(tmp_path / "nowhere", DIGEST).all() == []


def _says() -> dict[str, object]:
    says: dict[str, object] = json.loads(encode_session(_record()))
    return says


BROKEN: dict[str, bytes] = {
    "empty": b"",
    "cut short": encode_session(_record())[:-20],
    "no JSON": b"\x00\xff\xfe",
    "no object": b"[1, 2]",
    "deeply nested": b"[" * 100_000,
    "another version": json.dumps({**_says(), "version": 99}).encode(),
    "a field is missing": json.dumps({key: value for key, value in _says().items() if key != "messages"}).encode(),
    "tokens are text": json.dumps({**_says(), "token_ids": "123"}).encode(),
    "tokens are no list": json.dumps({**_says(), "token_ids": 5}).encode(),
    "a token is negative": json.dumps({**_says(), "token_ids": [-1]}).encode(),
    "a token is a truth value": json.dumps({**_says(), "token_ids": [True]}).encode(),
    "a token is too large": json.dumps({**_says(), "token_ids": [2**32]}).encode(),
    "messages are no pairs": json.dumps({**_says(), "messages": [["user"]]}).encode(),
    "a message is a number": json.dumps({**_says(), "messages": [["user", 5]]}).encode(),
    "no name": json.dumps({**_says(), "name": None}).encode(),
    "another name": json.dumps({**_says(), "name": "other"}).encode(),
    "another model": json.dumps({**_says(), "model_digest": OTHER_DIGEST}).encode(),
    "not a number": json.dumps({**_says(), "updated_s": float("nan")}).encode(),
    "an infinite priority": json.dumps({**_says(), "priority": float("inf")}).encode(),
    "a time as text": json.dumps({**_says(), "expires_s": "soon"}).encode(),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_broken_session_counts_as_absent(tmp_path: Path, content: bytes) -> None:
    sessions = SessionFiles(tmp_path, DIGEST)
    sessions.save(_record())
    path = _only_path(tmp_path)
    path.write_bytes(content)
    assert sessions.load("trip") is None
    assert "trip" not in [record.name for record in sessions.all()]
    assert sessions.save(_record())
    assert sessions.load("trip") == _record()


@pytest.mark.parametrize("offset", range(0, 300, 23))
def test_flipped_bit_never_raises(tmp_path: Path, offset: int) -> None:
    sessions = SessionFiles(tmp_path, DIGEST)
    sessions.save(_record())
    path = _only_path(tmp_path)
    content = bytearray(path.read_bytes())
    content[offset % len(content)] ^= 0x10
    path.write_bytes(bytes(content))
    found = sessions.load("trip")
    assert found is None or isinstance(found, SessionRecord)
    assert len(sessions.all()) <= 1


@pytest.mark.parametrize("what", ["directory", "link", "pipe"])
def test_what_is_no_file_counts_as_absent(tmp_path: Path, what: str) -> None:
    sessions = SessionFiles(tmp_path, DIGEST)
    sessions.save(_record())
    path = _only_path(tmp_path)
    path.rename(tmp_path / "moved.json")
    if what == "directory":
        path.mkdir()
    elif what == "link":
        path.symlink_to(tmp_path / "moved.json")
    else:
        os.mkfifo(path)
    assert sessions.load("trip") is None
    assert sessions.all() == []
    assert sessions.save(_record()) == (what != "directory")


@pytest.mark.parametrize("fails", ["write", "rename"])
def test_session_is_replaced_as_a_whole_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    sessions = SessionFiles(tmp_path, DIGEST)
    assert sessions.save(_record())

    def failing(*args: object, **more: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    if fails == "write":
        monkeypatch.setattr(os, "fdopen", failing)
    else:
        monkeypatch.setattr(Path, "replace", failing)
    assert not sessions.save(_record(token_ids=(9,)))
    monkeypatch.undo()
    assert sessions.load("trip") == _record()
    assert _only_path(tmp_path).name.startswith("trip-")  # nothing else is left


def test_sessions_keep_to_the_bound_of_the_folder(tmp_path: Path) -> None:
    limit = files.SMALL_FILES_BYTES + 3 * 4096
    sessions = SessionFiles(tmp_path, DIGEST, limit_bytes=limit)
    saved = [sessions.save(_record(f"{number}")) for number in range(6)]
    assert saved == [True, True, True, False, False, False]
    assert files.folder_bytes(tmp_path) <= limit
    assert sessions.load("4") is None


def test_sessions_can_be_read_by_their_owner_only(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        SessionFiles(tmp_path / "kv", DIGEST).save(_record())
    finally:
        os.umask(old)
    for path in (tmp_path / "kv").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
