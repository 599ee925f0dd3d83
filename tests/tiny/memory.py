"""Helpers for tests of the memory of the past: fixed prices, a clock to be moved, logits as they are sampled from, damage."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt

from headrace.engine.generation import Generation
from headrace.engine.model import Model
from headrace.engine.sampler import Sampled, Sampler
from headrace.kv.prices import PriceBook

Logits = npt.NDArray[np.float32]


class FixedPrices(PriceBook):
    """Prices that nothing measured changes: computing is dear, unless told otherwise, as it is with models of real size."""

    def __init__(self, token_s: float = 1e-3, position_s: float = 1e-7, byte_s: float = 1e-10) -> None:
        super().__init__()
        self.token_s, self.position_s = token_s, position_s
        self.read_s_per_byte = self.write_s_per_byte = byte_s

    def computed(self, num_tokens: int, past_tokens: int, seconds: float) -> None:
        pass

    def read(self, num_bytes: int, seconds: float) -> None:
        pass

    def written(self, num_bytes: int, seconds: float) -> None:
        pass

    def _line(self) -> tuple[float, float]:
        return self.token_s, self.position_s


class Clock:
    """The system's clock, put forward at will; files that the system dates are never from its future."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


class Ticks:
    """A wall clock that stands still unless it is moved."""

    def __init__(self, now_s: float = 1e9) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class Reference:
    """Logits computed from nothing, by a model that keeps no past and has memory for all of it."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], Logits] = {}

    def logits(self, token_ids: Sequence[int]) -> Logits:
        """Logits after each token: float32 [T, V]."""
        ids = tuple(token_ids)
        if ids not in self._known:
            if len(self._known) > 400:
                self._known.clear()
            self._known[ids] = self._model.logits(ids)
        return self._known[ids]

    def check(self, prompt_ids: Sequence[int], answer_ids: Sequence[int], sampled: Sequence[Logits]) -> None:
        """An answer, and the logits that its tokens were sampled from, are to the bit what they are without any past."""
        rows = self.logits([*prompt_ids, *answer_ids])[len(prompt_ids) - 1 :]
        assert list(answer_ids) == rows[:-1].argmax(axis=1).tolist()
        assert len(sampled) <= len(rows)
        for row, logits in zip(rows, sampled, strict=False):
            assert np.array_equal(row.view(np.uint32), logits.view(np.uint32))


@contextmanager
def recorded_logits() -> Iterator[list[Logits]]:
    """The logits that samplers are given meanwhile; the tokens of steps taken ahead are chosen without one."""
    seen: list[Logits] = []
    real = Sampler.sample

    def sample(self: Sampler, logits: Logits, *rest: object) -> Sampled:
        seen.append(logits.copy())
        return real(self, logits, *rest)  # type: ignore[arg-type]

    with mock.patch.object(Sampler, "sample", sample):
        yield seen


def answer(
    model: Model, reference: Reference, prompt_ids: Sequence[int], max_tokens: int = 4, *, every: bool = True
) -> Generation:
    """An answer of tokens that is right to the bit; with `every`, the logits of every step are compared."""
    with recorded_logits() as sampled:
        generation = model.generate_ids(
            prompt_ids, max_tokens=max_tokens, temperature=0.0, ignore_end=True, logprobs=1 if every else 0
        )
        generation.text()
    assert len(sampled) == (len(generation.token_ids) if every else 1)
    reference.check(prompt_ids, generation.token_ids, sampled)
    return generation


def crash(model: Model) -> None:
    """Ends a model as a killed process ends: what was not written is lost; only threads and files are let go of."""
    model.cache.mover.stop()
    if model.cache.disk is not None:
        model.cache.disk.store.close()
    model._executor.close()
    model._closed = True


def run_files(folder: Path) -> list[Path]:
    """The files of runs in a kv folder."""
    return sorted(folder.rglob("*.run"))
