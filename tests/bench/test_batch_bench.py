"""The benchmark of many requests against fake engines: what it asks, what it concludes, and that it leaves no process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FAKE = """
import sys, time, threading
sys.path.insert(0, {bench!r})
import batch_worker

engine = sys.argv[-1]
OURS = engine == "headrace"

class Fake:
    known = frozenset()

    def load(self, path, threads, slots, context):
        self.slots, self.context = slots, context
        return {{"version": "1", "build": f"{{slots}} slots", "context_tokens": 8192}}

    def know(self, first, count, shared, own):
        assert OURS or (count == self.slots and shared + own < self.context)
        self.known = self.known | {{first}}
        return {{"seconds": 1.0}}

    def decode(self, first, count, shared, own, tokens, sampled):
        if "slow" in sys.argv:
            print("pid of a worker that computes", flush=True)
            time.sleep(100)
        assert first in self.known
        speed = 100.0 if OURS else 6.0 if engine.endswith("no-fa") else 10.0
        return {{"tok_s": speed * count * (0.9 if sampled else 1.0), "computed_tokens": 1 if OURS else own}}

    def burst(self, first, count, own, tokens):
        return {{"seconds": 2.0 if OURS else 20.0}}

    def probe(self, name, **arguments):
        return {{
            "limits": lambda counts, depth: {{"bytes_per_s": 1e9, "macs_per_s": 4e9, "steps": [
                {{"streams": count, "bytes": 8e6 + count * 1e5, "macs": count * 2e7}} for count in counts]}},
            "first_token": lambda number, tokens: {{"first_token_s": tokens / 1000}},
            "beside": lambda first, streams, own, tokens: {{
                "undisturbed_s": 0.01, "gaps_s": [0.02, 0.03, 0.04, 0.05], "first_token_s": 9.0}},
            "queue": lambda first, waiting, waiting_tokens, tokens: {{"first_token_s": 0.2}},
            "outside": lambda first, streams, own, tokens: {{"share": 0.1}},
            "turn": lambda waiting, running: {{"turn_us": {turn_us}}},
        }}[name](**arguments)

