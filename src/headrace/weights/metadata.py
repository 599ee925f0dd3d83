"""Typed access to a model file's metadata: each accessor gives a value of one type, or an error that names the key.

`require_*` raise when the key is missing, `get_*` return a default then; both raise when the value has another type or lies
outside the bounds. Does not know what any key means: that belongs to the architectures and the tokenizer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MetadataValue: TypeAlias = "str | int | float | bool | npt.NDArray[Any] | list[str] | list[MetadataValue]"
"""Numbers and booleans in arrays are NumPy arrays (1-D, read-only), arrays of strings lists, arrays of arrays nested lists."""

_Default = TypeVar("_Default")
_SHOWN_CHARACTERS = 60


def shown(value: object) -> str:
    """A value from an untrusted file as a short, printable piece of an error message."""
    if isinstance(value, np.ndarray | list):
        return f"an array of {len(value)}"
    if isinstance(value, str) and len(value) > _SHOWN_CHARACTERS:
        return f"{value[:_SHOWN_CHARACTERS]!r}... ({len(value)} characters)"
    return repr(value)


class TypedMetadata:
    """Accessors over `metadata`; `path` is named in errors."""

    path: Path
    metadata: Mapping[str, MetadataValue]

    def require_int(self, key: str, *, minimum: int = 0, maximum: int | None = None) -> int:
        """A whole number within [minimum, maximum].

        Raises:
            ModelFileError: the key is missing, of another type or out of bounds.
        """
        value = self._required(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_type(key, value, "a whole number")
        self._check_bounds(key, value, minimum, maximum)
        return value

    def get_int(self, key: str, default: _Default, *, minimum: int = 0, maximum: int | None = None) -> int | _Default:
        """Like `require_int`, but `default` when the key is missing."""
        return self.require_int(key, minimum=minimum, maximum=maximum) if key in self.metadata else default

    def require_float(self, key: str, *, minimum: float | None = None, maximum: float | None = None) -> float:
        """A finite number within [minimum, maximum]; whole numbers are accepted too.

        Raises:
            ModelFileError: the key is missing, of another type, not finite or out of bounds.
        """
        value = self._required(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong_type(key, value, "a number")
        if not math.isfinite(value):
            raise self._error(f"has {key} = {value}, which must be finite")
        self._check_bounds(key, value, minimum, maximum)
        return float(value)

    def get_float(
        self, key: str, default: _Default, *, minimum: float | None = None, maximum: float | None = None
    ) -> float | _Default:
        """Like `require_float`, but `default` when the key is missing."""
        return self.require_float(key, minimum=minimum, maximum=maximum) if key in self.metadata else default

    def require_bool(self, key: str) -> bool:
        """True or False.

        Raises:
            ModelFileError: the key is missing or of another type.
        """
        value = self._required(key)
        if not isinstance(value, bool):
            raise self._wrong_type(key, value, "a boolean")
        return value

    def get_bool(self, key: str, default: _Default) -> bool | _Default:
        """Like `require_bool`, but `default` when the key is missing."""
        return self.require_bool(key) if key in self.metadata else default

    def require_str(self, key: str) -> str:
        """A string; bytes that are not UTF-8 appear as lone surrogates.

        Raises:
            ModelFileError: the key is missing or of another type.
        """
        value = self._required(key)
        if not isinstance(value, str):
            raise self._wrong_type(key, value, "a string")
        return value

    def get_str(self, key: str, default: _Default) -> str | _Default:
        """Like `require_str`, but `default` when the key is missing."""
        return self.require_str(key) if key in self.metadata else default

    def require_strings(self, key: str, *, length: int | None = None) -> list[str]:
        """An array of strings, of `length` entries when given. An empty array counts as one of strings.

        Raises:
            ModelFileError: the key is missing, of another type or length.
        """
        value = self._required(key)
        if isinstance(value, np.ndarray) and value.size == 0:
            value = []
        if not isinstance(value, list) or (value and not isinstance(value[0], str)):
            raise self._wrong_type(key, value, "an array of strings")
        self._check_length(key, len(value), length)
        return value  # type: ignore[return-value]  # a GGUF array has one type: the first entry speaks for all

    def require_ints(self, key: str, *, length: int, minimum: int = 0, maximum: int | None = None) -> tuple[int, ...]:
        """`length` whole numbers, one per layer for instance; a single number stands for `length` equal ones.

        Raises:
            ModelFileError: the key is missing, of another type or length, or a number is out of bounds.
        """
        value = self._required(key)
        if not isinstance(value, np.ndarray):
            return (self.require_int(key, minimum=minimum, maximum=maximum),) * length
        if value.dtype.kind not in "iu":
            raise self._wrong_type(key, value, "an array of whole numbers")
        self._check_length(key, len(value), length)
        for number in (int(value.min()), int(value.max())) if length else ():
            self._check_bounds(key, number, minimum, maximum)
        return tuple(value.tolist())

    def require_floats(self, key: str, *, length: int | None = None) -> npt.NDArray[np.float32]:
        """An array of numbers as float32 [length]; the values themselves may be anything, NaN included.

        Raises:
            ModelFileError: the key is missing, of another type or length.
        """
        value = self._required(key)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf":
            raise self._wrong_type(key, value, "an array of numbers")
        self._check_length(key, len(value), length)
        with np.errstate(over="ignore"):
            return value.astype(np.float32)

    def _required(self, key: str) -> MetadataValue:
        try:
            return self.metadata[key]
        except KeyError:
            raise self._error(f"has no metadata {key!r}, which this model needs") from None

    def _check_bounds(self, key: str, value: float, minimum: float | None, maximum: float | None) -> None:
        if minimum is not None and value < minimum:
            raise self._error(f"has {key} = {value}, which must be at least {minimum}")
        if maximum is not None and value > maximum:
            raise self._error(f"has {key} = {value}, which must be at most {maximum}")

    def _check_length(self, key: str, found: int, wanted: int | None) -> None:
        if wanted is not None and found != wanted:
            raise self._error(f"has {found} entries in {key}, which must have {wanted}")

    def _wrong_type(self, key: str, value: MetadataValue, wanted: str) -> ModelFileError:
        return self._error(f"has {key} = {shown(value)}, which must be {wanted}")

    def _error(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.path} {problem}: use another file of this model, or convert it again")
