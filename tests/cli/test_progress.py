from __future__ import annotations

import io
import sys

import pytest

from headrace.cli.progress import ConsoleProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_elsewhere_than_a_terminal_is_one_line_a_task(capsys: pytest.CaptureFixture[str]) -> None:
    with ConsoleProgress() as progress:
        progress.notice("Terms\nof use")
        progress.start("fetching smollm2", 98_362_432)
        progress.advance(1000)
        progress.done()
        progress.start("compiling kernels", None)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "headrace: Terms of use\nheadrace: fetching smollm2 (98.4 MB)\nheadrace: compiling kernels\n"


def test_progress_at_a_terminal_is_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    with ConsoleProgress() as progress:
        progress.start("fetching smollm2", 2_000_000)
        progress.advance(1_500_000)
        progress.notice("Terms [of] use")
    shown = terminal.getvalue()
    assert "fetching smollm2" in shown
    assert "1.5/2.0 MB" in shown
    assert "headrace: Terms [of] use" in shown
    assert shown.endswith("\x1b[2K")


def test_progress_task_that_fails_leaves_no_bar_running(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    progress = ConsoleProgress()

    def fail() -> None:
        with progress:
            progress.start("Packing", None)
            raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        fail()
    shown = terminal.getvalue()
    assert shown.endswith("\x1b[2K")
    progress.advance(1)
    progress.done()
    assert terminal.getvalue() == shown


def test_progress_of_other_things_than_bytes_names_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ConsoleProgress() as progress:
        progress.start("compiling", 18, "kernels")
    assert capsys.readouterr().err == "headrace: compiling (18 kernels)\n"
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    with ConsoleProgress() as progress:
        progress.start("compiling", 18, "kernels")
        progress.advance(3)
    assert "3/18" in terminal.getvalue()
    assert "kernels" in terminal.getvalue()
