"""Sessions that cannot be kept say so; sessions in several processes lose no turn, and what is ordered from outside holds."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.engine.chat import Session
from headrace.engine.model import Model
from headrace.kv import folder as files
from headrace.kv.inventory import clear
from headrace.kv.sessions import SessionFiles, SessionRecord
from tiny.memory import FixedPrices
from tiny.models import TinySpec

SPEC = TinySpec(seed=5, ends=False)

Open = Callable[..., Model]


@pytest.fixture
def two(open_tiny: Open, folder: Path) -> tuple[Model, Model]:
    """Two models on one folder, as in two processes."""
    first, second = (open_tiny(SPEC, folder=folder, context=512, prices=FixedPrices()) for _ in range(2))
    return first, second


def _say(session: Session, text: str = "the") -> tuple[int, ...]:
    session.send(text, max_tokens=4).text()
    return session.token_ids


def _kept(model: Model, name: str) -> SessionRecord | None:
    assert model._sessions.files is not None
    return model._sessions.files.load(name)


def _pin(model: Model, name: str, pinned: bool) -> None:
    """What `headrace kv pin` and `release` do."""
    assert model._sessions.files is not None
    assert model._sessions.files.update(name, lambda record, _: record and dataclasses.replace(record, pinned=pinned)) is None


def test_turns_of_two_processes_are_both_kept(two: tuple[Model, Model]) -> None:
    first, second = two
    begun = first.session("plan")
    _say(begun)
    theirs = second.session("plan")
    mine_ids, their_ids = _say(begun, "user"), _say(theirs, "and")
    assert theirs.name == "plan-2"
    assert theirs.take_notices() == ["session 'plan' was changed by another process: this goes on as 'plan-2'"]
    assert theirs.take_notices() == begun.take_notices() == []
    assert second.session("plan-2") is theirs
    for name, ids in (("plan", mine_ids), ("plan-2", their_ids)):
        record = _kept(first, name)
        assert record is not None
        assert record.token_ids == ids
    assert _say(theirs, "in") == theirs.token_ids
    assert theirs.name == "plan-2"


def test_two_processes_that_begin_one_session_keep_both(two: tuple[Model, Model]) -> None:
    sessions = [model.session("plan") for model in two]
    for session in sessions:
        _say(session)
    assert [session.name for session in sessions] == ["plan", "plan-2"]


def test_copies_take_names_that_are_free(two: tuple[Model, Model]) -> None:
    first, second = two
    _say(first.session("plan-2"))
    _say(first.session("plan"))
    other = second.session("plan")
    _say(first.session("plan"))
    _say(other)
    assert other.name == "plan-3"


@pytest.mark.parametrize("pinned", [True, False])
def test_pin_that_is_ordered_from_outside_holds_through_the_next_turn(two: tuple[Model, Model], pinned: bool) -> None:
    session = two[0].session("plan")
    _say(session)
    session.pin(not pinned)
    _pin(two[1], "plan", pinned)
    _say(session, "user")
    record = _kept(two[1], "plan")
    assert record is not None
    assert (record.pinned, session._standing.pinned, len(record.messages)) == (pinned, pinned, 4)


def test_own_wish_goes_before_that_of_others(two: tuple[Model, Model]) -> None:
    session = two[0].session("plan")
    _say(session)
    session.pin()
    _pin(two[1], "plan", False)
    session.prioritise(2.0)
    assert not session._standing.pinned
    _pin(two[1], "plan", True)
    session.pin(False)  # it is not pinned here, so nothing is asked for
    assert session._standing.pinned
    session.pin(False)
    record = _kept(two[1], "plan")
    assert record is not None
    assert (record.pinned, record.priority) == (False, 2.0)


def test_wish_does_not_overwrite_turns_of_others(two: tuple[Model, Model]) -> None:
    first, second = (model.session("plan") for model in two[:1] * 2)
    _say(first)
    second = two[1].session("plan")
    ids = _say(first, "user")
    second.pin()
    record = _kept(two[0], "plan")
    assert record is not None
    assert (record.token_ids, record.pinned) == (ids, True)
    _say(second, "and")
    assert second.name == "plan-2"


@pytest.mark.parametrize("how", ["delete", "clear"])
def test_session_that_is_deleted_meanwhile_does_not_come_back(two: tuple[Model, Model], folder: Path, how: str) -> None:
    session = two[0].session("plan")
    _say(session)
    if how == "delete":
        assert two[1]._sessions.files is not None
        assert two[1]._sessions.files.delete("plan")
    else:
        clear(folder, model=None, with_sessions=True)
    _say(session, "user")
    session.pin()
    assert _kept(two[1], "plan") is None
    assert session.take_notices() == ["session 'plan' is not kept: it was deleted by another process"]
    assert session.problem == "it was deleted by another process"
    assert two[0].session_names() == []


def test_damaged_file_is_replaced(two: tuple[Model, Model], folder: Path) -> None:
    session = two[0].session("plan")
    _say(session)
    (path,) = folder.glob("sessions/*/plan*.json")
    path.write_text("{")
    ids = _say(session, "user")
    record = _kept(two[1], "plan")
    assert record is not None
    assert record.token_ids == ids
    assert session.problem is None


def test_session_that_cannot_be_written_says_so_once_and_is_not_listed(
    two: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = two[0].session("plan")

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(files, "replace_file", full)
    _say(session)
    _say(session, "user")
    (notice,) = session.take_notices()
    assert notice.startswith("session 'plan' is not kept: No space left on device")
    assert two[0].session_names() == []
    copy = session.fork("copy")
    assert isinstance(copy, Session)
    assert copy.problem is not None
    monkeypatch.undo()
    session.pin()
    assert (session.problem, session.take_notices()) == (None, [])
    assert two[0].session_names() == ["plan"]


def test_session_where_nothing_is_kept_says_so(open_tiny: Open) -> None:
    session = open_tiny(SPEC, context=256).session("plan")
    assert session.problem == "nothing is kept on disk"
    assert session.take_notices() == []
    _say(session)
    assert session.take_notices() == ["session 'plan' is not kept: nothing is kept on disk"]


def test_turns_do_not_count_all_files_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    real = files.folder_bytes
    monkeypatch.setattr(files, "folder_bytes", lambda folder: counts.append(1) or real(folder))
    sessions = SessionFiles(tmp_path, "ab" * 32, limit_bytes=10**8)
    record = SessionRecord("plan", "ab" * 32, (), (), False, 1.0, None, 1e9)
    for turn in range(100):
        assert sessions.save(dataclasses.replace(record, token_ids=tuple(range(200 * turn))))
    assert len(counts) == 1
