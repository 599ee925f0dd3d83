"""Machines laid out as files, as Linux would show them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.engine import machine
from headrace.engine.machine import Cache, Memory


def _lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  600 kB\nHugePages_Total:  0\n"


def _cache(index: int, level: int, kind: str, size: str, shared: str) -> dict[str, str]:
    folder = f"sys/devices/system/cpu/cpu0/cache/index{index}"
    return {
        f"{folder}/level": f"{level}\n",
        f"{folder}/type": f"{kind}\n",
        f"{folder}/size": f"{size}\n",
        f"{folder}/shared_cpu_list": f"{shared}\n",
    }


def test_caches_are_data_and_unified_ones_nearest_first(tmp_path: Path) -> None:
    root = _lay_out(
        tmp_path,
        _cache(0, 3, "Unified", "32M", "0-3,8-11")
        | _cache(1, 1, "Data", "48K", "0,8")
        | _cache(2, 1, "Instruction", "32K", "0,8")
        | _cache(3, 2, "Unified", "1024K", "0"),
    )
    assert machine.read_caches(root) == (Cache(1, 49152, 2), Cache(2, 2**20, 1), Cache(3, 2**25, 8))


def test_caches_that_the_system_does_not_tell_are_none(tmp_path: Path) -> None:
    assert machine.read_caches(tmp_path) == ()
    assert machine.read_caches(_lay_out(tmp_path, _cache(0, 1, "Data", "", ""))) == ()


def test_memory_without_a_limit_is_that_of_the_machine(tmp_path: Path) -> None:
    root = _lay_out(tmp_path, {"proc/meminfo": MEMINFO})
    assert machine.read_memory(root) == Memory(1_024_000, 614_400, None)


def test_memory_that_the_system_does_not_tell_is_none(tmp_path: Path) -> None:
    assert machine.read_memory(tmp_path) == Memory(None, None, None)


@pytest.mark.parametrize("folder", ["sys/fs/cgroup/a/b", "sys/fs/cgroup/a", "sys/fs/cgroup"])
def test_memory_is_limited_by_the_innermost_group_that_has_a_limit(tmp_path: Path, folder: str) -> None:
    root = _lay_out(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            f"{folder}/memory.max": "500000\n",
            f"{folder}/memory.current": "300000\n",
            f"{folder}/memory.stat": "anon 200000\ninactive_file 50000\n",
        },
    )
    assert machine.read_memory(root) == Memory(1_024_000, 250_000, 500_000)


def test_memory_limit_of_version_one_groups_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/docker/abc"
    root = _lay_out(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "5:cpu:/docker/abc\n4:memory:/docker/abc\n",
            f"{group}/memory.limit_in_bytes": "400000\n",
            f"{group}/memory.usage_in_bytes": "450000\n",
            f"{group}/memory.stat": "total_inactive_file 0\n",
        },
    )
    assert machine.read_memory(root) == Memory(1_024_000, 0, 400_000)


def test_memory_limit_above_what_the_machine_has_is_none(tmp_path: Path) -> None:
    root = _lay_out(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000\n",
        },
    )
    assert machine.read_memory(root) == Memory(1_024_000, 614_400, None)


def test_cpu_name_and_load_are_those_of_the_machine(tmp_path: Path) -> None:
    root = _lay_out(
        tmp_path,
        {"proc/cpuinfo": "processor\t: 0\nmodel\t\t: 17\nmodel name\t: Some CPU @ 3 GHz\n", "proc/loadavg": "1.25 1 1 1/9 9\n"},
    )
    described = machine.describe(root)
    assert (described.cpu, described.load_average) == ("Some CPU @ 3 GHz", 1.25)


def test_resident_bytes_is_read_from_the_status(tmp_path: Path) -> None:
    assert machine.resident_bytes(_lay_out(tmp_path, {"proc/self/status": "Name:\tx\nVmRSS:\t   2048 kB\n"})) == 2_097_152
    assert machine.resident_bytes(tmp_path / "none") is None


def test_this_machine_can_be_described() -> None:
    described = machine.describe()
    assert described.cpu
    assert 1 <= described.num_usable_cores <= described.num_cores
    if sys.platform == "linux":
        memory = described.memory
        assert memory.total_bytes is not None
        assert memory.free_bytes is not None
        assert 0 < memory.free_bytes <= memory.total_bytes
        resident = machine.resident_bytes()
        assert resident is not None
        assert 2**20 < resident < memory.total_bytes
