"""SentencePiece BPE by scores: the pair whose union has the best score is merged first, the leftmost of equals.

Source: SentencePiece (Kudo and Richardson, 2018) as llama.cpp reads it out of GGUF files. This is done here and not
in the library `tokenizers`, because a list of merges cannot express "the leftmost of equal scores", has to be derived
first (513,511 merges for Gemma 3, 1.4 s) and takes 0.6 s and 90 MB to load; what is needed here is the dictionary
alone, and words are remembered, so that long texts are as fast.
Invariant: no special token can come out. Does not split special tokens off: see `tokenizer`.
"""

from __future__ import annotations

import re
from heapq import heapify, heappop, heappush
from typing import Final

from headrace.text.vocabulary import BYTE, NORMAL, SPACE, Vocabulary

_MAX_CACHED_WORDS: Final = 1 << 16
_MAX_CACHED_CHARACTERS: Final = 64


class ScoreEncoder:
    """Encodes plain text with a vocabulary of scored tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = vocabulary.text_ids()
        self._scores = vocabulary.scores
        self._unknown_id = vocabulary.unknown_id
        self._adds_space_prefix = vocabulary.adds_space_prefix
        # No token holds a space mark behind any other character, so no merge crosses such a place.
        self._word_start = re.compile(f"(?<=[^{SPACE}{re.escape(vocabulary.space_followers)}])(?={SPACE})")
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str, *, starts: bool) -> list[int]:
        """Ids of a text in which nothing is special; `starts` where it stands at the beginning or after a special token."""
        if starts and self._adds_space_prefix:
            text = " " + text
        ids: list[int] = []
        for word in self._word_start.split(text.replace(" ", SPACE)):
            ids += self._word(word)
        return ids

    def _word(self, word: str) -> list[int]:
        ids = self._cache.get(word)
        if ids is None:
            ids = [token_id for piece in self._merge(word) for token_id in self._piece(piece)]
            if len(word) <= _MAX_CACHED_CHARACTERS:
                if len(self._cache) >= _MAX_CACHED_WORDS:
                    self._cache.clear()
                self._cache[word] = ids
        return ids

    def _merge(self, word: str) -> list[str]:
        """Pieces of a word after all merges: a queue of candidate pairs over a doubly linked list of pieces."""
        ids, scores = self._ids, self._scores
        pieces = list(word)
        after = [*range(1, len(pieces)), -1]
        before = list(range(-1, len(pieces) - 1))
        queue: list[tuple[float, int, int, str]] = []
        for left in range(len(pieces) - 1):
            token_id = ids.get(union := pieces[left] + pieces[left + 1])
            if token_id is not None:
                queue.append((-scores[token_id], left, left + 1, union))
        heapify(queue)
        while queue:
            _, left, right, union = heappop(queue)
            # Pieces only grow or are emptied: the same length means that both are what they were.
            if not pieces[left] or not pieces[right] or len(pieces[left]) + len(pieces[right]) != len(union):
                continue
            pieces[left], pieces[right] = union, ""
            following = after[left] = after[right]
            if following >= 0:
                before[following] = left
            for first, second in ((before[left], left), (left, following)):
                if first >= 0 and second >= 0:
                    token_id = ids.get(union := pieces[first] + pieces[second])
                    if token_id is not None:
                        heappush(queue, (-scores[token_id], first, second, union))
        return [piece for piece in pieces if piece]

    def _piece(self, piece: str) -> list[int]:
        token_id = self._ids.get(piece)
        if token_id is not None:
            return [token_id]
        fallback = [self._ids.get(f"<0x{byte:02X}>") for byte in piece.encode()]
        ids = [byte_id for byte_id in fallback if byte_id is not None]
        if len(ids) == len(fallback):
            return ids
        return [] if self._unknown_id is None else [self._unknown_id]


def token_bytes(text: str, token_type: str) -> bytes:
    """Bytes that a token without a meaning of its own stands for; unused tokens stand for nothing."""
    if token_type == NORMAL:
        return text.replace(SPACE, " ").encode()
    return bytes([int(text[3:5], 16)]) if token_type == BYTE else b""
