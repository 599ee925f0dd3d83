"""What is measured: one function per group of figures of the README's table.

Engines take turns, run by run (A B C A B C), after one warm-up each, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import figures as f
from rivals import EngineError, Worker, busy_neighbours, first_output_s, headrace_command, llama_command

SHORT_TOKENS = 16
PROMPT_TOKENS = 512
CONTEXT_TOKENS = 8192
QUESTION = "Explain why the sky is blue"

Runs = dict[str, tuple[float, ...]]


@dataclass
class Session:
    """The workers, and how thoroughly to measure. `say` shows progress; `notes` collects what a reader has to know."""

    workers: Mapping[str, Worker]
    models: Mapping[str, Path]
    cores: int
    repeat: int
    gen_tokens: int
    say: Callable[[str], None]
    notes: list[str] = field(default_factory=list)
    undisturbed: float | None = None
    _loaded: dict[str, tuple[str, int]] = field(default_factory=dict)
    _unusable: set[tuple[str, str]] = field(default_factory=set)
    _prompts: int = 0

    def load(self, engine: str, model: str, threads: int) -> bool:
        """Loads a model unless it is loaded; False, and a note, where the engine cannot read it."""
        if (engine, model) in self._unusable:
            return False
        if self._loaded.get(engine) == (model, threads):
            return True
        self._loaded.pop(engine, None)
        try:
            self.workers[engine].load(self.models[model], threads, CONTEXT_TOKENS)
        except EngineError as error:
            if engine == f.OURS:
                raise
            self._unusable.add((engine, model))
            self.notes.append(f"- {f.TITLES[engine]} does not run {model}: {str(error).partition(': ')[2]}")
            return False
        self._loaded[engine] = (model, threads)
        return True

    def measure(self, model: str, threads: int, op: str, *, skip: tuple[str, ...] = (), **arguments: int) -> Runs:
        """Tokens per second of every engine: a warm-up each, then `repeat` rounds in turn."""
        engines = [name for name in self.workers if name not in skip and self.load(name, model, threads)]
        self.say(f"{op}, {model}, {threads} threads, {arguments}: {', '.join(engines)}")
        runs: dict[str, list[float]] = {engine: [] for engine in engines}
        for turn in range(self.repeat + 1):
            self._prompts += 1  # all engines get the same prompt in a round, and no prompt comes twice
            for engine in engines:
                speed = self.workers[engine].ask(op, number=self._prompts, **arguments)["tok_s"]
                if turn:
                    runs[engine].append(speed)
        return {engine: tuple(values) for engine, values in runs.items()}

    def forget(self, engine: str) -> None:
        """Makes the next `load` load anew."""
        self._loaded.pop(engine, None)

    def thread_counts(self) -> list[tuple[int, str]]:
        """One thread and all cores, with their names; once where there is one core only."""
        counts = [(1, "1 thread")]
        return counts if self.cores == 1 else [*counts, (self.cores, f"{self.cores} threads")]


def short(session: Session) -> Iterator[f.Row]:
    """Decoding with next to no past."""
    for threads, title in session.thread_counts():
        runs = session.measure("smollm2", threads, "decode", depth=SHORT_TOKENS, tokens=session.gen_tokens)
        goal = 2.0 if threads == 1 else 3.0
        session.undisturbed = statistics.median(runs[f.OURS])
        yield f.against("short", f"decode, smollm2, short context, {title}", "tok/s", runs, goal)


def depth(session: Session) -> Iterator[f.Row]:
    """Decoding with a long past."""
    for tokens, goal in ((2048, 4.0), (6144, 6.0)):
        runs = session.measure(
            "smollm2", session.cores, "decode", skip=("openvino",), depth=tokens, tokens=max(8, session.gen_tokens // 2)
        )
        name = f"decode, smollm2, {tokens:,} tokens of context, {session.cores} threads"
        yield f.against("depth", name, "tok/s", runs, goal)


def prefill(session: Session) -> list[f.Row]:
    """A prompt of 512 tokens."""
    runs = session.measure("smollm2", session.cores, "prefill", tokens=PROMPT_TOKENS)
    name = f"prefill, smollm2, {PROMPT_TOKENS} tokens, {session.cores} threads"
    rows = [f.against("prefill", name, "tok/s", runs, 5.0)]
    if "openvino" in runs:
        pair = {engine: runs[engine] for engine in (f.OURS, "openvino")}
        rows.append(f.against("prefill", "the same", "tok/s", pair, 2.0, ("openvino",)))
    return rows


def gemma3(session: Session) -> list[f.Row]:
    """The other real model."""
    at = f"{session.cores} threads"
    decoded = session.measure("gemma3", session.cores, "decode", depth=SHORT_TOKENS, tokens=session.gen_tokens)
    filled = session.measure("gemma3", session.cores, "prefill", tokens=PROMPT_TOKENS)
    return [
        f.against("gemma3", f"decode, gemma3-270m, short context, {at}", "tok/s", decoded, 1.6),
        f.against("gemma3", f"prefill, gemma3-270m, {PROMPT_TOKENS} tokens, {at}", "tok/s", filled, 2.0),
    ]


def neighbours(session: Session) -> Iterator[f.Row]:
    """Decoding while others keep cores busy."""
    if session.undisturbed is None:
        runs = session.measure("smollm2", session.cores, "decode", depth=SHORT_TOKENS, tokens=session.gen_tokens)
        session.undisturbed = statistics.median(runs[f.OURS])
    for count, goal, kept in ((1, 4.0, 0.65), (session.cores, 6.0, 0.5)):
        title = "one busy process" if count == 1 else f"{count} busy processes"
        with busy_neighbours(count):
            # a rival may fall to a few tokens per second, and neighbours live for a bounded time only
            tokens = max(16, session.gen_tokens // 2)
            runs = session.measure("smollm2", session.cores, "decode", depth=SHORT_TOKENS, tokens=tokens)
        name = f"decode, smollm2, {session.cores} threads, beside {title}"
        yield f.against("neighbours", name, "tok/s", runs, goal)
        shares = tuple(run / session.undisturbed for run in runs[f.OURS])
        yield f.at_least("neighbours", "the same", "share of undisturbed speed", shares, kept)


def bandwidth(session: Session) -> list[f.Row]:
    """How near decoding comes to the memory's limit."""
    session.say("share of the measured read bandwidth, 1 thread")
    accounts = []
    for _ in range(session.repeat):
        session.forget(f.OURS)  # a model measures the bandwidth once in its life, so each round has one of its own
        session.load(f.OURS, "smollm2", 1)
        accounts.append(session.workers[f.OURS].ask("account", tokens=session.gen_tokens))
    shares = tuple(account["bandwidth_fraction"] for account in accounts)
    limits, moved = (f.spread([account[name] for account in accounts]) for name in ("read_bandwidth_gb_s", "gb_s"))
    if max(shares) > 1.0:
        session.notes.append("- A share above 1 is no speed but a disturbed measurement of the bandwidth; it reaches nothing.")
    session.notes.append(
        f"- Read bandwidth with one thread: {limits} GB/s, measured in the same process; decoding moves {moved} GB/s."
    )
    return [f.at_least("bandwidth", "decode, smollm2, 1 thread", "share of read bandwidth", shares, 0.85, ceiling=1.0)]


