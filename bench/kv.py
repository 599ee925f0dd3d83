"""The memory of the past: every figure that it has to reach, measured in one run on this machine.

    python bench/kv.py                              everything, some 10 minutes
    python bench/kv.py --quick                      fewer rounds, 20 conversations, no traces
    python bench/kv.py --only restart --only moves
    python bench/kv.py --conversations 30 --json-out kv.json
    python bench/kv.py --readme README.md

Prints a table and ends in one JSON line. Needs some 6 GB of disk, in `--folder` or the system's folder for temporary files, and
the extra `bench` (xllamacpp) for the rival; without it, the table says so. A machine that does other work gives no results:
the run then says so, no goal counts as reached, and the README stays as it is.
"""

from __future__ import annotations

import argparse
import datetime as dt
import sys
from collections.abc import Sequence
from pathlib import Path

import kv_figures as f
from compare import model_paths
from figures import TITLES
from headrace.errors import HeadraceError
from kv_sections import SECTIONS
from kv_session import Session
from rivals import EngineError, installed
from runs import Watch, add_shared, machine_line, measured, report, tell, usable_cores

MARK = "kv"
ENGINES = ("headrace", "llama.cpp", "llama.cpp-no-fa")
FULL_CONVERSATIONS, QUICK_CONVERSATIONS = 100, 20
TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"2 rounds, {QUICK_CONVERSATIONS} conversations, no traces")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--repeat", type=int, help="rounds (default 5, quick 2)")
    parser.add_argument("--conversations", type=int, help=f"conversations in turn (default {FULL_CONVERSATIONS})")
    parser.add_argument("--skip-traces", action="store_true", help="no hit rates, which take a minute")
    parser.add_argument("--skip-rivals", action="store_true", help="no llama.cpp")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of the traces (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where temporary folders are made: on the disk to be measured")
    add_shared(parser, MARK)
    options = parser.parse_args(argv)
    options.repeat = (2 if options.quick else 5) if options.repeat is None else options.repeat
    if options.conversations is None:
        options.conversations = QUICK_CONVERSATIONS if options.quick else FULL_CONVERSATIONS
    for name in ("repeat", "conversations"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}={getattr(options, name)} measures nothing: use 1 or more")
    if options.folder is not None and not options.folder.is_dir():
        parser.error(f"--folder={options.folder} is no folder: make it first")
    return options


def wanted_sections(options: argparse.Namespace) -> list[str]:
    """The sections to measure, in their order."""
    names = [name for name in SECTIONS if not options.only or name in options.only]
    skipped = options.skip_traces or (options.quick and not options.only)
    return [name for name in names if not (skipped and name == "traces")]


def measure_all(options: argparse.Namespace) -> tuple[list[f.Figure], list[str], dict[str, object]]:
    """Runs the sections; figures, notes, and the facts that go into the JSON line."""
    cores = options.threads or usable_cores()
    asked = ENGINES[:1] if options.skip_rivals else ENGINES
    present = [engine for engine in asked if installed(engine)]
    notes = [f"- Machine: {machine_line(cores)}; {dt.datetime.now(dt.UTC).date().isoformat()}."]
    notes += [f"- {TITLES[engine]} is not installed here." for engine in asked if engine not in present]
    watch = Watch()
    session = Session(
        model=model_paths(options, ["smollm2"])["smollm2"],
        cores=cores,
        repeat=options.repeat,
        conversations=options.conversations,
        engines=present,
        say=tell,
        folder=options.folder,
        traces=options.traces,
    )
    figures, failures = measured(SECTIONS, wanted_sections(options), session, (EngineError, HeadraceError, OSError))
    load_facts, load_note = watch.end()
    about = {engine: {name: facts[name] for name in ("version", "build")} for engine, facts in session.about.items()}
    notes += [f"- {TITLES[engine]}: version {facts['version']} ({facts['build']})." for engine, facts in about.items()]
    notes += [*session.notes, *failures]
    notes.append(f"- Medians of {options.repeat} rounds, in brackets the lowest and the highest.")
    notes.append(load_note)
    facts = {"bench": MARK, **load_facts, "threads": cores, "repeat": options.repeat, "conversations": options.conversations}
    return figures, notes, {**facts, "engines": about, "failures": failures}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when all was measured on a quiet machine, 1 otherwise; goals do not change it."""
    options = arguments(argv)
    return report(f.table, *measure_all(options), mark=MARK, json_out=options.json_out, readme=options.readme)


if __name__ == "__main__":
    sys.exit(main())
