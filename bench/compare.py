"""Headrace against llama.cpp and OpenVINO GenAI: same machine, same file, same threads, in turn, in one run.

    python bench/compare.py                  every figure of the README's table
    python bench/compare.py --quick          fewer tokens and rounds, no first start
    python bench/compare.py --only short --only prefill
    python bench/compare.py --readme README.md --json-out bench.json

Prints a table and ends in one JSON line. Needs the extra `bench` (xllamacpp, openvino-genai); an engine that is not
installed is left out, and the table says so. A machine that does other work gives no results: the run then says so, no goal
counts as reached, and the README stays as it is. llama.cpp runs twice, as it comes and without flash attention; goals are
against the first, and a column of its own says what is left against the better of the two.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import platform
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import figures as f
from rivals import EngineError, Worker, installed
from sections import SECTIONS, Session

ENGINES = ("headrace", "llama.cpp", "llama.cpp-no-fa", "openvino")
# Share of all cores' time that processes other than ours, and the host, may have taken. Engines lose speed far out of
# proportion beside a busy process, so a ratio measured on a machine that does something else says nothing.
QUIET_SHARE = 0.03


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 rounds, 24 tokens, no first start")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--repeat", type=int, help="rounds after the warm-up (default 5, quick 2)")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="engines to run (default: all that are installed)")
    parser.add_argument("--threads", type=int, help="what 'all cores' means (default: those this process may use)")
    parser.add_argument("--smollm2", type=Path, help="the GGUF file (default: fetched)")
    parser.add_argument("--gemma3", type=Path, help="the GGUF file (default: fetched)")
    parser.add_argument("--json-out", type=Path, help="also write the JSON line to this file")
    parser.add_argument("--readme", type=Path, help="put the table between the bench marks of this file")
    options = parser.parse_args(argv)
    options.repeat = (2 if options.quick else 5) if options.repeat is None else options.repeat
    if options.repeat < 1:
        parser.error(f"--repeat={options.repeat} measures nothing: use 1 or more")
    return options


def model_paths(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Path]:
    """The GGUF files, fetched by Headrace's own code where no path is given."""
    from headrace.config import Config
    from headrace.weights import sources

    aliases = {"smollm2": "smollm2", "gemma3": "gemma3-270m"}
    return {
        name: getattr(options, name) or sources.fetch(alias, Config.from_environment())
        for name, alias in aliases.items()
        if name in names
    }


def machine_line(cores: int) -> str:
    """What the figures were measured on."""
    from headrace.engine import machine

    described = machine.describe()
    total = described.memory.total_bytes
    memory = f", {total / 2**30:.0f} GiB of memory" if total else ""
    return f"{described.cpu}, {cores} cores in use{memory}, {described.system}, Python {platform.python_version()}"


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


def measure_all(options: argparse.Namespace) -> tuple[list[f.Row], list[str], dict[str, object]]:
    """Runs the sections; rows, notes, and the facts that go into the JSON line."""
    cores = options.threads or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))
    names = options.only or [name for name in SECTIONS if not (options.quick and name == "first-start")]
    wanted = options.engine or list(ENGINES)
    present = [engine for engine in wanted if installed(engine)]
    notes = [f"- Machine: {machine_line(cores)}; {dt.datetime.now(dt.UTC).date().isoformat()}."]
    notes += [f"- {f.TITLES[engine]} is not installed here." for engine in wanted if engine not in present]
    models = model_paths(options, ["gemma3", "smollm2"] if "gemma3" in names else ["smollm2"])
    load_before, ticks, own_before_s = os.getloadavg()[0], cpu_ticks(), own_cpu_s()
    rows: list[f.Row] = []
    failures: list[str] = []
    with contextlib.ExitStack() as stack:
        workers = {engine: stack.enter_context(Worker(engine)) for engine in present}
        tell = lambda text: print(f"[load {os.getloadavg()[0]:.2f}] {text}", file=sys.stderr, flush=True)  # noqa: E731
        session = Session(workers, models, cores, options.repeat, 24 if options.quick else 96, tell)
        for name in (section for section in SECTIONS if section in names):
            try:
                for row in SECTIONS[name](session):  # one by one: a failure keeps the rows before it
                    rows.append(row)  # noqa: PERF402, see above
            except EngineError as error:
                failures.append(f"- {name} could not be measured: {error}.")
        about = {engine: worker.about for engine, worker in workers.items() if worker.about}
    others = others_share(ticks, cpu_ticks(), own_cpu_s() - own_before_s)
    quiet = others is not None and others <= QUIET_SHARE
    notes += [f"- {f.TITLES[engine]}: version {facts['version']} ({facts['build']})." for engine, facts in about.items()]
    notes += [*session.notes, *failures]
    notes.append(
        f"- Medians of {options.repeat} rounds in turn after a warm-up, in brackets the lowest and the highest; ratios are "
        "against llama.cpp as it comes, the last column against the better of its two settings."
    )
    taken = "an unknown share" if others is None else f"{others:.1%}"
    verdict = "" if quiet else "; that is too much, and none of these figures is a result"
    notes.append(
        f"- Others took {taken} of the machine's time during the run (load average before: {load_before:.2f}){verdict}."
    )
    facts = {"load_average": load_before, "others_share": others, "quiet": quiet, "threads": cores, "repeat": options.repeat}
    return rows, notes, {**facts, "engines": about, "failures": failures}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when all was measured on a quiet machine, 1 otherwise; goals do not change it."""
    options = arguments(argv)
    rows, notes, facts = measure_all(options)
    text = f.table(rows, notes, quiet=bool(facts["quiet"]))
    print(text)
    if options.readme and not facts["quiet"]:
        print(f"{options.readme} is left as it is: the machine was busy with other work", file=sys.stderr)
    elif options.readme:
        old = options.readme.read_text(encoding="utf-8")
        options.readme.write_text(f.rewritten(old, text), encoding="utf-8")
    line = json.dumps({**facts, "notes": notes, "figures": [row.document() for row in rows]})
    if options.json_out:
        options.json_out.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0 if facts["quiet"] and not facts["failures"] else 1


if __name__ == "__main__":
    sys.exit(main())
