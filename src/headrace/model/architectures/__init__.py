"""Architectures, by the name that `general.architecture` gives them. A new one is a file like these and a line here."""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import UnsupportedModelError
from headrace.model.architectures import gemma3, llama
from headrace.model.config import ModelConfig
from headrace.weights.gguf import GgufFile

ARCHITECTURES: dict[str, Callable[[GgufFile], ModelConfig]] = {
    "llama": llama.read_config,
    "gemma3": gemma3.read_config,
}


def read_config(gguf: GgufFile) -> ModelConfig:
    """The shape of the model in a file.

    Raises:
        UnsupportedModelError: the architecture, or something it asks for, is not known here.
        ModelFileError: metadata is missing or inconsistent.
    """
    name = gguf.require_str("general.architecture")
    reader = ARCHITECTURES.get(name)
    if reader is None:
        raise UnsupportedModelError(
            f"{gguf.path.name} has architecture {name!r}, which Headrace does not run: it runs {', '.join(ARCHITECTURES)}"
        )
    return reader(gguf)
