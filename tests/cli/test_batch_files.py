"""The files of `headrace batch`: what is read, what a run leaves behind however it ends, and how the next one goes on."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import batch as batch_verb
from headrace.cli import batch_files
from headrace.cli.batch_files import AnswerFile, read_lines
from headrace.engine.request_lines import read_requests
from tiny.batch import Runner, mixed_requests


def test_batch_goes_on_from_every_place_where_a_kill_can_leave_it(batch: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_verb.time, "time", lambda: 1_800_000_000.0)
    requests = batch.write(*mixed_requests(6))
    assert batch().code == 3
    whole = batch.out.read_bytes()
    ends = [0, *(index + 1 for index, byte in enumerate(whole) if byte == ord("\n"))]
    for cut in range(len(whole) + 1):
        batch.out.write_bytes(whole[:cut])
        with AnswerFile(batch.out) as file:
            found = file.find(read_requests(requests.splitlines(keepends=True)))
            kept = max(end for end in ends if end <= cut)
            assert found.num_answers == ends.index(kept)
            assert len(list(found.requests)) == len(ends) - 1 - found.num_answers
        assert batch.out.read_bytes() == whole[:kept]
    for cut in sorted({0, *(end + shift for end in ends for shift in (-1, 0, 17)), len(whole) // 2}):
        if 0 <= cut <= len(whole):
            batch.out.write_bytes(whole[:cut])
            assert batch().code == 3
            assert batch.out.read_bytes() == whole


def test_batch_that_goes_on_computes_what_is_missing_and_says_so(batch: Runner) -> None:
    batch.write(*({"id": number, "prompt": "one two"} for number in range(5)))
    batch()
    whole = batch.out.read_bytes()
    batch.out.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]) + b'{"id": 3, "te')
    ending = batch()
    assert ending.code == 0
    assert [prompt for prompt, _ in batch.engine.asked] == ["one two"] * 2
    assert "headrace: going on behind 3 answers\n" in ending.err
    assert "headrace: 5 answers (3 were there before), 4 tokens generated" in ending.err
    assert batch.out.read_bytes() == whole


def test_batch_that_is_complete_does_nothing_and_says_so(batch: Runner) -> None:
    batch.write({"id": "a", "prompt": "one"}, {"id": "b", "prompt": "broken"})
    assert batch().code == 3
    whole = batch.out.read_bytes()
    ending = batch()
    assert (ending.code, ending.out) == (3, "")
    assert ending.err == "headrace: nothing to do: 2 answers (2 were there before), 1 of them an error\n"
    assert len(batch.command_line.loaded) == 1
    assert batch.out.read_bytes() == whole


@pytest.mark.parametrize(
    "content",
    [
        b'{"id": "x", "text": "ONE "}\n',
        b'{"id": "a", "text": "ONE "}\n{"id": "x", "error": "y"}\n',
        b"my notes",
        b'{"id": "a", "text": "ONE "}\nmy notes',
        b'{"id": "a", "text": "ONE "}\n\0\0\0\0',
        b'{"id": "a", "text": "ONE "\n',
        b'{"id": "a", "text": 1}\n{"id": "b", "text": 1}\n{"id": "c", "text": 1}\n',
        b'{"id": "a", "text": 1}\n{"id": "b", "text": 1}\n{"i',
        b"\n",
    ],
)
def test_batch_leaves_a_file_alone_that_holds_something_else(batch: Runner, content: bytes) -> None:
    batch.write({"id": "a", "prompt": "one"}, {"id": "b", "prompt": "two"})
    batch.out.write_bytes(content)
    ending = batch()
    assert (ending.code, ending.out) == (2, "")
    assert "holds something else: line " in ending.err
    assert ending.err.count("\n") == 1
    assert batch.out.read_bytes() == content
    assert batch.command_line.loaded == []


def test_batch_of_nothing_is_an_empty_file(batch: Runner) -> None:
    batch.write(b"\xef\xbb\xbf\r\n\n")
    ending = batch()
    assert (ending.code, ending.err) == (0, "headrace: nothing to do: 0 answers\n")
    assert batch.out.read_bytes() == b""
    batch.prompts.write_bytes(b"")
    assert batch().code == 0


def test_batch_reads_bom_crlf_non_ascii_and_a_last_line_without_newline(batch: Runner) -> None:
    batch.write(b'\xef\xbb\xbf{"id": "\xc3\xa9", "prompt": "\xc3\xa9"}\r\n', b"\r\n", b'{"id": 2, "prompt": "two"}')
    assert batch().code == 0
    assert [(answer["id"], answer["text"]) for answer in batch.answers] == [("é", "É "), (2, "TWO ")]


def test_batch_huge_line_is_an_error_and_the_next_one_is_read(batch: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = batch.write({"id": "a", "prompt": "word " * 200_000}, {"id": "b", "prompt": "two"})
    assert batch().code == 3
    assert [set(answer) for answer in batch.answers] == [{"id", "error"}, {"id", "text", "token_ids", "finish_reason", "usage"}]
    first_bytes = requests.index(b"\n") + 1
    for longest, at_once in ((100, 1000), (100, 1 << 20), (first_bytes - 2, 1000), (first_bytes - 1, 1000)):
        monkeypatch.setattr(batch_files, "LINE_BYTES_MAX", longest)
        monkeypatch.setattr(batch_files, "_READ_BYTES", at_once)
        with batch.prompts.open("rb") as stream:
            first, second = read_lines(stream)
        assert (len(first), second) == (longest + 1, b'{"id": "b", "prompt": "two"}\n')


def test_batch_reads_standard_input_and_writes_standard_output(batch: Runner) -> None:
    requests = batch.write({"id": "a", "prompt": "one"}, {"id": "b", "prompt": "two"})
    ending = batch.command_line("batch", "-", "--out", "-", stdin=requests)
    assert ending.code == 0
    assert [json.loads(line)["text"] for line in ending.out.splitlines()] == ["ONE ", "TWO "]
    for _ in range(2):  # the second time it compares what comes in with what is there
        assert batch.command_line("batch", "-", "--out", str(batch.out), stdin=requests).code == 0
    assert len(batch.answers) == 2
    assert len(batch.command_line.loaded) == 2


def test_batch_refuses_places_where_nothing_can_be_written(batch: Runner, tmp_path: Path) -> None:
    requests = batch.write({"id": "a", "prompt": "one"})
    for out, told in (
        (tmp_path, "is a folder"),
        (tmp_path / "nowhere" / "out", "a folder that does not exist: create it first"),
        (batch.prompts, "is the file that the prompts are read from"),
    ):
        ending = batch.command_line("batch", str(batch.prompts), "--out", str(out))
        assert (ending.code, ending.out) == (2, "")
        assert told in ending.err
    link = tmp_path / "link"
    link.hardlink_to(batch.prompts)
    assert "is the file that the prompts" in batch.command_line("batch", str(batch.prompts), "--out", str(link)).err
    assert batch.prompts.read_bytes() == requests
    for prompts in (tmp_path, tmp_path / "none"):
        assert batch.command_line("batch", str(prompts), "--out", str(batch.out)).code == 2
    assert not batch.out.exists()
    assert batch.command_line.loaded == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_batch_on_a_full_disk_ends_with_one_sentence(batch: Runner) -> None:
    batch.write({"id": "a", "prompt": "one"})
    ending = batch.command_line("batch", str(batch.prompts), "--out", "/dev/full")
    assert (ending.code, ending.out) == (2, "")
    assert "headrace: /dev/full: No space left on device; make room there, or use another place\n" in ending.err
    assert batch.engine.closed


def test_batch_on_a_disk_that_gets_full_keeps_whole_lines(batch: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    batch.write(*({"id": number, "prompt": "one two"} for number in range(5)))
    batch()
    whole = batch.out.read_bytes()
    batch.out.unlink()
    room, write = 250, os.write

    def write_some(descriptor: int, data: Any) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        room -= (count := write(descriptor, data[: min(room, 10)]))
        return count

    with monkeypatch.context() as patch:
        patch.setattr(batch_files.os, "write", write_some)
        ending = batch()
    assert ending.code == 2
    assert f"{batch.out}: No space left on device" in ending.err
    left = batch.out.read_bytes()
    assert left.endswith(b"}\n")
    assert whole.startswith(left)
    assert 0 < len(left) <= 250
    assert batch().code == 0
    assert batch.out.read_bytes() == whole


def test_batch_that_is_interrupted_keeps_what_was_finished(batch: Runner) -> None:
    batch.write(*({"id": number, "prompt": "surprise" if number == 3 else "one"} for number in range(5)))
    batch.surprise = KeyboardInterrupt()
    ending = batch("--parallel", "1")
    assert ending.code == 130
    assert ending.err.endswith("headrace: interrupted\n")
    assert [answer["id"] for answer in batch.answers] == [0, 1, 2]
    assert batch.engine.closed
    batch.surprise = None
    assert batch().code == 0
    assert [answer["id"] for answer in batch.answers] == [0, 1, 2, 3, 4]


def test_batch_is_the_only_one_that_writes_a_file(batch: Runner) -> None:
    batch.write({"id": "a", "prompt": "one"})
    with AnswerFile(batch.out):
        ending = batch()
    assert ending.code == 2
    assert "is being written by another process" in ending.err
    assert batch().code == 0
