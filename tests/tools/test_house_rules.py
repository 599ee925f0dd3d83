from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "check_house_rules.py"
SLASH = "/"  # apart, so that this file holds no such path


@pytest.fixture(scope="module")
def rules() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_house_rules", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _findings(rules: ModuleType, root: Path, name: str, text: str) -> list[tuple[int, str]]:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return [(finding.line, finding.rule) for finding in rules.check(root)]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("print(1)", "output"),
        ("sys.stderr.write('x')", "output"),
        ("t = time.time()", "wall-clock"),
        ("clock = time.time", "wall-clock"),
        ("from time import time_ns", "wall-clock"),
        ("datetime.datetime.now()", "wall-clock"),
        ("datetime.now()", "wall-clock"),
        ("random.random()", "randomness"),
        ("np.random.rand(3)", "randomness"),
        ("np.random.default_rng()", "randomness"),
        ("from random import choice", "randomness"),
        ("os.urandom(3)", "randomness"),
        ("secrets.randbits(32)", "randomness"),
        ("raise E('lower --context')", "option"),
        ("raise E(f'{x}: lower --context')", "option"),
        ("os.environ['X']", "environment"),
        ("os.getenv('X')", "environment"),
        ("from os import environ", "environment"),
        (f"path = '{SLASH}work/main'", "machine-path"),
        (f"# see {SLASH}root/notes", "machine-path"),
        (f"x = '{SLASH}tmp/x'", "machine-path"),
    ],
)
def test_rules_find_what_is_forbidden_in_source(rules: ModuleType, tmp_path: Path, line: str, rule: str) -> None:
    assert _findings(rules, tmp_path, "src/headrace/engine/x.py", f"import os\n{line}\n") == [(2, rule)]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("src/headrace/engine/x.py", "clock = time.perf_counter"),
        ("src/headrace/engine/x.py", "np.random.default_rng(7).random()"),
        ("src/headrace/engine/x.py", "generator: np.random.Generator"),
        ("src/headrace/engine/x.py", "url = 'https://example.org/work/tmp'"),
        ("src/headrace/engine/x.py", "path = root / 'tmp'"),
        ("src/headrace/config.py", "os.environ['X']"),
        ("src/headrace/cli/x.py", "sys.stdout.write('x')"),
        ("src/headrace/cli/x.py", "raise E('lower --context')"),
        ("src/headrace/x.py", "'What --context says.'"),
        ("src/headrace/x.py", "raise E('a -- b')"),
        ("tests/test_x.py", "print(time.time())"),
    ],
)
def test_rules_allow_what_is_right(rules: ModuleType, tmp_path: Path, name: str, line: str) -> None:
    assert _findings(rules, tmp_path, name, f"import os\n{line}\n") == []


@pytest.mark.parametrize("folder", ["src", "tests", "tools", "bench"])
def test_rules_bound_files_and_functions(rules: ModuleType, tmp_path: Path, folder: str) -> None:
    function = "def f():\n" + "    x = 1\n" * 68
    assert _findings(rules, tmp_path, f"{folder}/x.py", function) == []
    assert _findings(rules, tmp_path, f"{folder}/x.py", function + "    x = 1\n") == [(1, "function-length")]
    assert _findings(rules, tmp_path, f"{folder}/x.py", "x = 1\n" * 499) == []
    assert _findings(rules, tmp_path, f"{folder}/x.py", "x = 1\n" * 500) == [(500, "file-length")]


def test_rules_reject_modules_whose_name_says_nothing(rules: ModuleType, tmp_path: Path) -> None:
    assert _findings(rules, tmp_path, "src/headrace/utils.py", "x = 1\n") == [(1, "module-name")]


def test_rules_follow_links(rules: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("# One heading, two\n")
    text = (
        "[a](docs/a.md) [b](docs/a.md#one-heading-two) [c](https://example.org/x) [d](#here)\n"
        "# Here\n"
        "[e](docs/b.md)\n"
        "[f](docs/a.md#none)\n"
        "[g](../outside.md)\n"
        "```\n[h](docs/b.md)\n```\n"
        "`[i](docs/b.md)`\n"
    )
    assert _findings(rules, tmp_path, "README.md", text) == [(3, "link"), (4, "link"), (5, "link")]


def test_rules_hold_in_this_repository(rules: ModuleType) -> None:
    assert [str(finding) for finding in rules.check(TOOL.parents[1])] == []
