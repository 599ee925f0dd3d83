"""The one place where the command line loads a model; tests put a scripted one in its stead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.cli.options import LoadOptions
from headrace.cli.progress import ConsoleProgress

if TYPE_CHECKING:
    from headrace.cli.protocols import ModelLike


@contextmanager
def loaded_model(options: LoadOptions) -> Iterator[ModelLike]:
    """The model that the options name, closed at the end.

    Raises:
        HeadraceError: it cannot be found, fetched, read, or fitted into memory.
    """
    with ConsoleProgress() as progress:
        model = load_model(options, progress)
    try:
        yield model
    finally:
        model.close()


def load_model(options: LoadOptions, progress: ConsoleProgress) -> ModelLike:
    """The engine's model. It keeps the past on disk without being asked; without a cache there, that neither."""
    from headrace.config import Config
    from headrace.engine.load import load_with
    from headrace.engine.memory import MemorySettings

    config = Config.from_environment()
    disk_bytes = options.kv_disk_bytes if options.cache else 0
    memory = MemorySettings.resolve(
        config, options.kv_dir, options.kv_memory_bytes, disk_bytes, options.kv_formats, keeps_unasked=True
    )
    return load_with(
        options.model,
        config,
        memory,
        threads=options.threads,
        context=options.context_tokens,
        cache=options.cache,
        progress=progress,
    )
