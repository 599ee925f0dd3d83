"""Helpers for tests of the memory of the past: fixed prices, clocks to be moved, answers and what they were computed from."""

from __future__ import annotations

import errno
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest

from headrace.engine.batch import Slice
from headrace.engine.generation import Generation
from headrace.engine.live import Live
from headrace.engine.loop import Loop
from headrace.engine.model import Model
from headrace.engine.results import MissReport
from headrace.kernels.runtime import Memory
from headrace.kv import runs
from headrace.kv.pages import layer_bytes, page_bytes, pages_for
from headrace.kv.prices import PriceBook
from headrace.kv.runs import parse_header
from headrace.model.step import MAX_STEP_TOKENS

Logits = npt.NDArray[np.float32]
Seen = tuple[int, Logits]
"""The position of a token, and what it was chosen from."""
Recorded = defaultdict[Live, list[Seen]]


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

    def resume(self, state: object) -> None:
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


def plain_ids(count: int, seed: int = 0) -> list[int]:
    """Tokens that no special token is among."""
    return np.random.default_rng(seed).integers(5, 200, count).tolist()


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

    def check(self, prompt_ids: Sequence[int], answer_ids: Sequence[int], seen: Sequence[Seen]) -> None:
        """An answer, and the logits that its tokens were chosen from, are to the bit what they are without any past."""
        rows = self.logits([*prompt_ids, *answer_ids])[len(prompt_ids) - 1 :]
        assert list(answer_ids) == rows[:-1].argmax(axis=1).tolist()
        for position, logits in seen:
            if position <= len(prompt_ids) + len(answer_ids):  # a cancelled answer forgets what nobody read
                assert np.array_equal(rows[position - len(prompt_ids)].view(np.uint32), logits.view(np.uint32))


@contextmanager
def recorded_logits() -> Iterator[Recorded]:
    """What tokens are chosen from meanwhile, by request; those of steps that were taken ahead are not seen."""
    recorded: Recorded = defaultdict(list)

    def watch(live: Live, logits: Logits) -> None:
        recorded[live].append((len(live.answer.history), logits.copy()))

    with mock.patch.object(Loop, "watch", staticmethod(watch)):
        yield recorded


def answer(
    model: Model, reference: Reference, prompt_ids: Sequence[int], max_tokens: int = 4, *, every: bool = True
) -> Generation:
    """An answer of tokens that is right to the bit; with `every`, the logits of every step are compared."""
    with recorded_logits() as recorded:
        generation = model.generate_ids(
            prompt_ids, max_tokens=max_tokens, temperature=0.0, ignore_end=True, logprobs=1 if every else 0
        )
        generation.text()
    seen = recorded[generation._live]
    assert len(seen) == len(generation.token_ids) if every else seen
    reference.check(prompt_ids, generation.token_ids, seen)
    return generation


def known_tokens(generation: Generation) -> int:
    """Tokens of the prompt that were not computed."""
    return generation.result.reuse.memory_tokens + generation.result.reuse.disk_tokens


def only_miss(generation: Generation) -> MissReport:
    """The one part of the prompt that was computed."""
    misses = generation.result.reuse.misses
    assert len(misses) == 1, misses
    return misses[0]


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


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has no space for pages from here on."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(runs, "_write", full)


def pages_on_disk(folder: Path) -> list[int]:
    """Whole pages of each run in a kv folder, oldest first."""
    return [parse_header(path.read_bytes()).pages_in(path.stat().st_size) for path in run_files(folder)]


class PagedRun:
    """Pages of one sequence of tokens, in memory of their own, and the logits of all of them."""

    def __init__(self, model: Model, token_ids: list[int]) -> None:
        self.model, self.config, self.executor = model, model.config, model._executor
        self.layer_bytes, self.page_bytes = layer_bytes(model.config), page_bytes(model.config)
        self.ids, self.num_pages = token_ids, pages_for(len(token_ids))
        self.expected = model.logits(token_ids)
        self.memory = Memory(self.num_pages * self.page_bytes)
        self.addresses = self.page_addresses()
        for start in range(0, len(token_ids), MAX_STEP_TOKENS):
            self.executor.run([Slice(token_ids[start : start + MAX_STEP_TOKENS], start, self.addresses)])
        self.whole = self.memory.bytes.copy()

    def page_addresses(self) -> npt.NDArray[np.int64]:
        """Where each page is in memory."""
        return self.memory.address + self.page_bytes * np.arange(self.num_pages)

    def page(self, index: int) -> npt.NDArray[np.uint8]:
        """A page as it is now."""
        return self.memory.bytes[index * self.page_bytes : (index + 1) * self.page_bytes]

    def whole_page(self, index: int) -> npt.NDArray[np.uint8]:
        """A page as it was computed."""
        return self.whole[index * self.page_bytes : (index + 1) * self.page_bytes]

    def check_step(self, part: Slice, pages: Iterable[int]) -> None:
        """A step has the bits of the computation from nothing, and so have some pages afterwards."""
        end = part.past_tokens + len(part.token_ids)
        rows = self.executor.run([part]).logits
        assert np.array_equal(rows.view(np.uint32), self.expected[end - part.num_outputs : end].view(np.uint32))
        for index in pages:
            assert np.array_equal(self.page(index), self.whole_page(index))

    def close(self) -> None:
        """Waits for late threads, since the pages go."""
        self.executor.streaming.release()
        while not all(self.executor.team.is_free(program) for program in self.executor._programs):
            time.sleep(0)
