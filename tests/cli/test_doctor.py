from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import doctor
from headrace.cli.doctor import MEMORY_BYTES_MIN, measure_levels
from headrace.config import Config
from headrace.engine.machine import Cache, Machine, Memory
from headrace.kernels.level import Level, host_levels
from headrace.kernels.library import library_key
from headrace.kv.folder import day_of, make_private, record_writes
from headrace.weights.container import LAYOUT_VERSION


def _machine(*caches: Cache, free_bytes: int | None = 2**34) -> Machine:
    return Machine("CPU", "x86_64", "Linux", 8, 8, caches, Memory(2**35, free_bytes, None), 0.0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What was measured, and with how many threads."""
    calls: list[tuple[int, int]] = []

    @contextmanager
    def quick(_config: Config, _level: Level, threads: int) -> Iterator[Callable[[int], float]]:
        def measure(num_bytes: int) -> float:
            calls.append((num_bytes, threads))
            return 20e9

        yield measure

    monkeypatch.setattr(doctor, "bandwidth_measure", quick)
    return calls


def test_doctor_json_says_what_it_found(headrace: Any, measured: list[tuple[int, int]], tmp_path: Path) -> None:
    packed = tmp_path / "home" / "packed"
    packed.mkdir(parents=True)
    (packed / "weights").write_bytes(b"x" * 1000)
    (packed / "more").mkdir()
    (packed / "more" / "weights").write_bytes(b"x" * 500)
    (packed / "link").symlink_to("weights")
    document = headrace("doctor", "--threads", "1", "--json").document
    assert document["threads"] == 1
    assert document["cpu_level"] in {"portable", "avx2", "avx512", "neon"}
    assert document["config"]["home"] == str(tmp_path / "home")
    assert document["bandwidth"][-1]["level"] == "memory"
    assert document["bandwidth"][-1]["bytes_per_s"] == 20e9
    assert {threads for _, threads in measured} == {1}
    assert {folder["what"]: (folder["num_files"], folder["size_bytes"]) for folder in document["folders"]} == {
        "models": (0, 0),
        "packed weights": (2, 1500),
        "kernels": (0, 0),
    }


def test_doctor_shows_the_past_that_is_kept_and_its_bounds(
    headrace: Any, measured: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert headrace("doctor", "--json").document["kv"] == {
        "folder": str(tmp_path / "home" / "kv"),
        "writable": True,
        "formats": ["f16"],
        "memory_limit_bytes": None,
        "disk_bytes": 0,
        "disk_limit_bytes": 20 * 10**9,
        "written_today_bytes": 0,
        "daily_limit_bytes": 100 * 10**9,
    }
    past = tmp_path / "past"
    make_private(past / "pages")
    (past / "pages" / "run").write_bytes(b"x" * 5000)
    record_writes(past, day_of(time.time()), 3 * 10**6)
    for name, value in {"DIR": str(past), "MEMORY": "1GB", "DISK": "2GB", "FORMATS": "f16,q8", "DISK_WRITES": "3GB"}.items():
        monkeypatch.setenv(f"HEADRACE_KV_{name}", value)
    lines = headrace("doctor").out.splitlines()
    at = lines.index(f"The past, kept in {past}")
    assert [line.rstrip() for line in lines[at + 1 : at + 5]] == [
        "memory         at most 1 GB",
        "disk           12.3 KB of 2 GB",  # in whole blocks: two of the page's and one of the file that counts writes
        "written today  3 MB of 3 GB",
        "page formats   f16, q8",
    ]
    assert measured


def test_doctor_counts_writes_of_another_day_as_none(headrace: Any, measured: list[tuple[int, int]], tmp_path: Path) -> None:
    make_private(tmp_path / "home" / "kv")
    record_writes(tmp_path / "home" / "kv", "2001-01-01", 10**9)
    assert headrace("doctor", "--json").document["kv"]["written_today_bytes"] == 0
    assert measured


def test_doctor_prints_a_report(headrace: Any, measured: list[tuple[int, int]], tmp_path: Path) -> None:
    ending = headrace("doctor")
    assert (ending.code, ending.err) == (0, "")
    assert all(title in ending.out for title in ("Machine", "Read bandwidth", "Settings", "Stored"))
    assert "20 GB/s" in ending.out
    assert str(tmp_path / "home") in ending.out.replace("\n", "")
    assert "--clean" not in ending.out
    assert measured


def test_doctor_uses_the_forced_level(headrace: Any, measured: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CPU", "portable")
    assert headrace("doctor", "--json").document["cpu_level"] == "portable"
    assert measured


def test_doctor_bad_environment_is_one_line_and_exit_code_two(headrace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_THREADS", "many")
    ending = headrace("doctor")
    assert (ending.code, ending.out) == (2, "")
    assert ending.err == "headrace: HEADRACE_THREADS='many' is not a thread count: use a whole number from 1 to 256\n"


def test_levels_are_read_over_what_fits_them_and_not_the_level_above() -> None:
    machine = _machine(Cache(1, 48 * 2**10, 1), Cache(2, 2**20, 1), Cache(3, 2**25, 8))
    levels = measure_levels(machine, 4, float)
    assert [(level.level, level.size_bytes, level.read_bytes) for level in levels] == [
        ("L1", 4 * 48 * 2**10, 2 * 48 * 2**10),
        ("L2", 4 * 2**20, 2 * 2**20),
        ("L3", 2**25, 2**24),
        ("memory", 2**35, MEMORY_BYTES_MIN),
    ]
    assert levels[0].bytes_per_s == 2 * 48 * 2**10


def test_memory_is_read_far_beyond_the_last_cache_but_within_what_is_free() -> None:
    big = Cache(3, 2**28, 8)
    assert measure_levels(_machine(big), 8, lambda *_: 1.0)[-1].read_bytes == 2**30
    assert measure_levels(_machine(big, free_bytes=2**28), 8, lambda *_: 1.0)[-1].read_bytes == 2**27
    assert measure_levels(_machine(free_bytes=None), 8, lambda *_: 1.0)[-1].read_bytes == MEMORY_BYTES_MIN


def test_doctor_clean_deletes_what_this_version_does_not_use(
    headrace: Any, measured: list[tuple[int, int]], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    kept = (
        home / "kernels" / library_key(host_levels()[0]) / "a.o",
        home / "packed" / f"abc.v{LAYOUT_VERSION}.headrace",
        home / "packed" / "young.partial",
        home / "models" / "smollm2.gguf",
    )
    stale = (
        home / "kernels" / "avx2-of-another-version" / "a.o",
        home / "packed" / f"abc.v{LAYOUT_VERSION + 1}.headrace",
        home / "packed" / "old.partial",
        home / "models" / ".smollm2-killed" / "part.whl",
    )
    for path in (*kept, *stale):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1000)
    for path in (home / "packed" / "old.partial", home / "models" / ".smollm2-killed"):
        os.utime(path, (0, 0))

    ending = headrace("doctor")
    assert ending.out.count("unused") == 3
    assert "headrace doctor --clean" in ending.out
    assert all(path.exists() for path in stale)

    ending = headrace("doctor", "--clean", "--json")
    assert ending.err == "headrace: freed 4 KB\n"
    assert [folder["stale_bytes"] for folder in ending.document["folders"]] == [0, 0, 0]
    assert [path.exists() for path in kept] == [True] * 4
    assert [path.exists() for path in stale] == [False] * 4
    assert measured


def test_doctor_measures_with_kernels_of_its_own(headrace: Any, tmp_path: Path) -> None:
    document = headrace("doctor", "--threads", "1", "--json").document
    assert all(0 < level["bytes_per_s"] < 1e13 for level in document["bandwidth"])
    assert document["folders"][2]["num_files"] > 0
    assert document["home_writable"]
