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
    from headrace.engine.accounts import OperationAccount
    from headrace.engine.chat import Chat, Session
    from headrace.engine.generation import Generation
    from headrace.engine.load import load
    from headrace.engine.model import Model
    from headrace.engine.results import (
        FinishReason,
        GenerationResult,
        KeptPast,
        MissReason,
        MissReport,
        Piece,
        Reuse,
        Timings,
        TokenLogprob,
        Usage,
    )
    from headrace.engine.sampler import SamplingOptions, SamplingParams
    from headrace.engine.sequence import Sequence
    from headrace.errors import (
        BusyError,
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
    from headrace.text.chat_template import ChatTemplate, Message
    from headrace.text.detokenizer import Stop
    from headrace.text.messages import Prompt
    from headrace.weights.progress import Progress

__version__ = "0.1.0"

_MODULE_OF = {
    "Chat": "headrace.engine.chat",
    "ChatTemplate": "headrace.text.chat_template",
    "Config": "headrace.config",
    "ContextOverflowError": "headrace.errors",
    "DownloadError": "headrace.errors",
    "FinishReason": "headrace.engine.results",
    "Generation": "headrace.engine.generation",
    "GenerationResult": "headrace.engine.results",
    "HeadraceError": "headrace.errors",
    "KeptPast": "headrace.engine.results",
    "KernelError": "headrace.errors",
    "LedgerTotals": "headrace.model.step",
    "MemoryLimitError": "headrace.errors",
    "Message": "headrace.text.chat_template",
    "MissReason": "headrace.engine.results",
    "MissReport": "headrace.engine.results",
    "Model": "headrace.engine.model",
    "ModelFileError": "headrace.errors",
    "ModelNotFoundError": "headrace.errors",
    "NumericError": "headrace.errors",
    "OperationAccount": "headrace.engine.accounts",
    "OptionError": "headrace.errors",
    "Piece": "headrace.engine.results",
    "Progress": "headrace.weights.progress",
    "Prompt": "headrace.text.messages",
    "Reuse": "headrace.engine.results",
    "SamplingOptions": "headrace.engine.sampler",
    "SamplingParams": "headrace.engine.sampler",
    "Sequence": "headrace.engine.sequence",
    "Session": "headrace.engine.chat",
    "Stop": "headrace.text.detokenizer",
    "StorageError": "headrace.errors",
    "BusyError": "headrace.errors",
    "TemplateError": "headrace.errors",
    "Timings": "headrace.engine.results",
    "TokenLogprob": "headrace.engine.results",
    "UnsupportedModelError": "headrace.errors",
    "Usage": "headrace.engine.results",
    "load": "headrace.engine.load",
}

__all__ = [
    "BusyError",
    "Chat",
    "ChatTemplate",
    "Config",
    "ContextOverflowError",
    "DownloadError",
    "FinishReason",
    "Generation",
    "GenerationResult",
    "HeadraceError",
    "KeptPast",
    "KernelError",
    "LedgerTotals",
    "MemoryLimitError",
    "Message",
    "MissReason",
    "MissReport",
    "Model",
    "ModelFileError",
    "ModelNotFoundError",
    "NumericError",
    "OperationAccount",
    "OptionError",
    "Piece",
    "Progress",
    "Prompt",
    "Reuse",
    "SamplingOptions",
    "SamplingParams",
    "Sequence",
    "Session",
    "Stop",
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
