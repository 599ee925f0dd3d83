"""The sampler against a slow twin that sorts the whole vocabulary and follows the documented order word for word."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.engine.sampler import MAX_LOGPROBS, Sampler, SamplingParams, uniform
from headrace.errors import NumericError, OptionError

# A probability is a quotient of float64 sums of float64 exponentials; sums in another order differ in the last few bits.
PROBABILITY_TOLERANCE = 1e-12
# The sampler sums float32 exponentials over the whole vocabulary (relative error below 1e-6) for log-probabilities and for
# top-p without top-k: a cumulative mass this near to top_p may fall on either side.
MASS_TOLERANCE = 1e-6

GOLDEN_NUMBERS = [0.011546754286331562, 0.21185954403345741, 0.6860900762927493]
PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def twin_penalised(logits: np.ndarray, history: Sequence[int], params: SamplingParams) -> np.ndarray:
    scores = logits.copy()
    window = list(history)[-params.penalty_window :] if params.penalty_window else []
    for token in set(window):
        value = scores[token]
        value = value / np.float32(params.repeat_penalty) if value > 0 else value * np.float32(params.repeat_penalty)
        count = np.float32(window.count(token))
        scores[token] = value - (count * np.float32(params.frequency_penalty) + np.float32(params.presence_penalty))
    return scores


def twin_distribution(
    logits: np.ndarray, history: Sequence[int], params: SamplingParams
) -> tuple[list[int], list[float], float]:
    """Ids ascending, their probabilities, and how near a cumulative mass came to top_p (relative to it)."""
    scores = twin_penalised(logits, history, params)
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if params.temperature == 0.0:
        return order[:1], [1.0], math.inf
    if params.top_k:
        order = order[: params.top_k]
    masses = [math.exp(float(scores[i]) - float(scores[order[0]])) for i in order]
    total, running, margin = math.fsum(masses), 0.0, math.inf
    if params.top_p < 1.0:
        for count, mass in enumerate(masses, start=1):
            running += mass
            margin = min(margin, abs(running / total - params.top_p))
            if running >= params.top_p * total:
                order = order[:count]
                break
    if params.min_p > 0.0:
        floor = scores[order[0]] + np.float32(math.log(params.min_p))
        order = [i for i in order if scores[i] >= floor]
    weights = {i: math.exp((float(scores[i]) - float(scores[order[0]])) / params.temperature) for i in order}
    total = math.fsum(weights.values())
    ids = sorted(weights)
    return ids, [weights[i] / total for i in ids], margin


def params_strategy() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0]),
        top_k=st.sampled_from([0, 1, 2, 5, 40, 1000]),
        top_p=st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.95, 1.0]),
        min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        repeat_penalty=st.sampled_from([1.0, 0.8, 1.3]),
        presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
        frequency_penalty=st.sampled_from([0.0, 0.25]),
        penalty_window=st.sampled_from([0, 3, 64]),
        seed=st.integers(0, 2**64 - 1),
        logprobs=st.integers(0, 8),
    )


def rows(min_size: int = 1, max_size: int = 40) -> st.SearchStrategy[np.ndarray]:
    """Logits with many ties (whole numbers) or none."""
    ties = st.lists(st.integers(-4, 4).map(float), min_size=min_size, max_size=max_size)
    any_values = st.lists(st.floats(-30, 30, width=32), min_size=min_size, max_size=max_size)
    return (ties | any_values).map(lambda values: np.array(values, dtype=np.float32))


def wide_row(seed: int, vocab_size: int = 9000) -> np.ndarray:
    """A row long enough that candidates are cut out by the threshold, with ties among the best."""
    rng = np.random.default_rng(seed)
    return np.round(rng.normal(0, 3, vocab_size), 1).astype(np.float32)


@given(logits=rows(), params=params_strategy(), data=st.data())
def test_sampler_distribution_matches_twin(logits: np.ndarray, params: SamplingParams, data: st.DataObject) -> None:
    history = data.draw(st.lists(st.integers(0, len(logits) - 1), max_size=10))
    expected_ids, expected, margin = twin_distribution(logits, history, params)
    assume(margin > MASS_TOLERANCE)
    ids, probabilities = Sampler(params, len(logits)).distribution(logits, history)
    assert ids.tolist() == expected_ids
    assert probabilities == pytest.approx(expected, abs=PROBABILITY_TOLERANCE)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8, top_k=0, min_p=0.0),
        SamplingParams(temperature=0.8, top_k=0, top_p=0.97, min_p=0.0),
        SamplingParams(temperature=0.8, top_k=0, top_p=0.9),
        SamplingParams(temperature=0.8, top_k=0, top_p=1.0),
        SamplingParams(temperature=0.8, top_k=700, top_p=1.0, min_p=0.0),
        SamplingParams(temperature=0.8, top_k=5000, repeat_penalty=1.2),
        SamplingParams(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0),
    ],
)
def test_sampler_distribution_of_a_wide_row_matches_twin(params: SamplingParams, seed: int) -> None:
    logits = wide_row(seed)
    history = [int(logits.argmax()), 5, 5]
    expected_ids, expected, margin = twin_distribution(logits, history, params)
    assert margin > MASS_TOLERANCE
    ids, probabilities = Sampler(params, len(logits)).distribution(logits, history)
    assert ids.tolist() == expected_ids
    assert probabilities == pytest.approx(expected, abs=PROBABILITY_TOLERANCE)


def test_sampler_keeps_the_lowest_ids_when_all_logits_are_equal() -> None:
    logits = np.zeros(9000, dtype=np.float32)
    ids, _ = Sampler(SamplingParams(temperature=1.0, top_k=7, top_p=1.0), 9000).distribution(logits, [])
    assert ids.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert Sampler(SamplingParams(), 9000).sample(logits, [], 0).token_id == 0


@given(logits=rows(), params=params_strategy(), position=st.integers(0, 2**40))
def test_sampler_token_is_the_inverse_of_the_cumulative_distribution(
    logits: np.ndarray, params: SamplingParams, position: int
) -> None:
    sampler = Sampler(params, len(logits))
    ids, probabilities = sampler.distribution(logits, [])
    point = uniform(params.seed or 0, position)
    below = [math.fsum(probabilities[:n]) for n in range(len(ids) + 1)]
    assume(all(abs(edge - point) > PROBABILITY_TOLERANCE for edge in below))
    token = sampler.sample(logits, [], position).token_id
    index = ids.tolist().index(token)
    assert params.temperature == 0.0 or below[index] < point < below[index + 1]


def test_sampler_frequencies_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))
    sampler = Sampler(PLAIN, 4)
    draws = 4000
    counts = np.bincount([sampler.sample(logits, [], position).token_id for position in range(draws)], minlength=4)
    expected = draws * np.array([0.5, 0.25, 0.125, 0.125])
    assert ((counts - expected) ** 2 / expected).sum() < 16.27  # chi-square, 3 degrees of freedom, p = 0.001


@given(logits=rows(), params=params_strategy(), data=st.data())
def test_sampler_logprobs_are_those_of_the_model(logits: np.ndarray, params: SamplingParams, data: st.DataObject) -> None:
    history = data.draw(st.lists(st.integers(0, len(logits) - 1), max_size=10))
    sampled = Sampler(params, len(logits)).sample(logits, history, 3)
    if params.logprobs == 0:
        assert (sampled.logprob, sampled.top) == (None, ())
        return
    log_total = math.log(math.fsum(math.exp(float(x) - float(logits.max())) for x in logits)) + float(logits.max())
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: params.logprobs]
    assert [token for token, _ in sampled.top] == order
    assert [value for _, value in sampled.top] == pytest.approx(
        [float(logits[i]) - log_total for i in order], abs=MASS_TOLERANCE
    )
    assert sampled.logprob == pytest.approx(float(logits[sampled.token_id]) - log_total, abs=MASS_TOLERANCE)


def test_sampler_top_logprobs_of_a_wide_row_are_the_best_in_order() -> None:
    logits = wide_row(1)
    top = Sampler(SamplingParams(logprobs=20), len(logits)).sample(logits, [], 0).top
    assert [token for token, _ in top] == np.argsort(-logits, kind="stable")[:20].tolist()


def test_sampler_penalties_on_a_row_by_hand() -> None:
    logits = np.array([2.0, -2.0, 1.0, 0.5], dtype=np.float32)
    history = [3, 0, 0, 1]  # the window of three leaves the 3 out
    params = SamplingParams(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repeat_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        penalty_window=3,
    )
    scores = np.array([2.0 / 2 - 2 * 0.25 - 0.5, -2.0 * 2 - 0.25 - 0.5, 1.0, 0.5])
    _, probabilities = Sampler(params, 4).distribution(logits, history)
    assert probabilities == pytest.approx(np.exp(scores) / np.exp(scores).sum())
    assert logits.tolist() == [2.0, -2.0, 1.0, 0.5]


def test_sampler_same_seed_and_position_give_the_same_token_in_any_order_of_calls() -> None:
    logits = wide_row(2)
    params = SamplingParams(temperature=1.5, seed=11)
    forward = [Sampler(params, len(logits)).sample(logits, [], position).token_id for position in range(50)]
    one = Sampler(params, len(logits))
    backward = [one.sample(logits, [], position).token_id for position in reversed(range(50))]
    assert forward == backward[::-1]
    other = Sampler(SamplingParams(temperature=1.5, seed=12), len(logits))
    assert forward != [other.sample(logits, [], position).token_id for position in range(50)]


def test_sampler_top_p_near_one_keeps_nearly_all_of_a_flat_row() -> None:
    params = SamplingParams(temperature=1.0, top_k=0, top_p=1 - 2**-53, min_p=0.0)
    ids, _ = Sampler(params, 9000).distribution(np.zeros(9000, dtype=np.float32), [])
    assert len(ids) >= 8999  # the sum of float32 exponentials may round either way


def test_uniform_numbers_stay_the_same_from_version_to_version() -> None:
    # a seed that a user noted down must give the same text after an upgrade
    assert [uniform(0, 0), uniform(0, 1), uniform(2**64 - 1, 8191)] == GOLDEN_NUMBERS


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampler_refuses_logits_that_are_not_finite(bad: float, temperature: float) -> None:
    logits = np.zeros(100, dtype=np.float32)
    logits[17] = bad
    with pytest.raises(NumericError, match=r"the logit of token 17 is"):
        Sampler(SamplingParams(temperature=temperature), 100).sample(logits, [], 0)


def test_sampler_refuses_penalties_that_leave_the_range_of_float32() -> None:
    params = SamplingParams(temperature=1.0, repeat_penalty=1e38)
    with pytest.raises(NumericError, match=r"repeat_penalty=1e\+38"):
        Sampler(params, 2).sample(np.array([-30.0, 1.0], dtype=np.float32), [0], 0)


def test_sampler_takes_the_best_token_at_a_tiny_temperature() -> None:
    logits = wide_row(4)
    params = SamplingParams(temperature=1e-300, top_k=0, top_p=1.0, min_p=0.0)
    tied = np.flatnonzero(logits == logits.max()).tolist()
    assert {Sampler(params, len(logits)).sample(logits, [], position).token_id for position in range(20)} <= set(tied)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 1.01),
        ("top_p", -0.5),
        ("min_p", 2.0),
        ("repeat_penalty", 0.0),
        ("repeat_penalty", -1.0),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("penalty_window", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("logprobs", MAX_LOGPROBS + 1),
    ],
)
def test_sampling_params_refuse_a_bad_value_and_name_it(name: str, value: object) -> None:
    with pytest.raises(OptionError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).startswith(f"{name}={value!r} cannot be used: give a ")


def test_sampler_adds_biases_before_penalties_and_masks_last() -> None:
    logits = np.array([1.0, -2.0, 0.5, 3.0], dtype=np.float32)
    params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=2.0, logit_bias={0: -4.0, 2: 1.5})
    ids, probabilities = Sampler(params, 4).distribution(logits, [0, 2], np.array([True, True, True, False]))
    # token 0: 1 - 4 = -3, times 2; token 2: 0.5 + 1.5 = 2, divided by 2
    weights = np.exp([-6.0, -2.0, 1.0])
    assert ids.tolist() == [0, 1, 2]
    assert probabilities == pytest.approx(weights / weights.sum(), abs=PROBABILITY_TOLERANCE)


@given(logits=rows(2), params=params_strategy(), data=st.data())
def test_sampler_with_a_mask_is_the_sampler_of_what_is_allowed(
    logits: np.ndarray, params: SamplingParams, data: st.DataObject
) -> None:
    allowed = np.array(data.draw(st.lists(st.booleans(), min_size=len(logits), max_size=len(logits)).filter(any)))
    assume(twin_distribution(logits[allowed], [], params)[2] > MASS_TOLERANCE)
    names = np.flatnonzero(allowed)
    expected_ids, expected = Sampler(params, len(names)).distribution(logits[allowed], [])
    ids, probabilities = Sampler(params, len(logits)).distribution(logits, [], allowed)
    assert ids.tolist() == names[expected_ids].tolist()
    assert probabilities == pytest.approx(expected, abs=PROBABILITY_TOLERANCE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampler_refuses_a_mask_that_allows_nothing(temperature: float) -> None:
    with pytest.raises(OptionError, match="no token is allowed here: a mask of allowed tokens has to allow at least one"):
        Sampler(SamplingParams(temperature=temperature), 3).sample(np.zeros(3, np.float32), [], 0, np.zeros(3, bool))


def test_sampler_refuses_a_bias_of_a_token_that_is_not_there() -> None:
    with pytest.raises(OptionError, match=r"logit_bias names token 9, and the model's tokens are 0 to 8"):
        Sampler(SamplingParams(logit_bias={9: 1.0}), 9)


@pytest.mark.parametrize("biases", [{-1: 1.0}, {"a": 1.0}, {True: 1.0}, {3: 101.0}, {3: math.nan}, {3: -math.inf}, [1.0]])
def test_sampling_params_refuse_bad_biases(biases: object) -> None:
    with pytest.raises(OptionError, match=r"logit_bias.* cannot be used: give "):
        SamplingParams(logit_bias=biases)  # type: ignore[arg-type]


def test_sampling_params_keep_their_biases_when_the_callers_change() -> None:
    biases = {3: 1.0}
    params = SamplingParams(logit_bias=biases)
    biases[4] = 2.0
    assert params.logit_bias == {3: 1.0}
    assert not params.takes_largest
    assert hash(params) == hash(SamplingParams())
