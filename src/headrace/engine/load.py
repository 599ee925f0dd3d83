"""From a model's name to a `Model`: finds the file, compiles, packs, and decides what of memory and disk it may take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from headrace.config import Config, check_threads
from headrace.engine import machine
from headrace.engine.fit import plan_memory
from headrace.engine.loading import load_weights
from headrace.engine.memory import MemorySettings, check_room
from headrace.engine.model import Model
from headrace.kernels.level import choose_level
from headrace.kernels.library import KernelLibrary
from headrace.kv.pages import page_bytes
from headrace.model.config import ModelConfig
from headrace.weights.progress import NullProgress, Progress
from headrace.weights.sources import DEFAULT_MODEL, resolve


def load(
    model: str | Path = DEFAULT_MODEL,
    *,
    threads: int | None = None,
    context: int | None = None,
    cache: bool = True,
    progress: Progress | None = None,
    config: Config | None = None,
    kv_dir: str | Path | None = None,
    kv_memory: int | str | None = None,
    kv_disk: int | str | None = None,
    kv_formats: Sequence[str] | str | None = None,
) -> Model:
    """Loads a model, fetching, compiling and packing what is not there yet.

    Nothing of prompts and answers is written to disk unless `kv_dir` or `kv_disk` is given.

    Args:
        model: an alias (`smollm2`, `gemma3-270m`), a path to a `.gguf`, or `hf:owner/repo/file.gguf`.
        threads: threads of the worker team; all usable cores by default.
        context: tokens of context; what the model was made for and memory allows by default.
        cache: keep packed weights and compiled kernels on disk for the next start; without it, the past neither.
        progress: is told what takes long.
        config: folders and defaults; from the environment by default.
        kv_dir: keep the past of conversations in this folder; that of `config` if only `kv_disk` is given.
        kv_memory: bound of the past in memory, bytes or text such as "2GB"; by default room for a few contexts.
        kv_disk: keep the past of conversations on disk, in so many bytes, a number or text; 0 keeps nothing there. That of
            `config`, within free space, if only `kv_dir` is given.
        kv_formats: formats of pages in memory, "f16" (exact) by default; see README.

    Raises:
        HeadraceError: the model cannot be found, fetched, read, or fitted into memory, or an option is wrong.
    """
    settings = config or Config.from_environment()
    memory = MemorySettings.resolve(settings, kv_dir, kv_memory, kv_disk if cache else 0, kv_formats)
    return load_with(model, settings, memory, threads=threads, context=context, cache=cache, progress=progress)


def load_with(
    model: str | Path,
    config: Config,
    memory: MemorySettings,
    *,
    threads: int | None = None,
    context: int | None = None,
    cache: bool = True,
    progress: Progress | None = None,
) -> Model:
    """`load` with the bounds of the past as they were resolved.

    Raises:
        HeadraceError: as `load` does.
    """
    start = time.perf_counter()
    team = config.threads if threads is None else check_threads(threads, "threads")
    level = choose_level(config.cpu_level)
    shown = progress or NullProgress()
    path = resolve(str(model), config, shown)
    library = KernelLibrary(config.kernels_dir if cache else None, level)
    free_bytes = machine.read_memory().free_bytes  # before weights are packed into it

    def check(shape: ModelConfig, weights_bytes: int) -> None:
        plan_memory(shape, weights_bytes, context, free_bytes, memory.memory_bytes)

    weights = load_weights(path, config.packed_dir if cache else None, shown, check)
    check_room(memory, page_bytes(weights.config))
    loaded = Model(path, weights, library, threads=team, context=context, progress=shown, free_bytes=free_bytes, memory=memory)
    loaded.load_s = time.perf_counter() - start
    return loaded
