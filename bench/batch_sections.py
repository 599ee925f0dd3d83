"""What is measured of many requests at once: one function per row of the table of goals.

Engines take turns, run by run, each in a process of its own; prompts are random, and no two of a run are the same unless they
are meant to be known.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import kv_figures as f
from rivals import EngineError, Worker

OURS = "headrace"
PROGRAM = (sys.executable, str(Path(__file__).with_name("batch_worker.py")))
TITLES = {
    "llama.cpp": "llama.cpp",
    "llama.cpp-no-fa": "llama.cpp, no flash attention",
    "build": "llama.cpp, other build",
    "build-no-fa": "llama.cpp, other build, no flash attention",
}
GOALS = {"llama.cpp": 8.0, "build": 3.0}
"""How many times the speed of the wheel, and of another build that was made for this machine."""
GOAL_STREAMS = (16, 64)
BOUND_SHARE = 0.75
SAMPLED_SHARE = 0.95
PICK_STREAMS, PICK_TOKENS = 4, 16
DECODED_TOKENS = 1024
"""Of all streams in one round, unless that is too few or too many for one of them."""
MARGIN_TOKENS = 32
SHARED_STREAMS, SHARED_TOKENS, APART_TOKENS, OWN_TOKENS = 16, 4000, 500, 16
SHARED_SHARE = 0.6
BURST_PROMPTS, BURST_PROMPT_TOKENS, BURST_ANSWER_TOKENS = 64, 100, 64
RUNNING_STREAMS, LONG_TOKENS = 8, 8000
WAITING_PROMPTS, WAITING_TOKENS, SHORT_TOKENS = 4, 4000, 50
OUTSIDE_STREAMS, OUTSIDE_SHARE = 16, 0.08
QUEUED_REQUESTS, RUNNING_REQUESTS, TURN_US = 1000, 64, 200.0


@dataclass
class Session:
    """The workers, and how thoroughly to measure. Use it in a `with` block, which ends all workers.

    `say` shows progress; `notes` collects what a reader has to know. `flash` says with which setting of flash attention a
    rival is measured: "on" (as it comes), "off", or "better", which is found out with 4 streams.
    """

    model: Path
    cores: int
    repeat: int
    streams: Sequence[int]
    depth: int
    rivals: Sequence[str]
    say: Callable[[str], None]
    flash: str = "better"
    sampled: bool = True
    rival_path: Path | None = None
    program: Sequence[str] = PROGRAM
    notes: list[str] = field(default_factory=list)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)
    _workers: dict[str, Worker] = field(default_factory=dict)
    _shapes: dict[str, tuple[int, int]] = field(default_factory=dict)
    _picked: dict[str, str] = field(default_factory=dict)
    _speeds: dict[int, dict[tuple[str, bool], list[float]]] = field(default_factory=dict)
    measured_limits: dict[str, Any] | None = None
    _prompts: int = 10_000

    def numbers(self, count: int = 1) -> int:
        """The first of `count` numbers of prompts that nobody has had."""
        self._prompts += count + 1
        return self._prompts - count

    def ask(self, engine: str, op: str, slots: int = 1, context: int = 1, **arguments: Any) -> dict[str, Any]:
        """Asks an engine that has at least so many slots, each of at least so many tokens; starts it again if it has not.

        Only one rival has a process at a time: memory is not to run short.

        Raises:
            EngineError: it cannot do it.
        """
        has_slots, has_context = self._shapes.get(engine, (0, 0))
        if engine not in self._workers or (engine != OURS and (has_slots != slots or has_context < context)):
            for other in [name for name in self._workers if name == engine or OURS not in {name, engine}]:
                self._shapes.pop(other, None)
                self._workers.pop(other).close()
            path = ("--path", str(self.rival_path)) if engine.startswith("build") else ()
            worker = self._workers[engine] = Worker(engine, (*self.program, *path))
            arguments_of_load = {"threads": self.cores, "slots": slots, "context": context}
            self.about[engine] = worker.ask("load", path=str(self.model), **arguments_of_load)
            self._shapes[engine] = (slots, context)
        return self._workers[engine].ask(op, **arguments)

    def probe(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Has our engine measure something inside itself."""
        return self.ask(OURS, "probe", name=name, **arguments)

    def picked(self) -> dict[str, str]:
        """The engine to ask of each rival: with flash attention or without, whichever is quicker with 4 streams."""
        if self.flash != "better":
            return {rival: rival if self.flash == "on" else f"{rival}-no-fa" for rival in self.rivals}
        for rival in self.rivals:
            if rival in self._picked:
                continue
            speeds = {}
            for engine in (rival, f"{rival}-no-fa"):
                self.say(f"which setting of flash attention is better: {engine}")
                runs = self._decode_runs(
                    {engine: self.numbers(PICK_STREAMS)}, PICK_STREAMS, self.depth, PICK_TOKENS, (False,), 2
                )
                speeds[engine] = statistics.median(runs[engine, False])
            self._picked[rival] = max(speeds, key=lambda engine: speeds[engine])
            told = ", ".join(f"{TITLES[engine]} {speed:.3g}" for engine, speed in speeds.items())
            self.notes.append(f"- {PICK_STREAMS} streams, tok/s: {told}; all that follows is against the better setting.")
        return dict(self._picked)

    def decoded(self, streams: int) -> dict[tuple[str, bool], list[float]]:
        """Speeds by engine (ours, and rivals by their own name) and by whether tokens were sampled; measured once."""
        if streams not in self._speeds:
            rivals = self.picked()
            tokens = decode_tokens(streams)
            first = self.numbers(streams)
            engines = {OURS: first, **dict.fromkeys(rivals.values(), first)}
            modes = (False, True) if self.sampled else (False,)
            self.say(f"{streams} streams on top of {self.depth} tokens, {tokens} tokens each")
            runs = self._decode_runs(engines, streams, self.depth, tokens, modes, self.repeat)
            told = (f"{engine}{' sampled' * mode} {statistics.median(each):.4g}" for (engine, mode), each in runs.items())
            self.say(f"{streams} streams, tok/s: {', '.join(told)}")  # a run that is ended early has said this much
            names = {OURS: OURS, **{engine: rival for rival, engine in rivals.items()}}
            self._speeds[streams] = {(names[engine], sampled): each for (engine, sampled), each in runs.items()}
        return self._speeds[streams]

    def _decode_runs(
        self, engines: dict[str, int], streams: int, own: int, tokens: int, modes: Sequence[bool], repeat: int
    ) -> dict[tuple[str, bool], list[float]]:
        """Has engines learn the prompts, and measures them in turn after a warm-up of each mode."""
        rivals = [engine for engine in engines if engine != OURS]
        slots = {"slots": streams, "context": own + tokens + MARGIN_TOKENS}
        runs: dict[tuple[str, bool], list[float]] = {(engine, mode): [] for engine in engines for mode in modes}
        # Rivals cannot all be there at once: each is measured beside all rounds of ours, or ours is asked once only.
        for group in [[OURS, rival] for rival in rivals] or [[OURS]]:
            for engine in [name for name in group if name in engines]:
                self.ask(engine, "know", **slots, first=engines[engine], count=streams, shared=0, own=own)
            for number in range(repeat + 1):
                for engine, mode in [(name, mode) for name in group if name in engines for mode in modes]:
                    asked = {"count": streams, "shared": 0, "own": own, "sampled": mode}
                    few = min(tokens, 8) if number == 0 else tokens
                    reply = self.ask(engine, "decode", **slots, first=engines[engine], tokens=few, **asked)
                    if number:
                        runs[engine, mode].append(reply["tok_s"])
                        self._check_known(engine, reply["computed_tokens"], own)
        return runs

    def _check_known(self, engine: str, computed_tokens: int, own: int) -> None:
        note = f"- {engine}: prompts that should have been known were computed again, {computed_tokens} of {own} tokens."
        if computed_tokens > own // 4 and note not in self.notes:
            self.notes.append(note)

    def limits(self) -> dict[str, Any]:
        """What `batch_probes.limits` says, with the depth that streams have on average; measured once."""
        if self.measured_limits is None:
            self.say("this machine's bandwidth and arithmetic")
            depth = self.depth + decode_tokens(max(self.streams)) // 2
            self.measured_limits = self.probe("limits", counts=list(self.streams), depth=depth)
            bandwidth, arithmetic = (self.measured_limits[name] / 1e9 for name in ("bytes_per_s", "macs_per_s"))
            self.notes.append(
                f"- Bound: a step takes the longer of its ledger's bytes at {bandwidth:.3g} GB/s "
                f"(what the team reads from memory) and its multiplications at {arithmetic:.3g} GMAC/s "
                "(what the matrix products of a step of 256 tokens reach, other operations left out; best of 5)."
            )
        return self.measured_limits

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.ExitStack() as stack:
            for worker in self._workers.values():
                stack.push(worker)  # an error reaches each of them: they are ended at once then
            self._workers = {}
            if error is not None:
                raise error


