"""Token ids to text while they arrive: whole characters only, and nothing that may turn out to be a stop string.

Invariant: however the ids arrive, the pieces put together are the text of all ids, cut before the first stop string
that is completed. Knows neither sampling nor end tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from headrace.errors import OptionError

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer


Stop: TypeAlias = str | Sequence[str] | None
"""One text that ends an answer, or several, or none."""


def stop_strings(stop: Stop) -> tuple[str, ...]:
    """The stop strings of an answer, each once: 'END' -> ('END',); None -> ().

    Raises:
        OptionError: one is empty, or no text.
    """
    texts = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in texts):  # type: ignore[redundant-expr] # callers may not be typed
        raise OptionError(
            f"stop={stop!r} is not a text or a list of texts with at least one character each: leave empty ones out"
        )
    return tuple(dict.fromkeys(texts))


class StreamingDetokenizer:
    """Decodes one generation.

    Special tokens have no text here. Bytes that are not UTF-8 become U+FFFD as in `bytes.decode(errors="replace")`.

    Args:
        tokenizer: the tokenizer of the model.
        stop: texts that end the generation, as `stop_strings` takes them; none of them is emitted.

    Raises:
        OptionError: a stop string is empty.

    Attributes:
        stopped: a stop string was completed; nothing more is emitted.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Stop = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop_strings(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; it can be empty.

        Raises:
            OptionError: the id is not in the vocabulary.
        """
        if self._tokenizer.is_special(token_id) or self.stopped:
            return ""
        return self._emit(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """The text that was held back; call it once, after the last token."""
        text = "" if self.stopped else self._emit(self._decoder.decode(b"", final=True))
        text, self._held = text + self._held, ""
        return text

    def _emit(self, text: str) -> str:
        text = self._held + text
        # The first one to be completed wins, and of those the longest: that does not depend on how the text was cut.
        found = [(index + len(stop), index) for stop in self._stop if (index := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        num_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        certain = len(text) - num_held
        self._held = text[certain:]
        return text[:certain]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of the text that may be the beginning of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
