from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import chat as chat_module
from headrace.cli.turns import TurnReader
from headrace.errors import ContextOverflowError


@pytest.fixture
def at_terminal(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes `headrace chat` read the given lines as if they were typed; an exception among them is raised in its turn."""

    def type_lines(*lines: str | type[BaseException]) -> None:
        left = list(lines)

        def read_line(_prompt: str) -> str:
            line = left.pop(0) if left else EOFError
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr(TurnReader, "of_process", lambda quiet: TurnReader(read_line, interactive=True))

    return type_lines


def _sent(headrace: Any) -> list[str]:
    return [call[1] for call in headrace.model.calls if call[0] == "send"]


def test_chat_answers_each_piped_turn(headrace: Any) -> None:
    headrace.model.answers = [["First."], ["Second."]]
    ending = headrace("chat", stdin="one\ntwo\n")
    assert (ending.code, ending.out, ending.err) == (0, "First.\nSecond.\n", "")
    assert _sent(headrace) == ["one", "two"]
    assert headrace.model.closed


def test_chat_passes_options_on(headrace: Any) -> None:
    headrace("chat", "--system", "Be brief", "--temperature", "0.7", "--max-tokens", "5", "--stop", "X", stdin="hi\n")
    assert headrace.model.calls[0] == ("chat", "Be brief")
    options = headrace.model.calls[1][2]
    assert (options["temperature"], options["max_tokens"], options["stop"], options["logprobs"]) == (0.7, 5, ("X",), 0)


def test_chat_ignores_blank_turns(headrace: Any) -> None:
    headrace("chat", stdin="\n   \nhi\n")
    assert _sent(headrace) == ["hi"]


def test_chat_continues_a_line_after_a_backslash(headrace: Any) -> None:
    headrace("chat", stdin="one\\\ntwo\\\nthree\nfour\n")
    assert _sent(headrace) == ["one\ntwo\nthree", "four"]


def test_chat_takes_a_block_as_it_is(headrace: Any) -> None:
    headrace("chat", stdin='"""\ndef f():\n    return "\\\\"\n\n/reset\n"""\n"""one line"""\n')
    assert _sent(headrace) == ['def f():\n    return "\\\\"\n\n/reset', "one line"]


@pytest.mark.parametrize("stdin", ['"""\nunfinished', "unfinished\\"])
def test_chat_sends_what_there_is_when_the_input_ends_inside_a_turn(headrace: Any, stdin: str) -> None:
    headrace("chat", stdin=stdin)
    assert [text.strip() for text in _sent(headrace)] == ["unfinished"]


def test_chat_exit_ends_it(headrace: Any) -> None:
    assert headrace("chat", stdin="one\n/exit\ntwo\n").code == 0
    assert _sent(headrace) == ["one"]


def test_chat_reset_starts_over(headrace: Any) -> None:
    document = headrace("chat", "--json", "--system", "S", stdin="one\n/reset\ntwo\n").document
    assert document["messages"] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "Hello, world"},
    ]


def test_chat_json_is_one_document_with_every_turn(headrace: Any) -> None:
    headrace.model.answers = [["First."], ["Second."]]
    ending = headrace("chat", "--json", stdin="one\ntwo\n")
    document = ending.document
    assert ending.err == ""
    assert [turn["text"] for turn in document["turns"]] == ["First.", "Second."]
    assert [turn["usage"]["cached_tokens"] for turn in document["turns"]] == [0, 4]
    assert [message["role"] for message in document["messages"]] == ["user", "assistant"] * 2
    assert len(document["token_ids"]) == 8


def test_chat_stats_shows_the_last_answer_and_the_context(headrace: Any) -> None:
    ending = headrace("chat", stdin="/stats\none\n/stats\n")
    lines = ending.err.splitlines()
    assert lines[0] == "context: 0 of 8,192 tokens"
    assert lines[1] == "the past: 12 pages f16, 3 pages q4 in memory, 9 MB of 750 MB; 44 MB on disk"
    assert lines[2] == "context: 6 of 8,192 tokens"
    assert lines[4].startswith("prompt 3 tokens at 300 tok/s, generated 3 tokens")
    assert any("matmul q4_1" in line for line in lines[5:])


def test_chat_stats_option_shows_them_after_every_answer(headrace: Any) -> None:
    assert headrace("chat", "--stats", stdin="one\ntwo\n").err.count("GB/s, 75 %") == 2


