"""Tokens drawn inside a step, against the NumPy sampler: the same token, but where the random number meets an edge.

Kernel and twin weigh tokens by exponentials of different roundings. They choose the same token unless the random number
lies within EDGE of an edge between two tokens of the cumulative distribution, or a cumulative mass within MASS of top_p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from headrace.engine.sampler import Sampler, SamplingParams, uniform
from headrace.engine.sampling_rows import SamplingRow
from headrace.errors import NumericError, OptionError
from headrace.kernels.fields import choose as fields_of_choose
from headrace.kernels.fields.sample import SAMPLE_WORDS

KERNELS = ["find", "find.commit", "choose", "choose.commit", "choose.draw", "choose.draw_flat"]
EDGE = 4e-6  # exponentials in float32, of arguments rounded to float32, where more than a few thousand tokens are kept
MASS = 4e-6

PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


@dataclass
class Row:
    """A row to draw from: logits, history, and what the request asks for."""

    logits: np.ndarray
    params: SamplingParams
    history: list[int] = field(default_factory=list)
    allowed: np.ndarray | None = None


class Chooser:
    """Runs `find` and `choose` over rows of one vocabulary."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.scores = np.zeros(0)
        self.kept: list[SamplingRow] = []

    def __call__(self, rows: Sequence[Row], part: int, *, steps_ahead: int = 0, repeat: bool = False) -> list[int]:
        kernels, count = self.kernels, len(rows[0].logits)
        num_parts = -(-count // part)
        samples = kernels.zeros((len(rows), SAMPLE_WORDS), np.int64)
        self.kept = []
        for words, row in zip(samples, rows, strict=True):
            made = SamplingRow(row.params, count, 1000)
            made.note(row.history, 0)
            made.allow(row.allowed)
            made.write(words, len(row.history) - steps_ahead)
            self.kept.append(made)
        chosen = kernels.zeros(len(rows), np.int64)
        self.scores = kernels.array(np.full((len(rows), count), 7.0, np.float32))
        common = {
            "logits": kernels.array(np.stack([row.logits for row in rows])),
            "stride": 4 * count,
            "count": count,
            "part": part,
            "num_parts": num_parts,
            "parts": kernels.zeros((len(rows), num_parts, fields_of_choose.part_bytes(part) // 8), np.int64),
            "scores": self.scores,
            "samples": samples,
            "step": steps_ahead,
            "chosen": chosen,
            "draw": kernels.library.address("choose.draw"),
            "draw_flat": kernels.library.address("choose.draw_flat"),
        }
        kernels.run("find", "find.commit", fields_of_choose, num_blocks=len(rows) * num_parts, repeat=repeat, **common)
        kernels.run("choose", "choose.commit", fields_of_choose, num_blocks=len(rows), repeat=repeat, **common)
        return chosen.tolist()


@pytest.fixture
def choose(kernels: Any) -> Chooser:
    if kernels._emulator is not None:
        pytest.skip("kernels that call each other by address are not run under emulation")
    return Chooser(kernels)


def explained(token: int, row: Row) -> bool:
    """Whether the twin chooses this token, for some top_p within MASS and a random number within EDGE."""
    point = uniform(row.params.seed or 0, len(row.history))
    for moved in (0.0, -MASS, MASS):
        top_p = min(max(row.params.top_p + moved, 0.0), 1.0) if row.params.top_p < 1.0 else 1.0
        sampler = Sampler(replace(row.params, top_p=top_p), len(row.logits))
        ids, probabilities = sampler.distribution(row.logits, row.history, row.allowed)
        index = int(np.searchsorted(ids, token))
        if index == len(ids) or ids[index] != token:
            continue
        edges = np.concatenate([[0.0], np.cumsum(probabilities)])
        if edges[index] - EDGE <= point <= edges[index + 1] + EDGE and probabilities[index] > 0.0:
            return True
    return False


def random_params(rng: np.random.Generator, count: int) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice([0.0, 1e-300, 0.01, 0.5, 0.8, 1.0, 3.0, 1e300])),
        top_k=int(rng.choice([0, 0, 1, 2, 40, 1000, 5000, count - 1, count, count + 7])) if count > 1 else 0,
        top_p=float(rng.choice([0.0, 1e-9, 0.5, 0.95, 0.999, 1 - 2**-53, 1.0, 1.0])),
        min_p=float(rng.choice([0.0, 0.0, 1e-5, 0.05, 1.0])),
        repeat_penalty=float(rng.choice([1.0, 1.0, 0.7, 1.3])),
        presence_penalty=float(rng.choice([0.0, 0.5, -1.0])),
        frequency_penalty=float(rng.choice([0.0, 0.25])),
        penalty_window=int(rng.choice([0, 3, 64, 1000])),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        logit_bias={int(i): float(rng.uniform(-100, 100)) for i in rng.integers(0, count, rng.choice([0, 0, 1, 20]))},
    )


def random_logits(rng: np.random.Generator, count: int) -> np.ndarray:
    """Peaked, usual, flat or all equal; with many ties or none; sometimes far from zero, or of a huge range."""
    spread = rng.choice([0.0, 0.01, 1.0, 3.0, 20.0, 1e4, 1e30])
    logits = (rng.normal(size=count) * spread + rng.choice([0.0, -3.0, 200.0])).astype(np.float32)
    return logits if rng.random() < 0.5 else np.round(logits).astype(np.float32)


def random_row(rng: np.random.Generator, count: int) -> Row:
    history = rng.integers(0, count, int(rng.choice([0, 1, 10, 200]))).tolist()
    history += history[:3]
    allowed = None
    if rng.random() < 0.3:
        allowed = rng.random(count) < rng.choice([0.001, 0.5, 0.99])
        allowed[rng.integers(0, count)] = True
    return Row(random_logits(rng, count), random_params(rng, count), history, allowed)


@pytest.mark.parametrize("count", [1, 2, 63, 65, 1000, 9001, 49152])
def test_drawn_token_is_that_of_the_twin(choose: Chooser, rng: np.random.Generator, count: int) -> None:
    rows = [random_row(rng, count) for _ in range(60)]
    chosen = choose(rows, part=3072)
    twins = [Sampler(row.params, count).sample(row.logits, row.history, len(row.history), row.allowed).token_id for row in rows]
    assert [i for i, (token, row) in enumerate(zip(chosen, rows, strict=True)) if not explained(token, row)] == []
    assert sum(token == twin for token, twin in zip(chosen, twins, strict=True)) >= 58


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8, top_k=0),
        SamplingParams(temperature=0.8, top_k=0, min_p=0.0),
        SamplingParams(temperature=0.8, top_k=0, top_p=0.999, min_p=0.0),
        SamplingParams(temperature=0.8, top_k=0, top_p=1.0, min_p=1e-6),
        SamplingParams(temperature=0.8, top_k=20000, top_p=0.9, min_p=0.0),
        SamplingParams(temperature=0.8, top_k=20000, top_p=1.0, min_p=0.0),
        PLAIN,
        replace(PLAIN, temperature=5.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_drawn_token_is_that_of_the_twin_for_many_positions(
    choose: Chooser, rng: np.random.Generator, params: SamplingParams, spread: float
) -> None:
    logits = (rng.normal(size=30011) * spread).astype(np.float32)
    rows = [Row(logits, replace(params, seed=seed), [0] * seed) for seed in range(50)]
    chosen = choose(rows, part=2048)
    assert [i for i, (token, row) in enumerate(zip(chosen, rows, strict=True)) if not explained(token, row)] == []


def test_drawn_token_does_not_depend_on_parts_of_work_or_repetition(choose: Chooser, rng: np.random.Generator) -> None:
    rows = [random_row(rng, 9001) for _ in range(40)]
    together = choose(rows, part=576)
    scores = choose.scores.copy()
    assert choose(rows, part=576, repeat=True) == together
    assert np.array_equal(choose.scores, scores)
    assert [choose([row], part=576)[0] for row in rows] == together


def test_drawn_token_of_a_later_step_has_the_later_position(choose: Chooser, rng: np.random.Generator) -> None:
    rows = [random_row(rng, 1000) for _ in range(20)]
    rows = [replace(row, history=[*row.history, 1, 2, 3]) for row in rows]
    assert choose(rows, part=64, steps_ahead=3) == choose(rows, part=64)


def test_chosen_token_becomes_history(choose: Chooser, rng: np.random.Generator) -> None:
    params = replace(PLAIN, repeat_penalty=1.2)
    (token,) = choose([Row(rng.normal(size=100).astype(np.float32), params, [5, 6])], part=64)
    memory = choose.kept[0]._history
    assert memory is not None
    assert memory.bytes.view(np.int32)[:4].tolist() == [5, 6, token, 0]


def test_edits_have_the_bits_of_the_twin(choose: Chooser, rng: np.random.Generator) -> None:
    rows = [random_row(rng, 1000) for _ in range(40)]
    choose(rows, part=64)
    for row, scores in zip(rows, choose.scores, strict=True):
        if row.params.has_edits or row.allowed is not None:
            assert np.array_equal(scores, Sampler(row.params, 1000)._edited(row.logits, row.history, row.allowed))
        else:
            assert (scores == 7.0).all()  # untouched: nothing was copied


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_tokens_are_never_chosen(choose: Chooser, rng: np.random.Generator, temperature: float) -> None:
    allowed = np.zeros(1000, bool)
    allowed[[3, 64, 999]] = True
    logits = rng.normal(size=1000).astype(np.float32)
    rows = [Row(logits, replace(PLAIN, temperature=temperature, seed=seed), allowed=allowed) for seed in range(40)]
    found = set(choose(rows, part=64))
    assert found == {3, 64, 999} if temperature else found == {int(np.where(allowed, logits, -np.inf).argmax())}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_cannot_be_chosen_from_says_why(choose: Chooser, temperature: float) -> None:
    params = replace(PLAIN, temperature=temperature)
    logits = np.linspace(-30, 1, 100).astype(np.float32)
    damaged = logits.copy()
    damaged[70] = np.nan
    masked = Row(logits, params, allowed=np.ones(100, bool))
    rows = [
        Row(damaged, params),
        Row(damaged, replace(params, logit_bias={3: 1.0})),
        Row(logits, replace(params, repeat_penalty=1e38), [0]),
        masked,
    ]
    out_of_range, damaged_code = fields_of_choose.EDITED_OUT_OF_RANGE, fields_of_choose.NOT_FINITE
    chosen = choose(rows, part=64)
    assert chosen[:3] == [damaged_code, damaged_code, out_of_range]
    assert chosen[3] >= 0
    with pytest.raises(NumericError, match=r"repeat_penalty=1e\+38"):
        choose.kept[2].check(out_of_range)
    with pytest.raises(OptionError, match="no token is allowed here"):
        choose.kept[3].allow(np.zeros(100, bool))


def test_a_record_of_zeros_takes_the_largest(choose: Chooser, rng: np.random.Generator) -> None:
    logits = rng.normal(size=200).astype(np.float32)
    words = np.ones(SAMPLE_WORDS, np.int64)
    SamplingRow(SamplingParams(), 200, 10).write(words, 0)
    assert words[0] == 0
    assert choose([Row(logits, SamplingParams())], part=64) == [int(logits.argmax())]


def test_a_mask_given_as_bits_is_that_of_booleans(rng: np.random.Generator) -> None:
    allowed = rng.random(77) < 0.5
    rows: list[SamplingRow] = [SamplingRow(PLAIN, 77, 10) for _ in range(2)]
    rows[0].allow(allowed)
    rows[1].allow(np.packbits(allowed, bitorder="little"))
    masks = [row._mask for row in rows]
    assert masks[0] is not None
    assert masks[1] is not None
    assert np.array_equal(masks[0].bytes, masks[1].bytes)
    assert rows[0].is_edited
    rows[0].allow(None)
    assert not rows[0].is_edited
