"""Opens the memory of the past for a model: its bounds, what of it was kept on disk, and who may read that.

Pages on disk belong to a key that covers all that changes their bits: the model's content, the machine code of the kernels,
the operations of a step and how they are shared out, and the formats that pages may have had. Not the context, the threads
or the batch, which change nothing.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.config import Config, parse_formats, parse_memory, parse_size
from headrace.errors import OptionError, StorageError
from headrace.kernels.library import KernelLibrary
from headrace.kernels.narrow import Narrower
from headrace.kernels.page_formats import FORMAT_NAMES
from headrace.kv.cache import PageCache
from headrace.kv.folder import folder_bytes
from headrace.kv.journal import FolderJournal
from headrace.kv.keys import StoreKey
from headrace.kv.opening import open_cache
from headrace.kv.pages import PagePool, layer_bytes, page_bytes
from headrace.kv.prices import PriceBook
from headrace.kv.runs import PageShape
from headrace.kv.sessions import SessionFiles
from headrace.kv.store import DiskStore
from headrace.model.config import ModelConfig
from headrace.units import format_bytes

_FREE_SHARE = 0.5
"""Of a disk's free space that the default bound may take."""
_SOURCES = ("model", "weights/pack.py", "engine/batch.py", "engine/records.py", "kv/pages.py")
"""Sources beside the kernels that decide what a step computes."""


@dataclass(frozen=True)
class MemorySettings:
    """Bounds and formats of the past. `memory_bytes` None: by free memory; `disk_bytes` 0: nothing on disk.

    `disk_is_optional`: a folder that cannot be used is no error, since nobody asked for one. `prices` None: measured.
    """

    folder: Path
    memory_bytes: int | None = None
    disk_bytes: int = 0
    daily_bytes: int = 0
    formats: tuple[str, ...] = ("f16",)
    disk_is_optional: bool = False
    prices: PriceBook | None = None

    @classmethod
    def resolve(
        cls,
        config: Config,
        folder: str | Path | None,
        memory: int | str | None,
        disk: int | str | None,
        formats: Sequence[str] | str | None,
        *,
        keeps_unasked: bool = False,
    ) -> MemorySettings:
        """What was asked for, and the configuration's values for the rest.

        Without a folder and a bound on disk nothing is kept there, unless `keeps_unasked` says that it is anyway.

        Raises:
            OptionError: a value cannot be used.
        """
        memory_bytes = config.kv_memory_bytes if memory is None else parse_memory(str(memory), "kv_memory")
        names = formats if formats is None or isinstance(formats, str) else ",".join(formats)
        path = config.kv_dir if folder is None else Path(folder).expanduser()
        if disk is not None:
            disk_bytes = parse_size(str(disk), "kv_disk")
        elif folder is None and not keeps_unasked:
            disk_bytes = 0
        else:
            # a folder that was asked for is used, or its error told
            spare_bytes = _spare_bytes(path)
            disk_bytes = min(config.kv_disk_bytes, spare_bytes if spare_bytes or folder is None else config.kv_disk_bytes)
        chosen = config.kv_formats if names is None else parse_formats(names, "kv_formats")
        optional = folder is None and disk is None
        return cls(path, memory_bytes, disk_bytes, config.kv_daily_bytes, chosen, optional)


def _spare_bytes(folder: Path) -> int:
    """What may be taken without having been asked for: what lies there already, and a share of what is free."""
    nearest = next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))
    try:
        return folder_bytes(folder) + int(_FREE_SHARE * shutil.disk_usage(nearest).free)
    except OSError:
        return 0


@dataclass(frozen=True)
class OpenedMemory:
    """The past of a model, and the files of its sessions, or why they are not kept."""

    cache: PageCache
    sessions: SessionFiles | None
    not_kept: str = "nothing is kept on disk"


def open_memory(
    config: ModelConfig,
    library: KernelLibrary,
    digest: str | None,
    memory_bytes: int,
    settings: MemorySettings | None,
    threads: int,
    wall_clock: Callable[[], float],
) -> OpenedMemory:
    """Opens the memory of a model.

    Args:
        config: the model's shape.
        library: its kernels, those that compress pages included.
        digest: of the model's content; without it nothing is kept on disk.
        memory_bytes: the bound of pages in memory.
        settings: bounds and formats; None: exact, in memory only.
        threads: threads of the team.
        wall_clock: seconds since the epoch.

    Raises:
        StorageError: the folder cannot be used.
    """
    num_formats = len(FORMAT_NAMES)
    pool = PagePool(memory_bytes, [page_bytes(config, each) for each in range(num_formats)])
    names = ("f16",) if settings is None else settings.formats
    formats = [FORMAT_NAMES.index(name) for name in names]
    narrower = Narrower(library, len(config.layers), config.kv_heads, config.head_width)
    store, sessions, not_kept = None, None, OpenedMemory.not_kept
    if settings is not None and settings.disk_bytes and digest is not None:
        shape = PageShape(len(config.layers), tuple(layer_bytes(config, each) for each in range(num_formats)))
        try:
            store = DiskStore(
                settings.folder,
                StoreKey(config.name, digest, numbers_of(library, names)),
                shape,
                limit_bytes=settings.disk_bytes,
                daily_bytes=settings.daily_bytes,
                clock=wall_clock,
            )
        except StorageError as error:
            if not settings.disk_is_optional:
                raise
            not_kept = str(error)
        else:
            sessions = SessionFiles(settings.folder, digest, limit_bytes=settings.disk_bytes)
    cache = open_cache(
        pool,
        formats=formats,
        narrow=narrower,
        store=store,
        journal=None if store is None else FolderJournal(store.key_folder, store.folder),
        prices=None if settings is None else settings.prices,
        threads=threads,
        wall_clock=wall_clock,
        timer=time.perf_counter,
    )
    return OpenedMemory(cache, sessions, not_kept)


def numbers_of(library: KernelLibrary, formats: Sequence[str]) -> str:
    """All that changes the bits of a page beside the model, as text that people can compare."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for name in _SOURCES:
        path = package / name
        for source in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(source.name.encode() + source.read_bytes())
    lossy = "" if tuple(formats) == ("f16",) else f", formats {','.join(formats)}"
    return f"kernels {library.folder.name}, steps {digest.hexdigest()[:12]}{lossy}"


def check_room(settings: MemorySettings, page_size_bytes: int) -> None:
    """Refuses a bound on disk that could not hold a single page.

    Raises:
        OptionError: it could not.
    """
    if 0 < settings.disk_bytes < 4 * page_size_bytes:
        raise OptionError(
            f"kv_disk={format_bytes(settings.disk_bytes)} holds no conversation: "
            f"give {format_bytes(100 * page_size_bytes)} or more, or 0 to keep nothing on disk",
            arguments=("kv_disk",),
        )