def test_chat_save_writes_markdown_and_json(headrace: Any, tmp_path: Path) -> None:
    markdown, document = tmp_path / "talk of today.md", tmp_path / "talk.json"
    ending = headrace("chat", stdin=f"one\n/save {markdown}\n/save {document}\n")
    assert ending.err == f"saved 2 messages to {markdown}\nsaved 2 messages to {document}\n"
    assert markdown.read_text() == "## user\n\none\n\n## assistant\n\nHello, world\n\n"
    assert json.loads(document.read_text()) == {
        "messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "Hello, world"}]
    }
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["talk of today.md", "talk.json"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/save", "/save needs the name of a file: /save conversation.md"),
        ("/fly", "/fly is no command: /help lists them; begin with a space to send it as text"),
    ],
)
def test_chat_bad_command_in_a_pipe_ends_it(headrace: Any, line: str, message: str) -> None:
    ending = headrace("chat", stdin=f"{line}\none\n")
    assert (ending.code, ending.err) == (2, f"headrace: {message}\n")


def test_chat_save_that_fails_leaves_nothing(headrace: Any, tmp_path: Path) -> None:
    ending = headrace("chat", stdin=f"/save {tmp_path}/none/talk.md\n")
    assert (ending.code, ending.out) == (2, "")
    assert "cannot write" in ending.err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("text", ["/etc/hosts is what?", " /reset", "/Reset", "/", "a/b"])
def test_chat_text_that_only_looks_like_a_command_is_sent(headrace: Any, text: str) -> None:
    headrace("chat", stdin=f"{text}\n")
    assert _sent(headrace) == [text]


def test_chat_help_lists_every_command(headrace: Any) -> None:
    ending = headrace("chat", stdin="/help\n")
    assert ending.out == ""
    assert all(
        command in ending.err
        for command in ("/reset", "/save FILE", "/stats", "/sessions", "/fork NAME", "/pin", "/unpin", "/help", "/exit")
    )


def test_chat_at_a_terminal_goes_on_after_an_error(headrace: Any, at_terminal: Any) -> None:
    headrace.model.answers = [[ContextOverflowError("too long")], ["fine"]]
    at_terminal("one", "/fly", "two")
    ending = headrace("chat")
    assert (ending.code, ending.out) == (0, "fine\n")
    assert "headrace: too long\n" in ending.err
    assert "headrace: /fly is no command" in ending.err


def test_chat_at_a_terminal_ctrl_c_drops_what_was_typed(headrace: Any, at_terminal: Any) -> None:
    at_terminal('"""', "half", KeyboardInterrupt, "whole")
    ending = headrace("chat")
    assert ending.code == 0
    assert _sent(headrace) == ["whole"]
    assert "headrace: Ctrl-D or /exit leaves\n" in ending.err


def test_chat_ctrl_c_stops_the_answer_and_not_the_conversation(headrace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    headrace.model.answers = [["one", "two", "three"], ["Second."]]
    written: list[str] = []

    def interrupt_after_first(piece: str) -> None:
        written.append(piece)
        if len(written) == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat_module, "_drop", interrupt_after_first)
    before = signal.getsignal(signal.SIGINT)
    ending = headrace("chat", "--json", stdin="a\nb\n")
    assert ending.code == 0
    assert [turn["finish_reason"] for turn in ending.document["turns"]] == ["cancelled", "stop"]
    assert written == ["one", "Second."]
    assert signal.getsignal(signal.SIGINT) is before


def test_chat_second_ctrl_c_ends_the_program(headrace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt_twice(_piece: str) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat_module, "_write", interrupt_twice)
    ending = headrace("chat", stdin="a\nb\n")
    assert (ending.code, ending.err) == (130, "headrace: interrupted\n")
    assert headrace.model.closed


def test_chat_session_goes_on_and_says_so(headrace: Any) -> None:
    assert headrace("chat", "--session", "plan", stdin="one\n").err == ""
    ending = headrace("chat", "--session", "plan", stdin="two\n")
    assert ending.err == "session 'plan' goes on with 2 messages, 6 tokens\n"
    assert [message.content for message in headrace.model.sessions["plan"].messages[::2]] == ["one", "two"]
    assert not headrace.model.sessions["plan"].open


def test_chat_session_at_a_terminal_says_that_it_is_new(headrace: Any, at_terminal: Any) -> None:
    at_terminal("/exit")
    assert headrace("chat", "--session", "plan").err.splitlines()[1] == "session 'plan' is new"


