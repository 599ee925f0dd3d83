"""Real models for the tests that need one: fetched once, by the same code that a user's first run fetches them with."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import Config
from headrace.weights import sources


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, in HEADRACE_HOME."""
    return sources.fetch("smollm2", Config.from_environment())


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """The GGUF file of Gemma 3 270M, in HEADRACE_HOME."""
    return sources.fetch("gemma3-270m", Config.from_environment())
