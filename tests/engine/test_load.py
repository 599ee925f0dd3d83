"""Loading as a library does: what is written to disk, and what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import headrace
from headrace.config import Config
from headrace.engine import load
from headrace.engine.memory import MemorySettings
from headrace.errors import OptionError
from tiny.models import TinySpec

if TYPE_CHECKING:
    from conftest import TinyModels

SPEC = TinySpec(seed=5, ends=False)
SECRET = "the user and the user and the user and the user and the user and the other"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of its own, with the kernels that are compiled already."""
    kernels = Config.from_environment().kernels_dir
    kernels.mkdir(parents=True, exist_ok=True)
    home = tmp_path / "home"
    home.mkdir()
    (home / "kernels").symlink_to(kernels, target_is_directory=True)
    monkeypatch.setenv("HEADRACE_HOME", str(home))
    yield home
    (home / "kernels").unlink()


def _answer(path: Path, **options: object) -> None:
    with headrace.load(path, context=256, threads=1, **options) as model:  # type: ignore[arg-type]
        model.generate(SECRET, max_tokens=4).text()
        model.session("plan").send(SECRET, max_tokens=4).text()


def _kept(folder: Path) -> list[str]:
    return sorted({path.suffix for path in folder.rglob("*") if path.is_file()}) if folder.exists() else []


def test_library_writes_nothing_of_a_prompt_to_disk_unasked(
    home: Path, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _answer(tiny_models.path(SPEC))
    monkeypatch.setenv("HEADRACE_KV_DIR", str(tmp_path / "named"))  # says where, not that
    monkeypatch.setenv("HEADRACE_KV_DISK", "1GB")
    _answer(tiny_models.path(SPEC))
    assert sorted(path.name for path in home.iterdir()) == ["kernels", "packed"]
    assert not (tmp_path / "named").exists()


@pytest.mark.parametrize("asked", [lambda folder: {"kv_dir": folder}, lambda folder: {"kv_disk": "1GB"}], ids=["dir", "disk"])
def test_library_keeps_the_past_on_disk_when_it_is_asked_to(
    home: Path, tiny_models: TinyModels, asked: Callable[[Path], dict[str, object]]
) -> None:
    _answer(tiny_models.path(SPEC), **asked(home / "kv"))
    assert {".json", ".run"} <= set(_kept(home / "kv"))


def test_without_a_cache_nothing_is_kept_even_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[MemorySettings] = []
    monkeypatch.setattr(load, "load_with", lambda _model, _config, memory, **_rest: seen.append(memory))
    for cache in (True, False):
        load.load("m", kv_disk="1GB", cache=cache)
    assert [memory.disk_bytes for memory in seen] == [10**9, 0]


def test_settings_without_folder_and_bound_keep_nothing_on_disk(tmp_path: Path) -> None:
    config = Config(tmp_path, None, 1, "", tmp_path / "kv")
    assert MemorySettings.resolve(config, None, None, None, None).disk_bytes == 0
    assert MemorySettings.resolve(config, None, None, None, None, keeps_unasked=True).disk_bytes > 0
    assert MemorySettings.resolve(config, None, None, "3MB", None).disk_bytes == 3_000_000
    assert MemorySettings.resolve(config, tmp_path, None, None, None).disk_bytes == config.kv_disk_bytes
    with pytest.raises(OptionError, match="kv_disk="):
        MemorySettings.resolve(config, None, None, "much", None)
