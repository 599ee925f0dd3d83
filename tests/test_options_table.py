"""What docs/options.md maps other engines' names to is what the code has."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import typer

import headrace
from headrace.cli.app import build_app
from headrace.engine.sampler import SamplingOptions, SamplingParams

DOCS = Path(__file__).parents[1] / "docs"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (DOCS / "options.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ")
][1:]


def _parameters(call: str) -> set[str]:
    function = headrace.load if call == "load" else getattr(headrace.Model, call)
    names = set(inspect.signature(function).parameters)
    return names - {"overrides"} | (set(SamplingOptions.__annotations__) if "overrides" in names else set())


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_our_names_in_the_table_of_options_exist(row: list[str]) -> None:
    assert len(row) == 7
    for call, name in re.findall(r"`(\w+)\((\w+)\)`", row[1]):
        assert name in _parameters(call)
    run = typer.main.get_command(build_app()).commands["run"]  # type: ignore[attr-defined]
    options = {option for parameter in run.params for option in parameter.opts}
    assert set(re.findall(r"`(--[\w-]+)`", row[2])) <= options
    verbs = set(typer.main.get_command(build_app()).commands)  # type: ignore[attr-defined]
    assert set(re.findall(r"`headrace (\w+)`", row[2])) <= verbs


def test_every_option_of_ours_is_in_the_table() -> None:
    ours = {name for row in ROWS for name in re.findall(r"`\w+\((\w+)\)`", row[1])}
    assert (set(SamplingOptions.__annotations__) | _parameters("load")) - {"progress", "config"} <= ours
    assert set(SamplingOptions.__annotations__) <= set(vars(SamplingParams()))
