"""Which token comes next: from a row of logits to one token id.

The order of operations, with the meaning that llama.cpp gives to each:

1. edits of the logits, in this order: `logit_bias` is added; penalties on tokens among the last `penalty_window` of the
   history, prompt included: a positive logit is divided by `repeat_penalty`, any other multiplied by it, then
   `frequency_penalty` times the token's count and `presence_penalty` once are subtracted; tokens that are not allowed get
   minus infinity, and are kept by none of the following;
2. top-k: the k tokens of highest logit (0: all);
3. top-p: of these, the shortest run from the best on whose probabilities reach `top_p` of their sum (1: all);
4. min-p: of these, the tokens at least `min_p` times as likely as the best one (0: all);
5. temperature: the logits that are left, divided by `temperature`; 0 takes the best token and skips 2 to 4;
6. one token is drawn by the inverse of the cumulative distribution over the remaining ids in ascending order.

Of tokens with equal logits the lower id goes first, everywhere.

The number that draws a token depends on the seed and on the token's position in its sequence and on nothing else
(a counter-based generator, Philox 4x64), so a sequence reads the same whatever else is in its batch.
Log-probabilities are those of the model: natural logarithms, before edits, truncation and temperature.

This is the slow twin of what a step does by itself (`kernels/choose.py`), and chooses where log-probabilities are asked for.

Invariant: nothing sorts the vocabulary (unless a top-k nearly as large is asked for): candidates are cut out first, by a
threshold below which no kept token can lie.
Knows nothing of models, text, stop strings or end tokens.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from headrace.errors import NumericError, OptionError

MAX_LOGPROBS = 1000
"""Most likely tokens that can be asked for at one place."""

MAX_BIAS = 100.0
"""The largest bias of a logit, either way: in practice it forces a token, or bans it."""

_BLOCKS = 1024
"""Columns whose maxima give the threshold of a top-k: one row of 4 KiB, several times a usual k."""

_FIRST_MASS_TOKENS = 256
"""Tokens looked at first for a top-p without top-k."""

_SLICES_PER_NAT = 16
_NUM_SLICES = 2048
"""Slices of the logits' range below the best, if these do not suffice; the last one holds all that lies further down."""

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class SamplingOptions(TypedDict, total=False):
    """Fields of `SamplingParams` that a call may give by name."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_window: int
    seed: int | None
    logit_bias: Mapping[int, float]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen; see the module's docstring for the meaning and the order.

    `seed` None: the model draws one for each answer and tells it in the result; a `Sampler` by itself, in which nothing is
    random, takes None for 0.
    `logit_bias` holds what is added to logits, from -100 to 100 by token id, as OpenAI's API has it.
    `logprobs` 0 computes none; N gives the chosen token's log-probability and the N most likely tokens.

    Raises:
        OptionError: a value that cannot be used.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 64
    seed: int | None = None
    logprobs: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_real("temperature", self.temperature, "0 (always the most likely token) or more", low=0.0)
        _check_real("top_p", self.top_p, "between 0 and 1 (1 keeps all)", low=0.0, high=1.0)
        _check_real("min_p", self.min_p, "between 0 (keeps all) and 1", low=0.0, high=1.0)
        _check_real("repeat_penalty", self.repeat_penalty, "above 0 (1 is none)", above=0.0)
        _check_real("presence_penalty", self.presence_penalty, "finite (0 is none)")
        _check_real("frequency_penalty", self.frequency_penalty, "finite (0 is none)")
        _check_whole("top_k", self.top_k, 2**31 - 1, "0 (keeps all) or more")
        _check_whole("penalty_window", self.penalty_window, 2**31 - 1, "0 (no penalties) or more tokens")
        _check_whole("logprobs", self.logprobs, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}")
        if self.seed is not None:
            _check_whole("seed", self.seed, 2**64 - 1, "from 0 to 2^64 - 1, or left out")
        _check_biases(self.logit_bias)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # what the caller changes later is no part of it

    @property
    def takes_largest(self) -> bool:
        """Whether the token of the largest logit is all that is asked for: then the step itself can choose it."""
        return self.temperature == 0.0 and not self.has_edits and self.logprobs == 0

    @property
    def has_edits(self) -> bool:
        """Whether logits are changed before a token is chosen; a mask of allowed tokens is not of these parameters."""
        return self.has_penalties or bool(self.logit_bias)

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty can change a logit."""
        changes = self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return changes and self.penalty_window > 0


