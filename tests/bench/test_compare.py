"""The comparison against fake engines: what it asks, what it concludes, and what it refuses to conclude."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

FAKE = """
import sys
sys.path.insert(0, {bench!r})
import workers

class Fake:
    def load(self, path, threads, context):
        if "unreadable" in path and sys.argv[1] != "headrace":
            raise ValueError("cannot read this")
        return {{"version": "1", "build": path}}

    def prefill(self, tokens):
        print("noise on standard output")
        return float(sum(tokens))

    def decode(self, depth, num_tokens):
        return 30.0 if sys.argv[1] == "headrace" else 10.0

    def account(self, num_tokens):
        return {{"bandwidth_fraction": 1.1, "read_bandwidth_gb_s": 10.0, "gb_s": 11.0, "weights_mb": 0.0, "kv_mb": 0.0}}

if sys.argv[1] == "dies":
    sys.exit("out of luck")
workers.serve(Fake(), workers.answer)
"""


@pytest.fixture
def program(bench: SimpleNamespace, tmp_path: Path) -> tuple[str, str]:
    path = tmp_path / "fake.py"
    path.write_text(FAKE.format(bench=str(bench.folder)), encoding="utf-8")
    return sys.executable, str(path)


def session(bench: SimpleNamespace, workers: dict[str, object], model: str = "m") -> SimpleNamespace:
    models = {"smollm2": Path(model), "gemma3": Path(model)}
    return bench.sections.Session(workers, models, cores=2, repeat=3, gen_tokens=8, say=lambda text: None)


def test_worker_answers_through_noise_and_names_failures(bench: SimpleNamespace, program: tuple[str, str]) -> None:
    with bench.rivals.Worker("llama.cpp", program) as worker:
        worker.load(Path("m"), 2, 64)
        assert worker.about["build"] == "m"
        assert worker.ask("prefill", tokens=4, number=1)["tok_s"] == sum(bench.workers.prompt(4, 1))
        with pytest.raises(bench.rivals.EngineError, match="ValueError: unknown request 'fly'"):
            worker.ask("fly")
        assert worker.ask("decode", depth=1, tokens=1)["tok_s"] == 10.0


def test_worker_that_ends_is_reported_with_its_last_words(bench: SimpleNamespace, program: tuple[str, str]) -> None:
    worker = bench.rivals.Worker("dies", program)
    with worker, pytest.raises(bench.rivals.EngineError, match="ended with exit code 1: out of luck"):
        worker.ask("memory")


def test_no_two_prefills_of_a_run_have_the_same_prompt(bench: SimpleNamespace, program: tuple[str, str]) -> None:
    # an engine that caches prompts answers a repeated one ten times faster than it computes it
    with bench.rivals.Worker("headrace", program) as ours, bench.rivals.Worker("openvino", program) as theirs:
        running = session(bench, {"headrace": ours, "openvino": theirs})
        runs = running.measure("smollm2", 2, "prefill", tokens=64)
        again = running.measure("smollm2", 2, "prefill", tokens=64)
    assert runs["headrace"] == runs["openvino"]  # the same prompts for all engines
    assert len({*runs["headrace"], *again["headrace"]}) == 6  # the fake's speed is the sum of the prompt's tokens


def test_an_engine_that_cannot_read_a_model_is_left_out_with_a_note(bench: SimpleNamespace, program: tuple[str, str]) -> None:
    with bench.rivals.Worker("headrace", program) as ours, bench.rivals.Worker("openvino", program) as theirs:
        running = session(bench, {"headrace": ours, "openvino": theirs}, "unreadable")
        assert list(running.measure("gemma3", 2, "decode", depth=1, tokens=1)) == ["headrace"]
    assert running.notes == ["- OpenVINO GenAI does not run gemma3: ValueError: cannot read this"]


def test_ratios_are_against_llama_cpp_as_it_comes_and_at_its_best(bench: SimpleNamespace) -> None:
    runs = {"headrace": (300.0, 310.0, 290.0), "llama.cpp": (50.0,), "llama.cpp-no-fa": (100.0,)}
    row = bench.figures.against("depth", "decode", "tok/s", runs, 4.0)
    assert (row.ratio, row.reached, row.best_ratio) == (6.0, True, 3.0)


def test_a_share_above_one_reaches_nothing(bench: SimpleNamespace, program: tuple[str, str]) -> None:
    with bench.rivals.Worker("headrace", program) as ours:
        running = session(bench, {"headrace": ours})
        (row,) = bench.sections.bandwidth(running)
    assert row.reached is None
    assert any("disturbed" in note for note in running.notes)
    assert "| not measured |" in bench.figures.table([row], [])


def test_table_of_a_busy_machine_claims_nothing(bench: SimpleNamespace) -> None:
    row = bench.figures.against("short", "decode", "tok/s", {"headrace": (30.0,), "llama.cpp": (10.0,)}, 2.0)
    assert "| 3.00 | 2x | yes |" in bench.figures.table([row], ["note"])
    assert "| 3.00 | 2x | machine busy |" in bench.figures.table([row], ["note"], quiet=False)


def test_first_output_is_timed_and_failures_are_named(bench: SimpleNamespace) -> None:
    late = "import time; print('x', flush=True); time.sleep(0.5)"
    start = time.perf_counter()
    seconds = bench.rivals.first_output_s([sys.executable, "-c", late])
    assert seconds < time.perf_counter() - start - 0.4
    with pytest.raises(bench.rivals.EngineError, match="no token"):
        bench.rivals.first_output_s([sys.executable, "-c", "import sys; sys.exit('no token')"])


def test_busy_neighbours_end_with_the_block_and_at_their_deadline(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def remember(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(real(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(bench.rivals.subprocess, "Popen", remember)
    with bench.rivals.busy_neighbours(1):
        assert started[0].poll() is None
    assert started[0].poll() is not None
    with pytest.raises(bench.rivals.EngineError, match="ended before"), bench.rivals.busy_neighbours(1, lifetime_s=0.01):
        pass


def test_a_failure_keeps_the_rows_before_it(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = bench.figures.at_most("memory", "memory", "MB", (200.0,), 250.0)

    def breaks(running: object) -> Iterator[object]:
        yield row
        raise bench.rivals.EngineError("llama.cpp ended with exit code -9")

    monkeypatch.setattr(bench.compare, "SECTIONS", {"memory": breaks})
    monkeypatch.setattr(bench.compare, "installed", lambda engine: False)
    options = bench.compare.arguments(["--smollm2", str(tmp_path)])
    rows, notes, facts = bench.compare.measure_all(options)
    assert rows == [row]
    assert facts["failures"] == ["- memory could not be measured: llama.cpp ended with exit code -9."]
    assert facts["failures"][0] in notes
