"""One thread that moves pages between memory and disk beside the computation.

Reads that somebody waits for come first and run at full speed. Everything else (writes, reads ahead) takes a bounded share
of the time, so that whoever decodes meanwhile keeps its cores:

    [read 1][read 2] | [write a] ..... pause ..... [write b] ..... pause .....

The thread touches pages' bytes and the store only. What has been done is picked up by the owner of tree and pool, on its
own thread, as finished jobs. Knows no tree, no worth and no policy.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.kv.budget import Refusal
from headrace.kv.readers import Failure
from headrace.kv.runs import Place, Run, RunDraft
from headrace.kv.stores import PageStore

Bytes = npt.NDArray[np.uint8]

PAUSE_RATIO = 9.0
"""Time to rest for each second of unhurried work."""
READ_GROUP_PAGES = 8
"""Pages that are asked of the store at once."""


@dataclass
class WriteJob:
    """A run to write; `tag` is the caller's. `outcome` is set when it is done, `work_s` is the processor time it took."""

    draft: RunDraft
    tag: Any
    outcome: Run | Refusal | None = None
    work_s: float = 0.0


@dataclass
class ReadJob:
    """Pages to read, in order. `outcomes` holds one entry per page that has been tried: what failed, or None."""

    places: Sequence[Place]
    targets: Sequence[Bytes]
    tag: Any = None
    urgent: bool = True
    outcomes: dict[int, Failure | None] = field(default_factory=dict)
    started: int = 0
    end: int = 0  # pages from here on are not read any more
    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def done(self) -> bool:
        """Whether nothing is left to read."""
        return len(self.outcomes) >= self.end


@dataclass
class LayersJob:
    """Pages to read in bands of layers: a band of all pages, then the next one; a page that has failed is left out.

    `started`, `end` and `num_read` count bands, those from `end` on are not read any more; `failures` are by page.
    """

    places: Sequence[Place]
    targets: Sequence[Bytes]
    bands: Sequence[range]
    end: int
    started: int = 0
    num_read: int = 0
    failures: dict[int, Failure] = field(default_factory=dict)
    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def done(self) -> bool:
        """Whether nothing is left to read."""
        return self.num_read >= self.end

    @property
    def num_layers(self) -> int:
        """Layers of a page."""
        return self.bands[-1].stop

    def has(self, layer: int) -> bool:
        """Whether a layer of all pages has been tried."""
        return self.num_read > 0 and layer < self.bands[self.num_read - 1].stop

    def layers_of(self, page: int, band: range) -> Bytes:
        """Where some layers of a page go."""
        size = len(self.targets[page]) // self.num_layers
        return self.targets[page][band.start * size : band.stop * size]


@dataclass
class CallJob:
    """Other work on the bytes of pages; `tag` is the caller's."""

    work: Callable[[], None]
    tag: Any


FinishedJob = WriteJob | ReadJob | CallJob
Job = FinishedJob | LayersJob


