"""pull and models: with a source whose file is put in place by hand, so that nothing is fetched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from headrace.weights.sources import ALIASES


def _place(home: Path, alias: str) -> Path:
    path = home / "models" / f"{alias}.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, ALIASES[alias].size_bytes)  # a hole: takes no room on disk
    return path


def test_pull_prints_where_the_file_lies(headrace: Any, tmp_path: Path) -> None:
    path = _place(tmp_path / "home", "smollm2")
    assert headrace("pull", "smollm2").out == f"{path}\n"


def test_pull_takes_a_path(headrace: Any, tmp_path: Path) -> None:
    path = tmp_path / "own.gguf"
    path.write_bytes(b"GGUF")
    assert headrace("pull", str(path), "--json").document == {"model": str(path), "path": str(path), "size_bytes": 4}


def test_pull_unknown_name_is_one_line_and_exit_code_two(headrace: Any) -> None:
    ending = headrace("pull", "smolm2")
    assert (ending.code, ending.out) == (2, "")
    assert ending.err.count("\n") == 1
    assert "'smolm2'" in ending.err


def test_models_lists_every_alias_and_whether_it_is_here(headrace: Any, tmp_path: Path) -> None:
    path = _place(tmp_path / "home", "smollm2")
    models = {model["alias"]: model for model in headrace("models", "--json").document}
    assert set(models) == set(ALIASES)
    assert models["smollm2"] == {
        "alias": "smollm2",
        "description": ALIASES["smollm2"].description,
        "licence": "Apache-2.0",
        "size_bytes": 98_362_432,
        "present": True,
        "path": str(path),
    }
    assert models["gemma3-270m"]["present"] is False


def test_models_prints_a_table(headrace: Any, tmp_path: Path) -> None:
    _place(tmp_path / "home", "gemma3-270m")
    rows = {line.split()[0]: line.split() for line in headrace("models").out.splitlines()[1:3]}
    assert rows["smollm2"][1:4] == ["98.4", "MB", "no"]
    assert rows["gemma3-270m"][1:4] == ["253", "MB", "yes"]
