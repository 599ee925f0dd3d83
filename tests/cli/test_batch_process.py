"""`headrace batch` in a process of its own, with a real model: killed at any moment, it ends with the same bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.config import Config
from tiny.models import TinySpec, write_model

CONTEXT = 512
KINDS: tuple[dict[str, Any], ...] = (
    {"prompt": "the user and the ", "raw": True},
    {"messages": [{"role": "user", "content": "and the é"}], "max_tokens": 200},
    {"prompt": "the user", "system": "and the", "temperature": 0.8, "seed": 5, "logprobs": 1},
    {"prompt": "the user " * 2000},
    {"prompt": "the user", "top_p": 2},
    {"messages": [{"role": "system", "content": "x"}], "system": "y"},
)
NUM_REQUESTS = 5 * len(KINDS)


def _requests() -> list[dict[str, Any]]:
    """Greedy ones and drawn ones, and some that are refused."""
    return [{"id": f"é{number}", "max_tokens": 50 + 5 * number, **KINDS[number % len(KINDS)]} for number in range(NUM_REQUESTS)]


@dataclass
class Batch:
    """`headrace batch` over the same requests, with a home of its own that has everybody's kernels."""

    model: Path
    folder: Path

    def __post_init__(self) -> None:
        self.prompts, self.home = self.folder / "prompts.jsonl", self.folder / "home"
        self.prompts.write_bytes(b"".join(json.dumps(request).encode() + b"\n" for request in _requests()))
        kernels = Config.from_environment().kernels_dir
        kernels.mkdir(parents=True, exist_ok=True)
        self.home.mkdir()
        (self.home / kernels.name).symlink_to(kernels)

    def start(self, out: Path, *options: str) -> subprocess.Popen[str]:
        arguments = ("batch", str(self.prompts), "--out", str(out), "-m", str(self.model), "--threads", "1", *options)
        return subprocess.Popen(
            [sys.executable, "-m", "headrace", *arguments],
            env={**os.environ, "HEADRACE_HOME": str(self.home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def start_and_signal(self, out: Path, num_lines: int, number: signal.Signals) -> tuple[int, str]:
        """Sends a signal when there are so many answers; the exit code and what was said."""
        process = self.start(out, "--parallel", "3")  # so that answers do not all come at the end
        while process.poll() is None and _num_lines(out) < num_lines:
            time.sleep(0.001)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        return process.returncode, err


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Batch:
    """A tiny model that answers until it is stopped, and requests for it."""
    folder = tmp_path_factory.mktemp("batch")
    spec = TinySpec(seed=3, ends=False, context=CONTEXT)
    return Batch(write_model(folder / "tiny.gguf", spec), folder)


@pytest.fixture(scope="module")
def whole(batch: Batch) -> bytes:
    """The answers of a run that nobody interrupts, and that finds nothing on disk."""
    out = batch.folder / "whole.jsonl"
    process = batch.start(out, "--kv-disk", "0")
    _, err = process.communicate(timeout=240)
    assert process.returncode == 3, err
    assert f"{NUM_REQUESTS} answers, {3 * NUM_REQUESTS // len(KINDS)} of them errors" in err
    return out.read_bytes()


def test_batch_answers_are_those_that_each_request_has_alone(whole: bytes, batch: Batch) -> None:
    model = headrace.load(batch.model, threads=1, kv_disk=0, config=Config.from_environment({"HEADRACE_HOME": str(batch.home)}))
    with model:
        for line, request in zip(whole.splitlines(), _requests(), strict=True):
            answer = json.loads(line)
            assert answer["id"] == request["id"]
            if "error" in answer:
                continue
            options: Any = {name: value for name, value in request.items() if name not in {"id", "prompt", "messages"}}
            alone = model.generate(request.get("prompt") or request["messages"], **options)
            assert alone.text() == answer["text"]
            assert list(alone.result.token_ids) == answer["token_ids"]
            assert answer["finish_reason"] == "length"


def test_batch_that_is_killed_again_and_again_ends_with_the_same_bytes(batch: Batch, whole: bytes) -> None:
    out = batch.folder / "killed.jsonl"
    codes = []
    for num_lines in (1, 9, 16):
        code, _ = batch.start_and_signal(out, num_lines, signal.SIGKILL)
        codes.append(code)
        left = out.read_bytes()
        assert whole.startswith(left)
    assert codes[0] == -signal.SIGKILL
    with out.open("ab") as file:  # what a kill in the middle of a line leaves
        file.write(whole[len(left) : len(left) + 20])
    process = batch.start(out)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert "going on behind" in err
    assert out.read_bytes() == whole


def test_batch_that_ctrl_c_ends_has_kept_whole_lines_and_goes_on(batch: Batch, whole: bytes) -> None:
    out = batch.folder / "interrupted.jsonl"
    code, err = batch.start_and_signal(out, 2, signal.SIGINT)
    assert (code, err.splitlines()[-1]) == (130, "headrace: interrupted")
    left = out.read_bytes()
    assert left.endswith(b"}\n")
    assert whole.startswith(left)
    process = batch.start(out)
    process.communicate(timeout=60)
    assert out.read_bytes() == whole
