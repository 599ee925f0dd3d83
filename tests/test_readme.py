"""What the README says of names, settings and calls is what the code has."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

import headrace
from headrace import config
from headrace.cli.app import VERBS
from headrace.engine.results import Piece
from headrace.engine.sampler import SamplingOptions
from headrace.weights.formats import FORMATS
from headrace.weights.sources import ALIASES

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def _rows(text: str, pattern: str) -> list[tuple[str, ...]]:
    lines = [line for line in text.splitlines() if re.match(pattern, line)]
    return [tuple(cell.strip().replace("`", "") for cell in line.strip("|").split("|")) for line in lines]


def test_readme_settings_are_those_of_config() -> None:
    shown = {name: meaning for name, meaning, _ in _rows(README, r"\| `HEADRACE_")}
    assert config.__doc__ is not None
    assert shown == {name: meaning for name, meaning, _ in _rows(config.__doc__, r"\| HEADRACE_")}


def test_readme_lists_every_verb() -> None:
    assert [row[0].split()[1] for row in _rows(README, r"\| `headrace ")] == list(VERBS)


def test_readme_names_every_alias_and_every_tensor_type() -> None:
    assert [alias for alias in ALIASES if f"`{alias}`" not in README] == []
    named = re.search(r"Tensor types: (.*)\.", README)
    assert named is not None
    assert set(named[1].split(", ")) == {tensor_format.name for tensor_format in FORMATS.values()}


@pytest.mark.parametrize("mark", ["bench", "kv"])
def test_readme_has_the_place_for_each_measured_table(mark: str) -> None:
    assert README.count(f"<!-- {mark}:begin -->") == README.count(f"<!-- {mark}:end -->") == 1


def test_readme_snippet_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Model:
        def __enter__(self) -> Self:
            return self

        def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
            pass

        def generate(self, prompt: str, *, max_tokens: int) -> Iterator[Piece]:
            yield from (Piece(word, (0,)) for word in (prompt[:3], str(max_tokens)))

    monkeypatch.setitem(vars(headrace), "load", lambda _name: Model())  # without importing the real one
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out == "Exp128"


def test_readme_calls_take_the_arguments_it_names() -> None:
    for owner, call, arguments in re.findall(r"^\| `(\w+)\.(\w+)\((.*?)\)`", README, re.MULTILINE):
        function = getattr(headrace if owner == "headrace" else headrace.Model, call)
        named = {argument.strip().removesuffix("=") for argument in arguments.split(",")} - {"..."}
        parameters = set(inspect.signature(function).parameters)
        assert named <= (parameters | set(SamplingOptions.__annotations__) if "overrides" in parameters else parameters), call
