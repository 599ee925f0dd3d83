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
import sys
from collections.abc import Sequence
from pathlib import Path

import figures as f
from rivals import EngineError, Worker, installed
from runs import Watch, add_shared, machine_line, measured, report, tell, usable_cores
from sections import SECTIONS, Session

MARK = "bench"
ENGINES = ("headrace", "llama.cpp", "llama.cpp-no-fa", "openvino")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 rounds, 24 tokens, no first start")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--repeat", type=int, help="rounds after the warm-up (default 5, quick 2)")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="engines to run (default: all that are installed)")
    parser.add_argument("--gemma3", type=Path, help="the GGUF file (default: fetched)")
    add_shared(parser, MARK)
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


def measure_all(options: argparse.Namespace) -> tuple[list[f.Row], list[str], dict[str, object]]:
    """Runs the sections; rows, notes, and the facts that go into the JSON line."""
    cores = options.threads or usable_cores()
    names = options.only or [name for name in SECTIONS if not (options.quick and name == "first-start")]
    wanted = options.engine or list(ENGINES)
    present = [engine for engine in wanted if installed(engine)]
    notes = [f"- Machine: {machine_line(cores)}; {dt.datetime.now(dt.UTC).date().isoformat()}."]
    notes += [f"- {f.TITLES[engine]} is not installed here." for engine in wanted if engine not in present]
    models = model_paths(options, ["gemma3", "smollm2"] if "gemma3" in names else ["smollm2"])
    watch = Watch()
    with contextlib.ExitStack() as stack:
        workers = {engine: stack.enter_context(Worker(engine)) for engine in present}
        session = Session(workers, models, cores, options.repeat, 24 if options.quick else 96, tell)
        rows, failures = measured(SECTIONS, [name for name in SECTIONS if name in names], session, (EngineError,))
        about = {engine: worker.about for engine, worker in workers.items() if worker.about}
    load_facts, load_note = watch.end()
    notes += [f"- {f.TITLES[engine]}: version {facts['version']} ({facts['build']})." for engine, facts in about.items()]
    notes += [*session.notes, *failures]
    notes.append(
        f"- Medians of {options.repeat} rounds in turn after a warm-up, in brackets the lowest and the highest; ratios are "
        "against llama.cpp as it comes, the last column against the better of its two settings."
    )
    notes.append(load_note)
    return rows, notes, {**load_facts, "threads": cores, "repeat": options.repeat, "engines": about, "failures": failures}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when all was measured on a quiet machine, 1 otherwise; goals do not change it."""
    options = arguments(argv)
    return report(f.table, *measure_all(options), mark=MARK, json_out=options.json_out, readme=options.readme)


if __name__ == "__main__":
    sys.exit(main())
