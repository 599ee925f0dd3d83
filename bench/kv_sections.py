"""What is measured of the memory of the past: one function per row of the table of goals."""

from __future__ import annotations

import contextlib
import shutil
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import starmap
from pathlib import Path
from typing import Any

import kv_figures as f
import kv_files
import kv_policies
from figures import TITLES, spread
from headrace.kv.pages import pages_for
from headrace.model.step import PAGE_TOKENS
from kv_session import MEMORY_BYTES, Restarted, Session
from rivals import EngineError
from workers import prompt

OURS = "headrace"
RIVALS = {"llama.cpp": 2.0, "llama.cpp-no-fa": None}
"""How many times quicker than this rival; None: for comparison only."""
RESTART_TOKENS = 4000
TURN_TOKENS = 20
CONVERSATION_TOKENS = 2000
HOT_CONVERSATIONS = 10
ANSWER_TOKENS = 4
REVISITS = 2
NEW_TOKENS = TURN_TOKENS + 1
"""Of a turn: its own, and the last one of the answer before, which was chosen and never computed."""
OVERHEAD_ANSWER_TOKENS = 256
LIVE_TOKENS = 512
FORMAT_TOKENS = 2048


def restart(session: Session) -> Iterator[f.Figure]:
    """A conversation whose process is killed: its next turn against computing it, reading its bytes, and llama.cpp's slots."""
    past = prompt(RESTART_TOKENS, session.number())
    with contextlib.ExitStack() as stack:
        restarted = {}
        for engine in session.engines:
            session.say(f"restart: {engine} computes {RESTART_TOKENS:,} tokens and writes them")
            folder = stack.enter_context(session.temporary_folder())
            try:
                restarted[engine] = Restarted(session, engine, folder, past)
            except EngineError as error:
                if engine == OURS:
                    raise
                session.notes.append(f"- {TITLES[engine]}: slots cannot be saved here: {error}.")
                continue
            stack.callback(restarted[engine].close)
        ours = restarted[OURS]
        # little memory, so that pages are used again; and a warm-up, as a process that has just started computes a bit slower
        afresh_folder = stack.enter_context(session.temporary_folder())
        afresh = stack.enter_context(session.start(OURS, afresh_folder, MEMORY_BYTES // 4, 0))
        afresh.ask("turn", tokens=prompt(RESTART_TOKENS // 8, session.number()), num_answer=1)
        modes = {False: "files in the page cache", True: "files dropped from it"}
        if not kv_files.can_drop():
            del modes[True]
            session.notes.append("- Files cannot be dropped from this system's cache: they were read from it only.")
        turns: dict[tuple[str, bool], list[dict[str, Any]]] = {(e, d): [] for e in restarted for d in modes}
        computed_s, in_memory_s = [], []
        for number in range(session.repeat):
            session.say(f"restart: round {number + 1} of {session.repeat}")
            for dropped in modes:
                new = prompt(TURN_TOKENS, session.number())
                for engine, conversation in restarted.items():
                    turns[engine, dropped].append(conversation.again(new, dropped=dropped))
            in_memory_s.append(ours.in_memory(prompt(TURN_TOKENS, session.number())))
            whole = prompt(RESTART_TOKENS + TURN_TOKENS, session.number())
            computed_s.append(afresh.ask("turn", tokens=whole, num_answer=1)["first_token_s"])
        session.notes += _restart_notes(session, ours, turns, in_memory_s)
    for dropped, title in modes.items():
        yield from _restart_figures(title, turns, dropped, computed_s)


def _restart_figures(
    title: str, turns: dict[tuple[str, bool], list[dict[str, Any]]], dropped: bool, computed_s: list[float]
) -> Iterator[f.Figure]:
    ours = turns[OURS, dropped]
    waited_s = [turn["waited_s"] for turn in ours]
    name = f"first token of the next turn after a restart, {RESTART_TOKENS:,} tokens, {title}"
    again = sum(turn["computed_tokens"] for turn in ours) - TURN_TOKENS * len(ours)
    if again:
        name += f" ({again:,} known tokens computed again)"
    yield f.quicker("restart", name, waited_s, "computing them", computed_s, 20.0)
    disk_s = [turn["disk_s"] for turn in ours]
    times, times_reading = ([turn[part] / turn["disk_s"] for turn in ours] for part in ("waited_s", "read_s"))
    unit = "times a plain read"
    yield f.at_most("restart", f"the same, {title}", unit, times, 1.5).beside("a plain read, s", disk_s)
    yield f.Figure("restart", f"reading and checking them alone, {title}", unit, times_reading)
    for engine, goal in RIVALS.items():
        against = f"{TITLES[engine]}, slot restored"
        if (engine, dropped) in turns:
            theirs_s = [turn["waited_s"] for turn in turns[engine, dropped]]
            yield f.quicker("restart", f"the same, {title}", waited_s, against, theirs_s, goal)
        elif goal:
            yield f.Figure("restart", f"the same, {title}", "s", waited_s, against, goal=f"{goal:g}x")


def _restart_notes(
    session: Session, ours: Restarted, turns: dict[tuple[str, bool], list[dict[str, Any]]], in_memory_s: list[float]
) -> Iterator[str]:
    own = [turn for (engine, _), each in turns.items() if engine == OURS for turn in each]
    gigabytes = kv_files.total_bytes(ours.files) / 1e9
    speeds = [gigabytes / turn["disk_s"] for turn in own]
    yield (
        f"- Restart: pages take {gigabytes * 1e3:,.1f} MB in {len(ours.files)} files, which were complete "
        f"{ours.save_s:.2f} s after the answer; the process was killed (SIGKILL) after that, and before every later turn. "
        f"Loading the model in the new process took {spread([turn['load_s'] for turn in own])} s, and comes on top of all "
        f"of these times. With its past in memory, a turn of {TURN_TOKENS} tokens takes {spread(in_memory_s)} s to its first "
        "token."
    )
    yield (
        f"- A plain read of these files, dropped from the page cache before, in pieces of 1 MiB into one buffer: "
        f"{spread(speeds)} GB/s, measured right before each restart. The host of a virtual machine may take back memory that "
        "its guest has freed, and whoever uses it next waits for it: so each process starts when the one before has just been "
        f"killed, and {session.ballast_bytes / 1e6:,.0f} MB that the benchmark holds are freed when it has loaded. To use them "
        f"for the first time took {spread([turn['touch_s'] for turn in own])} s."
    )
    for engine in RIVALS:
        theirs = [turn for (name, _), each in turns.items() if name == engine for turn in each]
        if theirs:
            known = min(turn["disk_tokens"] for turn in theirs)
            yield (
                f"- {TITLES[engine]}: the slot is saved and restored over its server's HTTP, the turn asked in the process. "
                f"Restoring took {spread([turn['restore_s'] for turn in theirs])} s; {known:,} tokens were found in the slot; "
                f"loading took {spread([turn['load_s'] for turn in theirs])} s, and comes on top as well."
            )


def conversations(session: Session) -> Iterator[f.Figure]:
    """Many conversations, in turn, with memory for a few of them."""
    count = session.conversations
    longest = CONVERSATION_TOKENS + REVISITS * (TURN_TOKENS + ANSWER_TOKENS) + ANSWER_TOKENS
    with session.temporary_folder() as folder:
        with session.start(OURS, folder) as worker:
            page_bytes = worker.about["page_bytes"]
        _check_room(session, folder, count * pages_for(longest) * page_bytes)
        memory = min(HOT_CONVERSATIONS, max(1, count // 10)) * pages_for(longest) * page_bytes
        session.say(f"conversations: {count} of {CONVERSATION_TOKENS:,} tokens, {memory / 1e6:,.0f} MB of memory")
        with session.start(OURS, folder, memory) as worker:
            past = [prompt(CONVERSATION_TOKENS, session.number()) for _ in range(count)]
            first = [worker.ask("turn", tokens=tokens, num_answer=ANSWER_TOKENS) for tokens in past]
            for tokens, turn in zip(past, first, strict=True):
                tokens.extend(turn["answer"])
            session.say(f"conversations: {first[-1]['written_bytes'] / 1e9:.2f} GB written, now {REVISITS} rounds of revisits")
            turns = []
            for _ in range(REVISITS):
                for tokens in past:
                    tokens.extend(prompt(TURN_TOKENS, session.number()))
                    turns.append(worker.ask("turn", tokens=tokens, num_answer=ANSWER_TOKENS))
                    tokens.extend(turns[-1]["answer"])
            worker.kill()
    session.notes.append(_conversations_note(count, memory, turns))
    title = f"{count} conversations of {CONVERSATION_TOKENS:,} tokens, memory for {memory // page_bytes * PAGE_TOKENS:,} tokens"
    worst = max(turn["computed_tokens"] - NEW_TOKENS for turn in turns)
    yield f.at_most("conversations", f"{title}: most known tokens computed again in a turn", "tokens", [worst], 0)
    name, firsts_s = "the same: first token of a turn", [turn["first_token_s"] for turn in first]
    yield f.quicker("conversations", name, [turn["first_token_s"] for turn in turns], "computing them", firsts_s, 10.0)


def _check_room(session: Session, folder: Path, num_bytes: int) -> None:
    """Refuses what the disk has no room for.

    Raises:
        EngineError: it has not.
    """
    free = shutil.disk_usage(folder).free
    if free < 1.25 * num_bytes:
        raise EngineError(
            f"{session.conversations} conversations take {num_bytes / 1e9:.1f} GB and the disk has {free / 1e9:.1f} GB left: "
            "lower --conversations or name another --folder"
        )


def _conversations_note(count: int, memory: int, turns: list[dict[str, Any]]) -> str:
    again = [turn for turn in turns if turn["computed_tokens"] > NEW_TOKENS]
    reasons: Counter[str] = Counter()
    for turn in again:
        for reason, num_tokens in turn["misses"]:
            if reason not in {"first_seen", "diverged"}:
                reasons[reason] += num_tokens
    said = "".join(f", {reason}: {num_tokens:,} tokens" for reason, num_tokens in sorted(reasons.items()))
    disk, near = (sum(turn[name] for turn in turns) for name in ("disk_tokens", "memory_tokens"))
    return (
        f"- Conversations: {count} of {CONVERSATION_TOKENS:,} tokens, {REVISITS} rounds of turns of {TURN_TOKENS} tokens with "
        f"answers of {ANSWER_TOKENS}, in the same order each round; memory for pages {memory / 1e6:,.0f} MB, "
        f"{turns[-1]['written_bytes'] / 1e9:.2f} GB written, {turns[-1]['refused_pages']:,} pages not admitted to the disk. A "
        f"turn has {NEW_TOKENS} new tokens (the last one of the answer before was never computed). Of the known ones "
        f"{disk / max(1, disk + near):.0%} came from disk; {len(again)} of "
        f"{len(turns)} turns computed known ones again{said}."
    )


def traces(session: Session) -> Iterator[f.Figure]:
    """The rule that decides what stays, on traces of requests."""
    if session.traces is None or not session.traces.is_dir():
        where = "no folder is named" if session.traces is None else f"there is no folder {session.traces.name}"
        session.notes.append(f"- Traces: left out, as {where} (--traces FOLDER).")
        return
    rows = []
    for name, capacities in kv_policies.CAPACITIES.items():
        session.say(f"traces: {name}")
        found = kv_policies.measure(session.traces / f"{name}.jsonl.gz", capacities)
        rows += found
        shares = ", ".join(
            f"{row['capacity_blocks']:,}: {row['headrace']:.4f} (LRU {row['lru']:.4f}, best {row['best']:.4f})" for row in found
        )
        session.notes.append(f"- Hit rates on {name} by blocks: {shares}.")
    distances = [row["headrace"] - row["lru"] for row in rows]
    shares_closed = [row["share"] for row in rows]
    closed = statistics.fmean(shares_closed)
    worst = min(distances)
    yield f.at_least("traces", "hit rate against LRU, worst of all traces and sizes", "", [worst], -kv_policies.MOST_BELOW_LRU)
    yield f.at_least(
        "traces", "distance from LRU to the best possible that is closed, mean", "share", [closed], kv_policies.LEAST_MEAN_SHARE
    )
    speeds = [row["requests_per_s"] for row in rows]
    yield f.at_least("traces", "requests replayed, slowest trace and size", "per s", [min(speeds)], 1000)


def moves(session: Session) -> Iterator[f.Figure]:
    """Decoding beside the moves of another session's past."""
    with session.temporary_folder() as folder, session.start(OURS, folder) as worker:
        session.say(f"moves: decoding while {RESTART_TOKENS:,} tokens are written, and read")
        arguments = {"past_tokens": RESTART_TOKENS, "live_tokens": LIVE_TOKENS, "rounds": session.repeat}
        found = worker.ask("probe", name="moves", **arguments)
        worker.kill()
    for name, title in (("write", "written to disk"), ("read", "read ahead from disk")):
        beside, alone = found[name], found[f"{name}_undisturbed"]
        shares = [a / b for a, b in zip(beside, alone, strict=True)]
        what = f"decoding while {RESTART_TOKENS:,} tokens of another session are {title}"
        yield f.at_least("moves", what, "share of undisturbed speed", shares, 0.9).beside("undisturbed, tok/s", alone)
        tokens = spread([float(count) for count in found["window_tokens"][name]])
        session.notes.append(
            f"- {title.capitalize()}: {found['past_bytes'] / 1e6:,.1f} MB while {tokens} tokens are decoded on top of "
            f"{LIVE_TOKENS}, at {spread(beside)} tok/s; windows as long without a move in turn with them."
        )


def overhead(session: Session) -> Iterator[f.Figure]:
    """What the memory takes of an answer's time."""
    with session.temporary_folder() as folder, session.start(OURS, folder) as worker:
        session.say("overhead of tree and tables")
        arguments = {"past_tokens": CONVERSATION_TOKENS, "new_tokens": TURN_TOKENS, "answer_tokens": OVERHEAD_ANSWER_TOKENS}
        found = worker.ask("probe", name="overhead", rounds=session.repeat, **arguments)
        worker.kill()
    shares = list(starmap(lambda spent, decode: spent / decode, zip(found["overhead_s"], found["decode_s"], strict=True)))
    names = sorted({name for calls in found["by_call_s"] for name in calls})
    parts = ", ".join(
        f"{name.strip('_')} {statistics.median(calls.get(name, 0.0) for calls in found['by_call_s']) * 1e3:.2f} ms"
        for name in names
    )
    session.notes.append(
        f"- Overhead: an answer of {OVERHEAD_ANSWER_TOKENS} tokens on top of {CONVERSATION_TOKENS:,} known ones and "
        f"{TURN_TOKENS} new ones, decoded in {spread(found['decode_s'])} s; in it {parts}."
    )
    title = f"time of tree and tables in an answer of {OVERHEAD_ANSWER_TOKENS} tokens on {CONVERSATION_TOKENS:,}"
    yield f.at_most("overhead", title, "share of decoding", shares, 0.02)


def fork(session: Session) -> Iterator[f.Figure]:
    """A session that is forked."""
    with session.temporary_folder() as folder, session.start(OURS, folder) as worker:
        session.say("fork of a session")
        found = worker.ask("probe", name="forks", past_tokens=RESTART_TOKENS, rounds=4 * session.repeat)
        worker.kill()
    named_ms, unnamed_ms = ([1e3 * seconds for seconds in found[name]] for name in ("named_s", "unnamed_s"))
    name = f"fork of a session of {found['num_tokens']:,} tokens"
    unnamed = "a fork without a name, which writes no file, ms"
    yield f.at_most("fork", name, "ms", named_ms, 1.0).beside(unnamed, unnamed_ms)
    yield f.at_most("fork", "the same, pages copied", "bytes", [float(found["copied_bytes"])], 0)
    session.notes.append(f"- Fork: its next turn found {found['reused_tokens']:,} tokens of its past.")


def formats(session: Session) -> Iterator[f.Figure]:
    """Pages of fewer bits: how many tokens more fit, and what it costs."""
    with session.temporary_folder() as folder, session.start(OURS, folder) as worker:
        session.say("page formats")
        found = worker.ask("probe", name="formats", num_tokens=FORMAT_TOKENS)
    if not found["formats"]:
        session.notes.append("- Page formats: left out, as this version has no kernels that compress pages.")
        return
    exact = found["formats"][0]
    session.notes.append(
        f"- Page formats: perplexity of {found['num_tokens']:,} tokens of text; f16 has {exact['perplexity']:.3f} at "
        f"{exact['bytes_per_token']:,.0f} bytes per token."
    )
    for each in found["formats"][1:]:
        floor = {"q8": 1.9, "q4": 3.4}[each["name"]]
        what = f"tokens in the same bytes, {each['name']} ({each['bytes_per_token']:,.0f} bytes per token)"
        yield f.at_least("formats", what, "times those of f16", [each["fit_ratio"]], floor)
        yield f.Figure("formats", f"the same, perplexity {each['perplexity']:.3f}, change", "%", [100 * each["change"]])


SECTIONS: dict[str, Callable[[Session], Iterable[f.Figure]]] = {
    "restart": restart,
    "moves": moves,
    "overhead": overhead,
    "fork": fork,
    "formats": formats,
    "conversations": conversations,
    "traces": traces,
}
