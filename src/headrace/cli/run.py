"""`headrace run`: one prompt, one answer, streamed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli import options as o
from headrace.cli.errors import guarded, say
from headrace.cli.loading import loaded_model
from headrace.errors import OptionError, StorageError

if TYPE_CHECKING:
    from headrace.cli.protocols import GenerationLike, ModelLike


@guarded
def run(
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="What to answer; read from standard input when not given.", show_default=False),
    ] = None,
    model: o.Model = o.DEFAULT_MODEL,
    max_tokens: o.MaxTokens = o.DEFAULT_MAX_TOKENS,
    temperature: o.Temperature = o.TEMPERATURE,
    top_k: o.TopK = o.TOP_K,
    top_p: o.TopP = o.TOP_P,
    min_p: o.MinP = o.MIN_P,
    repeat_penalty: o.RepeatPenalty = o.REPEAT_PENALTY,
    presence_penalty: o.PresencePenalty = o.PRESENCE_PENALTY,
    frequency_penalty: o.FrequencyPenalty = o.FREQUENCY_PENALTY,
    seed: o.Seed = o.SEED,
    stop: o.Stop = None,
    system: o.System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")] = False,
    threads: o.Threads = None,
    context: o.Context = None,
    no_cache: o.NoCache = False,
    session: o.Session = None,
    kv_memory: o.KvMemory = None,
    kv_disk: o.KvDisk = None,
    kv_formats: o.KvFormats = None,
    kv_dir: o.KvDir = None,
    logprobs: o.Logprobs = 0,
    stats: o.Stats = False,
    as_json: o.AsJson = False,
) -> None:
    """Answer one prompt and print how fast it went."""
    loading = o.LoadOptions.checked(
        model,
        threads,
        context,
        no_cache=no_cache,
        kv_memory=kv_memory,
        kv_disk=kv_disk,
        kv_formats=kv_formats,
        kv_dir=kv_dir,
    )
    answering = o.AnswerOptions.checked(
        max_tokens=max_tokens,
        stop=stop,
        logprobs=logprobs,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
    )
    if raw and system is not None:
        raise OptionError("--raw continues a text, and --system needs the chat template: leave one of them out")
    if session is not None:
        loading.check_session(session)
        if raw:
            raise OptionError("--raw continues a text and --session a conversation: leave one of them out")
    text = read_prompt() if prompt is None else prompt
    if not text:
        raise OptionError("the prompt is empty: give some text, or pipe it in")
    with loaded_model(loading) as loaded, _answer(loaded, text, answering, session, system, raw=raw) as generation:
        _stream(generation, show=not as_json, with_logprobs=logprobs > 0)
        _report(generation, loaded.name, loaded.read_bandwidth, stats=stats, as_json=as_json)


@contextmanager
def _answer(
    model: ModelLike, text: str, answering: o.AnswerOptions, name: str | None, system: str | None, *, raw: bool
) -> Iterator[GenerationLike]:
    """The answer to the prompt: alone, or as the next turn of the session of this name, which is kept at the end."""
    most, stop, logprobs, sampling = answering.max_tokens, answering.stop, answering.logprobs, answering.sampling
    if name is None:
        yield model.generate(text, max_tokens=most, stop=stop, system=system, raw=raw, logprobs=logprobs, **sampling)
        return
    from headrace.cli.session import open_session

    session = open_session(model, name, system)
    try:
        yield session.send(text, max_tokens=most, stop=stop, logprobs=logprobs, **sampling)
    finally:
        session.close(keep=True)
        problem, notices = session.problem, session.take_notices()
        for notice in notices if problem is None else ():
            say(notice)
    if problem is not None:  # the answer is there, and what was asked for besides is not
        raise StorageError(f"session {session.name!r} is not kept: {problem}")


def read_prompt() -> str:
    """The prompt from standard input, without the newline that ends a text file.

    Raises:
        OptionError: it is not UTF-8.
    """
    if sys.stdin.isatty():
        say("reading the prompt from the terminal; end it with Ctrl-D")
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise OptionError(f"the prompt is not UTF-8 text at byte {error.start}: convert it first") from None


def _stream(generation: GenerationLike, *, show: bool, with_logprobs: bool) -> None:
    last = "\n"
    for piece in generation:
        if not show:
            continue
        if piece.text:
            last = piece.text
            sys.stdout.write(piece.text)
            sys.stdout.flush()
        if with_logprobs:
            for token in piece.logprobs:
                rivals = "  ".join(f"{text!r} {logprob:.3f}" for _, text, logprob in token.top)
                sys.stderr.write(f"{token.logprob:9.4f}  {token.text!r}  {rivals}\n".replace("  \n", "\n"))
    if not last.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()


def _report(generation: GenerationLike, name: str, read_bandwidth: Callable[[], float], *, stats: bool, as_json: bool) -> None:
    from headrace.cli import report
    from headrace.cli.output import write_json

    result = generation.result
    speeds = report.Speeds.of(result, read_bandwidth)
    if as_json:
        document = {"model": name, **report.result_document(result, speeds)}
        write_json({**document, "operations": report.operations_document(generation.operations())} if stats else document)
        return
    report.print_line(report.closing_line(result, speeds))
    if stats:
        for line in (*report.seed_lines(result), *report.miss_lines(result.reuse)):
            report.print_line(line)
        report.print_operations(generation.operations())