class Mover:
    """Jobs of one store, if there is one, and other work on pages.

    `clock` gives seconds, `work_clock` those of the processor that the calling thread had.
    """

    def __init__(
        self, store: PageStore | None, clock: Callable[[], float], work_clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._store, self._clock, self._work_clock = store, clock, work_clock
        self._changed = threading.Condition()
        self._urgent: deque[ReadJob | LayersJob] = deque()
        self._writes: deque[WriteJob] = deque()
        self._calls: deque[CallJob] = deque()
        self._ahead: deque[ReadJob] = deque()
        self._finished: deque[FinishedJob] = deque()
        self._hurried = 0
        self._stopped = False
        self._busy = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def write(self, draft: RunDraft, tag: Any) -> WriteJob:
        """Queues a run to be written; its pages must not change or be freed until the job has finished."""
        job = WriteJob(draft, tag)
        self._add(self._writes, job)
        return job

    def read(
        self,
        places: Sequence[Place],
        targets: Sequence[Bytes],
        tag: Any = None,
        *,
        urgent: bool = True,
        end: int | None = None,
    ) -> ReadJob:
        """Queues pages, up to `end`, to be read. Urgent jobs are waited for; others are handed out by `finished`."""
        job = ReadJob(places, targets, tag, urgent, end=len(places) if end is None else end)
        if job.end:
            self._add(self._urgent if urgent else self._ahead, job)
        return job

    def call(self, work: Callable[[], None], tag: Any) -> None:
        """Queues other work."""
        self._add(self._calls, CallJob(work, tag))

    def finished(self) -> list[FinishedJob]:
        """Jobs that are done since the last call; urgent reads are not among them."""
        with self._changed:
            jobs = list(self._finished)
            self._finished.clear()
        return jobs

    def cut(self, job: ReadJob, num_pages: int) -> bool:
        """Takes the last pages off a job; False if one of them is being read already."""
        with self._changed:
            if job.end - num_pages < job.started:
                return False
            job.end -= num_pages
            self._changed.notify_all()
            return True

    def read_layers(self, places: Sequence[Place], targets: Sequence[Bytes], num_bands: int) -> LayersJob:
        """Queues pages to be read in bands of layers, for somebody who waits."""
        assert self._store is not None
        layers = self._store.num_layers
        cuts = [layers * number // num_bands for number in range(num_bands + 1)]
        bands = [range(start, stop) for start, stop in itertools.pairwise(cuts) if start < stop]
        job = LayersJob(places, targets, bands, len(bands))
        self._add(self._urgent, job)
        return job

    def wait_layer(self, job: LayersJob, layer: int) -> None:
        """Waits until a layer of all pages of a job has been tried. What will never be read has failed then."""
        with self._changed:
            self._wait(lambda: self._stopped or job.done or job.has(layer))
            if not job.has(layer):
                job.failures.update((page, "gone") for page in range(len(job.places)) if page not in job.failures)

    def abandon(self, job: ReadJob | LayersJob) -> None:
        """Reads no more of a job; when this returns, nothing is written to its targets any more."""
        with self._changed:
            job.end = job.started
            self._changed.notify_all()
            self._wait(lambda: job.done)

    def wait_read(self, job: ReadJob, more_than: int) -> None:
        """Waits until more than so many pages of a job have been tried, or it is done."""
        with self._changed:
            self._wait(lambda: job.done or len(job.outcomes) > more_than)

    def wait_write(self, job: WriteJob) -> None:
        """Waits until a run is written or refused, at full speed."""
        with self._changed:
            self._hurry(lambda: job.outcome is not None)

    def flush(self) -> None:
        """Waits until every job is done, at full speed."""
        with self._changed:
            self._hurry(lambda: not (self._urgent or self._writes or self._calls or self._ahead or self._busy))

    @property
    def pending_writes(self) -> int:
        """Runs that are not written yet."""
        return len(self._writes)

    def stop(self) -> None:
        """Ends the thread after the job that is running; what has not begun is dropped."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _hurry(self, until: Callable[[], bool]) -> None:
        self._hurried += 1
        self._changed.notify_all()
        try:
            self._wait(until)
        finally:
            self._hurried -= 1

    def _wait(self, until: Callable[[], bool]) -> None:
        """Waits for something that the thread does; raises what ended it instead."""
        self._changed.wait_for(lambda: self._error is not None or until())
        if self._error is not None:
            raise RuntimeError("the thread that moves pages has failed") from self._error

    def _add(self, queue: deque[Any], job: Job) -> None:
        with self._changed:
            assert not self._stopped, "the mover has stopped"
            queue.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="headrace-mover", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            self._work_on()
        except BaseException as error:  # noqa: BLE001 # whoever waits for this thread raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _work_on(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stopped or self._next())
                if self._stopped:
                    return
                self._busy = True
                job = self._next()
                assert job is not None
            start = self._clock()
            if isinstance(job, ReadJob):
                self._read(job)
            elif isinstance(job, LayersJob):
                self._read_band(job)
            elif isinstance(job, WriteJob):
                self._write(job)
            else:
                job.work()
                with self._changed:
                    self._calls.popleft()
                    self._finished.append(job)
            self._rest(self._clock() - start)

    def _next(self) -> Job | None:
        """What to do next: what somebody waits for, then what keeps pages from being lost."""
        for queue in (self._urgent, self._writes, self._calls, self._ahead):
            if queue:
                job: Job = queue[0]
                return job
        return None

    def _write(self, job: WriteJob) -> None:
        assert self._store is not None
        start = self._work_clock()
        try:
            outcome: Run | Refusal = self._store.write(job.draft)
        except OSError as error:
            outcome = Refusal("unusable", str(error))
        job.work_s = self._work_clock() - start
        with self._changed:
            job.outcome = outcome
            self._writes.popleft()
            self._finished.append(job)
            self._changed.notify_all()

    def _read(self, job: ReadJob) -> None:
        """Reads one group of a job's pages."""
        with self._changed:
            first, end = job.started, min(job.started + READ_GROUP_PAGES, job.end)
            job.started = end
        assert self._store is not None
        start = self._clock()
        found = self._store.read_many(job.places[first:end], job.targets[first:end])
        seconds = self._clock() - start
        with self._changed:
            job.seconds += seconds
            job.num_bytes += sum(len(target) for target in job.targets[first:end])
            job.outcomes.update(zip(range(first, end), found, strict=True))
            if job.done:
                queue = self._urgent if job.urgent else self._ahead
                queue.remove(job)
                if not job.urgent:
                    self._finished.append(job)
            self._changed.notify_all()

    def _read_band(self, job: LayersJob) -> None:
        """Reads one band of a job's pages."""
        with self._changed:
            if job.started == job.end:  # abandoned
                self._urgent.remove(job)
                return
            band = job.bands[job.started]
            job.started += 1
        assert self._store is not None
        pages = [page for page in range(len(job.places)) if page not in job.failures]
        targets = [job.layers_of(page, band) for page in pages]
        start = self._clock()
        found = self._store.read_many([job.places[page] for page in pages], targets, band)
        seconds = self._clock() - start
        with self._changed:
            job.seconds += seconds
            job.num_bytes += sum(len(target) for target in targets)
            job.failures.update((page, failure) for page, failure in zip(pages, found, strict=True) if failure is not None)
            job.num_read += 1
            if job.done:
                self._urgent.remove(job)
            self._changed.notify_all()

    def _rest(self, worked_s: float) -> None:
        """Leaves the cores to others for a while, unless somebody waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._hurried or self._urgent, PAUSE_RATIO * worked_s)