def test_chat_session_in_json_names_it_and_says_nothing_else(headrace: Any) -> None:
    headrace("chat", "--session", "plan", stdin="one\n")
    ending = headrace("chat", "--session", "plan", "--json", stdin="two\n")
    assert ending.err == ""
    assert (ending.document["session"], len(ending.document["messages"])) == ("plan", 4)
    assert ending.document["turns"][0]["reuse"]["misses"] == []
    assert "session" not in headrace("chat", "--json", stdin="one\n").document


def test_chat_session_with_another_system_message_is_refused(headrace: Any) -> None:
    headrace("chat", "--session", "plan", "--system", "Be brief", stdin="one\n")
    ending = headrace("chat", "--session", "plan", "--system", "Be long", stdin="two\n")
    assert (ending.code, ending.out) == (2, "")
    assert "'plan' began without this system message" in ending.err
    assert headrace("chat", "--session", "plan", stdin="two\n").code == 0


def test_chat_session_is_checked_before_anything_is_loaded(headrace: Any) -> None:
    assert headrace("chat", "--session", "x", "--no-cache", stdin="one\n").code == 2
    assert headrace.loaded == []


def test_chat_sessions_lists_their_names(headrace: Any) -> None:
    assert headrace("chat", stdin="/sessions\n").err == "no session is kept yet\n"
    for name in ("plan", "a poem"):
        headrace("chat", "--session", name, stdin="one\n")
    assert headrace("chat", stdin="/sessions\n").err == "a poem\nplan\n"


def test_chat_pin_and_unpin_a_session(headrace: Any) -> None:
    assert headrace("chat", "--session", "plan", stdin="/pin\n").err == "session 'plan' is pinned\n"
    assert headrace.model.sessions["plan"].pinned
    assert headrace("chat", "--session", "plan", stdin="/unpin\n").err == "session 'plan' is no longer pinned\n"
    assert not headrace.model.sessions["plan"].pinned


def test_chat_fork_goes_on_in_a_copy(headrace: Any) -> None:
    ending = headrace("chat", "--session", "plan", stdin="one\n/fork plan B\ntwo\n")
    assert ending.code == 0
    assert ending.err == "this is session 'plan B' now, a copy of 'plan'\n"
    contents = {name: [each.content for each in session.messages[::2]] for name, session in headrace.model.sessions.items()}
    assert contents == {"plan": ["one"], "plan B": ["one", "two"]}
    assert not any(session.open for session in headrace.model.sessions.values())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/fork", "/fork needs the name of the copy: /fork NAME"),
        ("/fork plan", "session 'plan' is there already"),
        (f"/fork {'x' * 201}", "201 characters"),
    ],
)
def test_chat_fork_that_cannot_be_leaves_the_session(headrace: Any, at_terminal: Any, line: str, message: str) -> None:
    at_terminal(line, "one")
    ending = headrace("chat", "--session", "plan")
    assert ending.code == 0
    assert message in ending.err
    assert len(headrace.model.sessions["plan"].messages) == 2


@pytest.mark.parametrize("command", ["/pin", "/unpin", "/fork b"])
def test_chat_without_a_name_has_no_session_to_work_on(headrace: Any, command: str) -> None:
    ending = headrace("chat", stdin=f"{command}\n")
    assert ending.code == 2
    needs = f"headrace: {command.removesuffix(' b')} needs a session"
    assert ending.err == f"{needs}, and this conversation has no name: start with --session NAME\n"


@pytest.mark.parametrize("command", ["/pin", "/fork b"])
def test_chat_session_that_is_not_kept_claims_no_success(headrace: Any, at_terminal: Any, command: str) -> None:
    headrace.model.session_problem = "the disk is full"
    at_terminal("one", command, "two")
    ending = headrace("chat", "--session", "plan")
    assert ending.code == 0
    assert "kept: the disk is full" in ending.err
    assert "pinned" not in ending.err.replace("headrace: ", "")
    assert "this is session" not in ending.err
    assert len(headrace.model.sessions["plan"].messages) == 4


def test_chat_says_once_what_became_of_the_session(headrace: Any) -> None:
    session = headrace.model.session("plan")
    session.notices = ["session 'plan' was changed"]
    session.close()
    ending = headrace("chat", "--session", "plan", stdin="one\ntwo\n")
    assert ending.err.count("session 'plan' was changed") == 1


def test_chat_sessions_leaves_out_what_is_not_kept(headrace: Any) -> None:
    headrace.model.session_problem = "the disk is full"
    assert headrace("chat", "--session", "plan", stdin="/sessions\n").err.endswith("no session is kept yet\n")
