"""What the verbs need of a model: the engine provides it, and a scripted fake does in tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Unpack

from headrace.engine.bench import BenchModel
from headrace.engine.kv_bench import KvBenchModel
from headrace.engine.results import GenerationResult, KeptPast, Piece
from headrace.text.messages import Prompt

if TYPE_CHECKING:
    from headrace.engine.sampler import SamplingOptions


class OperationRow(Protocol):
    """All steps of one answer, summed over one class of operation."""

    @property
    def phase(self) -> str:
        """'prefill' or 'decode'."""

    @property
    def operation(self) -> str:
        """The class: 'matmul q4_1', 'attention', 'norm' ..."""

    @property
    def calls(self) -> int:
        """How many ledger rows were summed."""

    @property
    def macs(self) -> int:
        """Multiply-accumulates."""

    @property
    def total_bytes(self) -> int:
        """Bytes moved, all classes."""

    @property
    def time_s(self) -> float:
        """Seconds measured."""


class GenerationLike(Protocol):
    """An answer on its way: iterate it to its end, then read `result`."""

    def __iter__(self) -> Iterator[Piece]:
        """Pieces of text as they come."""

    def __next__(self) -> Piece:
        """The next piece; whatever else was asked of the model may be computed meanwhile."""

    @property
    def has_news(self) -> bool:
        """Whether the next piece, or the end, is there without computing anything."""

    def close(self) -> None:
        """Ends the answer now."""

    def cancel(self) -> None:
        """Ends the answer after the step that is running. Safe to call from a signal handler."""

    @property
    def result(self) -> GenerationResult:
        """Everything about the answer, once the iteration has ended."""

    def operations(self) -> Sequence[OperationRow]:
        """Time and bytes by class of operation, once the iteration has ended; prefill first, in the order of the step."""


class MessageLike(Protocol):
    """One turn's text and who said it."""

    @property
    def role(self) -> str:
        """'system', 'user' or 'assistant'."""

    @property
    def content(self) -> str:
        """The text."""


class ChatLike(Protocol):
    """A conversation. A later turn never prefills what an earlier one has."""

    def send(
        self, text: str, *, max_tokens: int, stop: Sequence[str], logprobs: int, **sampling: Unpack[SamplingOptions]
    ) -> GenerationLike:
        """The answer to `text`. A cancelled answer stays in the conversation as far as it got."""

    def reset(self) -> None:
        """Forgets all turns, the system message excepted."""

    @property
    def messages(self) -> Sequence[MessageLike]:
        """All turns so far."""

    @property
    def token_ids(self) -> Sequence[int]:
        """All tokens so far, the template's included."""


class SessionLike(ChatLike, Protocol):
    """A conversation with a name, which goes on after a restart."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def problem(self) -> str | None:
        """Why it is not kept, as the end of a sentence; None if it is, or will be after its first turn."""

    def take_notices(self) -> list[str]:
        """What its user should know and has not been told."""

    def pin(self, pinned: bool = True) -> None:
        """Keeps its past before that of others, or no longer does."""

    def fork(self, name: str) -> SessionLike:
        """A session of another name that shares the past so far.

        Raises:
            OptionError: there is a session of this name.
        """

    def close(self, keep: bool = True) -> None:
        """Lets go of it. With `keep` it can be gone on with, in this process or the next; otherwise it is forgotten."""


class ModelLike(BenchModel, KvBenchModel, Protocol):
    """A loaded model."""

    @property
    def path(self) -> Path:
        """The file it was loaded from."""

    @property
    def cpu_level(self) -> str:
        """Level of the kernels in use."""

    def generate(  # noqa: D102, documented by the engine
        self,
        prompt: Prompt,
        *,
        max_tokens: int,
        stop: Sequence[str],
        system: str | None,
        raw: bool,
        logprobs: int,
        **sampling: Unpack[SamplingOptions],
    ) -> GenerationLike: ...

    def chat(self, system: str | None = None) -> ChatLike:
        """A new conversation."""

    def session(self, name: str, system: str | None = None) -> SessionLike:
        """The conversation of this name, as it was left; a new one, with this system message, if there is none."""

    def session_names(self) -> Sequence[str]:
        """Names of the sessions that can be gone on with, sorted."""

    def kept(self) -> KeptPast:
        """What is kept of the past now, in memory and on disk."""

    def close(self) -> None:
        """Stops the worker team and gives memory back."""
