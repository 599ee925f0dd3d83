"""What lies in a kv folder, without a model: listed, checked byte by byte, repaired, removed.

Processes that use the folder meanwhile may go on: what is taken from them is a recompute. Knows no conversation and no rule
of what is worth keeping.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.kv import folder as files
from headrace.kv.counters import Counters, read_counters
from headrace.kv.journal import FolderJournal
from headrace.kv.keys import StoreKey, key_folders, read_key
from headrace.kv.runs import RUN, Damaged, Header, Run, chains, layer_checksums, open_run, read_header, read_into
from headrace.kv.sessions import SessionRecord, all_sessions, read_session, session_folders, session_paths, sessions_locked
from headrace.model.step import PAGE_TOKENS

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""


@dataclass(frozen=True)
class KeyInventory:
    """What is kept of one key: `key` is None if its folder does not say. Times are those of its runs, None without any.

    `pages_by_format` counts pages by the code of their format. `in_use` is true while a process has the folder open.
    """

    folder: Path
    key: StoreKey | None
    total_bytes: int
    num_runs: int
    num_pages: int
    num_tokens: int
    pages_by_format: dict[int, int]
    oldest_s: float | None
    newest_s: float | None
    in_use: bool
    counters: Counters

    @property
    def model(self) -> str:
        """The model's name."""
        return self.key.model if self.key is not None else self.folder.name[:-17]

    @property
    def numbers(self) -> str:
        """What else the pages belong to."""
        return self.key.numbers if self.key is not None else "unknown"


@dataclass(frozen=True)
class SessionInventory:
    """A session, and how many of its tokens have their pages on disk (under the key that has most of them)."""

    record: SessionRecord
    disk_tokens: int

    @property
    def num_tokens(self) -> int:
        """All tokens of the session."""
        return len(self.record.token_ids)


@dataclass(frozen=True)
class Inventory:
    """A kv folder. `total_bytes` counts everything; `written_bytes` were written on `written_day` (UTC), the last one."""

    folder: Path
    keys: tuple[KeyInventory, ...]
    sessions: tuple[SessionInventory, ...]
    total_bytes: int
    written_day: str
    written_bytes: int
    num_problems: int


@dataclass(frozen=True)
class Damage:
    """Something in a file that is not as it was written: a page of a run, or (None) the file as such."""

    path: Path
    page: int | None
    what: str


def inventory(folder: Path) -> Inventory:
    """What lies in a kv folder. Reads headers and sessions, no pages; a folder that is not there holds nothing."""
    keys, known, num_problems = [], {}, 0
    for each in key_folders(folder):
        key, runs = read_key(each), []
        for path in _run_paths(each):
            found = _inspect(path, each)
            if isinstance(found, Run):
                runs.append(found)
            else:
                num_problems += found is not None
        keys.append(_key_inventory(each, key, runs))
        known[each] = (key.model_digest if key is not None else "", {chain for run in runs for chain in run.chains()})
    sessions = []
    for record in all_sessions(folder):
        candidates = [found for digest, found in known.values() if digest == record.model_digest]
        disk_tokens = max((_tokens_found(record.token_ids, found) for found in candidates), default=0)
        sessions.append(SessionInventory(record, disk_tokens))
    day, written_bytes = files.read_writes(folder)
    return Inventory(folder, tuple(keys), tuple(sessions), files.folder_bytes(folder), day, written_bytes, num_problems)


def verify(folder: Path, *, repair: bool, on_progress: Progress | None = None) -> list[Damage]:
    """Reads everything in a kv folder, and says what is damaged or can never be reached.

    With `repair`, runs are cut off before their first damaged page, and what is of no use is removed.
    """
    total = sum(path.lstat().st_size for each in key_folders(folder) for path in _run_paths(each) if path.is_file())
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done = min(done + num_bytes, total)
        if on_progress is not None:
            on_progress(done, total)

    damages = [damage for each in key_folders(folder) for damage in _verify_key(each, repair, advance)]
    for path in (path for each in session_folders(folder) for path in session_paths(each)):
        if read_session(path) is None and path.exists():
            damages.append(Damage(path, None, "no session of this version"))
            if repair:
                _remove(path)
    if repair:
        _remove_partial(folder)
    return damages


def _verify_key(folder: Path, repair: bool, advance: Callable[[int], None]) -> Iterator[Damage]:
    """Checks the runs of a key, parents before children: what hangs on a page that is cut off can never be reached."""
    known: set[bytes] = set()
    sound: list[Run] = []
    for path in _run_paths(folder):
        found = _inspect(path, folder)
        if isinstance(found, Run):
            sound.append(found)
        elif found is not None:
            yield Damage(path, None, found)
            if repair:
                _remove(path)
    for run in sorted(sound, key=lambda run: run.start_page):
        num_good = run.num_pages
        if run.start_page and run.parent not in known:
            yield Damage(run.path, None, "pages before it are damaged or gone")
            num_good = 0
        else:
            for page in _damaged_pages(run):
                yield Damage(run.path, page, "its bytes are not those that were written")
                num_good = min(num_good, page)
        if repair and num_good < run.num_pages:
            _cut(run, num_good)
        known.update(run.chains()[:num_good])
        advance(run.num_bytes)


