from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import loading, options
from headrace.cli.progress import ConsoleProgress
from headrace.engine.memory import MemorySettings
from headrace.engine.results import MissReport, Reuse
from headrace.engine.sampler import SamplingParams
from headrace.errors import ContextOverflowError, MemoryLimitError, NumericError


def test_run_streams_the_answer_to_stdout_and_the_rest_to_stderr(headrace: Any) -> None:
    ending = headrace("run", "Hi")
    assert ending.code == 0
    assert ending.out == "Hello, world\n"
    assert ending.err == (
        "prompt 24 tokens (4 known) at 2,000 tok/s, generated 3 tokens at 10 tok/s, 7.5 GB/s, "
        "75 % of the machine's read bandwidth\n"
    )
    assert headrace.model.closed


def test_run_adds_no_newline_to_an_answer_that_ends_in_one(headrace: Any) -> None:
    headrace.model.answers = [["done\n"]]
    assert headrace("run", "Hi").out == "done\n"


def test_run_passes_every_option_on(headrace: Any) -> None:
    ending = headrace(
        *("run", "Hi", "-m", "gemma3-270m", "--max-tokens", "9", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.9"),
        *("--min-p", "0.1", "--repeat-penalty", "1.1", "--presence-penalty", "0.2", "--frequency-penalty", "0.3"),
        *("--seed", "7", "--stop", "END", "--stop", "\n\n", "--system", "Be brief", "--threads", "3"),
        *("--context", "1000", "--logprobs", "2", "--no-cache", "--kv-memory", "2GB", "--kv-disk", "20 GB"),
        *("--kv-formats", "f16,q4", "--kv-dir", "past"),
    )
    assert ending.code == 0, ending.err
    assert headrace.loaded == [
        options.LoadOptions(
            "gemma3-270m",
            threads=3,
            context_tokens=1000,
            cache=False,
            kv_memory_bytes=2 * 10**9,
            kv_disk_bytes=20 * 10**9,
            kv_formats=("f16", "q4"),
            kv_dir=Path("past"),
        )
    ]
    assert headrace.model.calls == [
        (
            "generate",
            "Hi",
            {
                "max_tokens": 9,
                "stop": ("END", "\n\n"),
                "system": "Be brief",
                "raw": False,
                "logprobs": 2,
                "temperature": 0.5,
                "top_k": 3,
                "top_p": 0.9,
                "min_p": 0.1,
                "repeat_penalty": 1.1,
                "presence_penalty": 0.2,
                "frequency_penalty": 0.3,
                "seed": 7,
            },
        )
    ]


def test_run_raw_goes_without_a_template(headrace: Any) -> None:
    assert headrace("run", "Once", "--raw").code == 0
    assert headrace.model.calls[0][2]["raw"] is True


def test_run_defaults_are_those_of_the_sampler() -> None:
    shown = {name: getattr(options, name.upper()) for name in vars(SamplingParams()) if hasattr(options, name.upper())}
    sampler = dataclasses.asdict(SamplingParams())
    assert shown == {name: sampler[name] for name in shown}
    assert len(shown) == 8


@pytest.mark.parametrize("stdin", ["from a pipe", "from a pipe\n", "from a pipe\r\n"])
def test_run_reads_the_prompt_from_stdin(headrace: Any, stdin: str) -> None:
    assert headrace("run", stdin=stdin).code == 0
    assert headrace.model.calls[0][1] == "from a pipe"


def test_run_keeps_inner_newlines_of_a_piped_prompt(headrace: Any) -> None:
    headrace("run", stdin="one\n\ntwo\n\n")
    assert headrace.model.calls[0][1] == "one\n\ntwo\n"


def test_run_prints_one_json_document(headrace: Any) -> None:
    ending = headrace("run", "Hi", "--json")
    assert ending.code == 0
    assert ending.err == ""
    assert ending.document == {
        "model": "fake",
        "text": "Hello, world",
        "token_ids": [0, 1, 2],
        "finish_reason": "stop",
        "seed": None,
        "usage": {"prompt_tokens": 24, "cached_tokens": 4, "completion_tokens": 3},
        "timings": {"load_s": 0.5, "prefill_s": 0.01, "decode_s": 0.2, "first_token_s": 0.02},
        "speeds": {
            "prefill_tok_s": 2000.0,
            "decode_tok_s": 10.0,
            "gb_s": 7.5,
            "read_bandwidth_gb_s": 10.0,
            "bandwidth_fraction": 0.75,
        },
        "reuse": {
            "memory_tokens": 0,
            "compressed_tokens": 0,
            "disk_tokens": 0,
            "computed_tokens": 0,
            "load_s": 0.0,
            "saved_s": 0.0,
            "misses": [],
            "streamed_bytes": 0,
            "streamed_s": 0.0,
        },
        "ledger": {
            "prefill": _ledger(1, 1000, 10, 20, 30, 40, 100),
            "decode": _ledger(2, 2000, 1_000_000_000, 0, 0, 500_000_000, 1_500_000_000),
            "total": _ledger(3, 3000, 1_000_000_010, 20, 30, 500_000_040, 1_500_000_100),
        },
    }


def _ledger(*values: int) -> dict[str, int]:
    names = ("steps", "macs", "weight_bytes", "kv_read_bytes", "kv_write_bytes", "activation_bytes", "total_bytes")
    return dict(zip(names, values, strict=True))


def test_run_json_holds_logprobs_and_operations_when_asked(headrace: Any) -> None:
    document = headrace("run", "Hi", "--json", "--logprobs", "1", "--stats").document
    assert document["logprobs"][0] == {
        "token_id": 0,
        "text": "Hello",
        "logprob": -0.25,
        "top": [{"token_id": 100, "text": "rival0", "logprob": -1.0}],
    }
    assert [row["operation"] for row in document["operations"]] == ["matmul q4_1", "attention", "matmul q4_1"]


def test_run_shows_logprobs_on_stderr(headrace: Any) -> None:
    ending = headrace("run", "Hi", "--logprobs", "2")
    assert ending.out == "Hello, world\n"
    assert "-0.2500  'Hello'  'rival0' -1.000  'rival1' -2.000\n" in ending.err


def test_run_stats_shows_time_and_bytes_by_operation(headrace: Any) -> None:
    lines = headrace("run", "Hi", "--stats").err.splitlines()
    assert lines[1].split() == ["phase", "operation", "calls", "time", "share", "bytes", "GB/s", "GMAC/s"]
    rows = [" ".join(line.split()) for line in lines[2:]]
    assert rows == [
        "prefill matmul q4_1 30 8 ms 100.0 % 100 MB 12.5 125",
        "decode attention 60 50 ms 25.0 % 10 MB 0.2 0.02",
        "decode matmul q4_1 60 150 ms 75.0 % 1 GB 6.67 0.667",
    ]


def test_run_stats_says_why_what_was_computed_was_not_found(headrace: Any) -> None:
    headrace.model.reuse = Reuse(4, 0, 20, saved_s=0.5, misses=(MissReport("diverged", 4, 20, "'b' where 'a' was"),))
    lines = headrace("run", "Hi", "--stats").err.splitlines()
    assert lines[0].startswith("prompt 24 tokens (4 known, 0.50 s saved) at ")
    assert lines[1] == "computed 20 tokens from token 4 on: diverged, 'b' where 'a' was"
    assert headrace("run", "Hi").err.count("\n") == 1


def test_run_tells_the_seed_that_gives_the_same_text_again(headrace: Any) -> None:
    headrace.model.draw_seed = lambda: 1234
    assert headrace("run", "Hi", "--temperature", "0.8", "--stats").err.splitlines()[1] == "seed 1234"
    assert headrace("run", "Hi", "--temperature", "0.8", "--json").document["seed"] == 1234
    assert headrace("run", "Hi", "--temperature", "0.8", "--seed", "7", "--json").document["seed"] == 7
    assert headrace("run", "Hi", "--json").document["seed"] is None
    assert "seed" not in headrace("run", "Hi", "--temperature", "0.8").err


def test_run_session_goes_on_where_it_was_left(headrace: Any) -> None:
    headrace.model.answers = [["First."], ["Second."]]
    assert headrace("run", "one", "--session", "plan", "--system", "Be brief", "--max-tokens", "9").out == "First.\n"
    ending = headrace("run", "two", "--session", "plan", "--system", "Be brief")
    assert (ending.code, ending.out) == (0, "Second.\n")
    assert [call for call in headrace.model.calls if call[0] != "send"] == [("session", "plan", "Be brief")] * 2
    session = headrace.model.sessions["plan"]
    assert [message.content for message in session.messages] == ["Be brief", "one", "First.", "two", "Second."]
    assert headrace.model.calls[1][2]["max_tokens"] == 9
    assert not session.open


def test_run_session_with_another_system_message_is_refused(headrace: Any) -> None:
    headrace("run", "one", "--session", "plan")
    ending = headrace("run", "two", "--session", "plan", "--system", "Be brief")
    assert (ending.code, ending.out) == (2, "")
    assert ending.err == (
        "headrace: session 'plan' began without this system message: leave out --system, or take another name\n"
    )
    assert len(headrace.model.sessions["plan"].messages) == 2


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), NumericError("logits are not finite")])
def test_run_session_is_kept_when_the_answer_fails(headrace: Any, failure: BaseException) -> None:
    headrace.model.answers = [["Hel", failure]]
    assert headrace("run", "one", "--session", "plan").code in {2, 130}
    assert not headrace.model.sessions["plan"].open


