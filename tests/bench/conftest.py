"""The programs of bench/, which is no package: imported for one test, and forgotten after it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

BENCH = Path(__file__).parent.parent.parent / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Every module of bench/ by its name, and `folder`, where they are."""
    monkeypatch.syspath_prepend(str(BENCH))
    names = sorted(path.stem for path in BENCH.glob("*.py"))
    modules: dict[str, ModuleType] = {name: importlib.import_module(name) for name in names}
    yield SimpleNamespace(**modules, folder=BENCH)
    for name in names:
        sys.modules.pop(name, None)
