"""Typed access to metadata: values of the right type come back, all else is an error that names the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import ModelFileError
from headrace.weights.metadata import TypedMetadata, shown

VALUES: dict[str, Any] = {
    "int": 7,
    "float": 0.5,
    "nan": float("nan"),
    "bool": True,
    "str": "x",
    "strings": ["a", "b"],
    "ints": np.array([1, 2, 3], np.int32),
    "floats": np.array([0.5, 1e300]),
    "bools": np.array([True]),
    "empty": np.empty(0, np.uint8),
    "nested": [["a"]],
}


@pytest.fixture
def typed() -> TypedMetadata:
    typed = TypedMetadata()
    typed.path = Path("m.gguf")
    typed.metadata = VALUES
    return typed


def test_accessors_return_values_of_their_type(typed: TypedMetadata) -> None:
    assert typed.require_int("int", minimum=7, maximum=7) == 7
    assert typed.require_float("float", minimum=0.5, maximum=0.5) == 0.5
    assert type(typed.require_float("int")) is float
    assert typed.require_bool("bool") is True
    assert typed.require_str("str") == "x"
    assert typed.require_strings("strings", length=2) == ["a", "b"]
    assert typed.require_strings("empty") == []
    assert typed.require_ints("ints", length=3, minimum=1, maximum=3) == (1, 2, 3)
    assert typed.require_ints("int", length=2) == (7, 7)
    assert typed.require_floats("ints", length=3).tolist() == [1, 2, 3]
    assert typed.require_floats("floats").tolist() == [0.5, float("inf")]


def test_get_returns_default_only_when_missing(typed: TypedMetadata) -> None:
    assert typed.get_int("absent", None) is None
    assert typed.get_float("absent", 1.0) == 1.0
    assert typed.get_bool("absent", False) is False
    assert typed.get_str("absent", "d") == "d"
    assert typed.get_int("int", 1) == 7
    assert typed.get_float("float", 1.0) == 0.5
    assert typed.get_bool("bool", False) is True
    assert typed.get_str("str", "d") == "x"
    with pytest.raises(ModelFileError, match="int = 7, which must be at most 6"):
        typed.get_int("int", 1, maximum=6)


@pytest.mark.parametrize(
    ("accessor", "key", "options", "problem"),
    [
        ("require_int", "absent", {}, "has no metadata 'absent'"),
        ("require_int", "float", {}, "float = 0.5, which must be a whole number"),
        ("require_int", "bool", {}, "bool = True, which must be a whole number"),
        ("require_int", "int", {"minimum": 8}, "int = 7, which must be at least 8"),
        ("require_int", "ints", {}, "ints = an array of 3, which must be a whole number"),
        ("require_float", "bool", {}, "bool = True, which must be a number"),
        ("require_float", "nan", {}, "nan = nan, which must be finite"),
        ("require_float", "float", {"maximum": 0.25}, "float = 0.5, which must be at most 0.25"),
        ("require_bool", "int", {}, "int = 7, which must be a boolean"),
        ("require_str", "strings", {}, "strings = an array of 2, which must be a string"),
        ("require_strings", "str", {}, "str = 'x', which must be an array of strings"),
        ("require_strings", "ints", {}, "must be an array of strings"),
        ("require_strings", "nested", {}, "must be an array of strings"),
        ("require_strings", "strings", {"length": 3}, "has 2 entries in strings, which must have 3"),
        ("require_ints", "floats", {"length": 2}, "must be an array of whole numbers"),
        ("require_ints", "ints", {"length": 2}, "has 3 entries in ints, which must have 2"),
        ("require_ints", "ints", {"length": 3, "maximum": 2}, "ints = 3, which must be at most 2"),
        ("require_floats", "bools", {}, "must be an array of numbers"),
        ("require_floats", "floats", {"length": 1}, "has 2 entries in floats, which must have 1"),
    ],
)
def test_accessors_name_key_value_and_remedy(
    typed: TypedMetadata, accessor: str, key: str, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelFileError) as caught:
        getattr(typed, accessor)(key, **options)
    assert problem in str(caught.value)
    assert str(caught.value).startswith("m.gguf has ")
    assert str(caught.value).endswith(": use another file of this model, or convert it again")


def test_shown_stays_short_and_printable() -> None:
    assert shown("x" * 100) == repr("x" * 60) + "... (100 characters)"
    assert shown("a\udcffb\n") == "'a\\udcffb\\n'"