@dataclass(frozen=True)
class Sampled:
    """A chosen token; `logprob` is None and `top` empty when `SamplingParams.logprobs` is 0.

    `top` holds (token id, log-probability), the most likely first.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses tokens of one sequence. It has no state: the same arguments give the same token, in any order of calls."""

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        """`vocab_size` is V, the length of every row of logits to come.

        Raises:
            OptionError: `logit_bias` names a token that there is none of.
        """
        check_bias_ids(params, vocab_size)
        self.params = params
        self.vocab_size = vocab_size

    def sample(self, logits: Float32Array, history: Sequence[int], position: int, allowed: BoolArray | None = None) -> Sampled:
        """Chooses one token.

        Args:
            logits: float32[V], left unchanged.
            history: token ids so far, prompt included; only the last `penalty_window` are read.
            position: index of the new token in its sequence, prompt included; picks the random number.
            allowed: bool[V], the tokens that may be chosen; None: all.

        Raises:
            NumericError: a logit is NaN or infinite.
            OptionError: no token is allowed.
        """
        best_logit = _check_finite(logits, self.vocab_size)
        if self.params.temperature == 0.0:
            token_id = int(self._edited(logits, history, allowed).argmax())
        else:
            ids, probabilities = self._distribution(self._edited(logits, history, allowed))
            token_id = int(ids[_inverse_cdf(probabilities, uniform(self.params.seed or 0, position))])
        return self._told(logits, token_id, best_logit)

    def tell(self, logits: Float32Array, token_id: int) -> Sampled:
        """A token that a step has chosen from these logits, float32[V], with the log-probabilities that were asked for."""
        return self._told(logits, token_id, logits.max())

    def _told(self, logits: Float32Array, token_id: int, best_logit: np.float32) -> Sampled:
        if self.params.logprobs == 0:
            return Sampled(token_id)
        log_total = float(best_logit) + math.log(_mass(logits, best_logit))
        top = tuple((int(i), float(logits[i]) - log_total) for i in _top_ids(logits, self.params.logprobs))
        return Sampled(token_id, float(logits[token_id]) - log_total, top)

    def distribution(
        self, logits: Float32Array, history: Sequence[int], allowed: BoolArray | None = None
    ) -> tuple[Int64Array, Float64Array]:
        """The tokens that can be drawn and their probabilities: ids int64[N] ascending, float64[N] that sum to 1.

        Raises:
            NumericError: a logit is NaN or infinite.
            OptionError: no token is allowed.
        """
        _check_finite(logits, self.vocab_size)
        scores = self._edited(logits, history, allowed)
        if self.params.temperature == 0.0:
            return np.array([scores.argmax()], dtype=np.int64), np.ones(1)
        return self._distribution(scores)

    def _edited(self, logits: Float32Array, history: Sequence[int], allowed: BoolArray | None) -> Float32Array:
        """Float32[V] after step 1: the same array when there are no edits, a changed copy otherwise."""
        scores = logits
        if self.params.logit_bias:
            ids, biases = biases_of(self.params)
            scores = scores.copy()
            scores[ids] += biases
        if self.params.has_penalties and len(history) > 0:
            scores = self._penalised(scores, history)
        if allowed is None:
            return scores
        assert allowed.shape == scores.shape
        if not allowed.any():
            raise OptionError(NOTHING_ALLOWED)
        return np.where(allowed, scores, np.float32(-np.inf))

    def _penalised(self, logits: Float32Array, history: Sequence[int]) -> Float32Array:
        """Float32[V], a copy with the penalties."""
        params = self.params
        counts = Counter(history[-params.penalty_window :])
        ids = np.fromiter(counts.keys(), dtype=np.int64, count=len(counts))
        times = np.fromiter(counts.values(), dtype=np.float32, count=len(counts))
        scores = logits.copy()
        values = scores[ids]
        repeat = np.float32(params.repeat_penalty)
        with np.errstate(over="ignore", invalid="ignore"):  # out of float32's range: turned away below
            values = np.where(values > 0, values / repeat, values * repeat)
            values -= times * np.float32(params.frequency_penalty) + np.float32(params.presence_penalty)
        if not np.isfinite(values).all():
            raise NumericError(out_of_range(params))
        scores[ids] = values
        return scores

    def _distribution(self, scores: Float32Array) -> tuple[Int64Array, Float64Array]:
        """Steps 2 to 5: ids int64[N] ascending and their probabilities float64[N]."""
        ids = self._kept(scores)
        values = scores if ids is None else scores[ids]
        # far below the best at a tiny temperature: weight 0; as is what is not allowed
        with np.errstate(over="ignore", under="ignore"):
            weights = np.exp((values.astype(np.float64) - float(values.max())) / self.params.temperature)
        weights /= weights.sum()
        ids = np.arange(len(scores), dtype=np.int64) if ids is None else ids
        allowed = values > -np.inf
        return (ids, weights) if allowed.all() else (ids[allowed], weights[allowed])

    def _kept(self, scores: Float32Array) -> Int64Array | None:
        """Ids, ascending, that pass top-k, top-p and min-p; None for the whole vocabulary.

        All three keep a prefix of the order (logit descending, id ascending), so their intersection is the shortest.
        """
        params = self.params
        best = scores.max()
        floor = np.float32(best + np.float32(math.log(params.min_p))) if params.min_p > 0.0 else np.float32(-np.inf)
        has_top_k = 0 < params.top_k < len(scores)
        if not has_top_k and params.top_p >= 1.0:
            return np.flatnonzero(scores >= floor) if params.min_p > 0.0 else None
        if has_top_k:
            kept = _top_ids(scores, params.top_k)
            if params.top_p < 1.0:
                cumulative = _cumulative_mass(scores[kept], best)
                kept = kept[: int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1]
        else:
            kept = _until_mass(scores, best, params.top_p * _mass(scores, best), floor)
        kept = kept[scores[kept] >= floor]
        kept.sort()
        return kept


