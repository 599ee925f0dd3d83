"""A scripted model in the place where the command line loads one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
import pytest
from typer.testing import CliRunner

from headrace.cli import loading
from headrace.cli.app import build_app
from headrace.cli.options import LoadOptions
from headrace.cli.progress import ConsoleProgress
from headrace.cli.protocols import ModelLike
from headrace.engine.generation import check_max_tokens
from headrace.engine.results import GenerationResult, KeptPast, Piece, Reuse, Timings, TokenLogprob, Usage
from headrace.engine.sampler import SamplingOptions, sampling_params
from headrace.errors import OptionError
from headrace.model.step import LedgerTotals
from headrace.text.detokenizer import Stop, stop_strings
from headrace.text.messages import Prompt, conversation

NO_REUSE = Reuse()


@dataclass(frozen=True)
class FakeOperation:
    phase: str
    operation: str
    calls: int
    macs: int
    total_bytes: int
    time_s: float


@dataclass(frozen=True)
class FakeMessage:
    role: str
    content: str


class FakeGeneration:
    """Gives the scripted pieces; an exception among them is raised in its turn."""

    def __init__(
        self,
        script: Sequence[str | BaseException],
        prompt_tokens: int,
        cached_tokens: int,
        logprobs: int,
        reuse: Reuse = NO_REUSE,
        seed: int | None = None,
    ) -> None:
        self._script = script
        self._usage = (prompt_tokens, cached_tokens)
        self._reuse = reuse
        self._seed = seed
        self._logprobs = logprobs
        self._cancelled = False
        self._pieces: list[Piece] = []
        self._coming = self._speak()

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._coming)

    @property
    def has_news(self) -> bool:
        return True

    def close(self) -> None:
        self._coming.close()

    def _speak(self) -> Generator[Piece, None, None]:
        for token_id, text in enumerate(self._script):
            if self._cancelled:
                return
            if isinstance(text, BaseException):
                raise text
            top = tuple((100 + rank, f"rival{rank}", -1.0 - rank) for rank in range(self._logprobs))
            logprobs = (TokenLogprob(token_id, text, -0.25, top),) if self._logprobs else ()
            self._pieces.append(Piece(text, (token_id,), logprobs))
            yield self._pieces[-1]

    def cancel(self) -> None:
        self._cancelled = True

    @property
    def result(self) -> GenerationResult:
        return GenerationResult(
            text="".join(piece.text for piece in self._pieces),
            token_ids=tuple(token for piece in self._pieces for token in piece.token_ids),
            finish_reason="cancelled" if self._cancelled else "stop",
            usage=Usage(*self._usage, len(self._pieces)),
            timings=Timings(load_s=0.5, prefill_s=0.01, decode_s=0.2, first_token_s=0.02),
            prefill_ledger=LedgerTotals(1, 1000, 10, 20, 30, 40),
            decode_ledger=LedgerTotals(2, 2000, 1_000_000_000, 0, 0, 500_000_000),
            logprobs=tuple(token for piece in self._pieces for token in piece.logprobs),
            reuse=self._reuse,
            seed=self._seed,
        )

    def operations(self) -> Sequence[FakeOperation]:
        return (
            FakeOperation("prefill", "matmul q4_1", 30, 10**9, 10**8, 0.008),
            FakeOperation("decode", "attention", 60, 10**6, 10**7, 0.05),
            FakeOperation("decode", "matmul q4_1", 60, 10**8, 10**9, 0.15),
        )


class FakeChat:
    def __init__(self, model: FakeModel, system: str | None) -> None:
        self._model = model
        self._system = system
        self.messages: list[FakeMessage] = []
        self.token_ids: list[int] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self._system is None else [FakeMessage("system", self._system)]
        self.token_ids = []

    def send(
        self, text: str, *, max_tokens: int, stop: Stop, logprobs: int, **sampling: Unpack[SamplingOptions]
    ) -> FakeGeneration:
        self._model.calls.append(("send", text, {"max_tokens": max_tokens, "stop": stop, "logprobs": logprobs, **sampling}))
        seed = self._model.checked(max_tokens, stop, logprobs, sampling)
        self.messages.append(FakeMessage("user", text))
        known = len(self.token_ids)
        self.token_ids += [0] * len(text)
        chat = self

        class Recorded(FakeGeneration):
            def _speak(self) -> Generator[Piece, None, None]:
                yield from super()._speak()
                chat.messages.append(FakeMessage("assistant", self.result.text))
                chat.token_ids += self.result.token_ids

        return Recorded(self._model.next_answer(), len(self.token_ids), known, logprobs, self._model.reuse, seed)


class FakeSession(FakeChat):
    """A chat that the model knows by its name."""

    def __init__(self, model: FakeModel, name: str, system: str | None) -> None:
        super().__init__(model, system)
        self.name = name
        self.pinned = False
        self.open = True
        self.problem: str | None = model.session_problem
        self.notices: list[str] = []

    def take_notices(self) -> list[str]:
        notices, self.notices = self.notices, []
        return notices

    def send(
        self, text: str, *, max_tokens: int, stop: Stop, logprobs: int, **sampling: Unpack[SamplingOptions]
    ) -> FakeGeneration:
        assert self.open
        return super().send(text, max_tokens=max_tokens, stop=stop, logprobs=logprobs, **sampling)

    def pin(self, pinned: bool = True) -> None:
        self.pinned = pinned

    def fork(self, name: str) -> FakeSession:
        assert self.open
        if name in self._model.sessions:
            raise OptionError(f"session {name!r} is there already")
        copy = FakeSession(self._model, name, self._system)
        copy.messages, copy.token_ids = list(self.messages), list(self.token_ids)
        self._model.sessions[copy.name] = copy
        return copy

    def close(self, keep: bool = True) -> None:
        assert self.open
        self.open = False
        if not keep:
            del self._model.sessions[self.name]


class FakeTokenizer:
    """A token a word; the BOS token is 1."""

    def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
        return [1] * add_bos + [2] * len(text.split())


class FakeSequence:
    """Counts the bytes of every step: 100 of weights a call and 1 of keys and values a token."""

    def __init__(self, model: FakeModel) -> None:
        self.ledger = LedgerTotals()
        self.model = model
        self.num_tokens = 0

    def append(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        assert token_ids
        assert all(0 <= token < self.model.vocab_size for token in token_ids)
        self.num_tokens += len(token_ids)
        assert self.num_tokens <= self.model.context_tokens
        self.ledger += LedgerTotals(1, 10, 100, self.num_tokens, len(token_ids), 0)
        self.model.steps.append((self.num_tokens - len(token_ids), len(token_ids)))
        return np.zeros(self.model.vocab_size, np.float32)

    def run_ahead(self, token_id: int, steps: int) -> list[int]:
        for _ in range(steps):
            self.append([token_id])
        return [token_id] * steps

    def truncate(self, num_tokens: int) -> None:
        assert num_tokens <= self.num_tokens
        self.num_tokens = num_tokens

    def close(self) -> None:
        self.model.calls.append(("sequence closed",))


@dataclass
class FakeModel:
    answers: list[list[str | BaseException]] = field(default_factory=lambda: [["Hello", ", ", "world"]])
    name: str = "fake"
    path: Path = Path("fake.gguf")
    threads: int = 2
    context_tokens: int = 8192
    vocab_size: int = 50
    load_s: float = 0.5
    cpu_level: str = "portable"
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    reuse: Reuse = NO_REUSE
    sessions: dict[str, FakeSession] = field(default_factory=dict)
    session_problem: str | None = None
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    closed: bool = False
    draw_seed: Callable[[], int] = lambda: 0

    def next_answer(self) -> list[str | BaseException]:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int,
        stop: Stop,
        system: str | None,
        raw: bool,
        logprobs: int,
        **sampling: Unpack[SamplingOptions],
    ) -> FakeGeneration:
        options = {"max_tokens": max_tokens, "stop": stop, "system": system, "raw": raw, "logprobs": logprobs, **sampling}
        self.calls.append(("generate", prompt, options))
        seed = self.checked(max_tokens, stop, logprobs, sampling)
        if raw and (system is not None or not isinstance(prompt, str)):
            raise OptionError("a system message or a list of messages needs the chat template")
        if not raw:
            conversation(prompt, system)
        return FakeGeneration(self.next_answer(), 24, 4, logprobs, self.reuse, seed)

    def checked(self, max_tokens: int, stop: Stop, logprobs: int, sampling: SamplingOptions) -> int | None:
        """The seed of an answer; what the engine refuses is refused here as well."""
        check_max_tokens(max_tokens)
        stop_strings(stop)
        params = sampling_params(None, sampling, logprobs)
        return self.draw_seed() if params.seed is None and params.temperature > 0 else params.seed

    def chat(self, system: str | None = None) -> FakeChat:
        self.calls.append(("chat", system))
        return FakeChat(self, system)

    def session(self, name: str, system: str | None = None) -> FakeSession:
        self.calls.append(("session", name, system))
        session = self.sessions.setdefault(name, FakeSession(self, name, system))
        session.open = True
        return session

    def session_names(self) -> list[str]:
        return sorted(self.sessions)

    def perplexity_of(self, token_ids: Sequence[int], *, page_format: str) -> float:
        self.calls.append(("perplexity", len(token_ids), token_ids[0], page_format))
        return {"f16": 20.0, "q8": 20.1, "q4": 21.0}[page_format]

    def page_bytes(self, page_format: str) -> int:
        return {"f16": 32_000, "q8": 16_000, "q4": 8_000}[page_format]

    def sequence(self) -> FakeSequence:
        return FakeSequence(self)

    def read_bandwidth(self) -> float:
        return 10e9

    def kept(self) -> KeptPast:
        return KeptPast({"f16": 12, "q8": 0, "q4": 3}, 9_000_000, 750_000_000, 44_000_000, 20_000_000_000)

    def close(self) -> None:
        assert not any(session.open for session in self.sessions.values()), "a session is kept when it is closed"
        self.closed = True


def _stands_for_the_engine(model: FakeModel) -> ModelLike:
    """Checked by mypy: the fakes have the types that the verbs ask for, as the engine has."""
    return model


@dataclass
class Ending:
    code: int
    out: str
    err: str
    exception: BaseException | None

    @property
    def document(self) -> Any:
        return json.loads(self.out)


class CommandLine:
    """Runs verbs in this process on a scripted model."""

    def __init__(self) -> None:
        self.model = FakeModel()
        self.loaded: list[LoadOptions] = []
        self.load: Callable[[LoadOptions, ConsoleProgress], FakeModel] = lambda options, progress: self.model

    def load_model(self, options: LoadOptions, progress: ConsoleProgress) -> FakeModel:
        self.loaded.append(options)
        return self.load(options, progress)

    def __call__(self, *arguments: str, stdin: str | bytes | None = None) -> Ending:
        ending = CliRunner().invoke(build_app(), arguments, input=stdin, prog_name="headrace")
        exception = None if isinstance(ending.exception, SystemExit) else ending.exception
        return Ending(ending.exit_code, ending.stdout, ending.stderr, exception)


@pytest.fixture
def headrace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CommandLine:
    """The command line, with a scripted model and a home of its own."""
    command_line = CommandLine()
    monkeypatch.setattr(loading, "load_model", command_line.load_model)
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    for name in list(os.environ):
        if name.startswith("HEADRACE_") and name != "HEADRACE_HOME":
            monkeypatch.delenv(name)
    return command_line


@pytest.fixture
def batch(headrace: CommandLine, tmp_path: Path) -> Any:
    """`headrace batch` in a folder of its own, on an engine that computes many answers in turns."""
    from tiny.batch import Runner  # tests start this file in processes that do not know where it lies

    return Runner(headrace, tmp_path)
