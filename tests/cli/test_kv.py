"""The verbs of `headrace kv` that look at a folder and tidy it: on real folders of small random pages."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.config import KV_FORMATS
from headrace.kernels.page_formats import FORMAT_NAMES
from headrace.kv.counters import Counters, merge_counters
from headrace.kv.sessions import SessionFiles, SessionRecord
from headrace.kv.store import StoreKey
from tiny.runs import KEY, NOW, STRIDE, draft, journal_of, open_store, set_byte, write

OTHER_KEY = StoreKey("Other 2B", "cd" * 32, "kernels 1a2b width 64")
VERBS = (("status",), ("list",), ("pin", "plan"), ("release", "plan"), ("clear",), ("verify",))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "home" / "kv"


def _record(name: str, key: StoreKey = KEY, **changes: Any) -> SessionRecord:
    messages = (("user", "Hi"), ("assistant", "Hello"))
    record = SessionRecord(name, key.model_digest, (1, 2, 3), messages, False, 0.0, None, NOW)
    return dataclasses.replace(record, **changes)


def _save(folder: Path, record: SessionRecord) -> None:
    assert SessionFiles(folder, record.model_digest).save(record)


def _load(folder: Path, name: str, key: StoreKey = KEY) -> SessionRecord | None:
    return SessionFiles(folder, key.model_digest).load(name)


@pytest.fixture
def filled(folder: Path) -> Path:
    """Four exact pages and a small one of Tiny 1B, three small ones of Other 2B, and four sessions of the two."""
    store = open_store(folder)
    first = write(store, draft(1, 4, last_tokens=10))
    write(store, draft(2, 1, page_format=2))
    store.close()
    other = open_store(folder, OTHER_KEY)
    write(other, draft(3, 3, page_format=1))
    other.close()
    assert merge_counters(
        journal_of(store),
        Counters(4, 1000, 600, 100, 100, {"diverged": 50, "first_seen": 250}, 2_000_000, 3_000_000, 0, 1, 2, 3, 4.5),
    )
    assert merge_counters(journal_of(other), Counters(1, 1000, 0, 0, 500, {"first_seen": 500}, saved_s=1.5))
    _save(folder, _record("plan", token_ids=(*first.tokens[:70], 7, 7), updated_s=NOW + 60))
    _save(folder, _record("a [red] poem", pinned=True, expires_s=NOW + 86_400))
    _save(folder, _record("shared"))
    _save(folder, _record("shared", OTHER_KEY, updated_s=NOW - 60))
    return folder


def test_page_formats_have_the_names_of_the_kernels() -> None:
    assert KV_FORMATS == FORMAT_NAMES


@pytest.mark.parametrize("made", [False, True])
def test_empty_folder_is_fine_for_every_verb_that_needs_no_session(headrace: Any, folder: Path, made: bool) -> None:
    if made:
        folder.mkdir(parents=True)
    assert headrace("kv", "status").out == f"nothing is kept yet in {folder}\n"
    assert headrace("kv", "list").out == f"no session is kept yet in {folder}\n"
    assert headrace("kv", "clear").out == "freed 0 B\n"
    assert headrace("kv", "verify").out == f"everything in {folder} is sound\n"
    assert headrace("kv", "status", "--json").document["disk_bytes"] == 0
    assert headrace("kv", "list", "--json").document == []
    assert folder.exists() is made


@pytest.mark.parametrize("arguments", VERBS)
def test_verbs_load_no_model_and_print_one_document(headrace: Any, filled: Path, arguments: tuple[str, ...]) -> None:
    ending = headrace("kv", *arguments, "--json")
    assert (ending.code, headrace.loaded) == (0, [])
    assert ending.document is not None
    assert ending.err.startswith("headrace: checking pages (") if arguments == ("verify",) else not ending.err
    assert ending.err.count("\n") <= 1


@pytest.mark.parametrize("arguments", VERBS)
def test_verbs_look_into_the_folder_that_is_named(
    headrace: Any, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    moved = filled.rename(tmp_path / "elsewhere")
    named = headrace("kv", *arguments, "--kv-dir", str(moved), "--json")
    assert named.code == 0
    headrace("kv", "release", "plan", "--kv-dir", str(moved))  # as it was
    monkeypatch.setenv("HEADRACE_KV_DIR", str(moved))
    if arguments != ("clear",):  # which has left nothing
        assert headrace("kv", *arguments, "--json").document == named.document


def test_status_document_holds_sizes_bounds_and_counts(headrace: Any, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_KV_DISK", "1GB")
    document = headrace("kv", "status", "--json").document
    disk_bytes = sum(-(-path.stat().st_size // 4096) * 4096 for path in filled.rglob("*") if path.is_file())
    assert (document["disk_bytes"], document["disk_limit_bytes"]) == (disk_bytes, 10**9)
    assert (document["disk_pages"], document["disk_tokens"], document["sessions"]) == (8, 3 * 32 + 10 + 32 + 96, 4)
    assert document["written_day"] == "2027-01-15"
    assert 8 * STRIDE <= document["written_bytes"] <= document["disk_bytes"]
    assert (document["daily_limit_bytes"], document["memory_limit_bytes"], document["formats"]) == (10**11, None, ["f16"])
    assert document["damaged_files"] == 0
    counters = document["counters"]
    assert (counters["lookups"], counters["prompt_tokens"], counters["saved_s"]) == (5, 2000, 6.0)
    assert counters["hit_rates"] == {"memory": 0.25, "compressed": 0.05, "disk": 0.3}
    assert counters["missed_tokens"] == {"diverged": 50, "first_seen": 750}
    assert (counters["read_bytes"], counters["written_bytes"], counters["compressed_bytes"]) == (2_000_000, 3_000_000, 0)
    keys = {key["model"]: key for key in document["keys"]}
    assert keys["Tiny 1B"]["pages_by_format"] == {"f16": 4, "q4": 1}
    assert (keys["Tiny 1B"]["runs"], keys["Tiny 1B"]["pages"], keys["Tiny 1B"]["tokens"]) == (2, 5, 138)
    assert keys["Tiny 1B"]["numbers"] == KEY.numbers
    assert keys["Tiny 1B"]["newest_s"] == NOW
    assert keys["Tiny 1B"]["counters"]["hit_rates"] == {"memory": 0.5, "compressed": 0.1, "disk": 0.1}
    assert keys["Other 2B"]["pages_by_format"] == {"q8": 3}
    assert not keys["Other 2B"]["in_use"]


def test_status_shows_sizes_bounds_and_counts(headrace: Any, filled: Path) -> None:
    lines = headrace("kv", "status").out.splitlines()
    assert lines[0].endswith(f" KB of 20 GB in {filled}")
    assert lines[1] == "8 pages of 234 tokens, 4 sessions"
    assert lines[2].startswith("written on 2027-01-15 (UTC): ")
    assert lines[2].endswith(" KB of 100 GB a day")
    assert lines[4].split()[:5] == ["model", "pages", "tokens", "bytes", "formats"]
    assert lines[5].split()[:4] == ["Other", "2B", "3", "96"]
    assert "4 f16, 1 q4" in lines[6]
    assert lines[-3:] == [
        "5 lookups of 2,000 tokens: 25.0 % found in memory, 5.0 % there in compressed pages, 30.0 % on disk, 6 s saved",
        "800 tokens missed: 750 first seen, 50 diverged",
        "2 MB read, 3 MB written, 0 B compressed",
    ]


def test_status_tells_apart_what_other_versions_made_of_one_model(headrace: Any, filled: Path) -> None:
    assert "made by" not in headrace("kv", "status").out
    newer = open_store(filled, dataclasses.replace(KEY, numbers="kernels 3c4d width 64"))
    write(newer, draft(4, 2))
    newer.close()
    lines = headrace("kv", "status").out.splitlines()
    assert lines[4].rstrip().endswith("made by")
    assert {line.rstrip().endswith("kernels 3c4d width 64") for line in lines if line.startswith("Tiny 1B")} == {True, False}


def test_status_says_that_a_process_uses_the_folder_and_that_files_are_damaged(headrace: Any, filled: Path) -> None:
    store = open_store(filled)
    set_byte(next(filled.glob("pages/other*/*.run")), 30)
    document = headrace("kv", "status", "--json").document
    assert {key["model"]: key["in_use"] for key in document["keys"]} == {"Tiny 1B": True, "Other 2B": False}
    assert document["damaged_files"] == 1
    assert "1 damaged file: headrace kv verify --repair keeps what is sound" in headrace("kv", "status").out
    store.close()


def test_list_holds_every_session_the_last_used_first(headrace: Any, filled: Path) -> None:
    document = headrace("kv", "list", "--json").document
    assert document[0] == {
        "name": "plan",
        "model": "Tiny 1B",
        "messages": 2,
        "tokens": 72,
        "disk_tokens": 64,
        "pinned": False,
        "priority": 0.0,
        "expires_s": None,
        "updated_s": NOW + 60,
    }
    assert [(each["name"], each["model"]) for each in document[1:]] == [
        ("a [red] poem", "Tiny 1B"),
        ("shared", "Tiny 1B"),
        ("shared", "Other 2B"),
    ]


def test_list_shows_names_as_they_are(headrace: Any, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [" ".join(line.split()) for line in headrace("kv", "list").out.splitlines()]
    assert rows[0] == "session model messages tokens on disk pinned expires last used"
    assert rows[1].startswith("plan Tiny 1B 2 72 64 no never 2027-01-1")
    assert rows[2].startswith("a [red] poem Tiny 1B 2 3 0 yes 2027-01-1")


def test_list_names_a_model_without_pages_by_its_digest(headrace: Any, folder: Path) -> None:
    _save(folder, _record("plan"))
    assert headrace("kv", "list", "--json").document[0]["model"] == "abababab"
    assert headrace("kv", "status", "--json").document["sessions"] == 1


def test_pin_and_release_change_nothing_else(headrace: Any, filled: Path) -> None:
    before = _load(filled, "plan")
    assert before is not None
    assert headrace("kv", "pin", "plan").out == "session 'plan' is pinned\n"
    assert _load(filled, "plan") == dataclasses.replace(before, pinned=True)
    assert headrace("kv", "release", "plan", "--json").document == {"name": "plan", "pinned": False}
    assert _load(filled, "plan") == before


def test_release_delete_forgets_the_session_and_not_its_pages(headrace: Any, filled: Path) -> None:
    assert headrace("kv", "release", "plan", "--delete").out == "session 'plan' is forgotten\n"
    assert _load(filled, "plan") is None
    assert headrace("kv", "status", "--json").document["disk_pages"] == 8
    assert headrace("kv", "release", "a [red] poem", "--delete", "--json").document == {"name": "a [red] poem", "deleted": True}


@pytest.mark.parametrize("verb", [("pin",), ("release",), ("release", "--delete")])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plam", "did you mean 'plan'?"),
        ("sharde", "did you mean 'shared'?"),
        ("zzz", "headrace kv list shows all"),
    ],
)
def test_session_name_that_is_not_there_gets_the_nearest(
    headrace: Any, filled: Path, verb: tuple[str, ...], name: str, said: str
) -> None:
    ending = headrace("kv", *verb, name)
    assert (ending.code, ending.out) == (2, "")
    assert ending.err == f"headrace: no session has the name '{name}' in {filled}: {said}\n"


def test_session_name_of_several_models_needs_the_model(headrace: Any, filled: Path) -> None:
    ending = headrace("kv", "pin", "shared")
    assert (ending.code, ending.out) == (2, "")
    assert "for several models: say which with --model (Tiny 1B, Other 2B)" in ending.err
    assert headrace("kv", "pin", "shared", "--model", "other2b").code == 0
    pinned = [_load(filled, "shared", key) for key in (KEY, OTHER_KEY)]
    assert [each.pinned for each in pinned if each is not None] == [False, True]
    assert "of a model like '-' has the name 'shared'" in headrace("kv", "pin", "shared", "--model", "-").err


def test_pin_that_cannot_be_written_says_so(headrace: Any, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SessionFiles, "update", lambda self, name, change: "the disk is full")
    ending = headrace("kv", "pin", "plan")
    assert (ending.code, ending.out) == (2, "")
    assert "cannot be written" in ending.err


def test_clear_deletes_pages_and_keeps_sessions(headrace: Any, filled: Path) -> None:
    before_bytes = headrace("kv", "status", "--json").document["disk_bytes"]
    document = headrace("kv", "clear", "--json").document
    after = headrace("kv", "status", "--json").document
    assert (document["kv_dir"], document["deleted_sessions"]) == (str(filled), 0)
    assert document["freed_bytes"] == before_bytes - after["disk_bytes"] > 8 * STRIDE
    assert (after["disk_pages"], after["sessions"]) == (0, 4)
    assert after["counters"]["lookups"] == 0


def test_clear_of_one_model_leaves_the_others(headrace: Any, filled: Path) -> None:
    ending = headrace("kv", "clear", "--model", "OTHER")
    assert ending.out.startswith("freed ")
    assert [key["pages"] for key in headrace("kv", "status", "--json").document["keys"]] == [5]


def test_clear_with_sessions_forgets_them_as_well(headrace: Any, filled: Path) -> None:
    assert headrace("kv", "clear", "--model", "tiny", "--sessions").out.endswith(", forgot 3 sessions\n")
    assert [session["model"] for session in headrace("kv", "list", "--json").document] == ["Other 2B"]
    assert headrace("kv", "clear", "--sessions", "--json").document["deleted_sessions"] == 1
    assert headrace("kv", "list").out == f"no session is kept yet in {filled}\n"


@pytest.mark.parametrize(("model", "said"), [("Tinny 1B", "did you mean 'Tiny 1B'?"), ("-", "headrace kv status shows")])
def test_clear_of_an_unknown_model_deletes_nothing(headrace: Any, filled: Path, model: str, said: str) -> None:
    ending = headrace("kv", "clear", "--sessions", "--model", model)
    assert (ending.code, ending.out) == (2, "")
    assert said in ending.err
    after = headrace("kv", "status", "--json").document
    assert (after["disk_pages"], after["sessions"]) == (8, 4)


@pytest.mark.parametrize(("answer", "num_pages"), [(True, 0), (False, 8)])
def test_clear_at_a_terminal_asks_first(
    headrace: Any, filled: Path, monkeypatch: pytest.MonkeyPatch, answer: bool, num_pages: int
) -> None:
    asked: list[str] = []

    def confirm(question: str, **_options: Any) -> bool:
        asked.append(question)
        return answer

    monkeypatch.setattr("typer.confirm", confirm)
    monkeypatch.setattr("headrace.cli.kv.at_terminal", lambda: True)
    ending = headrace("kv", "clear", "--sessions")
    assert (ending.code, bool(ending.out)) == (0, answer)
    assert len(asked) == 1
    assert asked[0].endswith(f" KB and 4 sessions of the past in {filled}?")
    assert headrace("kv", "status", "--json").document["disk_pages"] == num_pages
    assert headrace("kv", "clear", "--yes").code == 0
    assert len(asked) == 1


def test_verify_finds_damage_and_exits_with_one(headrace: Any, filled: Path) -> None:
    (damaged,) = (path for path in filled.glob("pages/tiny*/*.run") if path.stat().st_size > 4 * STRIDE)
    set_byte(damaged, damaged.stat().st_size - STRIDE + 5)  # in the last page
    ending = headrace("kv", "verify")
    assert ending.code == 1
    lines = ending.out.splitlines()
    assert lines[0].startswith(f"{damaged}, page 3: ")
    assert lines[1] == "1 place is damaged; headrace kv verify --repair keeps what is sound"
    document = headrace("kv", "verify", "--json").document
    assert (document["kv_dir"], document["repaired"]) == (str(filled), False)
    assert [(each["path"], each["page"]) for each in document["damages"]] == [(str(damaged), 3)]


def test_verify_repair_keeps_what_is_sound(headrace: Any, filled: Path) -> None:
    (damaged,) = (path for path in filled.glob("pages/tiny*/*.run") if path.stat().st_size > 4 * STRIDE)
    set_byte(damaged, damaged.stat().st_size - STRIDE + 5)
    ending = headrace("kv", "verify", "--repair")
    assert ending.code == 1
    assert ending.out.endswith("1 place is damaged, and repaired\n")
    assert headrace("kv", "verify").out == f"everything in {filled} is sound\n"
    assert headrace("kv", "status", "--json").document["disk_pages"] == 7


def test_verify_shows_how_far_it_is(headrace: Any, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[Any, ...]] = []
    progress = "headrace.cli.progress.ConsoleProgress"
    monkeypatch.setattr(f"{progress}.start", lambda self, label, total: shown.append((label, total)))
    monkeypatch.setattr(f"{progress}.advance", lambda self, amount: shown.append((amount,)))
    assert headrace("kv", "verify").code == 0
    label, total = shown[0]
    assert label == "checking pages"
    assert total == sum(amount for (amount,) in shown[1:]) > 8 * STRIDE


@pytest.mark.parametrize("arguments", [("status",), ("list",), ("verify",), ("pin", "plan")])
def test_verbs_load_no_kernels(filled: Path, arguments: tuple[str, ...]) -> None:
    code = (
        "import sys\n"
        "from headrace.cli import main\n"
        f"sys.argv = ['headrace', 'kv', *{arguments!r}, '--kv-dir', {str(filled)!r}]\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout
    imported = {name.split(".")[0] for name in done.stderr.split()}
    assert "headrace" in imported
    assert imported.isdisjoint({"numba", "llvmlite", "tokenizers", "jinja2"})
