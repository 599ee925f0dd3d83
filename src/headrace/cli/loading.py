"""The one place where the command line loads a model; tests put a scripted one in its stead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

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
    """The engine's model. Without a cache on disk nothing of the past lies there either."""
    from headrace.engine.model import load

    model = load(
        options.model,
        threads=options.threads,
        context=options.context_tokens,
        cache=options.cache,
        progress=progress,
        kv_dir=options.kv_dir,
        kv_memory=options.kv_memory_bytes,
        kv_disk=options.kv_disk_bytes if options.cache else 0,
        kv_formats=options.kv_formats,
    )
    return cast("ModelLike", model)