NOTHING_ALLOWED = "no token is allowed here: a mask of allowed tokens has to allow at least one"


def out_of_range(params: SamplingParams) -> str:
    """Says that penalties are too strong for the logits that they met."""
    return (
        f"repeat_penalty={params.repeat_penalty}, presence_penalty={params.presence_penalty} and frequency_penalty="
        f"{params.frequency_penalty} push a logit out of float32's range: use penalties nearer to their neutral values"
    )


def check_bias_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuses biases of tokens that the vocabulary does not have.

    Raises:
        OptionError: an id is too large.
    """
    highest = max(params.logit_bias, default=0)
    if highest >= vocab_size:
        raise OptionError(f"logit_bias names token {highest}, and the model's tokens are 0 to {vocab_size - 1}")


def biases_of(params: SamplingParams) -> tuple[Int64Array, Float32Array]:
    """`logit_bias` as arrays: ids int64[N] ascending, float32[N]."""
    ids = sorted(params.logit_bias)
    return np.array(ids, dtype=np.int64), np.array([params.logit_bias[token] for token in ids], dtype=np.float32)


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of one position under one seed: Philox 4x64, keyed by the seed.

    The position is the counter's second word, so that each position owns 2^64 blocks of numbers.
    """
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position << 64)).random())


def _inverse_cdf(probabilities: Float64Array, random: float) -> int:
    """Index of the first entry whose cumulative sum exceeds `random` times the sum; never one of probability 0."""
    cumulative = np.cumsum(probabilities)
    index = int(np.searchsorted(cumulative, random * cumulative[-1], side="right"))
    if index < len(cumulative):
        return index
    return int(np.searchsorted(cumulative, cumulative[-1]))  # the product rounded up to the sum itself


def _top_ids(values: Float32Array, count: int) -> Int64Array:
    """Ids int64[min(count, V)] of the largest values, largest first, lower ids first among equals.

    Each of `count` columns of the row, taken as a table, holds a value at least as large as the count-th largest of the
    columns' maxima. So that maximum is a threshold that the wanted values all reach, and seldom do many others.
    """
    num_blocks = max(_BLOCKS, 4 * count)
    num_rows = len(values) // num_blocks
    if num_rows < 2:
        candidates = np.arange(len(values))
    else:
        maxima = values[: num_rows * num_blocks].reshape(num_rows, num_blocks).max(axis=0)
        threshold = np.partition(maxima, num_blocks - count)[num_blocks - count]
        candidates = np.flatnonzero(values >= threshold)
    best_first = np.argsort(-values[candidates], kind="stable")[:count]
    ids: Int64Array = candidates[best_first]
    return ids


