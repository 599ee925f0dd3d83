"""What every comparison does around its measuring: the machine it runs on, whether that was quiet, and the report at the end.

Does not know what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import figures as f

# Share of all cores' time that processes other than ours, and the host, may have taken. Engines lose speed far out of
# proportion beside a busy process, so a ratio measured on a machine that does something else says nothing.
QUIET_SHARE = 0.03


class Documented(Protocol):
    """A figure of any kind."""

    def document(self) -> dict[str, Any]:
        """For the JSON line."""


S = TypeVar("S")
F = TypeVar("F", bound=Documented)


def add_shared(parser: argparse.ArgumentParser, mark: str) -> None:
    """Adds the options that every comparison has."""
    parser.add_argument("--threads", type=int, help="what 'all cores' means (default: those this process may use)")
    parser.add_argument("--smollm2", type=Path, help="the GGUF file (default: fetched)")
    parser.add_argument("--json-out", type=Path, help="also write the JSON line to this file")
    parser.add_argument("--readme", type=Path, help=f"put the table between the {mark} marks of this file")


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_line(cores: int) -> str:
    """What the figures were measured on."""
    from headrace.engine import machine

    described = machine.describe()
    total = described.memory.total_bytes
    memory = f", {total / 2**30:.0f} GiB of memory" if total else ""
    return f"{described.cpu}, {cores} cores in use{memory}, {described.system}, Python {platform.python_version()}"


def tell(text: str) -> None:
    """Shows progress, and how busy the machine is."""
    print(f"[load {os.getloadavg()[0]:.2f}] {text}", file=sys.stderr, flush=True)


def others_share(before: list[int], after: list[int], ours_s: float) -> float | None:
    """Share of the machine's time between two readings of `cpu_ticks` that others had: its host, and other processes.

    `ours_s` is the processor time of this program and of all processes it started, busy neighbours included.
    """
    spent = [b - a for a, b in zip(before, after, strict=True)]
    if len(spent) < 8 or not sum(spent):
        return None
    user, nice, system, _idle, _wait, interrupts, soft_interrupts, stolen = spent
    ours = ours_s * os.sysconf("SC_CLK_TCK")
    return max(0.0, user + nice + system + interrupts + soft_interrupts - ours + stolen) / sum(spent)


def own_cpu_s() -> float:
    """Processor time of this program and of the processes it started that have ended, in seconds."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def cpu_ticks() -> list[int]:
    """Ticks by kind since the machine started, as /proc/stat counts them; empty where there is none."""
    with contextlib.suppress(OSError):
        return [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    return []


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP end the block as an error does, so that every `with` inside closes what it has started."""

    def end(number: int, frame: object) -> None:
        del frame
        raise SystemExit(128 + number)

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.signal(getattr(signal, name), end) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


class Watch:
    """Sees how much of the machine's time others take, from its making to `end`."""

    def __init__(self) -> None:
        self._load, self._ticks, self._own_s = os.getloadavg()[0], cpu_ticks(), own_cpu_s()

    def end(self) -> tuple[dict[str, object], str]:
        """Facts for the JSON line, and the note: ask when all processes of the run have ended."""
        others = others_share(self._ticks, cpu_ticks(), own_cpu_s() - self._own_s)
        quiet = others is not None and others <= QUIET_SHARE
        taken = "an unknown share" if others is None else f"{others:.1%}"
        verdict = "" if quiet else "; that is too much, and none of these figures is a result"
        note = f"- Others took {taken} of the machine's time during the run (load average before: {self._load:.2f}){verdict}."
        return {"load_average": self._load, "others_share": others, "quiet": quiet}, note


def measured(
    sections: Mapping[str, Callable[[S], Iterable[F]]], names: Iterable[str], session: S, errors: tuple[type[Exception], ...]
) -> tuple[list[F], list[str]]:
    """The figures of the named sections, and a note for each that ended in one of `errors`: the figures before it stay."""
    figures: list[F] = []
    failures: list[str] = []
    for name in names:
        try:
            for figure in sections[name](session):
                figures.append(figure)  # noqa: PERF402, one by one: a failure keeps those before it
        except errors as error:
            failures.append(f"- {name} could not be measured: {error}.")
    return figures, failures


def report(
    table: Callable[..., str],
    rows: Sequence[Documented],
    notes: Sequence[str],
    facts: Mapping[str, Any],
    *,
    mark: str,
    json_out: Path | None,
    readme: Path | None,
) -> int:
    """Prints the `table` and the JSON line, writes them where they were asked for, and gives the exit code.

    A busy machine leaves `readme` as it is. It comes last: what was measured is out when it cannot be written.

    Raises:
        ValueError: `readme` has no place with this mark.
    """
    text = table(rows, notes, quiet=bool(facts["quiet"]))
    line = json.dumps({**facts, "notes": notes, "figures": [row.document() for row in rows]})
    print(text)
    print(line)
    if json_out:
        json_out.write_text(line + "\n", encoding="utf-8")
    if readme and not facts["quiet"]:
        print(f"{readme} is left as it is: the machine was busy with other work", file=sys.stderr)
    elif readme:
        readme.write_text(f.rewritten(readme.read_text(encoding="utf-8"), text, mark), encoding="utf-8")
    return 0 if facts["quiet"] and not facts["failures"] else 1
