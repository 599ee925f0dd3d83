"""What compressed pages cost and what they gain: the perplexity of a text by the format of the pages that hold its past.

The text is the same for every format, so the difference is the pages' alone. f16 is exact: the others are compared with it.

Does not know: the command line, and how pages are made or compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from headrace.config import KV_FORMATS
from headrace.errors import ContextOverflowError, OptionError
from headrace.model.step import PAGE_TOKENS

DEFAULT_TOKENS = 2048
_MOST_CHARACTERS_OF_A_TOKEN = 16
"""Enough text for a number of tokens on the average of any language; a text of longer ones gives fewer tokens."""


class TextTokenizer(Protocol):
    """Token ids out of text."""

    def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
        """Token ids, behind the BOS token if that is asked for and the model expects it."""


class KvBenchModel(Protocol):
    """A loaded model: what this benchmark needs of it."""

    @property
    def name(self) -> str:
        """Name for people."""

    @property
    def context_tokens(self) -> int:
        """Most tokens a sequence can hold."""

    @property
    def tokenizer(self) -> TextTokenizer:
        """The model's tokenizer."""

    def perplexity_of(self, token_ids: Sequence[int], *, page_format: str) -> float:
        """Perplexity of each token given those before it, read from pages of this format wherever they are whole."""

    def page_bytes(self, page_format: str) -> int:
        """Bytes of a page of this format."""


@dataclass(frozen=True)
class KvFormatResult:
    """One page format.

    `change` is the perplexity's against f16's, as a fraction; `fit_ratio` says how many times the tokens of f16 fit into the
    same bytes.
    """

    page_format: str
    perplexity: float
    change: float
    bytes_per_token: float
    fit_ratio: float


@dataclass(frozen=True)
class KvBenchResult:
    """All formats, over `num_tokens` tokens of text."""

    model: str
    num_tokens: int
    formats: tuple[KvFormatResult, ...]


def run_kv_bench(
    model: KvBenchModel,
    text: str | None = None,
    *,
    num_tokens: int = DEFAULT_TOKENS,
    on_format: Callable[[str], None] | None = None,
) -> KvBenchResult:
    """Measures the perplexity of a text for every page format.

    Args:
        model: what reads the text.
        text: the text; `default_text()` if there is none.
        num_tokens: how many tokens of it are read, at most.
        on_format: is told each format before it is measured.

    Raises:
        OptionError: the text, or what is to be read of it, does not fill a page and one token more.
        ContextOverflowError: that many tokens do not fit into the context.
    """
    check_tokens(num_tokens)
    if num_tokens > model.context_tokens:
        raise ContextOverflowError(
            f"{num_tokens:,} tokens of text do not fit into the context of {model.context_tokens:,} that {model.name} has: "
            "lower num_tokens",
            arguments=("num_tokens",),
        )
    read = default_text() if text is None else text
    ids = model.tokenizer.encode(read[: _MOST_CHARACTERS_OF_A_TOKEN * num_tokens], add_bos=True)[:num_tokens]
    if len(ids) <= PAGE_TOKENS:
        raise OptionError(f"the text has {len(ids)} tokens, which do not fill a page: give more than {PAGE_TOKENS}")
    results: list[KvFormatResult] = []
    for name in KV_FORMATS:
        if on_format is not None:
            on_format(name)
        perplexity = model.perplexity_of(ids, page_format=name)
        exact = results[0].perplexity if results else perplexity
        ratio = model.page_bytes(KV_FORMATS[0]) / model.page_bytes(name)
        results.append(KvFormatResult(name, perplexity, perplexity / exact - 1, model.page_bytes(name) / PAGE_TOKENS, ratio))
    return KvBenchResult(model.name, len(ids), tuple(results))


def check_tokens(num_tokens: int) -> None:
    """Checks a number of tokens to read.

    Raises:
        OptionError: they do not fill a page and one token more.
    """
    if num_tokens <= PAGE_TOKENS:
        raise OptionError(
            f"num_tokens={num_tokens} does not fill a page: use {PAGE_TOKENS + 1} or more", arguments=("num_tokens",)
        )


def default_text() -> str:
    """English text that comes with Python: the topics of its interactive help, in the order of their names.

    Raises:
        OptionError: this Python comes without them.
    """
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError:
        raise OptionError(
            "this Python comes without the topics of its help: give a text of your own", arguments=("text",)
        ) from None
    return "\n".join(topics[name] for name in sorted(topics))