def test_run_session_is_refused_where_the_environment_allows_no_disk(headrace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_KV_DISK", "0")
    ending = headrace("run", "one", "--session", "plan")
    assert (ending.code, headrace.loaded) == (2, [])
    assert "--session='plan'" in ending.err
    assert headrace("run", "one", "--session", "plan", "--kv-disk", "1GB").code == 0


@pytest.mark.parametrize("cache", [True, False])
def test_without_a_cache_nothing_of_the_past_lies_on_disk(monkeypatch: pytest.MonkeyPatch, cache: bool) -> None:
    memory, given = _settings(monkeypatch, options.LoadOptions("m", cache=cache, kv_disk_bytes=9, kv_memory_bytes=8))
    assert (given["cache"], memory.disk_bytes, memory.memory_bytes) == (cache, 9 if cache else 0, 8)


def test_command_line_keeps_the_past_on_disk_without_being_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_KV_DIR", str(tmp_path / "kv"))
    monkeypatch.setenv("HEADRACE_KV_DISK", "5MB")
    memory, _ = _settings(monkeypatch, options.LoadOptions("m"))
    assert (memory.folder, memory.disk_bytes, memory.disk_is_optional) == (tmp_path / "kv", 5_000_000, True)
    assert _settings(monkeypatch, options.LoadOptions("m", cache=False))[0].disk_bytes == 0


def _settings(monkeypatch: pytest.MonkeyPatch, chosen: options.LoadOptions) -> tuple[MemorySettings, dict[str, Any]]:
    """What the engine would be told to load with."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        "headrace.engine.load.load_with", lambda _model, _config, memory, **rest: given.update(rest, memory=memory)
    )
    loading.load_model(chosen, ConsoleProgress())
    return given["memory"], given


@pytest.mark.parametrize(
    "error",
    [
        ContextOverflowError("the prompt has 9,000 tokens\nand the context 8,192"),
        NumericError("logits are not finite"),
    ],
)
def test_run_error_of_the_engine_is_one_line_and_exit_code_two(headrace: Any, error: Exception) -> None:
    headrace.model.answers = [[error]]
    ending = headrace("run", "Hi")
    assert (ending.code, ending.out) == (2, "")
    assert ending.err == f"headrace: {' '.join(str(error).split())}\n"
    assert headrace.model.closed


def test_run_error_of_the_library_names_the_options_that_this_verb_has(headrace: Any) -> None:
    headrace.model.answers = [[ContextOverflowError("too long: raise the context", arguments=("context", "nothing_here"))]]
    assert headrace("run", "Hi").err == "headrace: too long: raise the context (--context)\n"
    headrace.model.answers = [[NumericError("no weights are kept: use cache=False", arguments=("cache", "raw"))]]
    assert headrace("run", "Hi").err == "headrace: no weights are kept: use cache=False (--no-cache, --raw)\n"
    assert headrace("chat", stdin="Hi\n").err.endswith("headrace: no weights are kept: use cache=False (--no-cache)\n")


def test_run_error_while_loading_is_one_line_and_exit_code_two(headrace: Any) -> None:
    def load(_options: Any, progress: Any) -> Any:
        progress.start("Packing", 10)
        raise MemoryLimitError("it does not fit")

    headrace.load = load
    ending = headrace("run", "Hi", "--json")
    assert (ending.code, ending.out) == (2, "")
    assert ending.err == "headrace: Packing (10 B)\nheadrace: it does not fit\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-tokens", "0"], "--max-tokens=0"),
        (["--context", "0"], "--context=0"),
        (["--threads", "0"], "--threads=0"),
        (["--stop", ""], "--stop=''"),
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "1.5"], "top_p"),
        (["--logprobs", "-1"], "logprobs"),
        (["--kv-memory", "much"], "--kv-memory='much'"),
        (["--kv-memory", "0"], "--kv-memory='0'"),
        (["--kv-disk", "-1GB"], "--kv-disk='-1GB'"),
        (["--kv-formats", "q4,f16"], "--kv-formats='q4,f16'"),
        (["--session", ""], "--session=''"),
        (["--session", "x" * 201], "201 characters"),
        (["--session", "x", "--raw"], "--raw"),
        (["--system", "x", "--raw"], "--system"),
        (["--session", "x", "--no-cache"], "--no-cache"),
        (["--session", "x", "--kv-disk", "0"], "--kv-disk"),
    ],
)
def test_run_bad_value_is_named_before_anything_is_loaded(headrace: Any, arguments: list[str], named: str) -> None:
    ending = headrace("run", "Hi", *arguments)
    assert (ending.code, ending.out) == (2, "")
    assert ending.err.startswith("headrace: ")
    assert ending.err.count("\n") == 1
    assert named in ending.err
    assert headrace.loaded == []


@pytest.mark.parametrize(
    "arguments", [["--max-tokens", "many"], ["--temperature", "hot"], ["--no-such-option"], ["one", "two"]]
)
def test_run_command_line_that_cannot_be_read_is_a_usage_error(headrace: Any, arguments: list[str]) -> None:
    ending = headrace("run", *arguments)
    assert (ending.code, ending.out) == (2, "")
    assert "Usage: headrace run" in ending.err


@pytest.mark.parametrize("arguments", [[""], []])
def test_run_empty_prompt_is_an_error(headrace: Any, arguments: list[str]) -> None:
    ending = headrace("run", *arguments, stdin="")
    assert (ending.code, ending.err) == (2, "headrace: the prompt is empty: give some text, or pipe it in\n")


def test_run_prompt_that_is_not_utf8_is_an_error(headrace: Any) -> None:
    ending = headrace("run", stdin=b"caf\xe9 au lait")
    assert (ending.code, ending.err) == (2, "headrace: the prompt is not UTF-8 text at byte 3: convert it first\n")


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_run_ctrl_c_exits_130_and_says_so(headrace: Any, as_json: list[str]) -> None:
    headrace.model.answers = [["Hel", KeyboardInterrupt()]]
    ending = headrace("run", "Hi", *as_json)
    assert (ending.code, ending.err) == (130, "headrace: interrupted\n")
    assert ending.out == ("" if as_json else "Hel")
    assert headrace.model.closed


def test_run_ctrl_c_while_loading_exits_130_and_says_so(headrace: Any) -> None:
    def load(_options: Any, _progress: Any) -> Any:
        raise KeyboardInterrupt

    headrace.load = load
    ending = headrace("run", "Hi")
    assert (ending.code, ending.out, ending.err) == (130, "", "headrace: interrupted\n")


def test_run_closed_pipe_exits_141_and_says_nothing(headrace: Any) -> None:
    headrace.model.answers = [["Hel", BrokenPipeError()]]
    ending = headrace("run", "Hi")
    assert (ending.code, ending.err) == (141, "")


def test_run_mistake_of_ours_keeps_its_exception(headrace: Any) -> None:
    headrace.model.answers = [[ZeroDivisionError("ours")]]
    assert isinstance(headrace("run", "Hi").exception, ZeroDivisionError)


def test_run_character_that_cannot_be_encoded_does_not_stop_the_answer(headrace: Any) -> None:
    headrace.model.answers = [["a\udc80b"]]
    assert headrace("run", "Hi").out == "a?b\n"


def test_run_session_that_is_not_kept_fails_after_the_answer(headrace: Any) -> None:
    headrace.model.session_problem = "the disk is full"
    ending = headrace("run", "one", "--session", "plan")
    assert (ending.code, ending.out) == (2, "Hello, world\n")
    assert ending.err.endswith("headrace: session 'plan' is not kept: the disk is full\n")
