"""Where the loop leaves the pieces of one answer, and its reader takes them.

    pieces   0 ... read ... | ... waiting for the reader ... | ... to come

The loop is the only writer, the answer's handle the only reader; they may be on threads of their own, and need no lock: the
loop appends to the list, the reader moves its mark. The loop never waits for a reader: an outbox that is full pauses its
request, and a reader who makes room lets it go on.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engine.results import FinishReason, Piece


class Outbox:
    """The pieces of one answer; about `capacity_tokens` of them may wait for their reader.

    Attributes:
        finish_reason: why the answer ended; None while it is coming, or if an error ended it.
        error: what ended the answer instead.
        is_closed: nothing more will come.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._pieces: list[Piece] = []
        self._num_read = 0
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.is_closed = False

    @property
    def is_full(self) -> bool:
        """Whether its request has to pause. Each piece holds one token at most."""
        return len(self._pieces) - self._num_read >= self._capacity_tokens

    @property
    def has_pieces(self) -> bool:
        """Whether there are pieces that nobody has read."""
        return self._num_read < len(self._pieces)

    @property
    def has_news(self) -> bool:
        """Whether a reader finds something: a piece, or the end."""
        return self.has_pieces or self.is_closed

    @property
    def read(self) -> Sequence[Piece]:
        """The pieces that were read."""
        return self._pieces[: self._num_read]

    @property
    def num_read_tokens(self) -> int:
        """Tokens of the answer that somebody has seen."""
        return sum(len(piece.token_ids) for piece in self.read)

    def put(self, piece: Piece) -> None:
        """Adds a piece; only the loop does."""
        self._pieces.append(piece)

    def take(self) -> Piece | None:
        """The oldest piece that was not read, if there is one; only the reader does."""
        if not self.has_pieces:
            return None
        piece = self._pieces[self._num_read]
        self._num_read += 1
        return piece

    def close(self, reason: FinishReason | None, error: BaseException | None = None) -> None:
        """Says that nothing more will come; only the loop does, once."""
        self.finish_reason, self.error = reason, error
        self.is_closed = True
