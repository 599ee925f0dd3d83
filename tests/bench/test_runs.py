"""How every comparison begins and ends: whether the machine was quiet, what a failure keeps, and where the results go."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

KV_HEAD = "| figure | measured | compared with | times better |"
HEADS = {"compare": "| figure | Headrace | times better |", "kv": KV_HEAD, "batch": KV_HEAD}
MARKS = {"compare": "bench", "kv": "kv", "batch": "batch"}

Run = Callable[..., int]


@pytest.fixture(params=["compare", "kv", "batch"])
def program(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def run(bench: SimpleNamespace, program: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The main function of a program that has measured one figure."""
    module = getattr(bench, program)
    figure = module.f.at_most("memory", "memory", "MB", (200.0,), 250.0)

    def main(*argv: str, **facts: Any) -> int:
        monkeypatch.setattr(module, "measure_all", lambda options: ([figure], ["- note"], {"failures": [], **facts}))
        code: int = module.main(argv)
        return code

    return main


@pytest.mark.parametrize(("quiet", "code"), [(True, 0), (False, 1)])
def test_readme_is_rewritten_after_a_quiet_run_only(
    run: Run, program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet: bool, code: int
) -> None:
    readme, mark = tmp_path / "README.md", MARKS[program]
    others = "".join(f"<!-- {other}:begin -->\nnot ours\n<!-- {other}:end -->\n" for other in MARKS.values() if other != mark)
    before, after = f"before\n{others}<!-- {mark}:begin -->\n", f"\n<!-- {mark}:end -->\nafter\n"
    readme.write_text(f"{before}old{after}", encoding="utf-8")
    assert run("--readme", str(readme), quiet=quiet) == code
    text = readme.read_text(encoding="utf-8")
    assert text.startswith(before)
    assert text.endswith(after)
    measured = text.removeprefix(before).removesuffix(after)
    if quiet:
        assert measured.startswith(HEADS[program])
        assert measured.endswith("- note")
    else:
        assert measured == "old"
        assert "is left as it is" in capsys.readouterr().err


def test_run_ends_in_one_json_line(run: Run, program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert run("--json-out", str(out), quiet=True) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(HEADS[program])
    last = json.loads(printed[-1])
    assert last == json.loads(out.read_text(encoding="utf-8"))
    assert last["notes"] == ["- note"]
    assert [(each["figure"], each["reached"]) for each in last["figures"]] == [("memory", True)]


def test_run_with_failures_has_an_exit_code_that_says_so(run: Run) -> None:
    assert run(quiet=True, failures=["- fork could not be measured"]) == 1


def test_results_are_out_before_a_readme_without_marks_is_refused(
    run: Run, program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme, out = tmp_path / "README.md", tmp_path / "out.json"
    readme.write_text("no marks\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"{MARKS[program]}:begin"):
        run("--readme", str(readme), "--json-out", str(out), quiet=True)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads(out.read_text(encoding="utf-8"))
    assert readme.read_text(encoding="utf-8") == "no marks\n"


@pytest.mark.parametrize(
    "text", ["<!-- kv:end --> <!-- kv:begin -->", "<!-- kv:begin --> <!-- kv:begin --> <!-- kv:end -->", "<!-- kv:begin -->"]
)
def test_rewritten_needs_its_marks_once_each_and_in_order(bench: SimpleNamespace, text: str) -> None:
    with pytest.raises(ValueError, match="kv:begin"):
        bench.figures.rewritten(text, "table", "kv")


def test_others_share_counts_the_host_and_foreign_processes(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.runs.os, "sysconf", lambda name: 100)
    before = [0] * 8
    after = [400, 0, 100, 450, 0, 0, 0, 50]  # ticks: user, nice, system, idle, wait, interrupts, soft, stolen
    assert bench.runs.others_share(before, after, ours_s=4.5) == pytest.approx((500 - 450 + 50) / 1000)
    assert bench.runs.others_share([], [], 1.0) is None


@pytest.mark.parametrize(
    ("share", "quiet", "said"),
    [
        (0.004, True, "took 0.4% of"),
        (0.5, False, "none of these figures is a result"),
        (None, False, "took an unknown share of"),
    ],
)
def test_watch_calls_a_machine_quiet_that_did_little_else(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, share: float | None, quiet: bool, said: str
) -> None:
    monkeypatch.setattr(bench.runs, "others_share", lambda before, after, ours_s: share)
    facts, note = bench.runs.Watch().end()
    assert (facts["others_share"], facts["quiet"]) == (share, quiet)
    assert said in note


def test_measured_keeps_the_figures_before_a_failure(bench: SimpleNamespace) -> None:
    def breaks(session: str) -> Iterator[str]:
        yield f"{session} 1"
        raise OSError("no space left")

    sections = {"a": breaks, "b": lambda session: [f"{session} 2"], "c": breaks}
    figures, failures = bench.runs.measured(sections, ["a", "b"], "figure", (OSError,))
    assert figures == ["figure 1", "figure 2"]
    assert failures == ["- a could not be measured: no space left."]
    with pytest.raises(OSError, match="no space left"):
        bench.runs.measured(sections, ["c"], "figure", (ValueError,))


def test_table_has_no_comma_behind_a_figure_without_a_unit(bench: SimpleNamespace, program: str) -> None:
    f = getattr(bench, program).f
    text = f.table([f.at_least("s", "hit rate", "", (0.5,), 0.4), f.at_least("s", "speed", "tok/s", (9.0,), 8.0)], [])
    assert [line.split(" |")[0] for line in text.splitlines()[2:4]] == ["| hit rate", "| speed, tok/s"]
