from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from headrace import config
from headrace.config import CPU_LEVELS, KV_FORMATS, MAX_THREADS, Config, check_threads, parse_formats, usable_cores
from headrace.errors import OptionError


def test_config_defaults_come_from_the_platform() -> None:
    resolved = Config.from_environment({})
    assert resolved.home.name == "headrace"
    assert resolved.cpu_level is None
    assert resolved.threads == usable_cores()
    assert resolved.index_url == "https://pypi.org/simple"
    assert resolved.kv_dir == resolved.home / "kv"
    assert (resolved.kv_memory_bytes, resolved.kv_disk_bytes, resolved.kv_daily_bytes) == (None, 20 * 10**9, 100 * 10**9)
    assert resolved.kv_formats == ("f16",)


def test_config_takes_every_variable(tmp_path: Path) -> None:
    resolved = Config.from_environment(
        {
            "HEADRACE_HOME": str(tmp_path),
            "HEADRACE_CPU": "portable",
            "HEADRACE_THREADS": "3",
            "HEADRACE_INDEX_URL": "https://index.example/simple/",
            "HEADRACE_KV_DIR": str(tmp_path / "past"),
            "HEADRACE_KV_MEMORY": "2GB",
            "HEADRACE_KV_DISK": "0",
            "HEADRACE_KV_FORMATS": "f16,q8",
            "HEADRACE_KV_DISK_WRITES": "1 GiB",
        }
    )
    assert resolved == Config(
        tmp_path,
        "portable",
        3,
        "https://index.example/simple",
        kv_dir=tmp_path / "past",
        kv_memory_bytes=2 * 10**9,
        kv_disk_bytes=0,
        kv_formats=("f16", "q8"),
        kv_daily_bytes=2**30,
    )


def test_config_folders_lie_in_home(tmp_path: Path) -> None:
    resolved = Config.from_environment({"HEADRACE_HOME": str(tmp_path)})
    assert [resolved.models_dir, resolved.packed_dir, resolved.kernels_dir] == [
        tmp_path / "models",
        tmp_path / "packed",
        tmp_path / "kernels",
    ]


def test_config_home_expands_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert Config.from_environment({"HEADRACE_HOME": "~/cache"}).home == tmp_path / "cache"
    assert Config.from_environment({"HEADRACE_KV_DIR": "~/past"}).kv_dir == tmp_path / "past"


def test_config_prefers_the_xdg_cache_folder(tmp_path: Path) -> None:
    assert Config.from_environment({"XDG_CACHE_HOME": str(tmp_path)}).home == tmp_path / "headrace"


def test_config_takes_empty_variables_as_unset() -> None:
    listed = re.findall(r"^\| (HEADRACE_\w+)", config.__doc__ or "", re.MULTILINE)
    assert len(listed) == 9
    empty = dict.fromkeys(listed, "")
    assert Config.from_environment(empty) == Config.from_environment({})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HEADRACE_CPU", "sse9"),
        ("HEADRACE_THREADS", "0"),
        ("HEADRACE_THREADS", "-2"),
        ("HEADRACE_THREADS", "many"),
        ("HEADRACE_THREADS", "2.5"),
        ("HEADRACE_THREADS", str(MAX_THREADS + 1)),
        ("HEADRACE_KV_MEMORY", "much"),
        ("HEADRACE_KV_MEMORY", "0"),
        ("HEADRACE_KV_DISK", "-1GB"),
        ("HEADRACE_KV_DISK_WRITES", "1XB"),
        ("HEADRACE_KV_FORMATS", "f32"),
    ],
)
def test_config_rejects_and_names_a_bad_value(variable: str, value: str) -> None:
    with pytest.raises(OptionError, match=re.escape(f"{variable}={value!r}")):
        Config.from_environment({variable: value})


@pytest.mark.parametrize("level", CPU_LEVELS)
def test_config_takes_every_level_by_name(level: str) -> None:
    assert Config.from_environment({"HEADRACE_CPU": level}).cpu_level == level


def test_config_reads_the_process_environment_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_THREADS", "7")
    assert Config.from_environment().threads == 7


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config.from_environment({}).threads = 2  # type: ignore[misc]


def test_config_docstring_lists_the_variables_that_are_read() -> None:
    listed = set(re.findall(r"^\| (HEADRACE_\w+)", config.__doc__, re.MULTILINE))
    read = set(re.findall(r'"(HEADRACE_\w+)"', Path(config.__file__).read_text(encoding="utf-8")))
    assert listed == read


def test_check_threads_takes_the_whole_range() -> None:
    assert [check_threads(1, "--threads"), check_threads(str(MAX_THREADS), "--threads")] == [1, MAX_THREADS]


def test_formats_are_any_of_the_known_ones_in_order() -> None:
    for text in ("f16", "q8", "q4", "f16,q8", "f16,q4", "q8,q4", "f16,q8,q4"):
        assert parse_formats(text, "--kv-formats") == tuple(text.split(","))
    assert parse_formats(" f16 , q4 ", "--kv-formats") == ("f16", "q4")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "--kv-formats='' names no page format"),
        ("  ", "names no page format"),
        ("f16,", "holds '', which is no page format"),
        ("f16,F8", "holds 'F8', which is no page format"),
        ("q8,q8", "--kv-formats='q8,q8' names q8 twice"),
        ("q4,q8", "--kv-formats='q4,q8' is out of order"),
    ],
)
def test_formats_that_cannot_be_used_are_one_sentence(text: str, said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)) as caught:
        parse_formats(text, "--kv-formats")
    assert ",".join(KV_FORMATS) in str(caught.value)
    assert "\n" not in str(caught.value)