def _until_mass(values: Float32Array, best: np.float32, needed_mass: float, floor: np.float32) -> Int64Array:
    """Ids int64[N], in no order, of the largest values up to the one that brings their mass to `needed_mass`.

    Where values fall below `floor` first, any ids below it may be missing.
    """
    ordered = _top_ids(values, _FIRST_MASS_TOKENS)
    cumulative = _cumulative_mass(values[ordered], best)
    if cumulative[-1] >= needed_mass or values[ordered[-1]] < floor or len(ordered) == len(values):
        return ordered[: int(np.searchsorted(cumulative, needed_mass)) + 1]
    # A flat distribution: weigh slices of the value axis, and put in order only the slice in which the mass is reached.
    # what is not allowed lies infinitely far down
    slices = np.minimum((best - values) * np.float32(_SLICES_PER_NAT), np.float32(_NUM_SLICES - 1)).astype(np.int64)
    masses = np.cumsum(np.bincount(slices, weights=np.exp(values - best), minlength=_NUM_SLICES))
    last = int(np.searchsorted(masses, needed_mass))
    inside = np.flatnonzero(slices < last)
    edge = np.flatnonzero(slices == last)
    edge = edge[np.argsort(-values[edge], kind="stable")]
    reached = (masses[last - 1] if last else 0.0) + _cumulative_mass(values[edge], best)
    return np.concatenate([inside, edge[: int(np.searchsorted(reached, needed_mass)) + 1]])


def _cumulative_mass(values: Float32Array, best: np.float32) -> Float64Array:
    """Running sums of exp(value - best): float64[N] of float32[N]."""
    masses: Float64Array = np.cumsum(np.exp(values.astype(np.float64) - float(best)))
    return masses


def _mass(values: Float32Array, best: np.float32) -> float:
    """The sum of exp(value - best) over float32[V]: exponentials in float32, good to 1e-6, the sum in float64."""
    return float(np.exp(values - best).sum(dtype=np.float64))


def _check_finite(logits: Float32Array, vocab_size: int) -> np.float32:
    """The largest logit. NaN passes through a maximum, an infinity is one end or the other.

    Raises:
        NumericError: a logit is NaN or infinite.
    """
    assert logits.shape == (vocab_size,)
    assert logits.dtype == np.float32
    best: np.float32 = logits.max()
    if not (np.isfinite(best) and np.isfinite(logits.min())):
        token_id = int(np.flatnonzero(~np.isfinite(logits))[0])
        raise NumericError(
            f"the logit of token {token_id} is {logits[token_id]}: the weights are damaged, fetch or convert the model again"
        )
    return best


def _check_real(
    name: str,
    value: object,
    allowed: str,
    *,
    low: float = -sys.float_info.max,
    high: float = math.inf,
    above: float = -math.inf,
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (low <= value <= high and above < value < math.inf):
        raise OptionError(f"{name}={value!r} cannot be used: give a number {allowed}")


def _check_biases(biases: object) -> None:
    if not isinstance(biases, Mapping):
        raise OptionError(f"logit_bias={biases!r} cannot be used: give numbers from -100 to 100 by token id, as {{42: -5.0}}")
    for token, bias in biases.items():
        _check_whole("a token id of logit_bias", token, 2**31 - 1, "from 0 up")
        _check_real(f"logit_bias of token {token}", bias, "from -100 to 100 (0 is none)", low=-MAX_BIAS, high=MAX_BIAS)


def _check_whole(name: str, value: object, high: int, allowed: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= high:
        raise OptionError(f"{name}={value!r} cannot be used: give a whole number {allowed}")


def sampling_params(base: SamplingParams | None, overrides: SamplingOptions, logprobs: int) -> SamplingParams:
    """Sampling parameters with some fields replaced.

    Raises:
        OptionError: a name is no field, or a value cannot be used.
    """
    names = {field.name for field in fields(SamplingParams)}
    for name in overrides:
        if name not in names:
            raise OptionError(f"{name!r} is no sampling option: use {', '.join(sorted(names))}")
    params = replace(base or SamplingParams(), **overrides)
    return replace(params, logprobs=logprobs) if logprobs else params
