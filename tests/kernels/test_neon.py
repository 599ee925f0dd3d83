"""Kernels for 64-bit Arm can be made on any machine and use its dot product; the other tests run them as level `neon`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.kernels.level import LEVELS
from headrace.kernels.library import compile_environment

CHECK_NEON = Path(__file__).parents[2] / "tools" / "check_neon.py"


@pytest.fixture(scope="module")
def report() -> dict[str, dict[str, int]]:
    """Figures of some kernels by name, as the tool prints them."""
    names = ["matmul:Q4_1", "matmul:Q8_0", "matmul:Q6_K", "matmul:F16", "attention:3", "team.run_step", "team.work"]
    command = [sys.executable, str(CHECK_NEON), *names]
    environment = compile_environment(LEVELS["neon"])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    heading, *lines = (line.split() for line in done.stdout.splitlines())
    return {line[0]: dict(zip(heading[1:], map(int, line[1:]), strict=True)) for line in lines}


def test_neon_integer_products_use_the_dot_product(report: dict[str, dict[str, int]]) -> None:
    # a vector of 16 rows is four registers, and there are two loops: a tile of rows, and a single row
    assert all(report[f"matmul:{name}"]["sdot"] >= 2 * 4 for name in ("Q4_1", "Q8_0", "Q6_K"))


def test_neon_floats_use_fused_multiply_add(report: dict[str, dict[str, int]]) -> None:
    assert report["matmul:F16"]["fmla"] > 0
    assert report["attention:3"]["fmla"] > 0
    assert report["matmul:F16"]["sdot"] == 0


def test_neon_team_is_compiled(report: dict[str, dict[str, int]]) -> None:
    """The virtual counter of Arm and the C library's locks are all that the team needs of the machine."""
    assert report["team.run_step"]["bytes"] > 0
    assert report["team.work"]["bytes"] > 0
