"""Files and tests that ARCHITECTURE.md names are there, and every module of the source is in a package that it lists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
SOURCE = ROOT / "src" / "headrace"


def test_architecture_names_tests_that_exist() -> None:
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert named
    assert named - defined == set()


def test_architecture_names_files_that_exist() -> None:
    named = set(re.findall(r"`([\w./]+(?:\.py|/))`", TEXT))
    missing = {name for name in named if not (SOURCE / name).exists() and not (ROOT / name).exists()}
    assert missing == set()


def test_architecture_lists_every_package() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    listed = set(re.findall(r"^\| `(\w+)/` \|", TEXT, re.MULTILINE))
    assert listed == packages
