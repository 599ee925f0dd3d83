"""Byte-level BPE: each byte is written as one printable character, words are merged by the vocabulary's own list.

Source: the byte table of GPT-2 ("Language Models are Unsupervised Multitask Learners", 2019). Merging is done by the
library `tokenizers`. Invariant: no special token can come out. Does not split special tokens off: see `tokenizer`.
"""

from __future__ import annotations

from typing import Final

from headrace.text.pretokenizers import pre_tokenizer
from headrace.text.vocabulary import NORMAL, Vocabulary


def _byte_characters() -> list[str]:
    """The character of each byte: itself where it is printable in Latin-1, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


CHARACTERS: Final = _byte_characters()
"""Character of each of the 256 bytes."""
_BYTES: Final = {character: byte for byte, character in enumerate(CHARACTERS)}


class ByteLevelEncoder:
    """Encodes plain text with a byte-level BPE vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        rules = pre_tokenizer(vocabulary.pre)
        ids = vocabulary.text_ids()
        # A byte without a token is dropped, but only after merging, or its neighbours would meet: it gets an id past the end.
        self._num_tokens = len(vocabulary.tokens)
        missing = [character for character in CHARACTERS if character not in ids]
        ids.update(zip(missing, range(self._num_tokens, self._num_tokens + len(missing)), strict=True))
        self._drops = bool(missing)
        texts = iter(vocabulary.merges)
        merges = list(zip(texts, texts, strict=True))
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
        self._tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=rules.ignores_merges))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def encode(self, text: str, *, starts: bool) -> list[int]:  # noqa: ARG002 - bytes are the same wherever a text starts
        """Ids of a text in which nothing is special."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [token_id for token_id in ids if token_id < self._num_tokens] if self._drops else ids


def token_bytes(text: str, token_type: str) -> bytes:
    """Bytes that a token without a meaning of its own stands for; unused tokens stand for nothing."""
    if token_type != NORMAL:
        return b""
    return b"".join(bytes([_BYTES[character]]) if character in _BYTES else character.encode() for character in text)
