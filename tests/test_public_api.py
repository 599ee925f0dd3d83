from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

import headrace
from headrace import errors

PYTHON = (Path(__file__).parents[1] / "docs/python.md").read_text(encoding="utf-8")
HEAVY = ("numpy", "numba", "llvmlite", "tokenizers", "jinja2", "typer", "rich", "ctypes", "threading")


def test_all_is_sorted_and_without_repeats() -> None:
    assert headrace.__all__ == sorted(set(headrace.__all__))


@pytest.mark.parametrize("name", headrace.__all__)
def test_every_name_of_all_can_be_imported(name: str) -> None:
    assert getattr(headrace, name) is not None
    assert name in dir(headrace)


def test_all_is_what_the_module_offers() -> None:
    assert set(headrace.__all__) == {*headrace._MODULE_OF, "__version__"}


def test_all_holds_every_error() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined <= set(headrace.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        headrace.no_such_name  # noqa: B018


def test_package_is_marked_as_typed() -> None:
    assert (files(headrace) / "py.typed").is_file()


def _run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_import_loads_nothing_heavy() -> None:
    # -S and -I would change where packages are found; what an environment's own .pth files import is not ours.
    code = "import sys; before = set(sys.modules); import headrace; print(sorted(set(sys.modules) - before))"
    loaded = eval(_run_python(code))
    assert "headrace" in loaded
    assert [name for name in loaded if name.split(".")[0] in HEAVY] == []
    assert [name for name in loaded if name.startswith("headrace.")] == []


def test_import_leaves_no_trace() -> None:
    code = (
        "import logging, signal, sys, threading, warnings\n"
        "state = lambda: (threading.active_count(), signal.getsignal(signal.SIGINT), warnings.filters[:],\n"
        "                 logging.root.handlers[:], sys.excepthook, sys.stdout, sys.path[:])\n"
        "before = state()\n"
        "import headrace\n"
        "print(before == state())"
    )
    assert _run_python(code) == "True"


def test_errors_can_be_caught_without_importing_the_engine() -> None:
    code = "import headrace, sys; headrace.OptionError; print('numpy' in sys.modules or 'headrace.engine.model' in sys.modules)"
    assert _run_python(code) == "False"


def _own_types() -> dict[str, object]:
    """Every class and alias of the package by its name: what annotations can name."""
    found: dict[str, object] = {}
    for module in pkgutil.walk_packages(headrace.__path__, "headrace."):
        if not module.name.startswith(("headrace.cli", "headrace.kernels", "headrace.__main__")):
            found |= {name: value for name, value in vars(importlib.import_module(module.name)).items() if name[:1].isupper()}
    return found


def _public_functions(owner: object) -> Iterator[tuple[str, object]]:
    for name, value in vars(owner).items():
        if not name.startswith("_") or name in {"__enter__", "__next__", "__await__", "__anext__"}:
            function = value.fget if isinstance(value, property) else inspect.unwrap(getattr(value, "__func__", value))
            if inspect.isfunction(function):
                yield name, function


def _named(annotation: object) -> set[str]:
    """Names of this package's types in an annotation, however deep."""
    if isinstance(annotation, type) and annotation.__module__.startswith("headrace."):
        return {annotation.__name__}
    return {name for part in typing.get_args(annotation) for name in _named(part)}


def _returned(public: object, types: dict[str, object]) -> Iterator[tuple[str, set[str]]]:
    """What each public method and property gives, and what the fields of a record hold."""
    assert isinstance(public, type)
    for base in public.__mro__:
        if base.__module__.startswith("headrace."):
            scope = {**types, **vars(sys.modules[base.__module__])}
            for name, function in _public_functions(base):
                hints = typing.get_type_hints(function, scope)
                yield f"{public.__name__}.{name}", _named(hints.get("return"))
            if dataclasses.is_dataclass(base):
                for name, hint in typing.get_type_hints(base, scope).items():
                    yield f"{public.__name__}.{name}", _named(hint)


OF_THE_LOOP = {"Sequence.slice", "Sequence.run_alone", "Sequence.known_nodes"}
"""What the loop asks of a sequence, and nobody else."""


def test_what_public_calls_give_is_public_too() -> None:
    types = _own_types()
    missing: dict[str, set[str]] = {}
    for name in headrace.__all__:
        public = getattr(headrace, name)
        if isinstance(public, type):
            for where, given in _returned(public, types):
                if where not in OF_THE_LOOP and not given <= set(headrace.__all__):
                    missing[where] = given - set(headrace.__all__)
    assert missing == {}


def test_what_load_is_given_is_public_too() -> None:
    hints = typing.get_type_hints(headrace.load, {**_own_types(), **vars(sys.modules[headrace.load.__module__])})
    assert set().union(*map(_named, hints.values())) <= set(headrace.__all__)


@pytest.mark.parametrize("name", [name for name in headrace.__all__ if not name.startswith("_")])
def test_public_names_are_documented(name: str) -> None:
    assert re.search(rf"`(\w+\.)?{name}\b", PYTHON), name


def test_generating_does_not_load_asyncio() -> None:
    assert (
        _run_python("import sys, headrace.engine.generation; print('headrace.engine.asynchronous' in sys.modules)") == "False"
    )