def cold(session: Session) -> list[f.Row]:
    """The first token of a process that starts now, with everything cached."""
    commands = {
        f.OURS: headrace_command(session.models["smollm2"], session.cores, 2048, QUESTION),
        "llama.cpp": llama_command(session.models["smollm2"], session.cores, 2048, QUESTION),
    }
    session.say("first token from a cold process")
    present = {engine: command for engine, command in commands.items() if engine in session.workers}
    runs: dict[str, list[float]] = {engine: [] for engine in present}
    for turn in range(session.repeat + 1):
        for engine, command in present.items():
            seconds = first_output_s(command)
            if turn:
                runs[engine].append(seconds)
    ours, theirs = (statistics.median(runs[e]) if e in runs else None for e in (f.OURS, "llama.cpp"))
    ratio = theirs / ours if ours and theirs else None
    reached = None if ours is None else ours < max(1.0, theirs or 0.0)
    return [f.Row("cold", "first token from a cold process, smollm2", "s", runs, "below llama.cpp or 1.0", ratio, reached)]


def first_start(session: Session) -> list[f.Row]:
    """The first start ever: compiling the kernels and packing the model, in an empty home."""
    session.say("first start with an empty home")
    runs = []
    for _ in range(min(session.repeat, 3)):
        with tempfile.TemporaryDirectory() as home:
            command = headrace_command(session.models["smollm2"], session.cores, 2048, QUESTION)
            runs.append(first_output_s(command, {**os.environ, "HEADRACE_HOME": home}))
    return [f.at_most("first-start", "first start ever until the first token, smollm2", "s", runs, 20.0)]


def memory(session: Session) -> list[f.Row]:
    """Resident memory with a long past."""
    runs: Runs = {}
    session.say("resident memory")
    overhead = 0.0
    for engine, worker in session.workers.items():
        if engine == "llama.cpp-no-fa" or not session.load(engine, "smollm2", session.cores):
            continue
        worker.ask("decode", depth=2048, tokens=8)
        if (rss_mb := worker.ask("memory")["rss_mb"]) is None:
            session.notes.append("- Resident memory cannot be read on this system.")
            return []
        runs[engine] = (rss_mb,)
        if engine == f.OURS:
            account = worker.ask("account", tokens=8)
            overhead = rss_mb - account["weights_mb"] - account["kv_mb"]
    return [
        f.Row("memory", "resident memory, smollm2, 2,048 tokens of context", "MB", runs),
        f.at_most("memory", "the same beyond packed weights and KV", "MB", (overhead,), 250.0),
    ]


SECTIONS: dict[str, Callable[[Session], Iterable[f.Row]]] = {
    "short": short,
    "neighbours": neighbours,
    "depth": depth,
    "prefill": prefill,
    "bandwidth": bandwidth,
    "gemma3": gemma3,
    "cold": cold,
    "memory": memory,
    "first-start": first_start,
}
