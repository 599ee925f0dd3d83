"""`headrace doctor`: what Headrace finds on this machine, how fast its memory is, and what is stored where."""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli import options as o
from headrace.cli.errors import guarded
from headrace.units import format_bytes

if TYPE_CHECKING:
    from headrace.config import Config
    from headrace.engine.machine import Machine

Measure = Callable[[int, int], float]
"""Bytes per second that `threads` threads read together from `num_bytes`: (num_bytes, threads) -> bytes/s."""

MEMORY_BYTES_MIN = 2**28
"""Least that is read to measure memory itself: far above the caches that the system tells of, should it tell of none."""


@dataclass(frozen=True)
class Bandwidth:
    """Read bandwidth of one level of the memory, all threads together."""

    level: str
    size_bytes: int | None
    read_bytes: int
    bytes_per_s: float


@dataclass(frozen=True)
class Folder:
    """What lies in one folder."""

    what: str
    path: Path
    num_files: int
    size_bytes: int


@guarded
def doctor(threads: o.Threads = None, as_json: o.AsJson = False) -> None:
    """Show the machine, its measured bandwidth, the settings, and what is stored where."""
    from headrace.config import Config, check_threads
    from headrace.engine.machine import describe
    from headrace.kernels.level import choose_level

    config = Config.from_environment()
    used_threads = config.threads if threads is None else check_threads(threads, "--threads")
    machine = describe()
    level = choose_level(config.cpu_level).name
    bandwidths = measure_levels(machine, used_threads, bandwidth_measure())
    folders = measure_folders(config)
    if as_json:
        from headrace.cli.output import write_json

        write_json(
            {
                "machine": asdict(machine),
                "cpu_level": level,
                "threads": used_threads,
                "bandwidth": [asdict(bandwidth) for bandwidth in bandwidths],
                "config": asdict(config),
                "folders": [asdict(folder) for folder in folders],
                "python": platform.python_version(),
            }
        )
    else:
        _print_report(machine, config, level, used_threads, bandwidths, folders)


def bandwidth_measure() -> Measure:
    """What measures; tests put something quicker in its stead."""
    from headrace.kernels.bandwidth import measure

    return measure


def measure_levels(machine: Machine, threads: int, measure: Measure) -> list[Bandwidth]:
    """Bandwidth of each cache level and of memory.

    A level is read over half the size of its caches that `threads` cores have together, so that it holds all that is read
    and the level above it does not; memory over four times the last level.
    """
    bandwidths = []
    last_bytes = 0
    for cache in machine.caches:
        num_caches = max(1, min(threads, -(-threads // cache.num_sharing_cores)))
        size_bytes = cache.size_bytes * num_caches
        read_bytes = max(size_bytes // 2, min(size_bytes, 2 * last_bytes))
        bandwidths.append(Bandwidth(f"L{cache.level}", size_bytes, read_bytes, measure(read_bytes, threads)))
        last_bytes = size_bytes
    read_bytes = max(MEMORY_BYTES_MIN, 4 * last_bytes)
    if machine.memory.free_bytes is not None:
        read_bytes = max(2**20, min(read_bytes, machine.memory.free_bytes // 2))
    bandwidths.append(Bandwidth("memory", machine.memory.total_bytes, read_bytes, measure(read_bytes, threads)))
    return bandwidths


def measure_folders(config: Config) -> list[Folder]:
    """Files and bytes of each folder that Headrace writes to; one that is not there yet is empty."""
    folders = []
    for what, path in (("models", config.models_dir), ("packed weights", config.packed_dir), ("kernels", config.kernels_dir)):
        sizes = list(_file_sizes(path))
        folders.append(Folder(what, path, len(sizes), sum(sizes)))
    return folders


def _file_sizes(folder: Path) -> list[int]:
    sizes = []
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                status = (Path(parent) / name).lstat()
            except OSError:  # it went away meanwhile
                continue
            if stat.S_ISREG(status.st_mode):
                sizes.append(status.st_size)
    return sizes


def _print_report(
    machine: Machine, config: Config, level: str, threads: int, bandwidths: list[Bandwidth], folders: list[Folder]
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)

    def section(title: str, rows: list[tuple[str, ...]]) -> None:
        table = Table(box=None, pad_edge=False, show_header=False, title=title, title_justify="left", title_style="bold")
        table.add_column(no_wrap=True)
        for _ in rows[0][1:]:
            table.add_column(overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print()

    memory = machine.memory
    limit = f", limited to {format_bytes(memory.limit_bytes)}" if memory.limit_bytes is not None else ""
    section(
        "Machine",
        [
            ("CPU", f"{machine.cpu} ({machine.architecture})"),
            ("cores", f"{machine.num_usable_cores} usable of {machine.num_cores}"),
            ("system", f"{machine.system}, Python {platform.python_version()}"),
            ("memory", f"{_bytes(memory.free_bytes)} free of {_bytes(memory.total_bytes)}{limit}"),
            ("load", "unknown" if machine.load_average is None else f"{machine.load_average:.2f}"),
        ],
    )
    section(
        f"Read bandwidth, {threads} threads",
        [(each.level, f"{each.bytes_per_s / 1e9:.3g} GB/s", f"of {_bytes(each.size_bytes)}") for each in bandwidths],
    )
    section(
        "Settings",
        [
            ("kernels", f"{level}{' (forced by HEADRACE_CPU)' if config.cpu_level else ''}"),
            ("threads", str(threads)),
            ("package index", config.index_url),
        ],
    )
    section(
        "Stored",
        [(each.what, format_bytes(each.size_bytes), f"{each.num_files} files", str(each.path)) for each in folders],
    )


def _bytes(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else format_bytes(num_bytes)
