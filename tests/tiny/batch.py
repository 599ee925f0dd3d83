"""A scripted engine that computes all answers on their way in turns, as the real one does, and `headrace batch` on it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.engine.results import GenerationResult, LedgerTotals, Piece, Timings, Usage
from headrace.engine.sampler import SamplingParams
from headrace.errors import ContextOverflowError, NumericError, OptionError
from headrace.text.chat_template import Message

CONTEXT_WORDS = 50


class Answer:
    """The words of the prompt, capitals; one a turn. Pieces wait for their reader."""

    def __init__(self, model: Engine, prompt: str, max_tokens: int) -> None:
        self.model, self.prompt = model, prompt
        self.words = [f"{word.upper()} " for word in prompt.split()][:max_tokens]
        self.made = self.read = 0
        self.closed = False

    @property
    def has_ended(self) -> bool:
        return self.closed or self.made == len(self.words)

    @property
    def has_news(self) -> bool:
        return self.read < self.made or self.has_ended

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        assert not self.model.closed
        while not self.has_news:
            self.model.turn()
        if self.read == self.made:
            raise StopIteration
        self.read += 1
        word = self.words[self.read - 1]
        if word == "BROKEN ":
            self.closed = True
            raise NumericError("the logit of token 1 is nan: the weights are damaged")
        if isinstance(self.model.surprise, BaseException) and word == "SURPRISE ":
            raise self.model.surprise
        return Piece(word, (self.read,))

    def close(self) -> None:
        assert not self.model.closed, "answers end before their model"
        self.closed = True

    @property
    def result(self) -> GenerationResult:
        return GenerationResult(
            text="".join(self.words[: self.read]),
            token_ids=tuple(range(1, self.read + 1)),
            finish_reason="stop",
            usage=Usage(len(self.prompt.split()), self.model.num_turns, self.read),  # what is known is chance
            timings=Timings(),
            prefill_ledger=LedgerTotals(),
            decode_ledger=LedgerTotals(),
        )


@dataclass
class Engine:
    name: str = "scripted"
    answers: list[Answer] = field(default_factory=list)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    surprise: BaseException | None = None
    num_turns: int = 0
    most_on_their_way: int = 0
    closed: bool = False

    def generate(
        self,
        prompt: str | Sequence[Message],
        *,
        max_tokens: int,
        stop: Sequence[str],
        system: str | None,
        raw: bool,
        logprobs: int,
        **sampling: Any,
    ) -> Answer:
        assert not self.closed
        assert isinstance(stop, tuple)
        SamplingParams(**sampling, logprobs=logprobs)
        if raw and not isinstance(prompt, str):
            raise OptionError("raw continues a text")
        text = prompt if isinstance(prompt, str) else " ".join(f"{each.role} {each.content}" for each in prompt)
        num_words = len(text.split())
        if num_words > CONTEXT_WORDS:
            raise ContextOverflowError(f"the prompt has {num_words} tokens: shorten it")
        options = {"max_tokens": max_tokens, "stop": stop, "system": system, "raw": raw, "logprobs": logprobs}
        self.asked.append((text, options | sampling))
        self.answers.append(Answer(self, text, max_tokens))
        return self.answers[-1]

    def turn(self) -> None:
        """A token for everybody."""
        self.num_turns += 1
        running = [answer for answer in self.answers if not answer.has_ended]
        assert running
        self.most_on_their_way = max(self.most_on_their_way, len(running))
        for answer in running:
            answer.made += 1

    def close(self) -> None:
        self.closed = True


class Runner:
    """`headrace batch` in a folder of its own, each time with a fresh engine."""

    def __init__(self, command_line: Any, folder: Path) -> None:
        self.command_line, self.prompts, self.out = command_line, folder / "prompts.jsonl", folder / "answers.jsonl"
        self.engine = Engine()
        self.surprise: BaseException | None = None
        command_line.load = self._load

    def _load(self, _options: Any, _progress: Any) -> Engine:
        self.engine = Engine(surprise=self.surprise)
        return self.engine

    def write(self, *lines: object) -> bytes:
        texts = [line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines]
        self.prompts.write_bytes(b"".join(texts))
        return self.prompts.read_bytes()

    def __call__(self, *options: str, **rest: Any) -> Any:
        return self.command_line("batch", str(self.prompts), "--out", str(self.out), *options, **rest)

    @property
    def answers(self) -> list[Any]:
        return [json.loads(line) for line in self.out.read_bytes().splitlines()]


def mixed_requests(num_lines: int = 12) -> list[object]:
    """Requests of both forms and of different lengths; some are refused, some fail while they are computed."""
    lines: list[object] = []
    for number in range(num_lines):
        words = " ".join(f"w{number}é" for _ in range(1 + 7 * number % 11))
        body = {"messages": [{"role": "user", "content": words}]}
        lines.append(
            [
                {"id": f"é{number}", "prompt": words},
                {"custom_id": f"q{number}", "method": "POST", "url": "/v1/chat/completions", "body": body},
                {"id": number, "prompt": "one broken two"},
                b"nonsense\n",
                {"id": f"u{number}", "prompt": "x", "unknown": 1},
                {"id": f"m{number}", "messages": [{"role": "user", "content": words}], "max_tokens": 3},
            ][number % 6]
        )
    return lines
