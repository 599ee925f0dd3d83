"""`headrace doctor`: what Headrace finds on this machine, how fast its memory is, and what is stored where."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli import options as o
from headrace.cli.errors import guarded, say
from headrace.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from headrace.cli.stored import Folder
    from headrace.config import Config
    from headrace.engine.machine import Machine
    from headrace.kernels.level import Level

Measure = Callable[[int], float]
"""Bytes per second that all threads together read from so many bytes, again and again."""

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
class KeptPast:
    """Settings of the past that is kept, and what lies there. `memory_limit_bytes` None: chosen by free memory."""

    folder: Path
    writable: bool
    formats: tuple[str, ...]
    memory_limit_bytes: int | None
    disk_bytes: int
    disk_limit_bytes: int
    written_today_bytes: int
    daily_limit_bytes: int

    @classmethod
    def of(cls, config: Config, now_s: float) -> KeptPast:
        """What a process that starts now would find. `now_s` decides what today is."""
        from headrace.cli.stored import can_write
        from headrace.kv.folder import day_of, folder_bytes, read_writes

        day, written_bytes = read_writes(config.kv_dir)
        return cls(
            config.kv_dir,
            can_write(config.kv_dir),
            config.kv_formats,
            config.kv_memory_bytes,
            folder_bytes(config.kv_dir),
            config.kv_disk_bytes,
            written_bytes if day == day_of(now_s) else 0,
            config.kv_daily_bytes,
        )


@guarded
def doctor(
    threads: o.Threads = None,
    clean: Annotated[bool, typer.Option("--clean", help="Delete what is stored and not used by this version.")] = False,
    as_json: o.AsJson = False,
) -> None:
    """Show the machine, its measured bandwidth, the settings, and what is stored where."""
    from headrace.cli.stored import can_write, measure_folders, remove_stale
    from headrace.config import Config, check_threads
    from headrace.engine.machine import describe
    from headrace.kernels.level import choose_level

    config = Config.from_environment()
    used_threads = config.threads if threads is None else check_threads(threads, "--threads")
    machine = describe()
    level = choose_level(config.cpu_level)
    with bandwidth_measure(config, level, used_threads) as measure:
        bandwidths = measure_levels(machine, used_threads, measure)
    folders = measure_folders(config, time.time())
    if clean:
        say(f"freed {format_bytes(remove_stale(folders))}")
        folders = measure_folders(config, time.time())
    past = KeptPast.of(config, time.time())
    if as_json:
        from headrace.cli.output import write_json

        write_json(
            {
                "machine": asdict(machine),
                "cpu_level": level.name,
                "threads": used_threads,
                "bandwidth": [asdict(bandwidth) for bandwidth in bandwidths],
                "config": asdict(config),
                "home_writable": can_write(config.home),
                "folders": [asdict(folder) for folder in folders],
                "kv": asdict(past),
                "python": platform.python_version(),
            }
        )
    else:
        _print_report(machine, config, level.name, used_threads, bandwidths, folders, past)


@contextmanager
def bandwidth_measure(config: Config, level: Level, threads: int) -> Iterator[Measure]:
    """What measures; tests put something quicker in its stead. Its kernels are compiled first if need be."""
    from headrace.cli.progress import ConsoleProgress
    from headrace.cli.stored import can_write
    from headrace.engine.loading import prepare_kernels
    from headrace.kernels.bandwidth import KERNELS, BandwidthMeter
    from headrace.kernels.library import KernelLibrary
    from headrace.kernels.runtime import TEAM_KERNELS

    library = KernelLibrary(config.kernels_dir if can_write(config.kernels_dir) else None, level)
    with ConsoleProgress() as progress:
        prepare_kernels(library, [*TEAM_KERNELS, *KERNELS], threads, progress)
    with BandwidthMeter(library, threads) as meter:
        yield meter.measure


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
        bandwidths.append(Bandwidth(f"L{cache.level}", size_bytes, read_bytes, measure(read_bytes)))
        last_bytes = size_bytes
    read_bytes = max(MEMORY_BYTES_MIN, 4 * last_bytes)
    if machine.memory.free_bytes is not None:
        read_bytes = max(2**20, min(read_bytes, machine.memory.free_bytes // 2))
    bandwidths.append(Bandwidth("memory", machine.memory.total_bytes, read_bytes, measure(read_bytes)))
    return bandwidths


def _print_report(
    machine: Machine,
    config: Config,
    level: str,
    threads: int,
    bandwidths: list[Bandwidth],
    folders: list[Folder],
    past: KeptPast,
) -> None:
    from rich.console import Console

    from headrace.cli.stored import can_write

    console = Console(highlight=False)
    memory = machine.memory
    limit = f", limited to {format_bytes(memory.limit_bytes)}" if memory.limit_bytes is not None else ""
    _section(
        console,
        "Machine",
        [
            ("CPU", f"{machine.cpu} ({machine.architecture})"),
            ("cores", f"{machine.num_usable_cores} usable of {machine.num_cores}"),
            ("system", f"{machine.system}, Python {platform.python_version()}"),
            ("memory", f"{_bytes(memory.free_bytes)} free of {_bytes(memory.total_bytes)}{limit}"),
            ("load", "unknown" if machine.load_average is None else f"{machine.load_average:.2f}"),
        ],
    )
    _section(
        console,
        f"Read bandwidth, {'1 thread' if threads == 1 else f'{threads} threads'}",
        [(each.level, f"{each.bytes_per_s / 1e9:.3g} GB/s", f"of {_bytes(each.size_bytes)}") for each in bandwidths],
    )
    _section(
        console,
        "Settings",
        [
            ("kernels", f"{level}{' (forced by HEADRACE_CPU)' if config.cpu_level else ''}"),
            ("threads", str(threads)),
            ("package index", config.index_url),
        ],
    )
    writable = "" if past.writable else ", which cannot be written: set HEADRACE_KV_DIR to another folder"
    _section(
        console,
        f"The past, kept in {past.folder}{writable}",
        [
            ("memory", _memory_limit(past.memory_limit_bytes)),
            ("disk", f"{format_bytes(past.disk_bytes)} of {format_bytes(past.disk_limit_bytes)}"),
            ("written today", f"{format_bytes(past.written_today_bytes)} of {format_bytes(past.daily_limit_bytes)}"),
            ("page formats", ", ".join(past.formats)),
        ],
    )
    writable = "" if can_write(config.home) else ", which cannot be written: set HEADRACE_HOME to another folder"
    _section(
        console,
        f"Stored in {config.home}{writable}",
        [
            (each.what, format_bytes(each.size_bytes), _files(each.num_files), each.path.name, _unused(each.stale_bytes))
            for each in folders
        ],
    )
    if any(each.stale for each in folders):
        console.print("headrace doctor --clean deletes what this version does not use.", soft_wrap=True)


def _section(console: Console, title: str, rows: list[tuple[str, ...]]) -> None:
    from rich.table import Table

    console.print(title, style="bold", markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    for _ in rows[0][1:]:
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()


def _memory_limit(num_bytes: int | None) -> str:
    return "chosen by free memory when a model is loaded" if num_bytes is None else f"at most {format_bytes(num_bytes)}"


def _bytes(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else format_bytes(num_bytes)


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _unused(num_bytes: int) -> str:
    return f"{format_bytes(num_bytes)} unused" if num_bytes else ""
