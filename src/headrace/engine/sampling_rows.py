"""What a step needs to choose the next token of a request by itself: the request's sampling record, and its memory.

One `SamplingRow` serves a request from its first token to its last. A row that takes the largest of unedited logits needs
none: its record is zeros. Knows no sequences and no steps; `kernels/choose.py` reads what lies here, and adds chosen
tokens to the history.

Invariant: memory lies where it lies as long as the row lives. Whoever gives a record to a program keeps the row alive
until no thread can be reading that program any more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.engine.sampler import NOTHING_ALLOWED, BoolArray, SamplingParams, biases_of, check_bias_ids, out_of_range
from headrace.errors import NumericError, OptionError
from headrace.kernels.fields import choose, sample
from headrace.kernels.runtime import Memory, round_up

Words = npt.NDArray[np.int64]

_SCALES = (1e-37, 3e38)  # bounds of 1 / temperature, within float32's range


class SamplingRow:
    """The sampling record of one request, its history, its biases and its mask of allowed tokens."""

    def __init__(self, params: SamplingParams, vocab_size: int, context_tokens: int) -> None:
        """Reserves memory for a history of `context_tokens` if there are penalties, for a mask when there is one.

        Raises:
            OptionError: `logit_bias` names a token that there is none of.
        """
        check_bias_ids(params, vocab_size)
        self._params, self._vocab_size = params, vocab_size
        self._history = Memory(4 * (context_tokens + 1)) if params.has_penalties else None
        self._biases = _bias_memory(params) if params.logit_bias else None
        self._mask: Memory | None = None
        self._words = self._record()

    @property
    def is_edited(self) -> bool:
        """Whether logits are changed before a token is chosen, which the ledger counts."""
        return self._params.has_edits or bool(self._words[sample.MASK // 8])

    def write(self, words: Words, position: int) -> None:
        """Fills a record, int64 [SAMPLE_WORDS], for the token at `position` of its sequence, prompt included.

        Tokens of the history before it were noted, or chosen by steps; those from it on, if any, are forgotten.
        """
        words[:] = self._words
        words[sample.POSITION // 8] = position

    def note(self, token_ids: Sequence[int], position: int) -> None:
        """Tells which tokens lie from `position` on; needed for those that no step with this row has chosen."""
        if self._history is not None and len(token_ids) > 0:
            history = self._history.bytes.view(np.int32)
            assert position + len(token_ids) < len(history), "the history was reserved for fewer tokens"
            history[position : position + len(token_ids)] = token_ids

    def allow(self, allowed: BoolArray | npt.NDArray[np.uint8] | None) -> None:
        """Sets the tokens that may be chosen from now on: bool[V]; or uint8 bits, token 0 the lowest of the first; None: all.

        Raises:
            OptionError: no token is allowed.
        """
        if allowed is None:
            self._words = self._record()
            return
        bits = np.packbits(allowed, bitorder="little") if allowed.dtype == np.bool_ else allowed
        assert len(bits) == -(-self._vocab_size // 8), "a mask has a bit for each token"
        if not bits.any():
            raise OptionError(NOTHING_ALLOWED)
        if self._mask is None:
            self._mask = Memory(round_up(len(bits), 8))
        self._mask.bytes[: len(bits)] = bits
        self._words = self._record()
        self._words[sample.MASK // 8] = self._mask.address
        self._words[sample.FLAGS // 8] |= sample.EDITED

    def check(self, chosen: int) -> None:
        """Raises what stands in a chosen id's place, but for logits that are not finite, which are not of this row's making.

        Raises:
            NumericError: penalties pushed a logit out of float32's range.
            OptionError: no token was allowed.
        """
        if chosen == choose.EDITED_OUT_OF_RANGE:
            raise NumericError(out_of_range(self._params))
        if chosen == choose.NOTHING_ALLOWED:
            raise OptionError(NOTHING_ALLOWED)

    def _record(self) -> Words:
        """The record without a mask, for position 0."""
        params = self._params
        words = np.zeros(sample.SAMPLE_WORDS, np.int64)
        flags = sample.EDITED if params.has_edits else 0
        if params.has_penalties:
            assert self._history is not None
            words[sample.HISTORY // 8] = self._history.address
            words[sample.WINDOW // 8] = params.penalty_window
        if self._biases is not None:
            words[sample.BIASES // 8] = self._biases.address
        if params.temperature > 0.0:
            top_k = params.top_k if params.top_k < self._vocab_size else 0
            weighed = top_k == 0 and (params.top_p < 1.0 or params.min_p == 0.0)
            whole = weighed and params.top_p >= 1.0
            flags |= sample.SAMPLED | (sample.WEIGHED if weighed else 0) | (sample.WHOLE if whole else 0)
            words[sample.TOP_K // 8] = top_k
            words[sample.SEED // 8] = np.uint64(params.seed or 0).astype(np.int64)
            doubles, floats = words.view(np.float64), words.view(np.float32)
            doubles[sample.TEMPERATURE // 8] = params.temperature
            doubles[sample.TOP_P // 8] = params.top_p
            floats[sample.LOG_MIN_P // 4] = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
            rest = (1.0 - params.top_p) / self._vocab_size
            floats[sample.LOG_REST // 4] = math.log(rest) if rest > 0.0 else -math.inf
            low, high = _SCALES
            floats[sample.SCALE // 4] = min(max(1.0 / params.temperature, low), high) if whole else 1.0
        floats = words.view(np.float32)
        with np.errstate(over="ignore"):  # infinite as float32: what it makes of a logit is turned away
            floats[sample.REPEAT // 4] = params.repeat_penalty
            floats[sample.PRESENCE // 4] = params.presence_penalty
            floats[sample.FREQUENCY // 4] = params.frequency_penalty
        words[sample.FLAGS // 8] = flags
        return words


def _bias_memory(params: SamplingParams) -> Memory:
    ids, biases = biases_of(params)
    memory = Memory(8 + sample.BIAS_BYTES * len(ids))
    memory.words(0, 1)[0] = len(ids)
    memory.bytes[8 : 8 + 8 * len(ids)].view(np.int32)[::2] = ids
    memory.floats(8, 2 * len(ids))[1::2] = biases
    return memory