def clear(folder: Path, *, model: str | None, with_sessions: bool = True) -> int:
    """Removes what is kept of all models, or of those whose name contains `model`; the bytes freed.

    How much was written today is still known afterwards. Nothing is removed that was not made by this package.
    """
    before = files.folder_bytes(folder)
    digests = set()
    for each in key_folders(folder):
        key = read_key(each)
        if model is None or _slug(model) in _slug(key.model if key is not None else each.name[:-17]):
            digests.add(key.model_digest[:32] if key is not None else "")
            _empty(each, (RUN, files.PARTIAL, "key.json", "counters.json", "prices.json"))
    if with_sessions and session_folders(folder):
        with contextlib.suppress(OSError), sessions_locked(folder):  # a chat that is writing one must not bring it back
            for each in session_folders(folder):
                if model is None or each.name in digests:
                    _empty(each, (".json", files.PARTIAL))
    return max(0, before - files.folder_bytes(folder))


def _key_inventory(folder: Path, key: StoreKey | None, runs: list[Run]) -> KeyInventory:
    by_format: dict[int, int] = {}
    for run in runs:
        by_format[run.page_format] = by_format.get(run.page_format, 0) + run.num_pages
    return KeyInventory(
        folder=folder,
        key=key,
        total_bytes=files.folder_bytes(folder),
        num_runs=len(runs),
        num_pages=sum(run.num_pages for run in runs),
        num_tokens=sum(run.num_tokens for run in runs),
        pages_by_format=dict(sorted(by_format.items())),
        oldest_s=min((run.time_s for run in runs), default=None),
        newest_s=max((run.time_s for run in runs), default=None),
        in_use=_is_in_use(folder),
        counters=read_counters(FolderJournal(folder, folder.parent.parent)),
    )


def _is_in_use(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY | files.NO_FOLLOW)
    except OSError:
        return False
    try:
        return not files.try_lock(descriptor, files.LOCK_EXCLUSIVE)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _run_paths(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for name in sorted(files.list_names(folder, RUN)):
            yield folder / name


def _inspect(path: Path, folder: Path) -> Run | str | None:
    """A run file from its header alone; else what is wrong with it, None if it is gone by now."""
    try:
        opened = open_run(path)
        try:
            header: Header = read_header(opened.descriptor, opened.size)
        finally:
            os.close(opened.descriptor)
    except FileNotFoundError:
        return None
    except (OSError, Damaged) as error:
        return str(getattr(error, "strerror", None) or error)
    if not folder.name.endswith(f"-{header.key[:16]}"):
        return "pages of another key"
    num_pages = header.pages_in(opened.size)
    return Run.of(str(folder), path.name, header, num_pages, opened.time_s) if num_pages else "no page is whole"


def _damaged_pages(run: Run) -> list[int]:
    """Pages whose bytes are not those that were written; none, if the file is gone or replaced by now."""
    bad: list[int] = []
    try:
        opened = open_run(run.path)
    except (OSError, Damaged):
        return bad
    try:
        header = read_header(opened.descriptor, opened.size)
        checksums = header.checksums()
        page: npt.NDArray[np.uint8] = np.empty(header.page_bytes, np.uint8)
        for index in range(run.num_pages if header.digest == run.header_digest else 0):
            expected = checksums[index * header.num_layers : (index + 1) * header.num_layers].tolist()
            try:
                count = read_into(opened.descriptor, page.data, header.payload_offset + index * header.stride)
            except OSError:
                count = len(page)  # the disk cannot read it: what is in the buffer is not the page
                page[:] = 0
            if count == len(page) and layer_checksums(page, header.layer_bytes) != expected:
                bad.append(index)
    except (OSError, Damaged):
        return bad
    finally:
        os.close(opened.descriptor)
    return bad


def _tokens_found(tokens: tuple[int, ...], known: set[bytes]) -> int:
    """How many tokens from the start have their pages among those known."""
    count = 0
    for chain in chains(b"", tokens):
        if chain not in known:
            break
        count = min(count + PAGE_TOKENS, len(tokens))
    return count


def _cut(run: Run, num_pages: int) -> None:
    """Keeps the first pages of a run only."""
    with contextlib.suppress(OSError):
        if num_pages:
            os.truncate(run.path, run.payload_offset + num_pages * run.stride)
            os.utime(run.path, (run.time_s, run.time_s))
        else:
            _remove(run.path)


def _remove(path: Path) -> int:
    """Removes a file, or what took its name if that is an empty folder; its bytes."""
    with contextlib.suppress(OSError):
        size = path.lstat().st_size
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
        return size
    return 0


def _remove_partial(folder: Path) -> None:
    """Removes what processes that ended while writing have left."""
    with contextlib.suppress(OSError):
        lock = files.FolderLock(folder)
        with lock.held(wait=False) as held:
            for file in files.list_files(folder) if held and files.locks_are_known() else ():
                if file.name.endswith(files.PARTIAL) and Path(file.path).parent.parent.name != files.SESSIONS_FOLDER:
                    files.remove_file(file.path)
        lock.close()


def _empty(folder: Path, suffixes: tuple[str, ...]) -> None:
    """Removes files of ours from a folder, and the folder if nothing is left."""
    with contextlib.suppress(OSError):
        for name in files.list_names(folder, ""):
            if name.endswith(suffixes):
                files.remove_file(folder / name)
        folder.rmdir()


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", text.lower())
