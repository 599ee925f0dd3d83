"""Many requests at once: every figure that the engine's loop has to reach, with llama.cpp in the same run.

    python bench/batch.py                              everything
    python bench/batch.py --quick                      1 round, up to 16 streams
    python bench/batch.py --sections greedy,burst --streams 1,16
    python bench/batch.py --rival-path FOLDER          another build of xllamacpp too: FOLDER holds its package
    python bench/batch.py --readme README.md --json-out batch.json

Prints a table and ends in one JSON line. Needs the extra `bench` (xllamacpp) for the rival; without it, the table says so.
llama.cpp has a slot for each stream, and is measured with the better of its settings of flash attention. A machine that does
other work gives no results: the run then says so, no goal counts as reached, and the README stays as it is. However a run
ends, it leaves no process behind.
"""

from __future__ import annotations

import argparse
import datetime as dt
import sys
from collections.abc import Sequence
from pathlib import Path

import kv_figures as f
from batch_sections import SECTIONS, TITLES, Session
from compare import model_paths
from headrace.errors import HeadraceError
from rivals import EngineError, installed
from runs import Watch, add_shared, ended_by_signals, machine_line, measured, report, tell, usable_cores

MARK = "batch"
FULL_STREAMS, QUICK_STREAMS = (1, 4, 16, 64), (1, 4, 16)
FLASH = ("better", "on", "off")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 round, up to 16 streams")
    parser.add_argument("--sections", type=_sections, help=f"some of {','.join(SECTIONS)} (default: all)")
    parser.add_argument("--repeat", type=_count, help="rounds after a warm-up (default 3, quick 1)")
    parser.add_argument("--streams", type=_counts, help="numbers of streams (default 1,4,16,64)")
    parser.add_argument("--depth", type=_count, default=512, help="tokens of context of each stream (default: %(default)s)")
    parser.add_argument("--flash", choices=FLASH, default="better", help="the rivals' flash attention (default: %(default)s)")
    parser.add_argument("--skip-rivals", action="store_true", help="no llama.cpp")
    parser.add_argument("--rival-path", type=Path, help="folder with the package xllamacpp of another build")
    add_shared(parser, MARK)
    options = parser.parse_args(argv)
    options.repeat = options.repeat or (1 if options.quick else 3)
    options.streams = options.streams or (QUICK_STREAMS if options.quick else FULL_STREAMS)
    options.sections = options.sections or tuple(SECTIONS)
    if options.rival_path is not None and not (options.rival_path / "xllamacpp").is_dir():
        parser.error(f"--rival-path={options.rival_path} holds no package xllamacpp: give the folder that it was installed to")
    return options


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number: use 1 or more")
    return value


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(part) for part in text.split(",")}))


def _sections(text: str) -> tuple[str, ...]:
    names = text.split(",")
    for name in names:
        if name not in SECTIONS:
            raise argparse.ArgumentTypeError(f"{name!r} is no section: use some of {', '.join(SECTIONS)}")
    return tuple(name for name in SECTIONS if name in names)


def wanted_rivals(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The rivals to measure, and a note if there is none."""
    if options.skip_rivals:
        return [], []
    rivals = [rival for rival in ("llama.cpp",) if installed(rival)]
    notes = [] if rivals else ["- llama.cpp is not installed here."]
    return [*rivals, *(["build"] if options.rival_path else [])], notes


def measure_all(options: argparse.Namespace) -> tuple[list[f.Figure], list[str], dict[str, object]]:
    """Runs the sections; figures, notes, and the facts that go into the JSON line."""
    cores = options.threads or usable_cores()
    rivals, missing = wanted_rivals(options)
    notes = [f"- Machine: {machine_line(cores)}; {dt.datetime.now(dt.UTC).date().isoformat()}.", *missing]
    model = model_paths(options, ["smollm2"])["smollm2"]
    watch = Watch()
    with Session(
        model=model,
        cores=cores,
        repeat=options.repeat,
        streams=options.streams,
        depth=options.depth,
        rivals=rivals,
        say=tell,
        flash=options.flash,
        sampled="sampled" in options.sections,
        rival_path=options.rival_path,
    ) as session:
        figures, failures = measured(SECTIONS, options.sections, session, (EngineError, HeadraceError, OSError))
    load_facts, load_note = watch.end()
    names = {**TITLES, "headrace": "Headrace"}
    about = {engine: {name: facts[name] for name in ("version", "build")} for engine, facts in session.about.items()}
    notes += [f"- {names[engine]}: version {facts['version']} ({facts['build']})." for engine, facts in about.items()]
    notes += [*session.notes, *failures]
    notes.append(f"- Medians of {options.repeat} rounds in turn after a warm-up, in brackets the lowest and the highest.")
    notes.append(load_note)
    asked = {"threads": cores, "repeat": options.repeat, "streams": list(options.streams), "depth": options.depth}
    facts = {"bench": MARK, **load_facts, **asked, "limits": session.measured_limits}
    return figures, notes, {**facts, "engines": about, "failures": failures}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when all was measured on a quiet machine, 1 otherwise; goals do not change it."""
    options = arguments(argv)
    with ended_by_signals():
        figures, notes, facts = measure_all(options)
    return report(f.table, figures, notes, facts, mark=MARK, json_out=options.json_out, readme=options.readme)


if __name__ == "__main__":
    sys.exit(main())