batch_worker.serve(Fake(), batch_worker.answer)
"""

NewSession = Callable[..., Any]


@pytest.fixture
def new_session(bench: SimpleNamespace, tmp_path: Path) -> NewSession:
    def make(rivals: tuple[str, ...] = ("llama.cpp",), **options: Any) -> Any:
        program = tmp_path / "fake.py"
        turn_us = options.pop("turn_us", 150.0)
        program.write_text(FAKE.format(bench=str(bench.folder), turn_us=turn_us), encoding="utf-8")
        settings = {"streams": (1, 16), "depth": 64, "say": lambda text: None, "repeat": 2, "cores": 2, **options}
        return bench.batch_sections.Session(model=Path("m"), rivals=rivals, program=(sys.executable, str(program)), **settings)

    return make


def test_streams_are_held_against_the_better_rival_and_the_bound(bench: SimpleNamespace, new_session: NewSession) -> None:
    with new_session() as session:
        figures = list(bench.batch_sections.greedy(session))
        assert session.about["llama.cpp"]["build"] == "16 slots"
    alone, alone_bound, many, many_bound = figures
    assert (alone.ratio, alone.goal, alone.against) == (10.0, "", "llama.cpp")
    assert (many.ratio, many.goal, many.reached) == (10.0, "8x", True)
    # 16 streams: 9.6 ms for the bytes, 80 ms for the multiplications; 1 stream: 8.1 ms and 5 ms
    assert many_bound.against_runs == [pytest.approx(16 / 0.08)]
    assert alone_bound.against_runs == [pytest.approx(1 / 0.0081)]
    assert list(many_bound.runs) == [pytest.approx(1600 * 0.08 / 16)] * 2
    assert alone_bound.goal == ""
    assert any("llama.cpp 40" in note and "no flash attention 24" in note for note in session.notes)


def test_prompts_that_a_rival_computes_again_are_told_once(bench: SimpleNamespace, new_session: NewSession) -> None:
    with new_session(streams=(1,)) as session:
        list(bench.batch_sections.greedy(session))
    assert sum("should have been known" in note for note in session.notes) == 2  # one for each setting of the rival
    assert not any("headrace: prompts" in note for note in session.notes)


def test_sampled_speed_is_a_share_of_greedy_measured_in_the_same_rounds(
    bench: SimpleNamespace, new_session: NewSession
) -> None:
    with new_session(streams=(16,), flash="on") as session:
        share, rival = bench.batch_sections.sampled(session)
    assert list(share.runs) == [pytest.approx(0.9)] * 2
    assert (share.goal, share.reached) == ("at least 0.95", False)
    assert (rival.ratio, rival.goal) == (pytest.approx(10.0), "")


def test_another_build_has_a_goal_of_its_own(bench: SimpleNamespace, new_session: NewSession, tmp_path: Path) -> None:
    with new_session(("llama.cpp", "build"), flash="on", rival_path=tmp_path) as session:
        figures = list(bench.batch_sections.burst(session))
    assert [(figure.goal, figure.against) for figure in figures] == [("8x", "llama.cpp"), ("3x", "llama.cpp, other build")]


def test_waiting_gaps_and_overhead_are_held_against_their_goals(bench: SimpleNamespace, new_session: NewSession) -> None:
    sections = bench.batch_sections
    with new_session(()) as session:
        named = [
            figure for section in ("beside", "queue", "outside", "turns") for figure in sections.SECTIONS[section](session)
        ]
    assert [(figure.goal, figure.reached) for figure in named] == [
        ("at most 4", False),
        ("", None),
        ("at most 1.5", True),
        ("at most 5", True),
        ("at most 0.08", False),
        ("at most 200", True),
    ]
    assert list(named[0].runs) == [pytest.approx(5.0)] * 2  # against the undisturbed gap
    assert list(named[1].runs) == [pytest.approx(0.05 / 0.035)] * 2  # against the median of the gaps meanwhile


def test_without_a_scheduler_its_section_says_so(bench: SimpleNamespace, new_session: NewSession) -> None:
    with (
        new_session((), turn_us=None) as session,
        pytest.raises(bench.rivals.EngineError, match="there is no"),
    ):
        bench.batch_sections.turns(session)


def test_bound_is_the_longer_of_bytes_and_multiplications(bench: SimpleNamespace) -> None:
    assert bench.batch_sections.bound_step_s(4e9, 1e9, 2e9, 4e9) == 2.0
    assert bench.batch_sections.bound_step_s(1e9, 8e9, 2e9, 4e9) == 2.0


@pytest.mark.parametrize(("streams", "tokens"), [(1, 96), (16, 64), (64, 16), (200, 16)])
def test_streams_generate_a_bounded_number_of_tokens(bench: SimpleNamespace, streams: int, tokens: int) -> None:
    assert bench.batch_sections.decode_tokens(streams) == tokens


def test_speed_of_streams_begins_with_the_last_one(bench: SimpleNamespace) -> None:
    # the second begins at 2 s and ends at 6 s: 2 + 2 tokens in 4 s
    assert bench.batch_worker.streams_tok_s([[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 6.0]]) == 1.0


def test_prompts_share_a_beginning_and_nothing_else(bench: SimpleNamespace) -> None:
    first, second = bench.batch_worker.prompts(5, 2, shared=10, own=4)
    assert first[:10] == second[:10]
    assert first[10:] != second[10:]
    assert bench.batch_worker.prompts(5, 2, shared=0, own=4) == [first[10:], second[10:]]


def test_answers_are_read_in_turn_until_all_have_ended(bench: SimpleNamespace) -> None:
    read: list[str] = []

    def answer(name: str, count: int) -> Any:
        for _ in range(count):
            read.append(name)
            yield SimpleNamespace(token_ids=(1, 2))

    times = bench.batch_worker.read_in_turn([answer("a", 3), answer("b", 1)])
    assert read == ["a", "b", "a", "a"]
    assert [len(each) for each in times] == [6, 2]


def test_a_call_that_fails_in_its_thread_is_raised(bench: SimpleNamespace) -> None:
    def fail() -> None:
        raise ValueError("no slot")

    with pytest.raises(ValueError, match="no slot"):
        bench.batch_worker.at_once([lambda: None, fail])
    assert bench.batch_worker.at_once([lambda: time.sleep(0.05)] * 4) >= 0.05


def test_options_that_measure_nothing_are_refused(
    bench: SimpleNamespace, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = bench.batch.arguments(["--quick", "--sections", "burst,greedy", "--streams", "4,1,4"])
    assert (options.repeat, options.sections, options.streams) == (1, ("greedy", "burst"), (1, 4))
    assert bench.batch.arguments([]).streams == (1, 4, 16, 64)
    for wrong, said in (
        (["--streams", "0"], "'0' is no number"),
        (["--sections", "fly"], "'fly' is no section"),
        (["--repeat", "x"], "'x' is no number"),
        (["--rival-path", str(tmp_path)], "holds no package xllamacpp"),
    ):
        with pytest.raises(SystemExit):
            bench.batch.arguments(wrong)
        assert said in capsys.readouterr().err


def test_a_run_ends_in_a_table_and_one_json_line(
    bench: SimpleNamespace, new_session: NewSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = new_session().program
    monkeypatch.setattr(bench.batch, "Session", lambda **options: bench.batch_sections.Session(**options, program=program))
    monkeypatch.setattr(bench.batch, "installed", lambda rival: True)
    bench.batch.main(["--quick", "--streams", "1,16", "--depth", "64", "--smollm2", "m"])
    *text, last = capsys.readouterr().out.splitlines()
    line = json.loads(last)
    assert (line["bench"], line["failures"], line["streams"]) == ("batch", [], [1, 16])
    assert {figure["section"] for figure in line["figures"]} == set(bench.batch_sections.SECTIONS)
    assert sum(row.startswith("| ") for row in text) == 2 + len(line["figures"])
    assert line["engines"]["headrace"]["version"] == "1"


RUN = """
import sys
sys.path.insert(0, {bench!r})
import pathlib
import batch_sections, runs
with runs.ended_by_signals():
    with batch_sections.Session(
        model=pathlib.Path("m"), cores=1, repeat=1, streams=(1,), depth=8, rivals=(), say=print,
        program=(sys.executable, {fake!r}, "slow"),
    ) as session:
        session.ask("headrace", "know", first=1, count=1, shared=0, own=8)
        print(session._workers["headrace"]._process.pid, flush=True)
        session.decoded(1)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="signals of Unix")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGKILL"])
def test_a_run_that_is_ended_leaves_no_process(
    bench: SimpleNamespace, new_session: NewSession, tmp_path: Path, name: str
) -> None:
    fake = new_session().program[1]
    code = RUN.format(bench=str(bench.folder), fake=fake)
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert run.stdout is not None
    worker = int(run.stdout.readline())
    assert run.stdout.readline().startswith("1 stream")  # the worker is computing, or will in a moment
    run.send_signal(getattr(signal, name))
    assert run.wait(timeout=20) != 0
    run.stdout.close()
    deadline = time.monotonic() + bench.workers.ORPHAN_GRACE_S + 20
    while _is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(worker)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(") ")[2][:1]
    except ProcessLookupError:
        return False
    except OSError:
        return Path("/proc").is_dir() is False
    return state != "Z"
