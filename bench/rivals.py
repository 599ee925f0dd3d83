"""The processes that a comparison runs: one worker per engine, busy neighbours, and cold starts.

Every process has an end: workers end with their standard input, even while they compute, neighbours at a deadline of their
own, cold starts by a time limit.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

WORKERS = Path(__file__).with_name("workers.py")
NEIGHBOUR_LIFETIME_S = 900
COLD_START_LIMIT_S = 300

_NEIGHBOUR = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"

_LLAMA_FIRST_TOKEN = """
import sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, threads, params.n_ctx = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params.n_parallel, params.warmup, params.ui, params.verbosity = 1, False, False, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
server = xllamacpp.Server(params)
request = {"messages": [{"role": "user", "content": sys.argv[4]}], "max_tokens": 1, "temperature": 0}
print(server.handle_chat_completions(request)["choices"][0]["message"]["content"], flush=True)
"""


class EngineError(Exception):
    """An engine cannot do what it was asked for; the message is its own."""


class Worker:
    """An engine in its own process. Close it, or use it in a `with` block."""

    def __init__(self, engine: str, program: Sequence[str] = (sys.executable, str(WORKERS))) -> None:
        self.engine = engine
        self.about: dict[str, Any] = {}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, what the engine prints; closed in close()
        self._process = subprocess.Popen(
            [*program, engine], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, encoding="utf-8"
        )

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Sends a request and waits for the answer.

        Raises:
            EngineError: the engine failed, or its process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"{self.engine} ended with exit code {self._process.wait()}: {self._last_words()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise EngineError(f"{self.engine}: {reply['error']}")
        return reply

    def load(self, path: Path, threads: int, context: int) -> None:
        """Loads a model and remembers what the engine says of itself."""
        self.about = self.ask("load", path=str(path), threads=threads, context=context)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._process.kill()  # it may be computing for minutes, and nobody waits for that any more
        self.close()


@contextlib.contextmanager
def busy_neighbours(count: int, lifetime_s: float = NEIGHBOUR_LIFETIME_S) -> Iterator[None]:
    """Processes that never sleep, pinned to nothing; they end with the block, or at their deadline if we are killed."""
    processes = [subprocess.Popen([sys.executable, "-c", _NEIGHBOUR, str(lifetime_s)]) for _ in range(count)]
    try:
        time.sleep(0.5 if count else 0.0)  # they have started by then, and the scheduler has spread them
        yield
        if any(process.poll() is not None for process in processes):
            raise EngineError(f"a busy neighbour ended before the measurement did: it takes more than {lifetime_s} s")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def installed(engine: str) -> bool:
    """Whether the package of an engine can be imported."""
    package = {"openvino": "openvino_genai", "headrace": "headrace"}.get(engine, "xllamacpp")
    return importlib.util.find_spec(package) is not None


def headrace_command(model: Path, threads: int, context: int, text: str) -> list[str]:
    """The command line that a user would type, for one token."""
    options = ["--max-tokens", "1", "--temperature", "0", "--threads", str(threads), "--context", str(context)]
    return [sys.executable, "-m", "headrace", "run", text, "--model", str(model), *options]


def llama_command(model: Path, threads: int, context: int, text: str) -> list[str]:
    """The shortest program that gives the same token with xllamacpp; without warm-up, which only costs time here."""
    return [sys.executable, "-c", _LLAMA_FIRST_TOKEN, str(model), str(threads), str(context), text]


def first_output_s(command: Sequence[str], environment: dict[str, str] | None = None) -> float:
    """Seconds from starting a process to the first byte on its standard output.

    Raises:
        EngineError: it ended without one, or took longer than COLD_START_LIMIT_S.
    """
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment, bufsize=0)
        assert process.stdout is not None
        with process.stdout:
            first = process.stdout.read(1)
            seconds = time.perf_counter() - start
            process.stdout.read()
        try:
            exit_code = process.wait(timeout=COLD_START_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise EngineError(f"{command[:4]} did not end within {COLD_START_LIMIT_S} s") from None
        if not first or exit_code:
            log.seek(0)
            said = log.read().decode("utf-8", errors="replace").strip().splitlines()
            raise EngineError(f"{command[:4]} ended with exit code {exit_code}: {said[-1] if said else 'it said nothing'}")
        return seconds
