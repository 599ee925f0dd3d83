"""What this machine is: its CPU, cores, caches and memory, as the operating system tells it.

Invariant: nothing is measured and nothing is changed here; what cannot be told is None or empty, never guessed.
Does not know: models, kernels, and how fast anything is.

Linux tells through /proc and /sys, read below `root` so that a test can lay out a machine of its own; other systems tell
the few figures that Python's standard library reaches.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from headrace.config import usable_cores

_ROOT = Path("/")


@dataclass(frozen=True)
class Cache:
    """One level of data cache as one core sees it."""

    level: int
    size_bytes: int
    num_sharing_cores: int


@dataclass(frozen=True)
class Memory:
    """Memory in bytes. `free_bytes` is what this process may still take without swapping or being killed."""

    total_bytes: int | None
    free_bytes: int | None
    limit_bytes: int | None


@dataclass(frozen=True)
class Machine:
    """The machine that a figure was measured on."""

    cpu: str
    architecture: str
    system: str
    num_cores: int
    num_usable_cores: int
    caches: tuple[Cache, ...]
    memory: Memory
    load_average: float | None


def describe(root: Path = _ROOT) -> Machine:
    """This machine, or the one whose /proc and /sys lie below `root`."""
    return Machine(
        cpu=_cpu_name(root),
        architecture=platform.machine(),
        system=f"{platform.system()} {platform.release()}",
        num_cores=os.cpu_count() or 1,
        num_usable_cores=usable_cores(),
        caches=read_caches(root),
        memory=read_memory(root),
        load_average=_load_average(root),
    )


def read_caches(root: Path = _ROOT) -> tuple[Cache, ...]:
    """Data and unified caches of the first core, nearest first; empty where the system does not tell."""
    caches = []
    for folder in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind, level, size = (_read_text(folder / name) for name in ("type", "level", "size"))
        if kind in ("Data", "Unified") and level.isdigit() and (size_bytes := _cache_bytes(size)):
            caches.append(Cache(int(level), size_bytes, _count_cpus(_read_text(folder / "shared_cpu_list"))))
    return tuple(sorted(caches, key=lambda cache: cache.level))


def read_memory(root: Path = _ROOT) -> Memory:
    """Total and free memory, both within the limit of the control group that this process runs in, if there is one."""
    total, free = _meminfo(root)
    limit, used = _cgroup_memory(root)
    if total is not None and limit is not None and limit >= total:
        limit = None
    if limit is not None:
        room = max(0, limit - (used or 0))
        free = room if free is None else min(free, room)
    return Memory(total, free, limit)


def resident_bytes(root: Path = _ROOT) -> int | None:
    """Memory of this process that is resident now, mapped files included; None where the system does not tell."""
    for line in _read_text(root / "proc/self/status").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return None


def _cpu_name(root: Path) -> str:
    for line in _read_text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"


def _meminfo(root: Path) -> tuple[int | None, int | None]:
    fields = {}
    for line in _read_text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if value.split()[:1] and value.split()[0].isdigit():
            fields[name] = int(value.split()[0]) * 1024
    if fields:
        return fields.get("MemTotal"), fields.get("MemAvailable", fields.get("MemFree"))
    if sys.platform != "win32" and root == _ROOT and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
    return None, None


def _cgroup_memory(root: Path) -> tuple[int | None, int | None]:
    """Limit and use of the innermost control group that has a limit: version 2 first, then version 1.

    Of what a group uses, the file cache it could drop (`inactive_file`) is counted as free, as `free` and Docker do.
    """
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers not in ("", "memory"):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        # Inside a container the path is that of the host, and the group itself is mounted at the top.
        folder = mount / path.lstrip("/")
        for group in (folder, *folder.parents) if mount in folder.parents else (mount,):
            limit = _read_text(group / names[0])
            if limit.isdigit():
                used = _read_text(group / names[1])
                return int(limit), max(0, int(used) - _droppable_bytes(group)) if used.isdigit() else None
            if group == mount:
                break
    return None, None


def _droppable_bytes(group: Path) -> int:
    for line in _read_text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdigit():
            return int(value)
    return 0


def _load_average(root: Path) -> float | None:
    words = _read_text(root / "proc/loadavg").split()
    if words:
        return float(words[0])
    return os.getloadavg()[0] if root == _ROOT and hasattr(os, "getloadavg") else None


def _cache_bytes(text: str) -> int:
    """'48K' -> 49152, as /sys writes sizes; 0 when there is none."""
    scale = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
    digits = text.rstrip("KMG")
    return int(digits) * scale if digits.isdigit() else 0


def _count_cpus(cpu_list: str) -> int:
    """'0-3,8' -> 5; an empty list is one core."""
    count = 0
    for part in cpu_list.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            count += int(last) - int(first) + 1 if last.isdigit() else 1
    return max(1, count)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
