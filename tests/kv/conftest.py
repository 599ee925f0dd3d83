"""Caches of small pages on one folder, opened and looked through at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.kv.cache import PageCache
from tiny.caches import Open, Ticks, check_nothing_is_held, open_cache


@pytest.fixture
def clock() -> Ticks:
    """The wall clock of the caches."""
    return Ticks()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the past is kept."""
    return tmp_path / "kv"


@pytest.fixture
def opened(folder: Path, clock: Ticks) -> Iterator[Open]:
    """Opens caches on one folder, or without it; nothing may be held at the end."""
    caches: list[PageCache] = []

    def load(*, disk: bool = True, **options: Any) -> PageCache:
        caches.append(open_cache(folder if disk else None, **{"clock": clock, **options}))
        return caches[-1]

    yield load
    for cache in caches:
        if not cache.mover._stopped:
            check_nothing_is_held(cache)
            cache.close()
