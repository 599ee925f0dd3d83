from __future__ import annotations

import subprocess
import sys
from importlib.resources import files

import pytest

import headrace
from headrace import errors

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
