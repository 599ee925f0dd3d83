"""The benchmark of the memory of the past against fake engines: what it asks, what it concludes, and what it refuses to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

TABLE_HEAD = "| figure | measured | compared with | times better | goal | reached |"

FAKE = """
import pathlib, sys
sys.path.insert(0, {bench!r})
import kv_worker

engine, forgets = sys.argv[1], {forgets!r}

class Fake:
    def load(self, path, threads, context, folder, memory, disk):
        if "no slots" in path and engine == "llama.cpp":
            raise ValueError("slots are not supported")
        self.folder, self.disk = pathlib.Path(folder), disk
        return {{"version": "1", "build": "fake", "load_s": 0.1, "page_bytes": 64}}

    def kept(self):
        return self.folder / ("1.run" if engine == "headrace" else kv_worker.SLOT_FILE)

    def turn(self, tokens, num_answer):
        print("noise on standard output")
        file = self.kept()
        first = not file.exists() or not self.disk or (num_answer > 1 and len(tokens) == 50)
        # a conversation is known up to the last token of its last answer, but for those that were forgotten
        new = 20 if num_answer == 1 else 21 + forgets
        found = 0 if first else len(tokens) - new
        file.write_bytes(b"x" * 5000)
        return {{
            "first_token_s": 4.0 if first else 0.05 if engine == "headrace" else 0.5, "read_s": 0.01,
            "answer": [7] * num_answer, "memory_tokens": 0, "disk_tokens": found, "computed_tokens": len(tokens) - found,
            "misses": [["evicted", forgets - 1], ["evicted", 1]] if forgets else [], "written_bytes": 5000, "refused_pages": 0,
            "pid": __import__("os").getpid(),
        }}

    def save(self):
        return {{"save_s": 0.2}}

    def restore(self):
        return {{"restore_s": 0.0 if engine == "headrace" else 1.5}}

    def probe(self, name, **arguments):
        return {{
            "moves": {{"write": [95.0], "write_undisturbed": [100.0], "read": [80.0], "read_undisturbed": [100.0],
                       "window_tokens": {{"write": [50], "read": [50]}}, "past_bytes": 64}},
            "overhead": {{"overhead_s": [0.01, 0.03, 0.04], "decode_s": [1.0] * 3, "by_call_s": [{{"recall": 0.01}}] * 3}},
            "forks": {{"named_s": [0.0005], "unnamed_s": [0.0001], "copied_bytes": 64, "num_tokens": 9, "reused_tokens": 8}},
            "formats": {{"formats": []}} if arguments.get("num_tokens") != 7 else {{"num_tokens": 7, "formats": [
                {{"name": "f16", "perplexity": 10.0, "change": 0.0, "bytes_per_token": 100.0, "fit_ratio": 1.0}},
                {{"name": "q8", "perplexity": 10.1, "change": 0.01, "bytes_per_token": 55.0, "fit_ratio": 1.82}},
                {{"name": "q4", "perplexity": 11.0, "change": 0.1, "bytes_per_token": 29.0, "fit_ratio": 3.45}},
            ]}},
        }}[name]

