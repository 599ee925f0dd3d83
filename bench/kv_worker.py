"""One engine in one process, for what `kv.py` measures: driven by JSON lines, killed at any moment.

    python bench/kv_worker.py headrace | llama.cpp | llama.cpp-no-fa

A request names a method of the engine and its arguments; the answer is what it returns. Both engines do the same with a
conversation: `turn` answers a prompt that begins with it, `save` waits until it is on disk (`conversation_files` says where),
and `restore` brings back what the engine does not find by itself.

Does not know: what is compared with what, how often, and what the figures are for.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from workers import llama_params, llama_timings, serve

SLOT_FILE = "conversation.bin"


class Engine(Protocol):
    """What a worker can do with an engine. Times are in seconds."""

    def load(self, path: str, threads: int, context: int, folder: str, memory: int, disk: int) -> dict[str, Any]:
        """Loads a model that keeps its past in `folder`, within bounds in bytes; 0 `disk` keeps nothing there."""

    def turn(self, tokens: list[int], num_answer: int) -> dict[str, Any]:
        """Answers a prompt greedily; first_token_s, from being asked to the first token, and the answer's tokens."""

    def save(self) -> dict[str, Any]:
        """Waits until the conversation is on disk."""

    def restore(self) -> dict[str, Any]:
        """Brings the conversation back from disk as far as `turn` does not."""

    def probe(self, name: str, **arguments: int) -> dict[str, Any]:
        """Measures something inside the engine: see `kv_probes.py`."""


class Headrace(Engine):
    """This project, as its users drive it. It finds, reads and writes the past by itself."""

    def __init__(self) -> None:
        self._model: Any = None

    def load(self, path: str, threads: int, context: int, folder: str, memory: int, disk: int) -> dict[str, Any]:
        """Loads a model, after closing the one before."""
        import headrace

        if self._model is not None:
            self._model.close()
        self._model = headrace.load(path, threads=threads, context=context, kv_dir=folder, kv_memory=memory, kv_disk=disk)
        build = f"kernels {self._model.cpu_level}"
        return {
            "version": headrace.__version__,
            "build": build,
            "load_s": self._model.load_s,
            "page_bytes": self._model.page_bytes(),
        }

    def turn(self, tokens: list[int], num_answer: int) -> dict[str, Any]:
        """Answers a prompt, and says where its past came from."""
        start = time.perf_counter()
        answer = self._model.generate_ids(tokens, max_tokens=num_answer, ignore_end=True)
        next(answer)
        first_token_s = time.perf_counter() - start
        answer.text()
        result = answer.result
        reuse = result.reuse
        return {
            "first_token_s": first_token_s,
            "read_s": reuse.load_s,
            "answer": list(result.token_ids),
            "memory_tokens": reuse.memory_tokens,
            "disk_tokens": reuse.disk_tokens,
            "computed_tokens": reuse.computed_tokens,
            "misses": [[miss.reason, miss.num_tokens] for miss in reuse.misses],
            "written_bytes": self._model.cache.counters.written_bytes,
            "refused_pages": self._model.cache.counters.refused_pages,
        }

    def save(self) -> dict[str, Any]:
        """Waits until what is queued is written; how long that took."""
        start = time.perf_counter()
        self._model.cache.flush()
        return {"save_s": time.perf_counter() - start}

    def restore(self) -> dict[str, Any]:
        """Nothing: a turn finds its past itself."""
        return {"restore_s": 0.0}

    def probe(self, name: str, **arguments: int) -> dict[str, Any]:
        """Runs one of the probes."""
        import kv_probes

        return kv_probes.PROBES[name](self._model, **arguments)


class LlamaCpp(Engine):
    """llama.cpp as xllamacpp builds it, with the settings of `workers.py`; one slot, saved and restored over its HTTP."""

    def __init__(self, flash_attention: str = "AUTO") -> None:
        self._flash_attention = flash_attention
        self._server: Any = None

    def load(self, path: str, threads: int, context: int, folder: str, memory: int, disk: int) -> dict[str, Any]:
        """Starts the server."""
        import importlib.metadata

        import xllamacpp

        del memory, disk  # a slot has memory for its context, and a file is as long as it is
        start = time.perf_counter()
        params = llama_params(path, threads, context, self._flash_attention)
        params.port = 0  # any that is free
        params.slot_save_path = f"{folder}{os.sep}"
        self._server = xllamacpp.Server(params)
        return {
            "version": importlib.metadata.version("xllamacpp"),
            "build": "slots over HTTP, answers in the process",
            "load_s": time.perf_counter() - start,
        }

    def turn(self, tokens: list[int], num_answer: int) -> dict[str, Any]:
        """Answers a prompt on top of what the slot holds of it."""
        start = time.perf_counter()
        timings = llama_timings(self._server, tokens, num_answer, cache_prompt=True, id_slot=0)
        seconds = time.perf_counter() - start
        return {
            "first_token_s": seconds - timings["predicted_ms"] / 1e3,
            "read_s": 0.0,
            "disk_tokens": timings["cache_n"],
            "computed_tokens": timings["prompt_n"],
        }

    def save(self) -> dict[str, Any]:
        """Writes the slot to its file; how long that took."""
        return {"save_s": self._slot("save")}

    def restore(self) -> dict[str, Any]:
        """Reads the slot from its file; how long that took."""
        return {"restore_s": self._slot("restore")}

    def _slot(self, action: str) -> float:
        import urllib.request

        request = urllib.request.Request(
            f"{self._server.listening_address}/slots/0?action={action}",
            json.dumps({"filename": SLOT_FILE}).encode(),
            {"Content-Type": "application/json"},
        )
        start = time.perf_counter()
        with urllib.request.urlopen(request) as reply:
            done = json.loads(reply.read())
        if not done.get("n_saved", done.get("n_restored")):
            raise RuntimeError(f"llama.cpp answers {done}")
        return time.perf_counter() - start

    def probe(self, name: str, **arguments: int) -> dict[str, Any]:
        """There are none.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"no probe {name} {arguments} in llama.cpp")


ENGINES = {"headrace": Headrace, "llama.cpp": LlamaCpp, "llama.cpp-no-fa": lambda: LlamaCpp("DISABLED")}


def conversation_files(engine: str, folder: Path) -> list[Path]:
    """The files in which an engine keeps conversations below its folder."""
    return sorted(folder.rglob("*.run" if engine == "headrace" else SLOT_FILE))


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """Does what one request asks for."""
    op = request.pop("op")
    if op not in {"load", "turn", "save", "restore", "probe"}:
        raise ValueError(f"unknown request {op!r}")
    done: dict[str, Any] = getattr(engine, op)(**request)
    return done


if __name__ == "__main__":
    serve(ENGINES[sys.argv[1]](), answer)
