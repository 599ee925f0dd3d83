"""Tiny models for the engine's tests, loaded with kernels from the cache that the engine uses."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.config import Config
from headrace.engine.loading import LoadedWeights, load_weights
from headrace.engine.memory import MemorySettings
from headrace.engine.model import Model
from headrace.kernels.level import LEVELS, host_levels
from headrace.kernels.library import KernelLibrary
from headrace.kv.pages import page_bytes
from headrace.kv.prices import PriceBook
from headrace.weights.progress import NullProgress
from tiny.memory import FixedPrices, Reference
from tiny.models import TinySpec, write_model


class TinyModels:
    """Writes each specification once, loads each combination once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[tuple[str, int, str, int | None], Model] = {}

    def path(self, spec: TinySpec) -> Path:
        """The file of a model."""
        name = hashlib.sha256(repr(spec).encode()).hexdigest()[:16]
        path = self._folder / f"{name}.gguf"
        return path if path.exists() else write_model(path, spec)

    def load(self, spec: TinySpec, *, threads: int = 1, level: str = "", context: int | None = None) -> Model:
        """A model that is shared: close its sequences, not it."""
        level = level or host_levels()[-1].name
        key = (repr(spec), threads, level, context)
        if key not in self._models:
            self._models[key] = open_model(self.path(spec), threads=threads, level=level, context=context)
        return self._models[key]

    def close(self) -> None:
        """Stops all teams."""
        for model in self._models.values():
            model.close()


def check_memory(model: Model) -> None:
    """Books agree, nobody holds anything, and every page in memory belongs to the tree."""
    cache = model.cache
    cache.flush()
    cache.check()
    handles = []
    for node in cache.tree.nodes():
        assert node.pins == 0
        if node.page.handle is not None:
            handles.append(node.page.handle)
            assert cache.pool.owners(node.page.handle) == 1
    assert len(set(handles)) == len(handles)
    assert cache.pool.owned_bytes == sum(cache.pool.format_bytes[handle & 3] for handle in handles)
    assert cache.pool.reserved_bytes == 0


@functools.lru_cache(maxsize=4)
def _packed_once(path: Path) -> LoadedWeights:
    """Weights with the digest of their file, for tests that open one file again and again."""
    return dataclasses.replace(load_weights(path, None, NullProgress()), digest=hashlib.sha256(path.read_bytes()).hexdigest())


def open_model(
    path: Path,
    *,
    threads: int = 1,
    level: str = "",
    context: int | None = None,
    folder: Path | None = None,
    pages: int | None = None,
    disk_bytes: int = 10**9,
    daily_bytes: int = 10**12,
    formats: tuple[str, ...] = ("f16",),
    wall_clock: Callable[[], float] = time.time,
    prices: PriceBook | None = None,
    draw_seed: Callable[[], int] | None = None,
    timer: Callable[[], float] = time.perf_counter,
) -> Model:
    """Packs into memory; kernels come from the cache.

    The past is kept in `folder`, if there is one, and in memory for `pages` exact pages; `prices` are those of the past.
    """
    chosen = LEVELS[level] if level else host_levels()[-1]
    library = KernelLibrary(Config.from_environment().kernels_dir, chosen)
    memory = None
    if folder is None and pages is None and formats == ("f16",) and prices is None:
        weights = load_weights(path, None, NullProgress())
    else:
        weights = _packed_once(path)
        memory = MemorySettings(
            folder=folder or Path("nowhere"),
            memory_bytes=None if pages is None else pages * page_bytes(weights.config),
            disk_bytes=0 if folder is None else disk_bytes,
            daily_bytes=daily_bytes,
            formats=formats,
            prices=prices,
        )
    return Model(
        path,
        weights,
        library,
        threads=threads,
        context=context,
        progress=NullProgress(),
        memory=memory,
        wall_clock=wall_clock,
        timer=timer,
        **({} if draw_seed is None else {"draw_seed": draw_seed}),
    )


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyModels]:
    """Tiny models by their specification."""
    models = TinyModels(tmp_path_factory.mktemp("tiny"))
    yield models
    models.close()


@pytest.fixture
def checked_memory() -> Callable[[Model], None]:
    """What `check_memory` does, for tests that cannot import it."""
    return check_memory


@pytest.fixture
def open_tiny(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Callable[..., Model]:
    """Loads a tiny model of its own, with the options of `open_model`; closed after the test, if it is not by then."""

    def load(spec: TinySpec, **options: object) -> Model:
        model = open_model(tiny_models.path(spec), **options)  # type: ignore[arg-type]
        request.addfinalizer(model.close)
        return model

    return load


@pytest.fixture
def spec() -> TinySpec:
    """The model of `opened` and `reference`; tests that need another one say so by a fixture of the same name."""
    return TinySpec(ends=False, context=1536, layers=4, seed=31)


@pytest.fixture
def reference(tiny_models: TinyModels, spec: TinySpec) -> Reference:
    """What the model computes without any past."""
    return Reference(tiny_models.load(spec))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the past is kept."""
    return tmp_path / "kv"


@pytest.fixture
def open_kept(open_tiny: Callable[..., Model], folder: Path) -> Iterator[Callable[..., Model]]:
    """As `open_tiny`, with a past on disk, some memory, and computing that is dear; nobody may hold anything at the end."""
    models: list[Model] = []

    def load(spec: TinySpec, **options: object) -> Model:
        models.append(open_tiny(spec, **{"folder": folder, "pages": 64, "prices": FixedPrices(), **options}))
        return models[-1]

    yield load
    for model in models:
        if not model._closed:
            check_memory(model)


@pytest.fixture
def opened(open_kept: Callable[..., Model], spec: TinySpec) -> Callable[..., Model]:
    """As `open_kept`, for the one model of a test."""
    return functools.partial(open_kept, spec)


@pytest.fixture
def open_path() -> Callable[..., Model]:
    """What `open_model` does, for tests that cannot import it and close the model themselves."""
    return open_model


@pytest.fixture
def open_file(request: pytest.FixtureRequest) -> Callable[..., Model]:
    """Loads a model file that the test wrote; closed after the test."""

    def load(path: Path, **options: object) -> Model:
        model = open_model(path, **options)  # type: ignore[arg-type]
        request.addfinalizer(model.close)
        return model

    return load


@pytest.fixture(params=[level.name for level in host_levels()])
def level(request: pytest.FixtureRequest) -> str:
    """Each CPU level of this host."""
    return request.param
