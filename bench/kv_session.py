"""What the sections share: where to measure, how thoroughly, and engines that start, are killed, and start again."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kv_files
from kv_worker import conversation_files
from rivals import Worker

PROGRAM = (sys.executable, str(Path(__file__).with_name("kv_worker.py")))
CONTEXT_TOKENS = 8192
MEMORY_BYTES = 10**9
DISK_BYTES = 6 * 10**9
BALLAST_BYTES = 1 << 28
"""More than a turn after a restart uses for the first time."""


@dataclass
class Session:
    """Where and how thoroughly to measure. `say` shows progress; `notes` collects what a reader has to know.

    `folder` is where temporary folders are made, None for the system's. Prompts are random, and no two of them are the same.
    """

    model: Path
    cores: int
    repeat: int
    conversations: int
    engines: Sequence[str]
    say: Callable[[str], None]
    folder: Path | None = None
    traces: Path | None = None
    program: Sequence[str] = PROGRAM
    ballast_bytes: int = BALLAST_BYTES
    notes: list[str] = field(default_factory=list)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)
    _prompts: int = 10_000

    def number(self) -> int:
        """The number of a prompt that nobody has had."""
        self._prompts += 1
        return self._prompts

    @contextlib.contextmanager
    def temporary_folder(self) -> Iterator[Path]:
        """A folder that is removed at the end."""
        with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=self.folder) as name:
            yield Path(name)

    def start(self, engine: str, folder: Path, memory: int = MEMORY_BYTES, disk: int = DISK_BYTES) -> KvWorker:
        """A new process with the model loaded.

        Raises:
            EngineError: the engine cannot load it.
        """
        worker = KvWorker(engine, self.program)
        try:
            self.about[engine] = worker.load_with(self.model, self.cores, folder, memory, disk)
        except BaseException:
            worker.close()
            raise
        return worker


class KvWorker(Worker):
    """An engine in its own process, which can be killed."""

    def load_with(self, path: Path, threads: int, folder: Path, memory: int, disk: int) -> dict[str, Any]:
        """Loads a model that keeps its past in a folder; what the engine says of itself."""
        bounds = {"folder": str(folder), "memory": memory, "disk": disk}
        self.about = self.ask("load", path=str(path), threads=threads, context=CONTEXT_TOKENS, **bounds)
        return self.about

    def kill(self) -> None:
        """Ends the process as the system does when it has no memory left: at once, with no chance to write anything."""
        self._process.kill()
        self._process.wait()
        self.close()


class Restarted:
    """A conversation of one engine, whose process is killed and started again before each turn."""

    def __init__(self, session: Session, engine: str, folder: Path, past: Sequence[int]) -> None:
        """Computes the conversation and has it written."""
        self.engine = engine
        self._session, self._folder, self._past = session, folder, list(past)
        self._worker = session.start(engine, folder)
        try:
            self.computed_s: float = self._worker.ask("turn", tokens=self._past, num_answer=1)["first_token_s"]
            self.save_s: float = self._worker.ask("save")["save_s"]
        except BaseException:
            self.close()
            raise
        self.files = conversation_files(engine, folder)

    def again(self, new: Sequence[int], *, dropped: bool) -> dict[str, Any]:
        """The next turn in a new process; `disk_s` is what a plain read of the same files took right before.

        The new process gets memory that has just been freed: that of the old one when it loads, and a ballast's for its pages.
        """
        ballast = kv_files.Ballast(self._session.ballast_bytes)
        if kv_files.can_drop():
            kv_files.drop(self.files)
        disk_s = kv_files.plain_read_s(self.files)
        if dropped:
            kv_files.drop(self.files)
        self._worker.kill()
        self._worker = self._session.start(self.engine, self._folder)
        ballast.release()
        restored = self._worker.ask("restore")
        turn = self._worker.ask("turn", tokens=[*self._past, *new], num_answer=1)
        facts = {"load_s": self._worker.about["load_s"], "disk_s": disk_s, "touch_s": ballast.touch_s}
        return {**turn, **restored, **facts, "waited_s": restored["restore_s"] + turn["first_token_s"]}

    def in_memory(self, new: Sequence[int]) -> float:
        """Seconds to the first token of another next turn, now that the past is in memory."""
        seconds: float = self._worker.ask("turn", tokens=[*self._past, *new], num_answer=1)["first_token_s"]
        return seconds

    def close(self) -> None:
        """Ends the process."""
        self._worker.kill()