kv_worker.serve(Fake(), kv_worker.answer)
"""


NewSession = Callable[..., Any]


@pytest.fixture
def new_session(bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NewSession:
    monkeypatch.setattr(bench.kv_sections, "RESTART_TOKENS", 64)
    monkeypatch.setattr(bench.kv_sections, "CONVERSATION_TOKENS", 50)

    def make(engines: tuple[str, ...] = ("headrace",), model: str = "m", forgets: int = 0) -> Any:
        program = tmp_path / "fake.py"
        program.write_text(FAKE.format(bench=str(bench.folder), forgets=forgets), encoding="utf-8")
        return bench.kv_session.Session(
            model=Path(model),
            cores=2,
            repeat=1,
            conversations=3,
            engines=engines,
            say=lambda text: None,
            folder=tmp_path,
            program=(sys.executable, str(program)),
            ballast_bytes=1 << 16,
        )

    return make


def test_restart_compares_with_computing_reading_and_llama_cpp(bench: SimpleNamespace, new_session: NewSession) -> None:
    session = new_session(("headrace", "llama.cpp"))
    figures = list(bench.kv_sections.restart(session))
    by_goal = {(figure.goal, figure.name.split(", ")[-1]): figure for figure in figures if figure.goal}
    computed = by_goal["20x", "files in the page cache"]
    assert computed.ratio == pytest.approx(4.0 / 0.05)
    assert computed.reached is True
    slots = by_goal["2x", "files dropped from it"]
    assert slots.ratio == pytest.approx((1.5 + 0.5) / 0.05)  # the rival's restoring counts
    read = by_goal["at most 1.5", "files dropped from it"]
    assert read.reached is False  # the fake takes 50 ms for 5,000 bytes
    assert read.runs == [pytest.approx(0.05 / plain_s) for plain_s in read.against_runs]
    assert any("complete 0.20 s after the answer" in note for note in session.notes)


def test_every_turn_after_a_restart_has_a_new_process(bench: SimpleNamespace, new_session: NewSession, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    conversation = bench.kv_session.Restarted(new_session(), "headrace", folder, bench.workers.prompt(64, 1))
    turns = [conversation.again([1] * 20, dropped=dropped) for dropped in (False, True)]
    conversation.close()
    assert len({turn["pid"] for turn in turns}) == 2
    assert [turn["computed_tokens"] for turn in turns] == [20, 20]


def test_a_rival_without_slots_is_left_out_with_its_reason(bench: SimpleNamespace, new_session: NewSession) -> None:
    session = new_session(("headrace", "llama.cpp"), model="no slots")
    figures = list(bench.kv_sections.restart(session))
    assert any("slots cannot be saved here: llama.cpp: ValueError: slots are not supported" in note for note in session.notes)
    open_goals = [figure for figure in figures if figure.goal == "2x"]
    assert [figure.reached for figure in open_goals] == [None, None]
    assert "| 2x | not measured |" in bench.kv_figures.table(open_goals, [])


@pytest.mark.parametrize(("forgets", "reached"), [(0, True), (5, False)])
def test_conversations_count_known_tokens_that_were_computed_again(
    bench: SimpleNamespace, new_session: NewSession, forgets: int, reached: bool
) -> None:
    session = new_session(forgets=forgets)
    again, first_token = bench.kv_sections.conversations(session)
    assert again.runs == [forgets]
    assert again.reached is reached
    assert first_token.ratio == pytest.approx(80)
    assert len(first_token.runs) == 2 * 3
    assert any(("evicted: 30 tokens" in note) == bool(forgets) for note in session.notes)


def test_conversations_are_refused_where_the_disk_is_too_small(
    bench: SimpleNamespace, new_session: NewSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.kv_sections.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
    with pytest.raises(bench.rivals.EngineError, match="3 conversations take"):
        list(bench.kv_sections.conversations(new_session()))


def test_moves_overhead_and_fork_are_held_against_their_goals(bench: SimpleNamespace, new_session: NewSession) -> None:
    session = new_session()
    sections = (bench.kv_sections.moves, bench.kv_sections.overhead, bench.kv_sections.fork)
    figures = [figure for section in sections for figure in section(session)]
    assert [figure.reached for figure in figures] == [True, False, False, True, False]
    assert figures[2].runs == [0.01, 0.03, 0.04]


def test_formats_are_left_out_while_nothing_compresses_pages(
    bench: SimpleNamespace, new_session: NewSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = new_session()
    assert list(bench.kv_sections.formats(session)) == []
    assert "no kernels that compress pages" in session.notes[-1]
    monkeypatch.setattr(bench.kv_sections, "FORMAT_TOKENS", 7)
    figures = list(bench.kv_sections.formats(session))
    assert [(figure.goal, figure.reached) for figure in figures if figure.goal] == [
        ("at least 1.9", False),
        ("at least 3.4", True),
    ]


def test_traces_are_judged_by_the_worst_and_the_mean(
    bench: SimpleNamespace, new_session: NewSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session = new_session()
    assert list(bench.kv_sections.traces(session)) == []
    assert "--traces" in session.notes[-1]
    rows = [
        {"capacity_blocks": 1, "lru": 0.5, "headrace": 0.49, "best": 0.6, "share": -0.1, "requests_per_s": 2000.0},
        {"capacity_blocks": 2, "lru": 0.5, "headrace": 0.55, "best": 0.6, "share": 0.5, "requests_per_s": 900.0},
    ]
    monkeypatch.setattr(bench.kv_policies, "measure", lambda path, capacities: rows)
    session.traces = tmp_path
    worst, closed, speed = bench.kv_sections.traces(session)
    assert (worst.reached, closed.reached, speed.reached) == (False, True, False)
    assert worst.runs == [pytest.approx(-0.01)]


def test_plain_read_takes_files_to_their_end(bench: SimpleNamespace, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.write_bytes(b"x" * (bench.kv_files.CHUNK_BYTES + 1))
    if bench.kv_files.can_drop():
        bench.kv_files.drop(paths)
    assert bench.kv_files.plain_read_s(paths) > 0
    assert bench.kv_files.total_bytes(paths) == 2 * (bench.kv_files.CHUNK_BYTES + 1)
    with pytest.raises(FileNotFoundError):
        bench.kv_files.plain_read_s([tmp_path / "c"])


def test_stopwatch_counts_nested_calls_once(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 10.0, 11.0])
    monkeypatch.setattr(bench.kv_probes.time, "perf_counter", lambda: next(clock))

    class Cache:
        def find(self) -> str:
            return self.settle()

        def settle(self) -> str:
            return "settled"

    watch, original = bench.kv_probes.Stopwatch(), Cache.find
    with watch.on((Cache, "find"), (Cache, "settle")):
        assert Cache().find() == "settled"
        Cache().settle()
    assert watch.seconds == {"find": 5.0, "settle": 1.0}
    assert Cache.find is original


def test_table_of_a_busy_machine_claims_nothing(bench: SimpleNamespace) -> None:
    figures = [bench.kv_figures.quicker("restart", "turn", [0.1, 0.2], "computing", [6.0], 20.0)]
    figures.append(bench.kv_figures.at_most("fork", "fork", "ms", [0.5], 1.0))
    text = bench.kv_figures.table(figures, ["- note"])
    assert text.splitlines()[0] == TABLE_HEAD
    assert "| turn, s | 0.150 (0.100 to 0.200) | computing: 6.00 | 40.00 | 20x | yes |" in text
    busy = bench.kv_figures.table(figures, [], quiet=False)
    assert busy.count("machine busy") == 2
    assert "yes" not in busy


def test_a_failure_keeps_the_figures_before_it(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figure = bench.kv_figures.at_most("fork", "fork", "ms", [0.5], 1.0)

    def breaks(session: object) -> Iterator[object]:
        yield figure
        raise bench.rivals.EngineError("headrace ended with exit code -9")

    monkeypatch.setattr(bench.kv, "SECTIONS", {"fork": breaks})
    monkeypatch.setattr(bench.kv, "installed", lambda engine: engine == "headrace")
    figures, notes, facts = bench.kv.measure_all(bench.kv.arguments(["--smollm2", str(tmp_path)]))
    assert figures == [figure]
    assert facts["bench"] == "kv"
    assert facts["failures"] == ["- fork could not be measured: headrace ended with exit code -9."]
    assert facts["failures"][0] in notes
    assert "- llama.cpp is not installed here." in notes


def test_sections_are_chosen_by_options(bench: SimpleNamespace) -> None:
    def wanted(*argv: str) -> list[str]:
        sections: list[str] = bench.kv.wanted_sections(bench.kv.arguments(argv))
        return sections

    assert wanted() == list(bench.kv_sections.SECTIONS)
    assert "traces" not in wanted("--quick")
    assert "traces" not in wanted("--skip-traces")
    assert wanted("--quick", "--only", "traces", "--only", "restart") == ["restart", "traces"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--repeat", "0"], "--repeat=0 measures nothing"),
        (["--conversations", "0"], "--conversations=0 measures nothing"),
        (["--folder", "not there"], "--folder=not there is no folder"),
        (["--only", "flying"], "invalid choice: 'flying'"),
    ],
)
def test_arguments_that_measure_nothing_are_refused(
    bench: SimpleNamespace, capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        bench.kv.arguments(argv)
    assert said in capsys.readouterr().err


def test_worker_names_what_it_does_not_know(bench: SimpleNamespace, new_session: NewSession, tmp_path: Path) -> None:
    session = new_session()
    with (
        session.start("headrace", tmp_path) as worker,
        pytest.raises(bench.rivals.EngineError, match="ValueError: unknown request 'fly'"),
    ):
        worker.ask("fly")
