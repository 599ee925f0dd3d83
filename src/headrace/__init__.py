"""Headrace: an LLM inference engine that accounts for every byte it moves.

    >>> import headrace
    >>> with headrace.load("smollm2") as model:
    ...     for piece in model.generate("Explain why the sky is blue", max_tokens=64):
    ...         print(piece.text, end="")

Importing this package imports nothing else: each public name is imported from its own module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.config import Config
    from headrace.engine.chat import Chat, Session
    from headrace.engine.generation import Generation
    from headrace.engine.model import Model, load
    from headrace.engine.results import (
        FinishReason,
        GenerationResult,
        MissReport,
        Piece,
        Reuse,
        Timings,
        TokenLogprob,
        Usage,
    )
    from headrace.engine.sampler import SamplingParams
    from headrace.errors import (
        ContextOverflowError,
        DownloadError,
        HeadraceError,
        KernelError,
        MemoryLimitError,
        ModelFileError,
        ModelNotFoundError,
        NumericError,
        OptionError,
        StorageError,
        TemplateError,
        UnsupportedModelError,
    )
    from headrace.model.step import LedgerTotals
    from headrace.text.chat_template import Message

__version__ = "0.1.0"

_MODULE_OF = {
    "Chat": "headrace.engine.chat",
    "Config": "headrace.config",
    "ContextOverflowError": "headrace.errors",
    "DownloadError": "headrace.errors",
    "FinishReason": "headrace.engine.results",
    "Generation": "headrace.engine.generation",
    "GenerationResult": "headrace.engine.results",
    "HeadraceError": "headrace.errors",
    "KernelError": "headrace.errors",
    "LedgerTotals": "headrace.model.step",
    "MemoryLimitError": "headrace.errors",
    "Message": "headrace.text.chat_template",
    "MissReport": "headrace.engine.results",
    "Model": "headrace.engine.model",
    "ModelFileError": "headrace.errors",
    "ModelNotFoundError": "headrace.errors",
    "NumericError": "headrace.errors",
    "OptionError": "headrace.errors",
    "Piece": "headrace.engine.results",
    "Reuse": "headrace.engine.results",
    "SamplingParams": "headrace.engine.sampler",
    "Session": "headrace.engine.chat",
    "StorageError": "headrace.errors",
    "TemplateError": "headrace.errors",
    "Timings": "headrace.engine.results",
    "TokenLogprob": "headrace.engine.results",
    "UnsupportedModelError": "headrace.errors",
    "Usage": "headrace.engine.results",
    "load": "headrace.engine.model",
}

__all__ = [
    "Chat",
    "Config",
    "ContextOverflowError",
    "DownloadError",
    "FinishReason",
    "Generation",
    "GenerationResult",
    "HeadraceError",
    "KernelError",
    "LedgerTotals",
    "MemoryLimitError",
    "Message",
    "MissReport",
    "Model",
    "ModelFileError",
    "ModelNotFoundError",
    "NumericError",
    "OptionError",
    "Piece",
    "Reuse",
    "SamplingParams",
    "Session",
    "StorageError",
    "TemplateError",
    "Timings",
    "TokenLogprob",
    "UnsupportedModelError",
    "Usage",
    "__version__",
    "load",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