def decode_tokens(streams: int) -> int:
    """How many tokens each of so many streams generates in a round."""
    return max(16, min(96, DECODED_TOKENS // streams))


def bound_step_s(num_bytes: float, macs: float, bytes_per_s: float, macs_per_s: float) -> float:
    """The shortest time of a step: its bytes and its multiplications at the machine's limits, whichever takes longer."""
    return max(num_bytes / bytes_per_s, macs / macs_per_s)


def titled(streams: int) -> str:
    """Streams in words."""
    return "1 stream" if streams == 1 else f"{streams} streams"


def greedy(session: Session) -> Iterator[f.Figure]:
    """Speed of greedy streams, against llama.cpp and against the machine's bound."""
    for streams in session.streams:
        speeds = session.decoded(streams)
        ours = speeds[OURS, False]
        name = f"{titled(streams)}, greedy, {session.depth} tokens of context"
        if not session.rivals:
            yield f.Figure("greedy", name, "tok/s", ours)
        for rival in session.rivals:
            goal = GOALS[rival] if streams in GOAL_STREAMS else None
            against = TITLES[session.picked()[rival]]
            yield f.faster("greedy", name, "tok/s", ours, against, speeds[rival, False], goal)
        limits = session.limits()
        step = next(each for each in limits["steps"] if each["streams"] == streams)
        step_s = bound_step_s(step["bytes"], step["macs"], limits["bytes_per_s"], limits["macs_per_s"])
        shares = [speed * step_s / streams for speed in ours]
        if streams in GOAL_STREAMS:
            share = f.at_least("greedy", name, "share of the bound", shares, BOUND_SHARE)
        else:
            share = f.Figure("greedy", name, "share of the bound", shares)
        yield share.beside("bound, tok/s", [streams / step_s])


def sampled(session: Session) -> Iterator[f.Figure]:
    """Speed with temperature 0.8 and top-p 0.95, against greedy."""
    for streams in session.streams:
        speeds = session.decoded(streams)
        name = f"{titled(streams)}, temperature 0.8, top-p 0.95"
        shares = [a / b for a, b in zip(speeds[OURS, True], speeds[OURS, False], strict=True)]
        yield f.at_least("sampled", name, "share of greedy", shares, SAMPLED_SHARE).beside("tok/s", speeds[OURS, True])
        for rival in session.rivals:
            against = TITLES[session.picked()[rival]]
            yield f.faster("sampled", name, "tok/s", speeds[OURS, True], against, speeds[rival, True])


def shared(session: Session) -> list[f.Figure]:
    """Streams that share a long beginning, against streams with a short one of their own."""
    tokens = decode_tokens(SHARED_STREAMS)
    cases = {"shared": (SHARED_TOKENS, OWN_TOKENS), "apart": (0, APART_TOKENS), "shared short": (APART_TOKENS, OWN_TOKENS)}
    runs: dict[str, list[float]] = {case: [] for case in cases}
    asked = {}
    for case, (both, own) in cases.items():
        session.say(f"shared beginnings: {both} tokens shared, {own} of each stream's own")
        asked[case] = {"first": session.numbers(SHARED_STREAMS), "count": SHARED_STREAMS, "shared": both, "own": own}
        session.ask(OURS, "know", **asked[case])
    for number in range(session.repeat + 1):
        for case, arguments in asked.items():
            speed = session.ask(OURS, "decode", **arguments, tokens=tokens if number else 8, sampled=False)["tok_s"]
            if number:
                runs[case].append(speed)
    name = f"{SHARED_STREAMS} streams that share {SHARED_TOKENS:,} tokens"
    shares = {case: [a / b for a, b in zip(runs["shared"], runs[case], strict=True)] for case in ("apart", "shared short")}
    unit = f"share of their speed with {APART_TOKENS} tokens"
    return [
        f.Figure("shared", name, "tok/s", runs["shared"], f"{APART_TOKENS} tokens of their own, tok/s", runs["apart"]),
        f.at_least("shared", name, unit, shares["apart"], SHARED_SHARE),
        f.Figure("shared", name, f"{unit}, shared too", shares["shared short"], "these, tok/s", runs["shared short"]),
    ]


def burst(session: Session) -> Iterator[f.Figure]:
    """Many short prompts at once, until the last answer ends."""
    context = session.depth + decode_tokens(BURST_PROMPTS) + MARGIN_TOKENS  # the shape that `greedy` has left behind
    context = max(context, BURST_PROMPT_TOKENS + BURST_ANSWER_TOKENS + MARGIN_TOKENS)
    rivals = session.picked()
    ours: list[float] = []
    theirs: dict[str, list[float]] = {rival: [] for rival in rivals}
    for number in range(session.repeat):
        session.say(f"{BURST_PROMPTS} prompts at once: round {number + 1} of {session.repeat}")
        first = session.numbers(BURST_PROMPTS)
        asked = {"first": first, "count": BURST_PROMPTS, "own": BURST_PROMPT_TOKENS, "tokens": BURST_ANSWER_TOKENS}
        ours.append(session.ask(OURS, "burst", **asked)["seconds"])
        for rival, engine in rivals.items():
            theirs[rival].append(session.ask(engine, "burst", slots=BURST_PROMPTS, context=context, **asked)["seconds"])
    name = (
        f"{BURST_PROMPTS} prompts of {BURST_PROMPT_TOKENS} tokens at once, {BURST_ANSWER_TOKENS} tokens each, to the last end"
    )
    if not rivals:
        yield f.Figure("burst", name, "s", ours)
    for rival, engine in rivals.items():
        yield f.quicker("burst", name, ours, TITLES[engine], theirs[rival], GOALS[rival])


def beside(session: Session) -> list[f.Figure]:
    """A long prompt beside running streams: what it does to them, and they to it."""
    alone, with_them, over_undisturbed, over_median = [], [], [], []
    for number in range(session.repeat):
        session.say(f"a prompt of {LONG_TOKENS:,} tokens beside {RUNNING_STREAMS} streams: round {number + 1}")
        alone.append(session.probe("first_token", number=session.numbers(), tokens=LONG_TOKENS)["first_token_s"])
        first = session.numbers(RUNNING_STREAMS + 1)
        seen = session.probe("beside", first=first, streams=RUNNING_STREAMS, own=session.depth, tokens=LONG_TOKENS)
        with_them.append(seen["first_token_s"])
        over_undisturbed.append(max(seen["gaps_s"]) / seen["undisturbed_s"])
        over_median.append(max(seen["gaps_s"]) / statistics.median(seen["gaps_s"] or [1.0]))
    prompt = f"a prompt of {LONG_TOKENS:,} tokens beside {RUNNING_STREAMS} streams"
    shares = [a / b for a, b in zip(with_them, alone, strict=True)]
    return [
        f.at_most("beside", f"{prompt}: longest gap between their tokens", "times that undisturbed", over_undisturbed, 4.0),
        f.Figure("beside", "the same", "times the median gap beside it", over_median),
        f.at_most("beside", f"{prompt}: its first token", "times alone", shares, 1.5).beside("alone, s", alone),
    ]


def queue(session: Session) -> list[f.Figure]:
    """A short prompt that comes while long ones wait."""
    alone, loaded = [], []
    for number in range(session.repeat):
        session.say(f"a prompt of {SHORT_TOKENS} tokens while {WAITING_PROMPTS} of {WAITING_TOKENS:,} wait: round {number + 1}")
        alone.append(session.probe("first_token", number=session.numbers(), tokens=SHORT_TOKENS)["first_token_s"])
        first = session.numbers(WAITING_PROMPTS + 1)
        asked = {"waiting": WAITING_PROMPTS, "waiting_tokens": WAITING_TOKENS, "tokens": SHORT_TOKENS}
        loaded.append(session.probe("queue", first=first, **asked)["first_token_s"])
    idle_s = statistics.median(alone)
    name = f"first token of {SHORT_TOKENS} tokens while {WAITING_PROMPTS} prompts of {WAITING_TOKENS:,} wait"
    figure = f.at_most("queue", name, "times an idle engine's", [each / idle_s for each in loaded], 5.0)
    return [figure.beside("idle engine, s", alone)]


def outside(session: Session) -> list[f.Figure]:
    """Time that is spent outside of compiled code."""
    runs = []
    for number in range(session.repeat):
        session.say(f"time outside compiled code: round {number + 1}")
        asked = {"streams": OUTSIDE_STREAMS, "own": session.depth, "tokens": decode_tokens(OUTSIDE_STREAMS)}
        runs.append(session.probe("outside", first=session.numbers(OUTSIDE_STREAMS), **asked)["share"])
    name = f"time outside compiled code, {OUTSIDE_STREAMS} streams"
    return [f.at_most("outside", name, "share", runs, OUTSIDE_SHARE)]


def turns(session: Session) -> list[f.Figure]:
    """The scheduler alone."""
    asked = {"waiting": QUEUED_REQUESTS, "running": RUNNING_REQUESTS}
    runs = [session.probe("turn", **asked)["turn_us"] for _ in range(session.repeat)]
    if None in runs:
        raise EngineError("there is no headrace.engine.scheduler here")
    name = f"the scheduler's turn, {QUEUED_REQUESTS:,} waiting and {RUNNING_REQUESTS} running"
    return [f.at_most("turns", name, "us", runs, TURN_US)]


SECTIONS: dict[str, Callable[[Session], Iterable[f.Figure]]] = {
    "greedy": greedy,
    "sampled": sampled,
    "burst": burst,
    "shared": shared,
    "beside": beside,
    "queue": queue,
    "outside": outside,
    "turns": turns,
}
