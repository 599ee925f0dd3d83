"""Every error that Headrace raises on purpose, in one tree.

HeadraceError                       exit code 2 on the command line
├── OptionError                     an option or argument has a value that cannot be used
├── ModelNotFoundError              no model goes by this name, or the file is not there
├── DownloadError                   a registry or hub cannot be reached, or sent something else
├── ModelFileError                  a model file is truncated, corrupt or inconsistent
│   └── UnsupportedModelError       the file is sound, but its architecture or a format is unknown here
├── StorageError                    the cache folder is full, read-only or otherwise unusable
├── MemoryLimitError                the model and its context do not fit into free memory
├── ContextOverflowError            the prompt does not fit into the context
├── BusyError                       more requests wait already than may
├── TemplateError                   the chat template is missing, broken or refuses these messages
├── KernelError                     a kernel cannot be compiled or loaded on this machine
└── NumericError                    logits are not finite: the weights or the arithmetic are damaged

Messages are one sentence that holds the offending value, then what to do about it. They speak of arguments of the library,
and hold their names apart, so that the command line can add what it calls them.
"No room" inside the engine is a return value, never an exception; `assert` guards only our own mistakes.
"""

from __future__ import annotations

from collections.abc import Sequence


class HeadraceError(Exception):
    """Base of all errors raised on purpose; the command line prints its message and exits with `exit_code`.

    Attributes:
        arguments: names of the library's arguments that the message tells to change: 'context', 'cache', 'raw' ...
    """

    exit_code = 2

    def __init__(self, message: str = "", *, arguments: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.arguments = tuple(arguments)


class OptionError(HeadraceError):
    """An option or argument has a value that cannot be used."""


class ModelNotFoundError(HeadraceError):
    """No model goes by this name, or the named file is not there."""


class DownloadError(HeadraceError):
    """A registry or hub cannot be reached, or what it sent is not what was asked for."""


class ModelFileError(HeadraceError):
    """A model file is truncated, corrupt or inconsistent with itself."""


class UnsupportedModelError(ModelFileError):
    """The file is sound, but its architecture, tensor type or tokenizer is not known here."""


class StorageError(HeadraceError):
    """The cache folder is full, read-only or otherwise unusable."""


class MemoryLimitError(HeadraceError):
    """The model and its context do not fit into free memory."""


class ContextOverflowError(HeadraceError):
    """The prompt does not fit into the context."""


class BusyError(HeadraceError):
    """More requests wait already than may: ask again later."""


class TemplateError(HeadraceError):
    """The chat template is missing, broken, or refuses these messages."""


class KernelError(HeadraceError):
    """A kernel cannot be compiled or loaded on this machine."""


class NumericError(HeadraceError):
    """Logits are not finite: the weights or the arithmetic are damaged."""
