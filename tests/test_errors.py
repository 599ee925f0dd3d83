from __future__ import annotations

import inspect
import re

from headrace import errors


def _drawn_tree() -> dict[str, str]:
    """Each class in the docstring's drawing, with the class it is drawn below."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"^((?:[│ ] {3})*(?:[├└]── )?)([A-Z]\w+Error)\b", line)
        if match:
            depth = len(match[1]) // 4
            path[depth:] = [match[2]]
            parents[match[2]] = path[depth - 1] if depth else "Exception"
    return parents


def test_error_tree_drawn_in_docstring_is_the_tree_of_classes() -> None:
    classes = {
        name: cls.__bases__[0].__name__
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, Exception) and cls.__module__ == errors.__name__
    }
    assert _drawn_tree() == classes


def test_every_error_is_a_headrace_error_with_exit_code_two() -> None:
    for name in _drawn_tree():
        cls = getattr(errors, name)
        assert issubclass(cls, errors.HeadraceError)
        assert cls.exit_code == 2
        assert cls.__doc__
