"""The tokenizer of a model: text to token ids and back, exactly as llama.cpp does it.

Invariant: without `parse_special` no text becomes a control token, whatever it says. (llama.cpp lets merges of ordinary
text arrive at one where a vocabulary allows it, which neither of the two real models does; here they cannot.)
Knows neither chat templates nor streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.errors import OptionError
from headrace.text import byte_level, spm
from headrace.text.vocabulary import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary


class Tokenizer:
    """Encodes and decodes with one vocabulary of `V` tokens.

    Attributes:
        vocab_size: `V`.
        bos_id: token at the beginning of a text, or None.
        eos_id: token at the end of a text, or None.
        end_ids: all tokens that end a generation.
        adds_bos: whether the model expects the BOS token in front of a text.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._is_byte_level = vocabulary.model == "gpt2"
        self._encoder = byte_level.ByteLevelEncoder(vocabulary) if self._is_byte_level else spm.ScoreEncoder(vocabulary)
        self._user_defined = _longest_first(vocabulary, USER_DEFINED)
        self._marked = _longest_first(vocabulary, USER_DEFINED + CONTROL + UNKNOWN)
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.end_ids = frozenset(vocabulary.end_ids)
        self.adds_bos = vocabulary.adds_bos

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Builds the tokenizer out of the keys `tokenizer.ggml.*` of a GGUF file.

        Raises:
            UnsupportedModelError: the tokenizer model or pre-tokenizer is not known here.
            ModelFileError: a key is missing, has the wrong type or contradicts another one.
        """
        return cls(Vocabulary.from_metadata(metadata))

    @classmethod
    def from_json(cls, data: bytes) -> Tokenizer:
        """The tokenizer that `to_json` wrote.

        Raises:
            ModelFileError: the bytes are damaged or come from another version.
        """
        return cls(Vocabulary.from_json(data))

    def to_json(self) -> bytes:
        """UTF-8 JSON from which `from_json` builds the same tokenizer, much faster than from metadata."""
        return self._vocabulary.to_json()

    @property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of all special tokens, the longest first."""
        return tuple(text for text, token_id in self._marked if self.is_special(token_id))

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool = False, continues: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: any Unicode text without lone surrogates.
            parse_special: recognise the texts of special tokens; only for text that no user wrote.
            add_bos: put the BOS token in front if the model expects it (`adds_bos`).
            continues: the text goes on after ordinary text, so no space is put before it.

        Raises:
            OptionError: the text holds a lone surrogate.
        """
        _check_unicode(text)
        ids: list[int] = []
        starts = not continues
        if add_bos and self.adds_bos and self.bos_id is not None:
            ids.append(self.bos_id)
            starts = True
        for part in _split(text, self._marked if parse_special else self._user_defined):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encoder.encode(part, starts=starts)
            starts = isinstance(part, int)
        return ids

    def split_special(self, text: str) -> list[str | int]:
        """The text cut at the texts of special tokens: their ids, and the pieces of text between them."""
        parts: list[str | int] = []
        # User-defined tokens take part, so that the longest wins as in `encode`, and are put back as text.
        for part in _split(text, self._marked):
            if isinstance(part, int) and self.is_special(part):
                parts.append(part)
                continue
            piece = self._vocabulary.tokens[part] if isinstance(part, int) else part
            if parts and isinstance(parts[-1], str):
                parts[-1] += piece
            else:
                parts.append(piece)
        return parts

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            OptionError: an id is not in the vocabulary.
        """
        kept = (token_id for token_id in ids if not (skip_special and self.is_special(token_id)))
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def source_text(self, ids: Iterable[int]) -> str:
        """The text that was encoded: `decode` with special tokens, without the spaces that `encode` put in.

        Raises:
            OptionError: an id is not in the vocabulary.
        """
        pieces: list[bytes] = []
        starts = self._vocabulary.adds_space_prefix
        for token_id in ids:
            piece = self.token_bytes(token_id)
            is_marked = self._vocabulary.types[token_id] in {CONTROL, UNKNOWN, USER_DEFINED}
            pieces.append(piece.removeprefix(b" ") if starts and not is_marked else piece)
            starts = is_marked and self._vocabulary.adds_space_prefix
        return b"".join(pieces).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token stands for, which can be a part of a character; a special token stands for its own text.

        Raises:
            OptionError: the id is not in the vocabulary.
        """
        found = self._bytes.get(token_id)
        if found is None:
            text = self.token_text(token_id)
            token_type = self._vocabulary.types[token_id]
            if token_type in {CONTROL, UNKNOWN, USER_DEFINED}:
                found = text.encode()
            else:
                found = (byte_level if self._is_byte_level else spm).token_bytes(text, token_type)
            self._bytes[token_id] = found
        return found

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary writes it.

        Raises:
            OptionError: the id is not in the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise OptionError(f"the token id {token_id} is not in the vocabulary: use ids from 0 to {self.vocab_size - 1}")
        return self._vocabulary.tokens[token_id]

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a control token or the unknown token, which are no part of an answer's text.

        Raises:
            OptionError: the id is not in the vocabulary.
        """
        self.token_text(token_id)
        return self._vocabulary.is_special(token_id)


def _longest_first(vocabulary: Vocabulary, types: str) -> list[tuple[str, int]]:
    found = [(vocabulary.tokens[token_id], token_id) for token_id in vocabulary.ids_of_types(types)]
    return sorted(found, key=lambda item: -len(item[0].encode()))


def _split(text: str, marked: list[tuple[str, int]]) -> list[str | int]:
    """Cuts a text at marked tokens: all places of the longest one first, then the next one in what is left."""
    parts: list[str | int] = [text] if text else []
    for mark, token_id in marked:
        if mark not in text:
            continue
        cut: list[str | int] = []
        for part in parts:
            if isinstance(part, int) or mark not in part:
                cut.append(part)
                continue
            for index, piece in enumerate(part.split(mark)):
                if index:
                    cut.append(token_id)
                if piece:
                    cut.append(piece)
        parts = cut
    return parts


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"the lone surrogate {text[error.start]!r} at character {error.start}"
        raise OptionError(f"the text holds {what}: pass valid Unicode") from error
